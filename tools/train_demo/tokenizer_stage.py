"""Trains the bit tokenizer: Infinity's architecture and its fixed ±1/sqrt(d) codes, with the RGB shortcut.

Loss: L1 + 0.5 L1 of gradients on the full reconstruction, 0.2 of the same on a random partial sum of scales (so that
every scale carries its share), commitment 0.1, minus 0.02 times the entropy of the mean bit per scale and channel.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from toprovar.exporter.infinity.tokenizer import (
    BitTokenizer,
    TokenizerConfig,
    latent_from_bits,
    quantise_residual,
    resize_bilinear,
)
from toprovar.exporter.schedules import Schedule
from toprovar.tools.train_demo import state
from toprovar.tools.train_demo.clock import Budget, warm_cosine
from toprovar.tools.train_demo.data import KINDS, Composer, SceneSampler

CHANNELS = 16
WIDTHS = (32, 64, 128, 128)
RGB_GAIN = 1.2
LEARNING_RATE = 2e-3
PARTIAL_SHARE = 4  # a quarter of the batch is also decoded from a partial sum
SCENE_MIX = ("single",) * 12 + ("pattern",) * 3 + ("scene",) * 5  # 60 / 15 / 25 %


def new_tokenizer(seed: int, widths: tuple[int, ...] = WIDTHS) -> BitTokenizer:
    """A tokenizer at its training initialisation; the shortcut starts as the identity on three channels."""
    torch.manual_seed(seed)
    tokenizer = BitTokenizer(TokenizerConfig(CHANNELS, widths, rgb_shortcut=True))
    with torch.no_grad():
        tokenizer.rgb_shortcut.encode.weight.zero_()
        tokenizer.rgb_shortcut.decode.weight.zero_()
        for c in range(3):
            tokenizer.rgb_shortcut.encode.weight[c, c] = RGB_GAIN
            tokenizer.rgb_shortcut.decode.weight[c, c] = 1 / RGB_GAIN
        tokenizer.encoder.conv_out.conv.weight.mul_(0.3)
        for module in tokenizer.modules():
            if hasattr(module, "conv2"):
                module.conv2.conv.weight.mul_(0.3)
    return tokenizer


def load_tokenizer(folder: Path, device: torch.device) -> BitTokenizer:
    """The trained tokenizer of a working folder, in eval mode."""
    weights = state.load_required(folder, "tokenizer", "tokenizer")
    widths = tuple(weights[f"decoder.up.{i}.block.0.conv1.conv.weight"].shape[0] for i in range(len(WIDTHS)))
    tokenizer = new_tokenizer(0, widths)
    tokenizer.load_state_dict(weights)
    return tokenizer.to(device).eval()


@dataclass
class TrainingCodes:
    """sums: after each scale, [B, d, H, W], detached; diversity: mean entropy of the batch's bits, in nats."""

    sums: list[Tensor]
    diversity: Tensor


def quantise_for_training(latent: Tensor, schedule: Schedule) -> TrainingCodes:
    """`quantise_residual` that keeps every partial sum, and a differentiable entropy of the mean bit.

    latent: [B, d, H, W] fp32.
    """
    full = (latent.shape[-2], latent.shape[-1])
    residual = latent
    summed = torch.zeros_like(latent)
    sums, entropies = [], []
    for k, size in enumerate(schedule):
        last = k == len(schedule) - 1
        target = residual if size == full and last else F.interpolate(residual, size=size, mode="area")
        mean_bit = torch.sigmoid(target * (4 * latent.shape[1] ** 0.5)).mean((0, 2, 3)).clamp(1e-4, 1 - 1e-4)  # [d]
        entropies.append(-(mean_bit * mean_bit.log() + (1 - mean_bit) * (1 - mean_bit).log()).mean())
        code = latent_from_bits((target > 0).permute(0, 2, 3, 1))
        code = code if size == full else resize_bilinear(code, full)
        residual = residual - code
        summed = summed + code
        sums.append(summed.detach())
    return TrainingCodes(sums, torch.stack(entropies).mean())


def gradient_l1(a: Tensor, b: Tensor) -> Tensor:
    """Mean absolute difference of the pictures' horizontal and vertical differences."""
    difference = a - b
    return (difference[..., 1:] - difference[..., :-1]).abs().mean() + (
        difference[..., 1:, :] - difference[..., :-1, :]
    ).abs().mean()


