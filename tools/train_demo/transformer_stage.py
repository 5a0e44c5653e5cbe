"""Trains transformer and text encoder on the cached latents: phase A on the first seven scales, phase B on all.

Loss: cross entropy per bit, token weight proportional to N_k^-0.5. Inputs carry bit flips at a rate U(0, 0.3) per
picture and scale, and the following scales are quantised anew (bitwise self-correction). A tenth of the captions is
replaced by `cfg_uncond`.
"""

from __future__ import annotations

import copy
import random
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from toprovar.exporter.demo.text_encoder import WordTextEncoder
from toprovar.exporter.infinity.config import InfinityConfig
from toprovar.exporter.infinity.tokenizer import BitTokenizer, quantise_residual
from toprovar.exporter.infinity.transformer import Infinity
from toprovar.exporter.schedules import Schedule, token_counts
from toprovar.runtime.word_tokenizer import WordTokenizer
from toprovar.tools.train_demo import state
from toprovar.tools.train_demo.bank import Bank, mask_of
from toprovar.tools.train_demo.captions import COLOUR_NAMES, Scene, caption
from toprovar.tools.train_demo.clock import Budget, warm_cosine
from toprovar.tools.train_demo.data import Composer, SceneSampler, encode_captions
from toprovar.tools.train_demo.forward import TrainingForward, sample
from toprovar.tools.train_demo.workers import ALONE, Workers

# Heads are 64 wide in both. M's feed-forward width is 3.5 times the model's, not 4: all files must stay within 16 MB.
SIZES = {
    "S": InfinityConfig(
        depth=8, width=192, heads=3, ffn_width=768, text_width=256, bits=16, pool_heads=3, chunks=2, text_length=32
    ),
    "M": InfinityConfig(
        depth=8, width=256, heads=4, ffn_width=896, text_width=256, bits=16, pool_heads=4, chunks=2, text_length=32
    ),
}
TEXT_HEADS = 4
FLIP_RATE = 0.3
CAPTION_DROP = 0.1
SCALES_A = 7


@dataclass(frozen=True)
class Phase:
    """lr goes from lr_start to lr_end by a half cosine; the share of singles from singles_start to singles_end.

    between: another kind of step, of which `between_steps` come before every step of the phase itself.
    """

    name: str
    scales: int
    batch: int
    lr_start: float
    lr_end: float
    singles_start: float
    singles_end: float
    between: Phase | None = None
    between_steps: int = 0

    def at(self, step: int) -> Phase:
        """What a step trains, counted from 0."""
        is_between = self.between is not None and step % (self.between_steps + 1) < self.between_steps
        return self.between if is_between and self.between is not None else self


PHASE_A = Phase("transformer-a", SCALES_A, 256, 1.5e-3, 1.0e-3, 0.85, 0.75)
PHASE_B = Phase("transformer-b", 10, 128, 8e-4, 2e-5, 0.65, 0.45)
# Which object stands where is decided on the coarsest maps, and phases A and B see few pictures in which it matters.
COARSE_SCENES = Phase("coarse scenes", 6, 256, 0.0, 0.0, 0.15, 0.15)
PHASE_C = Phase("transformer-c", 10, 128, 5e-4, 2e-5, 0.55, 0.45, between=COARSE_SCENES, between_steps=4)
PHASES = {phase.name: phase for phase in (PHASE_A, PHASE_B, PHASE_C)}


