"""Prompt -> text rows: the one interface behind which text encoders stand. Step graphs never see token ids."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from toprovar.runtime.bundle import Bundle
from toprovar.runtime.errors import ToprovarError
from toprovar.runtime.json_files import read_json
from toprovar.runtime.word_tokenizer import WordTokenizer, tokenizer_from_document

if TYPE_CHECKING:
    from toprovar.runtime.pipeline import Backend

log = logging.getLogger("toprovar")


@dataclass(frozen=True)
class EncodedPrompt:
    """kept, total: tokens that fit, and tokens the prompt has."""

    text: str
    kept: int
    total: int


class TextEncoder:
    """The bundle's text side: rows for the conditional and, with guidance, the unconditional row."""

    def __init__(self, bundle: Bundle, backend: Backend) -> None:
        self._bundle = bundle
        self._backend = backend
        self._facts = bundle.manifest.text
        self._encoder = self._facts.encoder
        self._unconditional = bundle.unconditional_rows() if bundle.manifest.rows == 2 else np.empty((0, 0))
        self._tokenizer: WordTokenizer | None = None
        if self._encoder:
            path = bundle.path(self._encoder.vocabulary)
            self._tokenizer = tokenizer_from_document(read_json(path), str(path))

    def prepare(self) -> None:
        if self._encoder:
            self._backend.prepare(self._encoder.graph)

    def rows(
        self,
        prompt: str | None,
        negative: str | None,
        text_rows: np.ndarray | None,
        negative_rows: np.ndarray | None,
    ) -> tuple[EncodedPrompt | None, np.ndarray, np.ndarray]:
        """Returns: the prompt as it was understood, rows [R, T, width] float32, valid [R, T] float32.

        The unconditional rows are as many as the prompt has, from the learned table, unless a negative prompt is given.
        Raises: ToprovarError if there is neither a text encoder nor rows, or rows do not fit.
        """
        encoded = None
        if text_rows is None:
            encoded, text_rows = self._encode(prompt)
        if negative_rows is None and negative is not None:
            _, negative_rows = self._encode(negative)
        rows_per_image, T, width = self._bundle.manifest.rows, self._facts.tokens, self._facts.width
        rows = np.zeros((rows_per_image, T, width), np.float32)
        valid = np.zeros((rows_per_image, T), np.float32)
        self._place(text_rows, rows, valid, 0, "text")
        if rows_per_image == 2:
            if negative_rows is None:
                table = self._unconditional
                count = min(len(text_rows), T)
                negative_rows = np.zeros((count, width), np.float32)
                negative_rows[: min(count, len(table))] = table[:count]
            self._place(negative_rows, rows, valid, 1, "negative text")
        return encoded, rows, valid

    def _place(self, given: np.ndarray, rows: np.ndarray, valid: np.ndarray, row: int, what: str) -> None:
        T, width = rows.shape[1:]
        if given.ndim != 2 or given.shape[1] != width or not len(given):
            raise ToprovarError(f"{what} rows have shape {list(given.shape)}; expected [1 to {T}, {width}]")
        if not np.isfinite(given).all():
            raise ToprovarError(f"{what} rows hold non-finite values")
        if len(given) > T:
            log.warning("%s has %d rows; the bundle takes %d, the rest is cut off", what, len(given), T)
        count = min(len(given), T)
        rows[row, :count] = given[:count]
        valid[row, :count] = 1

    def _encode(self, prompt: str | None) -> tuple[EncodedPrompt, np.ndarray]:
        if self._encoder is None or self._tokenizer is None:
            raise ToprovarError(
                f"bundle {self._bundle.folder} holds no text encoder", "pass text rows made by its text encoder"
            )
        if prompt is None:
            raise ToprovarError("no prompt given", "pass --prompt")
        tokens = self._tokenizer.encode(prompt, self._encoder.max_tokens)
        if tokens.kept < tokens.total:
            log.warning("prompt has %d tokens; the first %d are used", tokens.total, tokens.kept)
        T, width = self._facts.tokens, self._facts.width
        ids = np.zeros((1, T), np.int64)
        valid = np.zeros((1, T), np.float32)
        ids[0, : len(tokens.ids)] = tokens.ids
        valid[0, : len(tokens.ids)] = 1
        memory = self._backend.memory
        with memory.scope():
            rows = memory.empty((1, T, width), "F32")
            inputs = {"ids": memory.place(ids), "valid": memory.place(valid)}
            self._backend.run(self._encoder.graph, inputs, {"rows": rows})
            array = memory.read(rows)
        return EncodedPrompt(prompt, tokens.kept, tokens.total), array[0, : len(tokens.ids)]
