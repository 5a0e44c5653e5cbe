"""Trains the evaluation's classifier on crops of drawn scenes, clean and as the tokenizer gives them back.

Half of the crops went through the tokenizer with bits flipped at a rate U(0, 0.15), so that the softness and the
speckle of drawn pictures are no surprise; random shifts, blur and contrast do the rest. Held-out pairs are included:
a judge that has not seen a drawing could not say whether the model has drawn it.
"""

from __future__ import annotations

import random
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from toprovar.exporter.infinity.tokenizer import BitTokenizer, quantise_residual
from toprovar.exporter.schedules import Schedule
from toprovar.tools.evaluation.classifier import (
    FILE,
    STYLES,
    DrawingClassifier,
    classifier_from_tensors,
    crop,
    places_of,
)
from toprovar.tools.train_demo import state
from toprovar.tools.train_demo.captions import Scene
from toprovar.tools.train_demo.clock import Budget, warm_cosine
from toprovar.tools.train_demo.data import KINDS, Composer, SceneSampler

LEARNING_RATE = 2e-3
FLIP_RATE = 0.15
NOTHING_SHARE = 0.06  # of scenes, whose unused places become examples of "nothing"
SHIFT = 3  # pixels of 64


def _scenes(composer: Composer, count: int, rng: random.Random) -> list[Scene]:
    """Seen and held-out singles, patterns and scenes of every layout; singles most, since they show every drawing."""
    seen, hidden = SceneSampler(composer.sprites.concepts), SceneSampler(composer.sprites.concepts, held_out=True)
    weights = {"single": 5, "pattern": 3, "scene": 4}
    kinds = rng.choices(KINDS, [weights[kind] for kind in KINDS], k=count)
    scenes = []
    for kind in kinds:
        held_out = (
            bool(hidden.singles)
            and kind != "scene"
            and rng.random() < len(hidden.singles) / (len(hidden.singles) + len(seen.singles))
        )
        scenes.append((hidden if held_out else seen).draw(kind, rng))
    return scenes


@torch.no_grad()
def through_tokenizer(
    tokenizer: BitTokenizer, images: Tensor, schedule: Schedule, generator: torch.Generator
) -> Tensor:
    """Pictures encoded, with bits flipped at a random rate per picture, and decoded. [B, 3, 256, 256]."""
    device = images.device
    with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
        latent = tokenizer.encode(images.contiguous(memory_format=torch.channels_last)).float()
        rate = torch.rand(images.shape[0], 1, 1, 1, device=device, generator=generator) * FLIP_RATE
        flips = [
            torch.rand(images.shape[0], h, w, latent.shape[1], device=device, generator=generator) < rate
            for h, w in schedule
        ]
        return tokenizer.decode(quantise_residual(latent, schedule, flips).summed).float()


@torch.no_grad()
def crops_of(
    composer: Composer,
    tokenizer: BitTokenizer,
    schedule: Schedule,
    scenes: list[Scene],
    rng: random.Random,
    generator: torch.Generator,
    spoil: float,
    batch: int = 128,
) -> tuple[Tensor, Tensor, Tensor]:
    """Every object's crop. spoil: share of pictures that go through the tokenizer.

    Returns: crops [M, 3, 64, 64] uint8, concept [M], style [M] (-1 where nothing is shown), on the composer's device.
    """
    nothing = len(composer.sprites.concepts)
    crops, concepts, styles = [], [], []
    for start in range(0, len(scenes), batch):
        part = scenes[start : start + batch]
        images = composer.draw(part)
        if rng.random() < spoil:
            images = through_tokenizer(tokenizer, images, schedule, generator)
        for layout in {scene.layout for scene in part}:
            rows = [i for i, scene in enumerate(part) if scene.layout == layout]
            for slot, place in enumerate(places_of(layout)):
                crops.append(crop(images[rows], place))
                concepts += [part[i].concepts[min(slot, len(part[i].concepts) - 1)] for i in rows]
                styles += [STYLES.index(part[i].style) for i in rows]
            if layout == "above":  # whose left and right edges are empty
                rows = [i for i in rows if rng.random() < NOTHING_SHARE * 6]
                if rows:
                    crops.append(crop(images[rows], (72, 0, 64)))
                    concepts += [nothing] * len(rows)
                    styles += [-1] * len(rows)
    device = composer.device
    stacked = ((torch.cat(crops).clamp(-1, 1) + 1) * 127.5).round().to(torch.uint8)
    return stacked, torch.tensor(concepts, device=device), torch.tensor(styles, device=device)


