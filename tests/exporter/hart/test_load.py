from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import hart_reference as reference
import numpy as np
import pytest
from typer.testing import CliRunner

torch = pytest.importorskip("torch", reason="needs PyTorch: pip install 'toprovar[torch]'")

from safetensors.torch import save_file  # noqa: E402

from toprovar.exporter.codebook import check_belong_together, load_quantizer  # noqa: E402
from toprovar.exporter.hart.config import PUBLISHED, config_from_shapes  # noqa: E402
from toprovar.exporter.hart.load import load_hart  # noqa: E402
from toprovar.exporter.hart.transformer import Hart  # noqa: E402
from toprovar.runtime.errors import ToprovarError  # noqa: E402
from toprovar.tools.cli import app  # noqa: E402

CASE = reference.Case()


def weights() -> dict[str, Any]:
    return {name: torch.from_numpy(array).half() for name, array in reference.random_weights(CASE).items()}


def refusal(tensors: dict[str, Any]) -> ToprovarError:
    with pytest.raises(ToprovarError) as error:
        load_hart(tensors, "file")
    assert error.value.hint
    return error.value


def test_published_sizes_give_the_published_parameter_count() -> None:
    with torch.device("meta"):
        model = Hart(PUBLISHED["hart-0.7b"])
    assert sum(p.numel() for p in model.parameters()) == 732_620_928
    assert sum(p.numel() for p in model.diffloss.parameters()) == 36_585_536
    shapes = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    assert config_from_shapes(shapes) == PUBLISHED["hart-0.7b"]


def test_buffers_may_be_there_or_not() -> None:
    tensors = weights()
    tensors["lvl_1L"] = torch.zeros(1, 14, dtype=torch.int64)
    tensors["attn_bias_for_masking"] = torch.full((1, 1, 14, 14), -torch.inf)
    for layer in range(CASE.depth):
        del tensors[f"blocks.{layer}.attn.zero_k_bias"]
    assert load_hart(tensors, "file").config.depth == CASE.depth


def test_without_cosine_the_heads_must_be_told() -> None:
    tensors = {name: tensor for name, tensor in weights().items() if "scale_mul" not in name}
    assert "its number of heads cannot be told" in str(refusal(tensors))
    model = load_hart(tensors, "file", heads=3)
    assert not model.config.cosine
    assert model.blocks[0].attn.plain_scale == pytest.approx(0.25 / 8**0.5)


def test_bad_checkpoints_are_named() -> None:
    tensors = weights()
    del tensors["blocks.1.ffn.up_proj.weight"]
    assert "blocks.1.ffn.up_proj.weight is missing" in str(refusal(tensors))
    tensors = weights()
    tensors["head.bias"] = tensors["head.bias"][:-1]
    assert "head.bias has the wrong shape: found (36), expected (37)" in str(refusal(tensors))
    tensors = weights()
    tensors["decoder_norm.weight"][0] = torch.nan
    assert "tensor decoder_norm.weight isn't finite" in str(refusal(tensors))
    tensors = {n: t for n, t in weights().items() if not n.startswith("blocks.0.")}
    assert "blocks.0" in str(refusal(tensors))
    tensors = {n: t for n, t in weights().items() if n != "word_embed.weight"}
    assert "tensor word_embed.weight is missing" in str(refusal(tensors))


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("blocks.0.ada_lin.1.weight", "AdaLN per block"),
        ("blocks.1.cross_attn.proj.weight", "cross attention"),
        ("blocks.0.ffn.fc1.weight", "GPT-2"),
        ("lvl_embed.weight", "learned level embedding"),
        ("blocks.0.attn.extra.weight", "belongs to no part of hart-0.7b's blocks"),
    ],
)
def test_other_variants_are_refused(name: str, words: str) -> None:
    error = refusal({**weights(), name: torch.zeros(2, 2)})
    assert words in str(error)
    assert name in str(error)
    assert "docs/families/hart.md" in str(error.hint)


def test_tokenizer_must_fit() -> None:
    tensors = weights()
    tensors["vae.quantize.embedding.weight"] = torch.zeros(36, 6)
    with pytest.raises(ToprovarError, match="codebook has 36 codes of 6 channels; the transformer draws 37 of 6"):
        check_belong_together(37, 6, load_quantizer(tensors, "file"), "file")
    del tensors["vae.quantize.embedding.weight"]
    with pytest.raises(ToprovarError, match=r"quantize\.embedding\.weight is missing"):
        load_quantizer(tensors, "file")


def test_inspect_tells_the_configuration(tmp_path: Path) -> None:
    own = {name: tensor.clone() for name, tensor in weights().items() if not name.startswith("vae.")}
    own["attn_bias_for_masking"] = torch.zeros(1, 1, 14, 14)
    save_file(own, tmp_path / "hart.safetensors")
    result = CliRunner().invoke(app, ["inspect", str(tmp_path / "hart.safetensors"), "--json"])
    assert result.exit_code == 0, result.output
    facts = json.loads(result.stdout)
    assert facts["family"] == "hart"
    assert facts["config"]["width"] == 24
    assert facts["config"]["residual_depth"] == 3
    assert facts["parameters"] == sum(t.numel() for n, t in own.items() if n != "attn_bias_for_masking")


def test_fixture_weights_are_exact_in_half_precision() -> None:
    for name, array in reference.random_weights(CASE).items():
        assert np.array_equal(array, array.astype(np.float16).astype(np.float64)), name
