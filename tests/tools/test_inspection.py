"""`toprovar inspect` tells the sizes of the tokenizers that have decoders of their own."""

from __future__ import annotations

import json

import numpy as np
import pytest
from safetensors.numpy import save_file
from typer.testing import CliRunner
from video_reference import random_video_tokenizer
from vq_reference import random_vq_tokenizer

pytest.importorskip("torch", reason="needs PyTorch: pip install 'toprovar[torch]'")

from toprovar.tools.cli import app


def inspected(path, weights):
    save_file({name: np.ascontiguousarray(array) for name, array in weights.items()}, path)
    result = CliRunner().invoke(app, ["inspect", str(path), "--json"])
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def test_a_vq_tokenizer_is_described(tmp_path):
    weights = {f"vae.{name}": array for name, array in random_vq_tokenizer(5, (32, 64)).items()}
    weights["vae.quantize.embedding.weight"] = np.zeros((7, 5), np.float32)
    facts = inspected(tmp_path / "vae.safetensors", weights)
    assert facts["family"] == "vq_tokenizer"
    assert facts["config"] == {
        "channels": 5,
        "widths": [32, 64],
        "res_blocks": 2,
        "attention_levels": [1],
        "middle_attention": True,
        "kernel": 3,
        "encoder": True,
        "stride": 2,
    }


def test_a_video_tokenizer_is_described(tmp_path):
    facts = inspected(tmp_path / "vae.safetensors", random_video_tokenizer(blocks=1))
    assert facts["family"] == "video_tokenizer"
    assert (facts["config"]["stride"], facts["config"]["frames_per_code"], facts["config"]["channels"]) == (16, 4, 2)
    assert facts["config"]["decoder"][2] == {"width": 16, "blocks": 2, "resized": 8, "time": 2}
