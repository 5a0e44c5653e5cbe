"""Running the tiny model in PyTorch and on ONNX Runtime with the same noise."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from toprovar.exporter.infinity.generate import Generation, generate
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


def open_pipeline(folder: Path) -> Pipeline:
    bundle = open_bundle(folder)
    return Pipeline(bundle, OnnxRuntimeBackend(bundle))


def differing_bits(run: Generation, bits: list[np.ndarray]) -> list[int]:
    """Bits that differ per scale; a comparison of different numbers of scales fails."""
    assert len(run.bits) == len(bits) > 0
    return [int((mine[0].numpy() != theirs).sum()) for mine, theirs in zip(run.bits, bits, strict=True)]
