"""Tiny seeded models of the families besides Infinity, written as a user has them: checkpoints and a model.json."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import hart_reference
import numpy as np
import torch
import var_reference
from conftest import WORDS
from safetensors.torch import save_file
from vq_reference import random_vq_tokenizer

from toprovar.exporter.demo.text_encoder import WordTextEncoder

SIDES = (1, 2, 4, 8, 16, 20)  # 256 and 400 tokens at the end: large enough to prune
CHANNELS, VOCABULARY = 6, 50
TEXT_WIDTH, TEXT_TOKENS = 16, 7


def _save(weights: dict[str, np.ndarray], path: Path) -> str:
    save_file({name: torch.from_numpy(np.ascontiguousarray(a, np.float32)) for name, a in weights.items()}, path)
    return path.name


def _parted(weights: dict[str, np.ndarray], folder: Path) -> dict[str, str]:
    """The reference's weights as two files, codebook and decoder in the second."""
    quantizer = {name.removeprefix("vae."): a for name, a in weights.items() if "quantize." in name}
    transformer = {name: a for name, a in weights.items() if "quantize." not in name}
    decoder = random_vq_tokenizer(CHANNELS, (32, 32), seed=3)
    return {
        "transformer": _save(transformer, folder / "transformer.safetensors"),
        "tokenizer": _save({**decoder, **quantizer}, folder / "tokenizer.safetensors"),
    }


def write_var(folder: Path, shared: bool = False, **settings: Any) -> Path:
    """A class-conditional VAR of 10 classes and 3 layers."""
    folder.mkdir(parents=True)
    case = var_reference.Case(
        sides=SIDES, classes=10, depth=3, vocabulary=VOCABULARY, channels=CHANNELS, shared=shared, seed=1
    )
    facts = {"schema_version": 1, **_parted(var_reference.random_weights(case), folder), "sides": SIDES}
    (folder / "model.json").write_text(json.dumps(facts | {"top_k": [20], **settings}))
    return folder


def write_hart(folder: Path, **settings: Any) -> Path:
    """A HART of 3 layers with a word text encoder; single codes, so that rounding does not grow (test_families.py)."""
    folder.mkdir(parents=True)
    case = hart_reference.Case(
        sides=SIDES, depth=3, vocabulary=VOCABULARY, channels=CHANNELS, text_width=TEXT_WIDTH, seed=2
    )
    encoder = WordTextEncoder(len(WORDS), TEXT_WIDTH, 2, TEXT_TOKENS)
    encoder.initialize(5)
    save_file({n: t.contiguous() for n, t in encoder.state_dict().items()}, folder / "text_encoder.safetensors")
    (folder / "vocabulary.json").write_text(
        json.dumps({"schema_version": 1, "max_tokens": TEXT_TOKENS, "words": WORDS})
    )
    facts = {"schema_version": 1, **_parted(hart_reference.random_weights(case), folder), "sides": SIDES}
    facts |= {"text_encoder": "text_encoder.safetensors", "vocabulary": "vocabulary.json"}
    (folder / "model.json").write_text(
        json.dumps(facts | {"text_tokens": TEXT_TOKENS, "top_k": [20], "smooth": False, **settings})
    )
    return folder
