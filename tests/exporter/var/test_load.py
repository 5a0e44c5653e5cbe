from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import var_reference as reference
from typer.testing import CliRunner

torch = pytest.importorskip("torch", reason="needs PyTorch: pip install 'toprovar[torch]'")

from safetensors.torch import save_file  # noqa: E402

from toprovar.exporter.var.config import PUBLISHED, config_from_shapes  # noqa: E402
from toprovar.exporter.var.load import load_var  # noqa: E402
from toprovar.exporter.var.transformer import Var  # noqa: E402
from toprovar.runtime.errors import ToprovarError  # noqa: E402
from toprovar.tools.cli import app  # noqa: E402

CASE = reference.Case()


def weights(case: reference.Case = CASE) -> dict[str, Any]:
    return {name: torch.from_numpy(array).half() for name, array in reference.random_weights(case).items()}


def refusal(tensors: dict[str, Any]) -> str:
    with pytest.raises(ToprovarError) as error:
        load_var(tensors, "file")
    assert error.value.hint
    return str(error.value)


@pytest.mark.parametrize(
    ("name", "millions"),
    [("var-d16", 310.3), ("var-d20", 600.9), ("var-d24", 1033.4), ("var-d30", 2010.0), ("var-d36", 2353.9)],
)
def test_published_sizes_give_the_published_parameter_count(name: str, millions: float) -> None:
    with torch.device("meta"):
        model = Var(PUBLISHED[name])
    assert round(sum(p.numel() for p in model.parameters()) / 1e6, 1) == millions
    assert config_from_shapes({n: tuple(t.shape) for n, t in model.state_dict().items()}) == PUBLISHED[name]


def test_buffers_may_be_there_or_not() -> None:
    tensors = weights()
    tensors["lvl_1L"] = torch.zeros(1, 14, dtype=torch.int64)
    tensors["attn_bias_for_masking"] = torch.full((1, 1, 14, 14), -torch.inf)
    for layer in range(CASE.depth):
        del tensors[f"blocks.{layer}.attn.zero_k_bias"]
    assert load_var(tensors, "file").config.depth == CASE.depth


def test_variants_of_the_modulation_are_told_apart() -> None:
    assert not load_var(weights(), "file").config.shared_ada
    shared = weights(reference.Case(shared=True))
    assert load_var(shared, "file").config.shared_ada
    del shared["blocks.1.ada_gss"]
    assert "blocks.1.ada_gss is missing" in refusal(shared)


def test_without_cosine_the_heads_must_be_told() -> None:
    tensors = weights(reference.Case(cosine=False))
    assert "its number of heads cannot be told" in refusal(tensors)
    assert not load_var(tensors, "file", heads=3).config.cosine


def test_bad_checkpoints_are_named() -> None:
    tensors = weights()
    del tensors["blocks.1.ffn.fc2.weight"]
    assert "blocks.1.ffn.fc2.weight is missing" in refusal(tensors)
    tensors = weights()
    tensors["head.bias"] = tensors["head.bias"][:-1]
    assert "head.bias has the wrong shape: found (36), expected (37)" in refusal(tensors)
    tensors = weights()
    tensors["pos_start"][0, 0, 0] = torch.nan
    assert "tensor pos_start isn't finite" in refusal(tensors)
    assert "blocks.0" in refusal({n: t for n, t in weights().items() if not n.startswith("blocks.0.")})
    assert "tensor word_embed.weight is missing" in refusal({n: t for n, t in weights().items() if "word" not in n})
    assert "at least a class" in refusal({**weights(), "class_emb.weight": torch.zeros(1, 24)})
    assert "blocks.0.attn.extra belongs to no part" in refusal({**weights(), "blocks.0.attn.extra": torch.zeros(2)})


def test_inspect_tells_the_configuration(tmp_path: Path) -> None:
    own = {name: tensor.clone() for name, tensor in weights().items() if not name.startswith("vae.")}
    own["attn_bias_for_masking"] = torch.zeros(1, 1, 14, 14)
    save_file(own, tmp_path / "var.safetensors")
    result = CliRunner().invoke(app, ["inspect", str(tmp_path / "var.safetensors"), "--json"])
    assert result.exit_code == 0, result.output
    facts = json.loads(result.stdout)
    assert facts["family"] == "var"
    assert (facts["config"]["width"], facts["config"]["tokens"], facts["config"]["classes"]) == (24, 14, 5)
    assert facts["parameters"] == sum(t.numel() for n, t in own.items() if n != "attn_bias_for_masking")
