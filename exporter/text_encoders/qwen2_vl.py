"""Qwen2-VL's text model as HART reads prompts: 300 rows of the last hidden state, behind the final norm.

A prompt is padded to 300 tokens, on the side that its tokenizer pads. A system prompt is put in front and its rows are
cut off again; positions count over all of it, padding included, and padding is masked. Source: mit-han-lab/hart,
hart/utils/tools.py; the published runs use the `llm_system_prompt` of hart/utils/constants.py.
"""

from __future__ import annotations

import hashlib
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

TOKENS = 300

# how the text model's tensors are named in whole models, old and new, and alone
_PREFIXES = ("model.language_model.", "language_model.model.", "language_model.", "model.", "")


def load_qwen2_vl_text_model(files: EncoderFiles, dtype: str = "fp32") -> Any:
    """transformers' Qwen2VLTextModel with the file's weights; the vision side is not read."""
    import torch
    from transformers import Qwen2VLConfig
    from transformers.models.qwen2_vl.modeling_qwen2_vl import Qwen2VLTextModel

    config = Qwen2VLConfig.from_dict(files.config).text_config
    with torch.device("meta"):
        module = Qwen2VLTextModel(config)
    module = fill(module, files, lambda name: [prefix + name for prefix in _PREFIXES], dtype)
    module.rotary_emb = type(module.rotary_emb)(config)  # its frequencies are in no file
    return module


class Qwen2VlTextEncoder:
    """Prompt -> rows [300, width] float32.

    system_prompt: text in front of every prompt; None for none
    dtype:         of the weights and products, "fp32" or "bf16"; rows are fp32 either way
    """

    kind = "qwen2-vl"

    def __init__(
        self, folder: Path, dtype: str = "fp32", device: str = "cpu", system_prompt: str | None = None
    ) -> None:
        require_transformers()
        self.files = open_encoder(folder, ("qwen2_vl", "qwen2_vl_text"))
        self.tokenizer = load_pretrained_tokenizer(folder)
        if self.tokenizer.pad_token_id is None:
            raise ToprovarError(f"the tokenizer in {folder} has no padding token", "take the model's own tokenizer")
        self.model = load_qwen2_vl_text_model(self.files, dtype).to(device)
        self.device = device
        self._system: list[int] = []
        if system_prompt is not None:
            self._system = self.tokenizer(system_prompt, truncation=True, max_length=TOKENS)["input_ids"]
        self.facts = {
            "max_tokens": TOKENS,
            "width": int(self.model.config.hidden_size),
            "padding_side": self.tokenizer.padding_side,
            "system_prompt_tokens": len(self._system),
            "system_prompt_sha256": hashlib.sha256((system_prompt or "").encode()).hexdigest(),
        }

    def encode(self, prompt: str) -> TextRows:
        """Raises: ToprovarError for a prompt without tokens: HART takes the mean over them."""
        import torch

        total = len(self.tokenizer(prompt, verbose=False)["input_ids"])
        padded = self.tokenizer(prompt, padding="max_length", truncation=True, max_length=TOKENS, verbose=False)
        ids = np.array(padded["input_ids"])
        valid = ids != self.tokenizer.pad_token_id  # as the reference: a padding token inside a prompt counts as one
        if not valid.any():
            raise ToprovarError(
                f"prompt {prompt!r} has no tokens; HART takes the mean over them", "write at least one word"
            )
        if ids.max() >= self.model.config.vocab_size:
            raise ToprovarError(
                f"the tokenizer in {self.files.folder} gives id {ids.max()}; the text model has "
                f"{self.model.config.vocab_size} words",
                "take tokenizer and weights from the same folder",
            )
        front = len(self._system)
        with torch.inference_mode():
            batch = torch.tensor([[*self._system, *ids]], device=self.device)
            mask = torch.tensor([[*[True] * front, *valid]], device=self.device)
            rows = self.model(input_ids=batch, attention_mask=mask.long(), use_cache=False).last_hidden_state[0, front:]
        return TextRows(rows.float().cpu().numpy(), valid, int(valid.sum()), total)