def tokenizer_loss(
    tokenizer: BitTokenizer, image: Tensor, schedule: Schedule, partial: int, device_type: str
) -> tuple[Tensor, Tensor]:
    """Loss of one batch and the L1 of the full reconstruction. partial: scales (counted from 1) of the partial sum."""
    amp = torch.autocast(device_type, torch.bfloat16, enabled=device_type == "cuda")
    with amp:
        latent = tokenizer.encode(image).float()
    codes = quantise_for_training(latent, schedule)
    full = latent + (codes.sums[-1] - latent).detach()
    rows = max(1, image.shape[0] // PARTIAL_SHARE)
    coarse = F.interpolate(latent[:rows], size=schedule[partial - 1], mode="area")
    coarse = resize_bilinear(coarse, (latent.shape[-2], latent.shape[-1]))
    coarse = coarse + (codes.sums[partial - 1][:rows] - coarse).detach()
    with amp:
        both = tokenizer.decode_raw(torch.cat([full, coarse]).contiguous(memory_format=torch.channels_last)).float()
    decoded, decoded_coarse = both[: image.shape[0]], both[image.shape[0] :]
    l1 = (decoded - image).abs().mean()
    l1_coarse = (decoded_coarse - image[:rows]).abs().mean()
    commit = (latent - codes.sums[-1]).square().mean()
    loss = l1 + 0.5 * gradient_l1(decoded, image) + 0.2 * l1_coarse + 0.1 * commit - 0.02 * codes.diversity
    return loss, l1.detach()


def decoder_loss(
    tokenizer: BitTokenizer, image: Tensor, schedule: Schedule, partial: int, device_type: str
) -> tuple[Tensor, Tensor]:
    """As `tokenizer_loss` with fixed codes: only the decoder gets gradients."""
    amp = torch.autocast(device_type, torch.bfloat16, enabled=device_type == "cuda")
    rows = max(1, image.shape[0] // PARTIAL_SHARE)
    with torch.no_grad():
        with amp:
            latent = tokenizer.encode(image).float()
        sums = quantise_for_training(latent, schedule).sums
        both = torch.cat([sums[-1], sums[partial - 1][:rows]]).contiguous(memory_format=torch.channels_last)
    with amp:
        decoded = tokenizer.decode_raw(both).float()
    full, coarse = decoded[: image.shape[0]], decoded[image.shape[0] :]
    l1 = (full - image).abs().mean()
    loss = l1 + 0.5 * gradient_l1(full, image) + 0.2 * (coarse - image[:rows]).abs().mean()
    return loss, l1.detach()


@torch.no_grad()
def psnr_by_scale(tokenizer: BitTokenizer, image: Tensor, schedule: Schedule) -> list[float]:
    """Mean PSNR in dB after each scale; image: [B, 3, H, W] in [-1, 1]."""
    codes = quantise_for_training(tokenizer.encode(image).float(), schedule)
    result = []
    for summed in codes.sums:
        error = ((tokenizer.decode(summed) - image) / 2).square().mean((1, 2, 3)).clamp(min=1e-10)  # [B]
        result.append(float((-10 * error.log10()).mean()))
    return result


def validation_images(composer: Composer, count: int, seed: int = 99) -> dict[str, Tensor]:
    """Fixed pictures per kind; `held_out` are drawings that training never sees."""
    rng = random.Random(seed)
    seen = SceneSampler(composer.sprites.concepts)
    hidden = SceneSampler(composer.sprites.concepts, held_out=True)
    images = {kind: composer.draw([seen.draw(kind, rng) for _ in range(count)]) for kind in KINDS}
    if hidden.singles:
        images["held_out"] = composer.draw([hidden.draw("single", rng) for _ in range(count)])
    return images


@dataclass(frozen=True)
class Part:
    """What a call trains. name: of the stage; rate: largest learning rate."""

    name: str
    decoder_only: bool
    rate: float


WHOLE = Part("tokenizer", False, LEARNING_RATE)
# A second, shorter climb for the decoder alone: codes stay as they are, so a transformer can train on them meanwhile.
DECODER = Part("decoder", True, LEARNING_RATE / 2)


def train_tokenizer(
    run: Path,
    composer: Composer,
    schedule: Schedule,
    seconds: float,
    *,
    seed: int,
    batch: int,
    compile_model: bool,
    log: state.Log,
    max_steps: int | None = None,
    widths: tuple[int, ...] = WIDTHS,
    span: tuple[float, float] = (0.0, 1.0),
    part: Part = WHOLE,
) -> BitTokenizer:
    """Trains, or goes on from the working folder's weights; writes `tokenizer-*.safetensors` there.

    Logs the PSNR of fixed pictures about once a minute, so that one can see whether it still rises.
    """
    device = composer.device
    torch.backends.cudnn.benchmark = True  # one shape for thousands of steps
    goes_on = span[0] > 0 or part.decoder_only
    tokenizer = load_tokenizer(run, device) if goes_on else new_tokenizer(seed, widths)
    tokenizer = tokenizer.to(device, memory_format=torch.channels_last).train()
    if part.decoder_only:
        tokenizer.encoder.requires_grad_(False)
        tokenizer.rgb_shortcut.encode.requires_grad_(False)
    if compile_model:
        tokenizer.encoder.compile(dynamic=False)
        tokenizer.decoder.compile(dynamic=False)
    parameters = [p for p in tokenizer.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(
        parameters, part.rate, betas=(0.9, 0.95), weight_decay=0.01, fused=device.type == "cuda"
    )
    rng = random.Random(seed + 1000 * round(span[0] * 100) + (7 if part.decoder_only else 0))
    sampler = SceneSampler(composer.sprites.concepts)
    watched = validation_images(composer, min(batch, 16), seed=98)
    loss_of = decoder_loss if part.decoder_only else tokenizer_loss
    budget = Budget(seconds, max_steps)
    saved_at = budget.elapsed_s
    log(stage=part.name, event="start", resumed=goes_on, parameters=sum(p.numel() for p in parameters))

    def save() -> None:
        state.save_pieces(state.as_fp16(tokenizer.state_dict()), run, "tokenizer")
        psnr = {kind: psnr_by_scale(tokenizer, image, schedule)[-1] for kind, image in watched.items()}
        log(stage=part.name, event="validation", step=budget.step, psnr_db={k: round(v, 3) for k, v in psnr.items()})

    while not budget.over:
        progress = span[0] + (span[1] - span[0]) * budget.progress
        for group in optimizer.param_groups:
            group["lr"] = part.rate * warm_cosine(progress, budget.step, 100, 0.01)
        image = composer.draw([sampler.draw(rng.choice(SCENE_MIX), rng) for _ in range(batch)])
        image = image.contiguous(memory_format=torch.channels_last)
        partial = rng.randint(min(3, len(schedule) - 1), len(schedule) - 1)
        loss, l1 = loss_of(tokenizer, image, schedule, partial, device.type)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        budget.step += 1
        if budget.step in (5, 15) or budget.step % 50 == 0:
            value = float(loss.detach())  # waits for the device
            budget.mark()
            if value != value:
                raise FloatingPointError(f"{part.name} loss is not finite at step {budget.step}")
            log(
                stage=part.name,
                step=budget.step,
                of=budget.expected_steps,
                loss=value,
                l1=float(l1),
                step_s=budget.step_s,
            )
        if budget.elapsed_s - saved_at > 60:
            save()
            saved_at = budget.elapsed_s
    torch.backends.cudnn.benchmark = False
    save()
    return load_tokenizer(run, device)


def tokenizer_metrics(tokenizer: BitTokenizer, composer: Composer, schedule: Schedule, count: int) -> dict[str, object]:
    """PSNR per kind and scale, and how often every bit is 1 per scale (smallest and largest channel)."""
    images = validation_images(composer, count)
    with torch.no_grad():
        codes = quantise_residual(tokenizer.encode(images["single"]).float(), schedule)
    ones = [bits.float().mean((0, 1, 2)) for bits in codes.bits]
    return {
        "psnr_db_by_scale": {kind: psnr_by_scale(tokenizer, image, schedule) for kind, image in images.items()},
        "share_of_ones": [[float(o.min()), float(o.max())] for o in ones],
    }
