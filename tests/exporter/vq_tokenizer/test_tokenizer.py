"""The VQ tokenizer equals a plain float64 reference, whatever its file calls the tensors; misfits are refused."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
from vq_reference import ReferenceVqTokenizer, random_vq_tokenizer

torch = pytest.importorskip("torch", reason="needs PyTorch: pip install 'toprovar[torch]'")

from toprovar.exporter.autoencoder import AutoencoderShape  # noqa: E402
from toprovar.exporter.vq_tokenizer.config import PUBLISHED, VqTokenizerConfig  # noqa: E402
from toprovar.exporter.vq_tokenizer.tokenizer import VqTokenizer, load_vq_tokenizer  # noqa: E402
from toprovar.runtime.errors import ToprovarError  # noqa: E402

# fp32 convolutions and attention against float64; measured 3e-6 of the largest value
TOLERANCE = 1e-5
WIDTHS = (32, 32, 64)


def torch_weights(weights: dict[str, np.ndarray]) -> dict[str, Any]:
    return {name: torch.from_numpy(array) for name, array in weights.items()}


def plain_names(weights: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    return {prefix + re.sub(r"\.(conv|norm)\.(weight|bias)$", r".\2", name): array for name, array in weights.items()}


@pytest.fixture(scope="module")
def weights() -> dict[str, np.ndarray]:
    return random_vq_tokenizer(5, WIDTHS)


def test_sizes_are_read_from_the_shapes(weights):
    config = load_vq_tokenizer(torch_weights(weights), "test").config
    assert config == VqTokenizerConfig(AutoencoderShape(5, WIDTHS, 2, (2,), True), 3, True)
    assert config.stride == 4


@pytest.mark.parametrize("size", [(3, 5), (1, 1), (4, 4)])
def test_decoder_equals_the_plain_reference(weights, size):
    z = np.random.default_rng(3).standard_normal((2, 5, *size)).astype(np.float32)
    expected = ReferenceVqTokenizer(weights, WIDTHS).decode(z)
    model = load_vq_tokenizer(torch_weights(weights), "test")
    found = model.decode_raw(torch.from_numpy(z)).numpy()
    assert found.shape == (2, 3, 4 * size[0], 4 * size[1])
    assert np.abs(found - expected).max() <= TOLERANCE * np.abs(expected).max()
    assert np.abs(model.decode(torch.from_numpy(z)).numpy()).max() <= 1


def test_encoder_equals_the_plain_reference(weights):
    image = np.random.default_rng(4).uniform(-1, 1, (1, 3, 20, 12)).astype(np.float32)
    expected = ReferenceVqTokenizer(weights, WIDTHS).encode(image)
    found = load_vq_tokenizer(torch_weights(weights), "test").encode(torch.from_numpy(image)).numpy()
    assert found.shape == (1, 5, 5, 3)
    assert np.abs(found - expected).max() <= TOLERANCE * np.abs(expected).max()


@pytest.mark.parametrize("prefix", ["", "vae."])
def test_plain_names_load_like_the_nested_ones(weights, prefix):
    plain = plain_names(torch_weights(weights), prefix) | {f"{prefix}quantize.embedding.weight": torch.zeros(7, 5)}
    first, second = load_vq_tokenizer(torch_weights(weights), "a"), load_vq_tokenizer(plain, "b")
    z = torch.randn(1, 5, 2, 3, generator=torch.Generator().manual_seed(0))
    assert torch.equal(first.decode_raw(z), second.decode_raw(z))


def test_files_that_keep_q_k_and_v_apart_load_like_the_joined_ones(weights):
    apart = {}
    for name, array in torch_weights(weights).items():
        if ".qkv." in name:
            for letter, part in zip("qkv", array.chunk(3), strict=True):
                apart[name.replace(".qkv.", f".{letter}.")] = part
        else:
            apart[name] = array
    first, second = load_vq_tokenizer(torch_weights(weights), "a"), load_vq_tokenizer(plain_names(apart), "b")
    z = torch.randn(1, 5, 2, 3, generator=torch.Generator().manual_seed(0))
    assert torch.equal(first.decode_raw(z), second.decode_raw(z))
    del apart["decoder.mid.attn_1.k.conv.weight"]
    with pytest.raises(ToprovarError, match=r"decoder.mid.attn_1.k.conv.weight does not fit .* found no such tensor"):
        load_vq_tokenizer(apart, "b")


def test_a_file_without_encoder_decodes(weights):
    own = {name: array for name, array in torch_weights(weights).items() if not name.startswith(("encoder", "quant_"))}
    model = load_vq_tokenizer(own, "test")
    assert not model.config.encoder
    with pytest.raises(ToprovarError, match="holds no encoder"):
        model.encode(torch.zeros(1, 3, 8, 8))


@pytest.mark.parametrize(
    ("name", "shape", "message"),
    [
        ("decoder.conv_in.conv.weight", None, "tensor decoder.conv_in.conv.weight is missing"),
        ("post_quant_conv.weight", None, "post_quant_conv.weight is missing"),
        (
            "post_quant_conv.weight",
            (5, 4, 3, 3),
            r"post_quant_conv.weight has shape \[5, 4, 3, 3\]; expected \[5, 5, n",
        ),
        ("post_quant_conv.weight", (5, 5, 2, 2), r"post_quant_conv.weight has shape \[5, 5, 2, 2\]"),
        ("quant_conv.bias", None, "test: tensor quant_conv.bias is missing"),
        ("decoder.up.2.attn.1.qkv.conv.weight", None, "test: tensor decoder.up.2.attn.1.qkv.conv.weight is missing"),
        ("decoder.mid.attn_1.proj_out.conv.weight", (64, 32, 1, 1), "proj_out.conv.weight has the wrong shape"),
        ("decoder.mid.attn_2.norm.norm.weight", (64,), "attn_2.norm.norm.weight belongs to no part"),
    ],
)
def test_tensors_that_fit_no_tokenizer_are_refused(weights, name, shape, message):
    tensors = torch_weights(weights)
    tensors.pop(name, None)
    if shape is not None:
        tensors[name] = torch.zeros(shape)
    with pytest.raises(ToprovarError, match=message):
        load_vq_tokenizer(tensors, "test")


def test_values_that_are_not_finite_are_refused(weights):
    tensors = torch_weights(weights)
    tensors["decoder.conv_out.conv.bias"] = torch.tensor([0.0, float("nan"), 0.0])
    with pytest.raises(ToprovarError, match=r"decoder.conv_out.conv.bias"):
        load_vq_tokenizer(tensors, "test")


def test_the_published_sizes_have_the_published_number_of_parameters():
    with torch.device("meta"):
        model = VqTokenizer(PUBLISHED)
    codebook, smoothing = 4096 * 32, 4 * (32 * 32 * 9 + 32)
    count = sum(parameter.numel() for parameter in model.parameters()) + codebook + smoothing
    assert round(count / 1e6, 1) == 108.9  # the figure the model is published with
