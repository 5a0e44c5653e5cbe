"""Prompt text to what the PyTorch model needs: through the model's own text encoder, or from rows made beforehand."""

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
    from toprovar.runtime.embeddings import PromptEmbeddings


def use_embeddings(model: Model, embeddings: PromptEmbeddings) -> None:
    """From now on the model reads these rows, and its own text encoder not at all.

    Raises: ToprovarError if they have another width than its text side.
    """
    if model.family.takes_classes:
        raise ToprovarError(
            f"model {model.name} draws classes, not texts; {embeddings.name} cannot be used",
            "leave --embeddings out, and give class numbers as prompts",
        )
    if embeddings.width != model.config.text_width:
        raise ToprovarError(
            f"{embeddings.name} holds rows of width {embeddings.width}; model {model.name} reads rows of width "
            f"{model.config.text_width}",
            "encode the prompts with the text encoder that the model was trained with",
        )
    model.embeddings = embeddings


def text_rows(model: Model, prompt: str) -> Tensor:
    """Rows of one prompt, [T, text width], with as many rows as the prompt has tokens.

    Raises: ToprovarError if the model has neither a text encoder nor rows of this prompt, made beforehand.
    """
    import torch

    if model.embeddings is not None:
        return torch.from_numpy(model.embeddings.rows[model.embeddings.index_of(prompt)])
    if model.text_encoder is None:
        raise ToprovarError(
            f"model {model.name} has no text encoder",
            "encode the prompts beforehand (toprovar encode-prompts) and pass --embeddings FILE",
        )
    tokens = WordTokenizer(model.vocabulary["words"]).encode(prompt, model.text_tokens)
    ids = torch.tensor([tokens.ids])
    with torch.inference_mode():
        return model.text_encoder(ids, torch.ones_like(ids, dtype=torch.bool))[0]


def encode_prompt(model: Model, prompt: str, guidance: Guidance) -> Prompt:
    """The conditional row and, under guidance, the unconditional one."""
    return encode_prompts(model, [prompt], guidance)


def encode_prompts(model: Model, prompts: Sequence[str], guidance: Guidance) -> Prompt:
    """Several prompts, padded to the longest: their conditional rows, then under guidance as many unconditional ones.

    An unconditional row is that of the negative prompt where rows made beforehand bring one; else it is learned, and as
    long as its prompt.
    """
    import torch

    found = [text_rows(model, prompt) for prompt in prompts]
    if guidance.uses_unconditional_row:
        found += [_unconditional(model, len(rows)) for rows in found]
    longest = max(len(rows) for rows in found)
    rows = torch.stack([torch.nn.functional.pad(r, (0, 0, 0, longest - len(r))) for r in found])  # [R, T, width]
    mask = torch.stack([torch.arange(longest) < len(r) for r in found])  # [R, T]
    with torch.inference_mode():
        return model.transformer.prompt(rows, mask)


def padded_rows(model: Model, prompts: Sequence[str], tokens: int) -> tuple[Tensor, Tensor]:
    """Rows of prompts for a family whose padding takes part in attention. Returns: [B, T, width], and [B, T] bool, True
    on a prompt's own tokens.

    Rows made beforehand bring their encoder's padding rows along; other padding is zero.
    """
    import torch

    rows = torch.zeros(len(prompts), tokens, model.config.text_width)
    mask = torch.zeros(len(prompts), tokens, dtype=torch.bool)
    for image, prompt in enumerate(prompts):
        found = text_rows(model, prompt)[:tokens]
        rows[image, : len(found)] = found
        valid = torch.ones(len(found), dtype=torch.bool)
        if model.embeddings is not None:
            valid = torch.from_numpy(model.embeddings.valid[model.embeddings.index_of(prompt)])[:tokens]
            _check_tokens(valid, model.embeddings.name, f"prompt {prompt!r}")
        mask[image, : len(found)] = valid
    return rows, mask


def padded_negative(model: Model, images: int, tokens: int) -> tuple[Tensor, Tensor] | None:
    """Rows of the negative prompt that rows made beforehand bring, once per image, as `padded_rows`; None without."""
    import torch

    if model.embeddings is None or model.embeddings.negative is None:
        return None
    _, found, valid = model.embeddings.negative
    rows = torch.zeros(images, tokens, model.config.text_width)
    mask = torch.zeros(images, tokens, dtype=torch.bool)
    rows[:, : len(found)] = torch.from_numpy(found)[:tokens]
    mask[:, : len(found)] = torch.from_numpy(valid)[:tokens]
    _check_tokens(mask[0], model.embeddings.name, "the negative prompt")
    return rows, mask


def _check_tokens(valid: Tensor, file: str, what: str) -> None:
    if not valid.any():
        raise ToprovarError(
            f"{file}: {what} has no token among its first {len(valid)} rows; expected one or more that are no padding",
            "encode the prompts again",
        )


def _unconditional(model: Model, tokens: int) -> Tensor:
    """[T, text width]; the learned table may have fewer rows than a prompt, the rest is zero."""
    import torch

    if model.embeddings is not None and model.embeddings.negative is not None:
        return torch.from_numpy(model.embeddings.negative[1])
    table = model.transformer.cfg_uncond[:tokens]
    return torch.nn.functional.pad(table, (0, 0, 0, tokens - len(table)))
