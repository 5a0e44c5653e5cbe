"""A small InfinityStar as a folder of files: random weights, three square maps, an image clip and one of two frames."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import infinitystar_reference as reference
from conftest import WORDS
from video_reference import random_video_tokenizer

SIDES, FRAMES, TEXT_TOKENS = (1, 3, 12), 9, 7
CASE = reference.Case(
    width=32, text_width=16, text_length=12, detail_bits=8, semantic_bits=4, depth=3, chunks=1, seed=5
)


def write_tiny_star(folder: Path, tokenizer: bool = True, **settings: Any) -> Path:
    """The model's folder. settings: of its model.json"""
    import torch
    from safetensors.torch import save_file

    from toprovar.exporter.demo.text_encoder import WordTextEncoder

    folder.mkdir(parents=True, exist_ok=True)

    def save(weights: dict[str, Any], name: str) -> str:
        save_file({n: torch.as_tensor(w).float().contiguous() for n, w in weights.items()}, folder / name)
        return name

    torch.manual_seed(1)
    encoder = WordTextEncoder(len(WORDS), CASE.text_width, 2, CASE.text_length)
    encoder.initialize(1)
    facts = {
        "transformer": save(reference.random_weights(CASE), "transformer.safetensors"),
        "text_encoder": save(encoder.state_dict(), "text_encoder.safetensors"),
        "vocabulary": "vocabulary.json",
        "sides": SIDES,
        "frames": FRAMES,
        "text_tokens": TEXT_TOKENS,
        "schema_version": 1,
    }
    if tokenizer:
        weights = random_video_tokenizer(2, (8, 8, 4), (2, 2), blocks=1)
        facts["tokenizer"] = save(weights, "tokenizer.safetensors")
    vocabulary = {"schema_version": 1, "max_tokens": CASE.text_length, "words": WORDS}
    (folder / "vocabulary.json").write_text(json.dumps(vocabulary))
    (folder / "model.json").write_text(json.dumps({**facts, **settings}))
    return folder
