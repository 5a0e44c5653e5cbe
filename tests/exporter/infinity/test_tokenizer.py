from __future__ import annotations

from typing import Any

import infinity_reference as reference
import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="needs PyTorch: pip install 'toprovar[torch]'")

from toprovar.exporter.infinity.load import load_tokenizer  # noqa: E402
from toprovar.exporter.infinity.tokenizer import (  # noqa: E402
    latent_from_bits,
    quantise_residual,
    resize_bilinear,
    tokenizer_config_from_shapes,
    tokens_from_latent,
    unpatch_bits,
)
from toprovar.runtime.errors import ToprovarError  # noqa: E402

# fp32 convolutions against float64; measured 1e-6 of the largest value
TOLERANCE = 1e-5

SQUARE = ((1, 1), (2, 2), (3, 3), (6, 6))


def torch_weights(weights: dict[str, np.ndarray]) -> dict[str, Any]:
    return {name: torch.from_numpy(array) for name, array in weights.items()}


@pytest.fixture(scope="module")
def weights() -> dict[str, np.ndarray]:
    return reference.random_tokenizer(5, (32, 64))


def test_decoder_equals_the_plain_reference(weights: dict[str, np.ndarray]) -> None:
    z = np.random.default_rng(3).standard_normal((2, 5, 3, 4)).astype(np.float32)
    expected = reference.ReferenceTokenizer(weights, (32, 64)).decode(z)
    model = load_tokenizer(torch_weights(weights), "test")
    found = model.decode_raw(torch.from_numpy(z)).numpy()
    assert found.shape == (2, 3, 6, 8)
    assert np.abs(found - expected).max() <= TOLERANCE * np.abs(expected).max()
    assert np.abs(model.decode(torch.from_numpy(z)).numpy()).max() <= 1


def test_encoder_equals_the_plain_reference(weights: dict[str, np.ndarray]) -> None:
    image = np.random.default_rng(4).uniform(-1, 1, (1, 3, 6, 8)).astype(np.float32)
    expected = reference.ReferenceTokenizer(weights, (32, 64)).encode(image)
    found = load_tokenizer(torch_weights(weights), "test").encode(torch.from_numpy(image)).numpy()
    assert found.shape == (1, 5, 3, 4)
    assert np.abs(found - expected).max() <= TOLERANCE * np.abs(expected).max()


def test_plain_names_load_like_the_nested_ones(weights: dict[str, np.ndarray]) -> None:
    plain = {name.replace(".conv.weight", ".weight").replace(".conv.bias", ".bias"): a for name, a in weights.items()}
    plain = {name.replace(".norm.weight", ".weight").replace(".norm.bias", ".bias"): a for name, a in plain.items()}
    z = torch.randn(1, 5, 2, 2, generator=torch.Generator().manual_seed(0))
    first, second = load_tokenizer(torch_weights(weights), "a"), load_tokenizer(torch_weights(plain), "b")
    assert torch.equal(first.decode_raw(z), second.decode_raw(z))


def test_bits_become_a_unit_vector_per_cell() -> None:
    bits = torch.randint(0, 2, (2, 3, 4, 14), generator=torch.Generator().manual_seed(1))
    latent = latent_from_bits(bits)
    assert latent.shape == (2, 14, 3, 4)
    assert torch.allclose(latent.square().sum(1), torch.ones(2, 3, 4), atol=1e-6)
    assert torch.equal(latent > 0, bits.permute(0, 3, 1, 2) == 1)


def test_patch_bits_put_the_place_in_the_patch_fastest() -> None:
    h, w, d = 3, 2, 14
    bits = torch.randint(0, 2, (1, h, w, 4 * d), generator=torch.Generator().manual_seed(2), dtype=torch.uint8)
    grid = unpatch_bits(bits)
    assert grid.shape == (1, 2 * h, 2 * w, d)
    for y in range(h):
        for x in range(w):
            for k in range(d):
                for i in range(2):
                    for j in range(2):
                        assert grid[0, 2 * y + i, 2 * x + j, k] == bits[0, y, x, 4 * k + 2 * i + j]


