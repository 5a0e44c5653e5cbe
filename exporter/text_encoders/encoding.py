"""A list of prompts through a text encoder, into the file that calibrating and running read."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from toprovar.exporter.text_encoders.qwen2_vl import Qwen2VlTextEncoder
from toprovar.exporter.text_encoders.rows import PromptEncoder, TextRows
from toprovar.exporter.text_encoders.t5 import T5TextEncoder
from toprovar.runtime.embeddings import PromptEmbeddings
from toprovar.runtime.version import VERSION

log = logging.getLogger("toprovar")

KINDS: dict[str, Callable[..., PromptEncoder]] = {"t5": T5TextEncoder, "qwen2-vl": Qwen2VlTextEncoder}
PROMPT_SHOWN = 40  # characters in a warning


def encode_all(
    encoder: PromptEncoder,
    prompts: Sequence[str],
    negative: str | None = None,
    prefix: str = "",
    source: str = "",
    dtype: str = "fp32",
    on_progress: Callable[[int, int], None] = lambda done, total: None,
) -> PromptEmbeddings:
    """Rows of every prompt, and of a negative one for all of them; warns about each prompt that is cut.

    prefix:        put before every prompt but the negative one; prompts go by their own text all the same
    source, dtype: as they were asked for, for the record
    """
    found = []
    for done, prompt in enumerate(prompts, 1):
        found.append(_encoded(encoder, prefix + prompt, f"prompt {done - 1}"))
        on_progress(done, len(prompts))
    other = None if negative is None else _encoded(encoder, negative, "negative prompt")
    facts: dict[str, Any] = {
        "kind": encoder.kind,
        "source": Path(source).name if source else "",
        "dtype": dtype,
        "prefix": prefix,
        "weights_sha256": encoder.files.weights.digest(),
        "tokenizer_sha256": encoder.files.tokenizer_sha256(),
        "tool_version": VERSION,
        **encoder.facts,
    }
    return PromptEmbeddings(
        prompts=tuple(prompts),
        rows=tuple(text.rows for text in found),
        valid=tuple(text.valid for text in found),
        token_counts=tuple(text.total for text in found),
        encoder=facts,
        negative=None if other is None or negative is None else (negative, other.rows, other.valid),
    )


def _encoded(encoder: PromptEncoder, prompt: str, what: str) -> TextRows:
    text = encoder.encode(prompt)
    if text.kept < text.total:
        shown = prompt if len(prompt) <= PROMPT_SHOWN else prompt[: PROMPT_SHOWN - 1] + "…"
        log.warning("%s has %d tokens; the first %d are used: %s", what, text.total, text.kept, shown)
    return text