def varied(crops: Tensor, generator: torch.Generator) -> Tensor:
    """Random shift, contrast and blur of a batch. crops: [B, 3, 64, 64] uint8 -> fp32 in [-1, 1]."""
    B, device = crops.shape[0], crops.device
    x = crops.float() / 127.5 - 1
    shift = (torch.rand(B, 2, device=device, generator=generator) * 2 - 1) * (2 * SHIFT / crops.shape[-1])
    zoom = 1 + (torch.rand(B, device=device, generator=generator) - 0.5) * 0.12
    theta = torch.zeros(B, 2, 3, device=device)
    theta[:, 0, 0], theta[:, 1, 1], theta[:, :, 2] = zoom, zoom, shift
    grid = F.affine_grid(theta, list(x.shape), align_corners=False)
    x = F.grid_sample(x, grid, padding_mode="border", align_corners=False)
    soft = F.avg_pool2d(F.pad(x, (1, 1, 1, 1), mode="replicate"), 3, stride=1)
    share = torch.rand(B, 1, 1, 1, device=device, generator=generator)
    x = x + share * (soft - x)
    gain = 1 + (torch.rand(B, 1, 1, 1, device=device, generator=generator) - 0.5) * 0.2
    return x * gain


@torch.no_grad()
def accuracy(classifier: DrawingClassifier, crops: Tensor, concepts: Tensor, styles: Tensor) -> dict[str, float]:
    """Share of crops whose concept, and whose style, is named right."""
    right = styled = 0
    with_style = styles >= 0
    for start in range(0, crops.shape[0], 512):
        part = slice(start, start + 512)
        judged = classifier(crops[part].float() / 127.5 - 1)
        right += int((judged.concepts.argmax(1) == concepts[part]).sum())
        styled += int(((judged.styles.argmax(1) == styles[part]) & with_style[part]).sum())
    return {"concept": right / crops.shape[0], "style": styled / int(with_style.sum())}


def train_classifier(
    run: Path,
    composer: Composer,
    tokenizer: BitTokenizer,
    schedule: Schedule,
    seconds: float,
    *,
    seed: int,
    pool: int,
    batch: int,
    log: state.Log,
    max_steps: int | None = None,
    spoil: float = 0.5,
) -> dict[str, object]:
    """Draws a pool of crops, trains on it, and writes `classifier.safetensors` as shipped (int8 rows).

    pool: pictures to draw; spoil: share of them that goes through the tokenizer.
    Returns: accuracies of the stored weights on new pictures, clean and through the tokenizer.
    """
    from toprovar.tools.train_demo.finish import packed

    device = composer.device
    rng, generator = random.Random(seed + 31), torch.Generator(device).manual_seed(seed + 31)
    budget = Budget(seconds, max_steps)
    crops, concepts, styles = crops_of(
        composer, tokenizer, schedule, _scenes(composer, pool, rng), rng, generator, spoil
    )
    log(stage="classifier", event="pool", crops=crops.shape[0], seconds=budget.elapsed_s)
    torch.manual_seed(seed + 31)
    classifier = DrawingClassifier(len(composer.sprites.concepts)).to(device).train()
    optimizer = torch.optim.AdamW(classifier.parameters(), LEARNING_RATE, betas=(0.9, 0.98), weight_decay=0.02)
    while not budget.over:
        for group in optimizer.param_groups:
            group["lr"] = LEARNING_RATE * warm_cosine(budget.progress, budget.step, 20, 0.01)
        rows = torch.randint(crops.shape[0], (batch,), device=device, generator=generator)
        judged = classifier(varied(crops[rows], generator))
        loss = F.cross_entropy(judged.concepts, concepts[rows], label_smoothing=0.05)
        loss = loss + 0.3 * F.cross_entropy(judged.styles, styles[rows], ignore_index=-1)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(classifier.parameters(), 1.0)
        optimizer.step()
        budget.step += 1
        if budget.step in (5, 15) or budget.step % 200 == 0:
            value = float(loss.detach())  # waits for the device
            budget.mark()
            if value != value:
                raise FloatingPointError(f"classifier loss is not finite at step {budget.step}")
            log(stage="classifier", step=budget.step, of=budget.expected_steps, loss=value, step_s=budget.step_s)
    stored = packed(classifier.state_dict())
    state.save_tensors(stored, run / FILE, {"schema_version": "1", "seed": str(seed)})
    judge = classifier_from_tensors({k: v.to(device) for k, v in stored.items()}).to(device)
    scenes = _scenes(composer, max(16, pool // 20), rng)
    result: dict[str, object] = {
        "parameters": sum(p.numel() for p in classifier.parameters()),
        "steps": budget.step,
        "size_bytes": (run / FILE).stat().st_size,
    }
    for name, share in (("clean", 0.0), ("through_tokenizer", 1.0)):
        result[name] = accuracy(judge, *crops_of(composer, tokenizer, schedule, scenes, rng, generator, share))
    return result