class DemoModel(nn.Module):
    """Transformer and text encoder, trained together."""

    def __init__(self, config: InfinityConfig, vocabulary_size: int) -> None:
        super().__init__()
        self.infinity = Infinity(config)
        self.text = WordTextEncoder(vocabulary_size, config.text_width, TEXT_HEADS, config.text_length)

    def initialize(self, seed: int) -> None:
        """The model's own initialisation, then wider matrices by fan-in: 0.02 is small for a width of 192.

        The text passes four matrices before it reaches a residual branch; at 0.02 each its signal would be 0.01.
        """
        self.infinity.initialize(seed)
        self.text.initialize(seed + 1)
        generator = torch.Generator().manual_seed(seed + 2)
        with torch.no_grad():
            for name, parameter in self.infinity.named_parameters():
                in_block = "block" in name
                if in_block and name.endswith(("proj.weight", "fc2.weight")):
                    std = (2 * self.infinity.config.depth * parameter.shape[1]) ** -0.5
                elif name.endswith("weight") and (
                    name.startswith(("text_proj_for", "word_embed")) or (in_block and parameter.dim() == 2)
                ):
                    std = parameter.shape[1] ** -0.5
                elif name in ("lvl_embed.weight", "cfg_uncond"):
                    std = 0.2
                else:
                    continue
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * std)


def phase_counts(phase: Phase, progress: float, bank: Bank, workers: int = 1) -> dict[str, int]:
    """Rows per kind in one worker's part of a batch; scenes get twice the patterns' share."""
    batch = phase.batch // workers
    singles = phase.singles_start + (phase.singles_end - phase.singles_start) * progress
    count = round(batch * singles)
    patterns = (batch - count) // 3
    counts = {"single": count, "pattern": patterns, "scene": batch - count - patterns}
    missing = [kind for kind in counts if kind not in bank.starts]
    for kind in missing:
        counts["single"] += counts.pop(kind)
    return {kind: n for kind, n in counts.items() if n}


def random_flips(batch: int, schedule: Schedule, bits: int, generator: torch.Generator) -> list[Tensor]:
    """Bool masks [B, h, w, bits] per scale, each row at its own rate U(0, 0.3)."""
    flips = []
    device = generator.device
    for height, width in schedule:
        rate = torch.rand(batch, 1, 1, 1, device=device, generator=generator) * FLIP_RATE
        flips.append(torch.rand(batch, height, width, bits, device=device, generator=generator) < rate)
    return flips


def bit_losses(logits: Tensor, bits: list[Tensor]) -> Tensor:
    """Mean cross entropy per scale in nats per bit. logits: [B, N, 2*bits]; bits: per scale [B, h, w, bits].

    Returns: [scales].
    """
    delta = logits[..., 1::2] - logits[..., 0::2]  # [B, N, bits]
    target = torch.cat([b.flatten(1, 2) for b in bits], dim=1).to(delta.dtype)
    per_token = F.binary_cross_entropy_with_logits(delta, target, reduction="none").mean((0, 2))  # [N]
    counts = [b.shape[1] * b.shape[2] for b in bits]
    return torch.stack([part.mean() for part in per_token.split(counts)])


def scale_weights(schedule: Schedule, device: torch.device) -> Tensor:
    """Weight of each scale's mean loss: N_k tokens of weight N_k^-0.5, normalised. Returns: [scales]."""
    weights = torch.tensor(token_counts(schedule), dtype=torch.float32, device=device).sqrt()
    return weights / weights.sum()


def training_loss(
    model: DemoModel,
    forward: TrainingForward,
    schedule: Schedule,
    latents: Tensor,
    ids: Tensor,
    generator: torch.Generator,
) -> tuple[Tensor, Tensor]:
    """Weighted loss of one batch, and the detached losses per scale."""
    flips = random_flips(latents.shape[0], schedule, latents.shape[1], generator)
    codes = quantise_residual(latents, schedule, flips)
    mask = mask_of(ids)
    device_type = latents.device.type
    with torch.autocast(device_type, torch.bfloat16, enabled=device_type == "cuda"):
        rows = model.text(ids, mask)
        drop = torch.rand(ids.shape[0], 1, 1, device=ids.device, generator=generator) < CAPTION_DROP
        rows = torch.where(drop, model.infinity.cfg_uncond[: ids.shape[1]], rows)
        logits = forward(rows, mask, codes.inputs)
    losses = bit_losses(logits.float(), codes.bits)
    return (losses * scale_weights(schedule, losses.device)).sum(), losses.detach()


