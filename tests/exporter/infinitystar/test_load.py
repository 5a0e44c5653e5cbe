from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import infinitystar_reference as reference
import pytest
from typer.testing import CliRunner

torch = pytest.importorskip("torch", reason="needs PyTorch: pip install 'toprovar[torch]'")

from safetensors.torch import save_file  # noqa: E402

from toprovar.exporter.infinitystar.config import PUBLISHED, config_from_shapes  # noqa: E402
from toprovar.exporter.infinitystar.load import load_infinitystar  # noqa: E402
from toprovar.exporter.infinitystar.transformer import InfinityStar  # noqa: E402
from toprovar.runtime.errors import ToprovarError  # noqa: E402
from toprovar.tools.cli import app  # noqa: E402

CASE = reference.Case()
BLOCK = "block_chunks.1.module.0"


def weights() -> dict[str, Any]:
    return {name: torch.from_numpy(array).half() for name, array in reference.random_weights(CASE).items()}


def refusal(tensors: dict[str, Any]) -> str:
    with pytest.raises(ToprovarError) as error:
        load_infinitystar(tensors, "file")
    return str(error.value)


def test_published_sizes_give_the_published_parameter_count() -> None:
    config = PUBLISHED["infinitystar-8b"]
    with torch.device("meta"):
        model = InfinityStar(config)
    assert round(sum(p.numel() for p in model.parameters()) / 1e5) == 87_684  # 8768.4 million
    shapes = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    assert config_from_shapes(shapes) == config
    assert shapes["block_chunks.5.module.5.attn.k_proj.weight"] == (1024, 4096)


def test_chunked_and_plain_names_load() -> None:
    chunked = load_infinitystar(weights(), "file")
    assert (chunked.config.depth, chunked.config.chunks, chunked.config.semantic_bits) == (2, 2, 6)
    plain = {name: tensor for name, tensor in weights().items() if not name.startswith("block")}
    for layer in range(2):
        for name, tensor in weights().items():
            if name.startswith(f"block_chunks.{layer}."):
                plain[name.replace(f"block_chunks.{layer}.module.0", f"blocks.{layer}")] = tensor
    model = load_infinitystar(plain, "file")
    assert model.config.chunks == 1
    assert torch.equal(model.layers[1].attn.q_proj.weight, chunked.layers[1].attn.q_proj.weight)


def test_bad_checkpoints_are_named() -> None:
    tensors = weights()
    del tensors[f"{BLOCK}.mlp.up_proj.weight"]
    assert f"{BLOCK}.mlp.up_proj.weight is missing" in refusal(tensors)
    tensors = weights()
    tensors["text_proj.bias"] = tensors["text_proj.bias"][:-1]
    assert "text_proj.bias has the wrong shape: found (23), expected (24)" in refusal(tensors)
    tensors = weights()
    tensors["norm_hidden_sates.weight"][0] = torch.nan
    assert "tensor norm_hidden_sates.weight isn't finite" in refusal(tensors)
    tensors = weights()
    del tensors["semantic_head2.weight"]
    assert "tensor semantic_head2.weight is missing" in refusal(tensors)
    for name, rows, words in (
        ("head.weight", 42, "head.weight has 42 rows; expected 40, two per channel of word_embed.weight"),
        ("semantic_head2.weight", 7, "semantic_head2.weight has 7 rows; expected an even number"),
        ("block_chunks.0.module.0.attn.k_proj.weight", 12, "has 12 rows; expected a multiple of the head width 8"),
        ("block_chunks.0.module.0.attn.k_proj.weight", 24, "4 query heads do not spread evenly over 3 key heads"),
    ):
        assert words in refusal({**weights(), name: torch.zeros(rows, 24)})
    assert "expected a multiple of 8" in refusal(
        {**weights(), "block_chunks.0.module.0.attn.q_norm.weight": torch.zeros(4)}
    )


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("text_norm.weight", "a norm of the text"),
        (f"{BLOCK}.attn.q_proj.bias", "belongs to no part of infinitystar-8b's blocks"),
        (f"{BLOCK}.ca.mat_q.weight", "belongs to no part of infinitystar-8b's blocks"),
    ],
)
def test_other_variants_are_refused(name: str, words: str) -> None:
    with pytest.raises(ToprovarError, match=words) as error:
        load_infinitystar({**weights(), name: torch.zeros(2)}, "file")
    assert name in str(error.value)
    assert "docs/families/infinitystar.md" in str(error.value.hint)


def test_inspect_tells_the_configuration(tmp_path: Path) -> None:
    save_file(weights(), tmp_path / "star.safetensors")
    result = CliRunner().invoke(app, ["inspect", str(tmp_path / "star.safetensors"), "--json"])
    assert result.exit_code == 0, result.output
    facts = json.loads(result.stdout)
    assert facts["family"] == "infinitystar"
    assert facts["config"]["kv_heads"] == 2
    assert facts["config"]["detail_bits"] == 20
    assert facts["parameters"] == sum(tensor.numel() for tensor in weights().values())
