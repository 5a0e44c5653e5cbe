"""PyTorch against the exported graphs on the same device, with the same noise or the same bits."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from toprovar.runtime.noise import uniform_noise
from toprovar.runtime.pipeline import Request
from toprovar.tools.parity_observe import NOISE_FOR_ONE, NOISE_FOR_ZERO

if TYPE_CHECKING:
    import torch

    from toprovar.exporter.infinity.transformer import Prompt
    from toprovar.exporter.model import Model
    from toprovar.exporter.planned.loop import Generation
    from toprovar.runtime.pipeline import Pipeline
    from toprovar.runtime.plan import Plan


def random_text(model: Model, tokens: int, seed: int) -> np.ndarray:
    """Rows as a text encoder would make them. Returns: [tokens, text width] float32."""
    return np.random.default_rng(seed).standard_normal((tokens, model.config.text_width), np.float32)


def torch_prompt(model: Model, rows: np.ndarray) -> Prompt:
    """The conditional row, and the unconditional one of the same length, on the model's device."""
    import torch

    transformer = model.transformer
    device = transformer.pos_start.device
    given = torch.from_numpy(rows).to(device)
    learned = torch.zeros_like(given)
    count = min(len(given), len(transformer.cfg_uncond))
    learned[:count] = transformer.cfg_uncond[:count]
    with torch.inference_mode():
        return transformer.prompt(torch.stack([given, learned]), torch.ones(2, len(given), dtype=torch.bool).to(device))


def torch_noise(model: Model, seed: int) -> list[torch.Tensor]:
    """The runtime's noise of every scale, [1, L, bits] on the model's device."""
    import torch

    device, bits = model.transformer.pos_start.device, model.config.bits
    return [
        torch.from_numpy(uniform_noise(seed, scale, height * width, bits))[None].to(device)
        for scale, (height, width) in enumerate(model.schedule)
    ]


def torch_run(model: Model, prompt: Prompt, seed: int, plan: Plan | None = None, **options: Any) -> Generation:
    """options: of `generate`."""
    from toprovar.exporter.infinity.generate import generate

    if "noise" not in options:
        made = torch_noise(model, seed)
        options["noise"] = lambda scale, tokens: made[scale]
    return generate(model.transformer, prompt, model.schedule, model.guidance(model.schedule), plan=plan, **options)


def compare_bits(model: Model, pipeline: Pipeline, rows: np.ndarray, seed: int, variant: str) -> dict[str, Any]:
    """Bits that differ per scale, and how near to a tie the first ones were: |noise - chance| where they differ."""
    plan = pipeline.bundle.plan() if variant == "planned" else None
    odds: dict[int, np.ndarray] = {}

    def keep(name: str, scale: int, tensor: torch.Tensor) -> None:
        if name == "logits":
            zero, one = tensor[0].double().unflatten(-1, (-1, 2)).unbind(-1)
            odds[scale] = (one - zero).cpu().numpy()

    run = torch_run(model, torch_prompt(model, rows), seed, plan, observe=keep)
    result = pipeline.generate(None, seed, variant, text_rows=rows)
    mine = [bits[0].cpu().numpy() for bits in run.bits]
    if len(mine) != len(result.bits) or not mine:
        return {"equal": False, "reason": f"{len(mine)} scales in PyTorch, {len(result.bits)} in the bundle"}
    counts = [int((a != b).sum()) for a, b in zip(mine, result.bits, strict=True)]
    facts: dict[str, Any] = {
        "equal": not any(counts),
        "bits_total": int(sum(bits.size for bits in mine)),
        "bits_different": counts,
        "codes_max_abs_difference": float(np.abs(run.codes[0].cpu().numpy() - result.codes).max()),
    }
    first = next((scale for scale, count in enumerate(counts) if count), None)
    if first is not None:
        facts["first_scale"] = first
        if odds[first].shape == mine[first].shape:
            noise = uniform_noise(seed, first, *mine[first].shape)
            distance = np.abs(noise - 1 / (1 + np.exp(-odds[first])))[mine[first] != result.bits[first]]
            facts["first_scale_largest_distance_from_a_tie"] = float(distance.max())
    return facts


def compare_logits(model: Model, pipeline: Pipeline, rows: np.ndarray, seed: int) -> dict[str, Any]:
    """Logits of a dense bundle that watches them, with PyTorch's bits forced into all: errors do not pile up by draws.

    Returns: per scale, root mean square and largest absolute difference to PyTorch in float32; the reference's own root
             mean square; and what PyTorch's own bf16 (autocast) differs from it, which a bf16 bundle is held against.
    """
    import torch

    def logits_of(run: Callable[[Any], Generation]) -> tuple[Generation, dict[int, np.ndarray]]:
        found: dict[int, np.ndarray] = {}

        def keep(name: str, scale: int, tensor: torch.Tensor) -> None:
            if name == "logits":
                found[scale] = tensor[0].float().cpu().numpy()

        return run(keep), found

    prompt = torch_prompt(model, rows)
    exact, reference = logits_of(lambda observe: torch_run(model, prompt, seed, observe=observe))
    forced = [bits[0].cpu().numpy() for bits in exact.bits]
    with torch.autocast(model.transformer.pos_start.device.type, torch.bfloat16):
        _, rounded = logits_of(lambda observe: torch_run(model, prompt, seed, forced_bits=exact.bits, observe=observe))
    seen: dict[int, np.ndarray] = {}

    def watch(name: str, scale: int, array: np.ndarray) -> None:
        if name == "logits":
            seen[scale] = np.asarray(array, np.float32).reshape(reference[scale].shape)

    def noise(scale: int, tokens: int, bits: int) -> np.ndarray:
        return np.where(forced[scale].astype(bool), np.float32(NOISE_FOR_ONE), np.float32(NOISE_FOR_ZERO))

    result = pipeline.generate_batch([Request(None, seed, text_rows=rows, noise=noise)], "dense", on_watch=watch)[0]
    taken = [int((a != b).sum()) for a, b in zip(forced, result.bits, strict=True)]
    scales = []
    for scale, expected in sorted(reference.items()):
        error, of_torch = np.abs(seen[scale] - expected), np.abs(rounded[scale] - expected)
        scales.append(
            {
                "scale": scale,
                "reference_rms": float(np.sqrt(np.mean(expected**2))),
                "rms": float(np.sqrt(np.mean(error**2))),
                "max_abs": float(error.max()),
                "torch_rms": float(np.sqrt(np.mean(of_torch**2))),
                "torch_max_abs": float(of_torch.max()),
            }
        )
    finite = bool(seen) and all(np.isfinite(array).all() for array in seen.values())
    return {"finite": finite, "forced_bits_not_taken": sum(taken), "scales": scales}