@torch.no_grad()
def clean_losses(
    model: DemoModel, forward: TrainingForward, schedule: Schedule, bank: Bank, batch: int = 64
) -> dict[str, list[float]]:
    """Losses per scale without flips, per kind of a validation bank (all its rows)."""
    result = {}
    cuda = bank.latents.device.type == "cuda"
    for kind, captions in bank.captions.items():
        total, rows = torch.zeros(len(schedule), device=bank.latents.device), captions.shape[0]
        for start in range(0, rows, batch):
            ids = captions[start : start + batch, 0].long()
            first = bank.starts[kind] + start
            codes = quantise_residual(bank.latents[first : first + ids.shape[0]].float(), schedule)
            with torch.autocast(bank.latents.device.type, torch.bfloat16, enabled=cuda):
                logits = forward(model.text(ids, mask_of(ids)), mask_of(ids), codes.inputs)
            total += bit_losses(logits.float(), codes.bits) * (ids.shape[0] / rows)
        result[kind] = total.tolist()
    return result


def save_model(
    run: Path, model: DemoModel, ema: state.Ema, optimizer: torch.optim.Optimizer, facts: dict[str, object]
) -> None:
    """Weights and their average as fp16 pieces, full weights and moments in one file of their own."""
    state.save_pieces(state.as_fp16(dict(model.named_parameters())), run, "transformer")
    state.save_pieces(state.as_fp16(ema.tensors()), run, "transformer_ema")
    full = state.prefixed("weights", dict(model.named_parameters())) | state.prefixed("ema", ema.tensors())
    for name, parameter in model.named_parameters():
        for moment in ("exp_avg", "exp_avg_sq"):
            if moment in optimizer.state.get(parameter, {}):
                full[f"{moment}.{name}"] = optimizer.state[parameter][moment]
    state.save_tensors(full, run / "full_state.safetensors", {"step": str(facts["step"])})
    state.write_json(run / "transformer.json", facts)


def restore_model(run: Path, model: DemoModel, ema: state.Ema, optimizer: torch.optim.Optimizer | None) -> str:
    """Loads the newest state: "full" (with moments), "weights" (fp16 pieces) or "none"."""
    facts = state.read_json(run / "transformer.json")
    full_path = run / "full_state.safetensors"
    parameters = dict(model.named_parameters())
    if full_path.exists():
        from safetensors import safe_open

        with safe_open(full_path, "pt") as file:
            is_newest = file.metadata().get("step") == str(facts.get("step"))
            tensors = {key: file.get_tensor(key) for key in file.keys()} if is_newest else {}  # noqa: SIM118
        if tensors:
            with torch.no_grad():
                for name, tensor in state.with_prefix("weights", tensors).items():
                    parameters[name].copy_(tensor)
            ema.load(state.with_prefix("ema", tensors), int(facts.get("ema_step", 0)))
            if optimizer is not None:
                for name, parameter in parameters.items():
                    if f"exp_avg.{name}" in tensors:
                        optimizer.state[parameter] = {
                            "step": torch.tensor(float(facts.get("step", 0)), device=parameter.device),
                            "exp_avg": tensors[f"exp_avg.{name}"].to(parameter.device),
                            "exp_avg_sq": tensors[f"exp_avg_sq.{name}"].to(parameter.device),
                        }
            return "full"
    # Of a lost machine only the small copies are left: the average goes on as the weights.
    weights = state.load_pieces(run, "transformer") or state.load_pieces(run, "transformer_ema")
    if weights is None:
        return "none"
    with torch.no_grad():
        for name, tensor in weights.items():
            parameters[name].copy_(tensor)
    ema.load(state.load_pieces(run, "transformer_ema") or weights, int(facts.get("ema_step", 0)))
    return "weights"


def averaged_model(model: DemoModel, ema: state.Ema) -> DemoModel:
    """A copy with the averaged weights, in eval mode."""
    averaged = copy.deepcopy(model).eval()
    averaged.load_state_dict(ema.tensors(), strict=False)
    return averaged


