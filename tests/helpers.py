"""Running the tiny model in PyTorch and on ONNX Runtime with the same noise."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from toprovar.exporter.infinity.generate import generate
from toprovar.exporter.planned.loop import Generation
from toprovar.exporter.prompts import encode_prompt
from toprovar.runtime.backends.onnxruntime import OnnxRuntimeBackend
from toprovar.runtime.bundle import open_bundle
from toprovar.runtime.noise import uniform_noise
from toprovar.runtime.pipeline import Pipeline


def generate_in_torch(model, schedule, guidance, prompt: str, seed: int, **options) -> Generation:
    return generate(
        model.transformer,
        encode_prompt(model, prompt, guidance),
        schedule,
        guidance,
        lambda scale, tokens: torch.from_numpy(uniform_noise(seed, scale, tokens, model.config.bits))[None],
        **options,
    )


@dataclass(frozen=True)
class Comparison:
    """Bits that differ at the first scale where any does, and how far the noise was from the chance there.

    A tie is a draw whose noise lies within fp32 rounding of its threshold: neither side is wrong.
    """

    different: int
    scale: int | None
    largest_distance: float

    @property
    def is_tie(self) -> bool:
        # measured: PyTorch's and ONNX Runtime's chances differ by up to 4e-7; eight times that
        return self.different > 0 and self.largest_distance < 3e-6


def compare_with_torch(model, pipeline: Pipeline, schedule, guidance, prompt: str, seed: int) -> Comparison:
    """Dense PyTorch against dense ONNX Runtime; behind a first difference the runs draw from different inputs."""
    logits: dict[int, np.ndarray] = {}

    def keep(name: str, scale: int, tensor: torch.Tensor) -> None:
        if name == "logits":
            logits[scale] = tensor[0].numpy()

    run = generate_in_torch(model, schedule, guidance, prompt, seed, observe=keep)
    result = pipeline.generate(prompt, seed, "dense")
    counts = differing_bits(run, result.bits)
    first = next((scale for scale, count in enumerate(counts) if count), None)
    if first is None:
        return Comparison(0, None, 0.0)
    different = run.bits[first][0].numpy() != result.bits[first]
    zero, one = np.moveaxis(logits[first].astype(np.float64).reshape(*different.shape, 2), -1, 0)
    chance = 1 / (1 + np.exp(zero - one))
    noise = uniform_noise(seed, first, *different.shape)
    return Comparison(int(different.sum()), first, float(np.abs(noise - chance)[different].max()))


def open_pipeline(folder: Path) -> Pipeline:
    bundle = open_bundle(folder)
    return Pipeline(bundle, OnnxRuntimeBackend(bundle))


def differing_bits(run: Generation, bits: list[np.ndarray]) -> list[int]:
    """Bits that differ per scale; a comparison of different numbers of scales fails."""
    assert len(run.bits) == len(bits) > 0
    return [int((mine[0].numpy() != theirs).sum()) for mine, theirs in zip(run.bits, bits, strict=True)]
