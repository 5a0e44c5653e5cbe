"""Indices of a picture are the nearest codes, scale by scale; fed to VAR's loop they give the latent of the picture."""

from __future__ import annotations

import numpy as np
import pytest
from hart_reference import area_rows, bicubic_rows, convolve, resize, smoothing_index
from var_reference import Case, random_weights
from vq_reference import random_vq_tokenizer

torch = pytest.importorskip("torch", reason="needs PyTorch: pip install 'toprovar[torch]'")

from toprovar.exporter.codebook import load_quantizer  # noqa: E402
from toprovar.exporter.var.generate import generate, guidance_of  # noqa: E402
from toprovar.exporter.var.load import load_var  # noqa: E402
from toprovar.exporter.vq_tokenizer.encode import image_indices, quantise_residual  # noqa: E402
from toprovar.exporter.vq_tokenizer.tokenizer import load_vq_tokenizer  # noqa: E402
from toprovar.runtime.errors import ToprovarError  # noqa: E402

CASE = Case(sides=(1, 2, 3, 5), labels=(1, 3))
# fp32 sums against float64; measured 5e-7 of the largest value
TOLERANCE = 1e-5


def tensors(weights):
    return {name: torch.from_numpy(np.asarray(array, np.float32)) for name, array in weights.items()}


@pytest.fixture(scope="module")
def weights():
    return random_weights(CASE)


def nearest_codes(latent, weights, sides):
    """Plain float64: every token compared with every code."""
    residual, total, found = latent.astype(np.float64), np.zeros(latent.shape), []
    codebook = weights["vae.quantize.embedding.weight"]
    for s, side in enumerate(sides):
        target = residual if side == sides[-1] else resize(residual, area_rows(sides[-1], side))
        tokens = target.reshape(*target.shape[:2], -1).swapaxes(1, 2)
        indices = np.array([[((code - codebook) ** 2).sum(1).argmin() for code in row] for row in tokens])
        grid = codebook[indices].swapaxes(1, 2).reshape(*target.shape)
        if side != sides[-1]:
            grid = resize(grid, bicubic_rows(side, sides[-1]))
        phi = f"vae.quantize.quant_resi.qresi_ls.{smoothing_index(s, len(sides))}"
        part = 0.5 * grid + 0.5 * convolve(grid, weights[f"{phi}.weight"], weights[f"{phi}.bias"])
        residual, total = residual - part, total + part
        found.append(indices)
    return found, total


def test_indices_are_the_nearest_codes(weights):
    latent = np.random.default_rng(0).standard_normal((2, CASE.channels, 5, 5)).astype(np.float32)
    expected, total = nearest_codes(latent, weights, CASE.sides)
    found = quantise_residual(torch.from_numpy(latent), load_quantizer(tensors(weights), "test"), CASE.sides)
    for indices, wanted in zip(found.indices, expected, strict=True):
        assert np.array_equal(indices.numpy(), wanted)
    assert np.abs(found.latent.numpy() - total).max() <= TOLERANCE * np.abs(total).max()


def test_forcing_the_indices_of_pictures_gives_their_latent(weights):
    tokenizer = load_vq_tokenizer(tensors(random_vq_tokenizer(CASE.channels, (32, 32))), "test")
    quantizer, model = load_quantizer(tensors(weights), "test"), load_var(tensors(weights), "test")
    pictures = np.random.default_rng(1).integers(0, 256, (2, 10, 10, 3), dtype=np.uint8)
    known = image_indices(tokenizer, quantizer, pictures, CASE.sides)
    prompt = model.prompt(torch.tensor(CASE.labels))
    guidance = guidance_of(len(CASE.sides), cfg=2.0)
    run = generate(model, quantizer, prompt, CASE.sides, guidance, forced_indices=known.indices)
    assert torch.allclose(run.codes, known.latent, atol=TOLERANCE)
    assert tokenizer.decode(known.latent).shape == (2, 3, 10, 10)


def test_pictures_of_another_size_are_refused(weights):
    tokenizer = load_vq_tokenizer(tensors(random_vq_tokenizer(CASE.channels, (32, 32))), "test")
    with pytest.raises(ToprovarError, match=r"10x12 pixels does not fit maps up to side 5: expected 10x10"):
        image_indices(tokenizer, load_quantizer(tensors(weights), "t"), np.zeros((10, 12, 3), np.uint8), CASE.sides)
    with pytest.raises(ValueError, match="expected uint8"):
        image_indices(tokenizer, load_quantizer(tensors(weights), "t"), np.zeros((10, 10, 3)), CASE.sides)