def load_averaged(run: Path, config: InfinityConfig, words: WordTokenizer, device: torch.device) -> DemoModel:
    """The averaged weights of a working folder."""
    model = DemoModel(config, words.size)
    model.load_state_dict(state.load_required(run, "transformer_ema", "transformer-a"), strict=False)
    return model.to(device).eval()


def train_transformer(
    run: Path,
    bank: Bank,
    words: WordTokenizer,
    schedule: Schedule,
    phase: Phase,
    seconds: float,
    *,
    config: InfinityConfig,
    seed: int,
    compile_model: bool,
    log: state.Log,
    max_steps: int | None = None,
    span: tuple[float, float] = (0.0, 1.0),
    workers: Workers = ALONE,
) -> DemoModel:
    """Trains one phase, or the part `span` of it, from the working folder's state. Returns the averaged model.

    phase.batch counts the pictures of all workers; each holds a bank of its own.
    """
    device = bank.latents.device
    schedule = schedule[: phase.scales]
    model = DemoModel(config, words.size)
    model.initialize(seed)
    model = model.to(device).train()
    parameters = dict(model.named_parameters())
    ema = state.Ema(parameters)
    matrices = [p for p in parameters.values() if p.dim() == 2]
    others = [p for p in parameters.values() if p.dim() != 2]
    optimizer = torch.optim.AdamW(
        [{"params": matrices, "weight_decay": 0.05}, {"params": others, "weight_decay": 0.0}],
        phase.lr_start,
        betas=(0.9, 0.95),
        fused=device.type == "cuda",
    )
    resumed = restore_model(run, model, ema, optimizer)
    workers.wait()  # until all have read, before the first one writes
    facts = state.read_json(run / "transformer.json")
    done = int(facts.get("step", 0))
    views = facts.get("views", {})
    kinds = [phase] if phase.between is None else [phase, phase.between]
    forwards = {
        kind.name: TrainingForward(model.infinity, schedule[: kind.scales], device, compile_model) for kind in kinds
    }
    generator = torch.Generator(device).manual_seed(seed + done + 1_000_003 * workers.rank)
    budget = Budget(seconds, max_steps)
    saved_at = budget.elapsed_s
    warmup = {"none": 200, "weights": 100, "full": 30}[resumed]
    size = sum(p.numel() for p in parameters.values())
    log(stage=phase.name, event="start", resumed=resumed, done=done, parameters=size, workers=workers.count)

    def save() -> None:
        if not workers.is_first:
            return
        now = {"step": done + budget.step, "ema_step": ema.step, "views": views, "phase": phase.name}
        save_model(run, model, ema, optimizer, now)

    while True:
        done_share, is_over = workers.from_first(budget.progress, budget.over)
        if is_over:
            break
        progress = span[0] + (span[1] - span[0]) * done_share
        rate = phase.lr_start * warm_cosine(progress, budget.step, warmup, phase.lr_end / phase.lr_start)
        for group in optimizer.param_groups:
            group["lr"] = rate
        kind = phase.at(budget.step)
        counts = phase_counts(kind, progress, bank, workers.count)
        latents, ids = bank.batch(counts, generator)
        loss, losses = training_loss(model, forwards[kind.name], schedule[: kind.scales], latents, ids, generator)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        workers.average_gradients(list(parameters.values()))
        torch.nn.utils.clip_grad_norm_(parameters.values(), 1.0)
        optimizer.step()
        ema.update()
        budget.step += 1
        for content, count in counts.items():
            views[content] = views.get(content, 0) + count * workers.count
        if budget.step in (5, 15) or budget.step % 50 == 0:
            value = float(loss.detach())  # waits for the device
            budget.mark()
            if value != value:
                raise FloatingPointError(f"{phase.name} loss is not finite at step {budget.step}")
            log(
                stage=phase.name,
                step=budget.step,
                of=budget.expected_steps,
                loss=value,
                lr=rate,
                step_s=budget.step_s,
                scales=[round(v, 4) for v in losses.tolist()],
            )
        if budget.elapsed_s - saved_at > 150:
            save()
            saved_at = budget.elapsed_s
    save()
    workers.wait()
    return averaged_model(model, ema)