def test_tokens_undo_the_patches_row_by_row() -> None:
    bits = torch.randint(0, 2, (2, 3, 5, 24), generator=torch.Generator().manual_seed(3), dtype=torch.uint8)
    latent = latent_from_bits(unpatch_bits(bits))
    assert torch.equal(tokens_from_latent(latent, 2) > 0, bits.flatten(1, 2) == 1)


def test_quantised_residual_equals_the_plain_reference() -> None:
    z = np.random.default_rng(5).standard_normal((2, 6, 6, 6)).astype(np.float32)
    bits, total = reference.residual_bits(z, SQUARE)
    codes = quantise_residual(torch.from_numpy(z), SQUARE)
    assert all((found.numpy() == expected).all() for found, expected in zip(codes.bits, bits, strict=True))
    assert np.abs(codes.summed.numpy() - total).max() <= 1e-5


@pytest.mark.parametrize("patch", [1, 2])
def test_bits_of_a_latent_rebuild_its_codes_and_inputs(patch: int) -> None:
    schedule = ((1, 1), (2, 2), (3, 3))
    full = 3 * patch
    z = torch.randn(2, 4, full, full, generator=torch.Generator().manual_seed(4))
    codes = quantise_residual(z, schedule, patch=patch)
    total = torch.zeros_like(z)
    for s, (height, width) in enumerate(schedule):
        size = (height * patch, width * patch)
        if s:
            assert torch.allclose(codes.inputs[s - 1], tokens_from_latent(resize_bilinear(total, size), patch))
            assert codes.inputs[s - 1].shape == (2, height * width, 4 * patch * patch)
        assert codes.bits[s].shape == (2, *size, 4)
        total = total + resize_bilinear(latent_from_bits(codes.bits[s]), (full, full))
    assert torch.allclose(codes.summed, total, atol=1e-6)


def test_last_scale_takes_the_sign_of_what_is_left() -> None:
    z = torch.randn(1, 4, 4, 4, generator=torch.Generator().manual_seed(5)) * 0.3
    codes = quantise_residual(z, ((1, 1), (4, 4)))
    before = codes.summed - latent_from_bits(codes.bits[-1])
    assert torch.equal(codes.bits[-1].permute(0, 3, 1, 2) == 1, z - before > 0)


def test_flipped_bits_are_seen_by_later_scales_but_not_reported() -> None:
    z = torch.randn(1, 4, 4, 4, generator=torch.Generator().manual_seed(6))
    schedule = ((2, 2), (4, 4))
    flips = [torch.ones(1, 2, 2, 4, dtype=torch.bool), None]
    plain, flipped = quantise_residual(z, schedule), quantise_residual(z, schedule, flips)
    assert torch.equal(plain.bits[0], flipped.bits[0])
    assert torch.allclose(plain.inputs[0], -flipped.inputs[0])


@pytest.mark.parametrize(
    ("name", "shape", "message"),
    [
        ("decoder.conv_in.conv.weight", None, "decoder.conv_in.conv.weight is missing"),
        ("decoder.conv_in.conv.weight", (7,), r"decoder.conv_in.conv.weight has shape \[7\]"),
        ("decoder.up.1.block.0.conv1.conv.weight", None, "decoder.up.1.block.0.conv1.conv.weight is missing"),
        ("decoder.up.1.block.0.conv1.conv.weight", (48, 64, 3, 3), r"levels are \[32, 48\] wide; expected multiples"),
    ],
)
def test_sizes_that_fit_no_tokenizer_are_refused(
    weights: dict[str, np.ndarray], name: str, shape: tuple[int, ...] | None, message: str
) -> None:
    shapes = {n: a.shape for n, a in weights.items()}
    if shape is None:
        del shapes[name]
    else:
        shapes[name] = shape
    with pytest.raises(ToprovarError, match=message):
        tokenizer_config_from_shapes(shapes)
