"""T5's encoder as Infinity and InfinityStar read prompts: last hidden state of every token, the end token included.

The reference pads prompts to 512 tokens with the padding masked out; a prompt alone gives the same rows.
Source: FoundationVision/Infinity, tools/run_infinity.py, encode_prompt.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from toprovar.exporter.text_encoders.folder import (
    EncoderFiles,
    fill,
    load_pretrained_tokenizer,
    open_encoder,
    require_transformers,
)
from toprovar.exporter.text_encoders.rows import TextRows
from toprovar.runtime.errors import ToprovarError

MAX_TOKENS = 512


def load_t5_model(files: EncoderFiles, dtype: str = "fp32") -> Any:
    """transformers' T5EncoderModel with the file's weights; the decoder of a whole T5 is not read."""
    import torch
    from transformers import T5Config, T5EncoderModel

    config = T5Config.from_dict(files.config)
    with torch.device("meta"):
        module = T5EncoderModel(config)

    def name_in_file(name: str) -> list[str]:
        tied = ["shared.weight", "encoder.embed_tokens.weight"]  # files hold the word table under one name, or both
        return tied if name in tied else [name]

    return fill(module, files, name_in_file, dtype)


class T5TextEncoder:
    """Prompt -> rows [T, width] float32.

    folder: config.json, weights, tokenizer
    dtype:  of the weights and products, "fp32" or "bf16"; rows are fp32 either way
    """

    kind = "t5"

    def __init__(self, folder: Path, dtype: str = "fp32", device: str = "cpu") -> None:
        require_transformers()
        self.files = open_encoder(folder, ("t5",))
        self.tokenizer = load_pretrained_tokenizer(folder)
        self.model = load_t5_model(self.files, dtype).to(device)
        self.device, self.width = device, int(self.model.config.d_model)
        self.facts = {"max_tokens": MAX_TOKENS, "width": self.width}

    def encode(self, prompt: str) -> TextRows:
        import torch

        total = len(self.tokenizer(prompt, verbose=False)["input_ids"])
        ids = self.tokenizer(prompt, truncation=True, max_length=MAX_TOKENS, verbose=False)["input_ids"]
        if not ids or max(ids) >= self.model.config.vocab_size:
            raise ToprovarError(
                f"the tokenizer in {self.files.folder} gives ids {ids[:8]}; the encoder has "
                f"{self.model.config.vocab_size} words",
                "take tokenizer and weights from the same folder",
            )
        with torch.inference_mode():
            batch = torch.tensor([ids], device=self.device)
            rows = self.model(input_ids=batch, attention_mask=torch.ones_like(batch)).last_hidden_state
        found = rows[0].float().cpu().numpy()
        return TextRows(found, np.ones(len(found), bool), len(ids), total)