# --- Judging ------------------------------------------------------------------------------------------------------


@torch.no_grad()
def draw_scenes(
    model: DemoModel,
    tokenizer: BitTokenizer,
    words: WordTokenizer,
    schedule: Schedule,
    texts: list[str],
    *,
    full: tuple[int, int],
    guidance: float = 2.0,
    temperature: float = 0.7,
    seed: int = 0,
    batch: int = 32,
) -> Tensor:
    """Pictures for prompts, [B, 3, 256, 256]. A shorter schedule than the tokenizer's draws soft pictures."""
    device = next(model.parameters()).device
    forward = TrainingForward(model.infinity, schedule, device, compile_block=False)
    generator = torch.Generator(device).manual_seed(seed)
    pictures = []
    for start in range(0, len(texts), batch):
        ids = encode_captions(texts[start : start + batch], words).long().to(device)
        rows = model.text(ids, mask_of(ids))
        latent = sample(
            forward,
            schedule,
            rows,
            mask_of(ids),
            full=full,
            guidance=guidance,
            temperature=temperature,
            generator=generator,
        )
        pictures.append(tokenizer.decode(latent).float())
    return torch.cat(pictures)


def sheet_scenes(composer: Composer, seed: int = 5) -> list[Scene]:
    """48 scenes: 24 seen singles, 8 held-out singles, 4 patterns, 12 scenes."""
    rng = random.Random(seed)
    seen, hidden = SceneSampler(composer.sprites.concepts), SceneSampler(composer.sprites.concepts, held_out=True)
    held = hidden if hidden.singles else seen
    return [
        *(seen.draw("single", rng) for _ in range(24)),
        *(held.draw("single", rng) for _ in range(8)),
        *(seen.draw("pattern", rng) for _ in range(4)),
        *(seen.draw("scene", rng) for _ in range(12)),
    ]


@torch.no_grad()
def retrieval(
    model: DemoModel,
    tokenizer: BitTokenizer,
    words: WordTokenizer,
    composer: Composer,
    schedule: Schedule,
    full: tuple[int, int],
    *,
    held_out: bool,
    count: int,
) -> dict[str, float]:
    """How often the drawn picture is nearest to its own concept among all concepts of that style and colour.

    Distance: mean squared difference of the 8x8 means (32x32 pixels). A blob of the right colour fails this.
    """
    concepts = composer.sprites.concepts
    sampler = SceneSampler(concepts, held_out)
    if not sampler.singles:
        return {}
    rng = random.Random(11)
    scenes = [sampler.draw("single", rng) for _ in range(count)]
    texts = [caption(s, concepts, rng, vary=False) for s in scenes]
    drawn = F.avg_pool2d(draw_scenes(model, tokenizer, words, schedule, texts, full=full), 8)  # [count, 3, 32, 32]
    first = fifth = 0
    references: dict[tuple[str, str], tuple[list[int], Tensor]] = {}
    for scene, picture in zip(scenes, drawn, strict=True):
        key = (scene.style, scene.first)
        if key not in references:
            drawable = [i for i, c in enumerate(concepts) if scene.style in c.styles]
            images = composer.draw([sampler.single(i, scene.style, scene.first) for i in drawable])
            references[key] = (drawable, F.avg_pool2d(images, 8))
        drawable, reference = references[key]
        distance = (reference - picture).square().mean((1, 2, 3))  # [concepts]
        rank = int((distance < distance[drawable.index(scene.concepts[0])]).sum())
        first += rank == 0
        fifth += rank < 5
    return {"top1": first / count, "top5": fifth / count, "count": float(count), "colours": float(len(COLOUR_NAMES))}
