"""Prompt text to what the PyTorch model needs, through the model's own text encoder."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from toprovar.runtime.errors import ToprovarError
from toprovar.runtime.guidance import Guidance
from toprovar.runtime.word_tokenizer import WordTokenizer

if TYPE_CHECKING:
    from torch import Tensor

    from toprovar.exporter.infinity.transformer import Prompt
    from toprovar.exporter.model import Model


def text_rows(model: Model, prompt: str) -> Tensor:
    """Rows of one prompt, [T, text width], with as many rows as the prompt has tokens.

    Raises: ToprovarError if the model has no text encoder.
    """
    import torch

    if model.text_encoder is None:
        raise ToprovarError(f"model {model.name} has no text encoder", "name one in its model.json")
    tokens = WordTokenizer(model.vocabulary["words"]).encode(prompt, model.settings.text_tokens)
    ids = torch.tensor([tokens.ids])
    with torch.inference_mode():
        return model.text_encoder(ids, torch.ones_like(ids, dtype=torch.bool))[0]


def encode_prompt(model: Model, prompt: str, guidance: Guidance) -> Prompt:
    """The conditional row and, under guidance, the unconditional one of the same length."""
    import torch

    rows = text_rows(model, prompt)[None]  # [1, T, width]
    with torch.inference_mode():
        if guidance.uses_unconditional_row:
            table = model.transformer.cfg_uncond
            learned = torch.zeros_like(rows[0])
            learned[: min(len(learned), len(table))] = table[: len(learned)]
            rows = torch.stack([rows[0], learned])
        return model.transformer.prompt(rows, torch.ones(rows.shape[:2], dtype=torch.bool))


def encode_prompts(model: Model, prompts: Sequence[str], guidance: Guidance) -> Prompt:
    """Several prompts, padded to the longest: their conditional rows, then under guidance as many unconditional ones.

    An unconditional row is as long as its prompt, as in `encode_prompt`.
    """
    import torch

    found = [text_rows(model, prompt) for prompt in prompts]
    longest = max(len(rows) for rows in found)
    rows = torch.stack([torch.nn.functional.pad(r, (0, 0, 0, longest - len(r))) for r in found])  # [B, T, width]
    mask = torch.stack([torch.arange(longest) < len(r) for r in found])  # [B, T]
    with torch.inference_mode():
        if guidance.uses_unconditional_row:
            table = model.transformer.cfg_uncond[:longest]
            learned = torch.nn.functional.pad(table, (0, 0, 0, longest - len(table))) * mask[..., None]
            rows, mask = torch.cat([rows, learned]), torch.cat([mask, mask])
        return model.transformer.prompt(rows, mask)
