"""Prompt -> what the prompt graph is told: the one interface behind which text encoders and classes stand."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from toprovar.runtime.bundle import Bundle
from toprovar.runtime.errors import ToprovarError
from toprovar.runtime.json_files import read_json
from toprovar.runtime.manifest import Text
from toprovar.runtime.word_tokenizer import WordTokenizer, tokenizer_from_document

if TYPE_CHECKING:
    from toprovar.runtime.pipeline import Backend

log = logging.getLogger("toprovar")


def class_number(prompt: str, classes: int) -> int:
    """The class that the prompt of a class-conditional model names.

    Raises: ToprovarError unless it is a whole number from 0 to classes - 1.
    """
    text = prompt.strip()
    if not text.isascii() or not text.isdigit() or int(text[:20]) >= classes:
        raise ToprovarError(
            f"prompt {prompt!r} is no class; expected a whole number from 0 to {classes - 1}",
            "this model draws classes, not texts: pass a class number as the prompt",
        )
    return int(text)


@dataclass(frozen=True)
class EncodedPrompt:
    """kept, total: tokens that fit, and tokens the prompt has."""

    text: str
    kept: int
    total: int


class Conditions:
    """What a bundle's prompt graph is told: rows of text, or classes; the conditional row and, with guidance, the
    unconditional one."""

    def __init__(self, bundle: Bundle, backend: Backend) -> None:
        self._bundle = bundle
        self._backend = backend
        manifest = bundle.manifest
        self._facts = manifest.text
        self._rows = manifest.rows
        self._encoder = self._facts.encoder if self._facts else None
        learned = self._facts.unconditional if self._facts else None
        self._unconditional = bundle.unconditional_rows() if self._rows == 2 and learned else None
        self._tokenizer: WordTokenizer | None = None
        if self._encoder:
            path = bundle.path(self._encoder.vocabulary)
            self._tokenizer = tokenizer_from_document(read_json(path), str(path))

    def prepare(self) -> None:
        if self._encoder:
            self._backend.prepare(self._encoder.graph)

    def inputs(
        self,
        prompt: str | None,
        negative: str | None = None,
        text_rows: np.ndarray | None = None,
        negative_rows: np.ndarray | None = None,
        text_valid: np.ndarray | None = None,
        negative_valid: np.ndarray | None = None,
    ) -> tuple[EncodedPrompt | None, dict[str, np.ndarray]]:
        """Returns: the prompt as it was understood, and the prompt graph's inputs by name.

        Text: text_rows [R, T, width], text_valid [R, T], text_positions [R, T], float32; classes: labels [R] int64.
        text_valid: [n] bool, False on padding among `text_rows`; negative_valid: likewise
        Raises:     ToprovarError if there is neither a text encoder nor rows, or what is given does not fit.
        """
        if self._facts is None:
            return self._labels(prompt, negative, text_rows)
        encoded, rows, valid = self._text(
            self._facts, prompt, negative, text_rows, negative_rows, text_valid, negative_valid
        )
        # of an unconditional row without text the first token stands for it, at position 0
        positions = np.maximum(valid.cumsum(1) - 1, 0).astype(np.float32)
        return encoded, {"text_rows": rows, "text_valid": valid, "text_positions": positions}

    def _labels(
        self, prompt: str | None, negative: str | None, text_rows: np.ndarray | None
    ) -> tuple[EncodedPrompt, dict[str, np.ndarray]]:
        classes = self._bundle.manifest.classes
        assert classes is not None
        if negative is not None or text_rows is not None:
            raise ToprovarError(
                f"bundle {self._bundle.folder} draws classes; a negative prompt or text rows cannot be used",
                f"pass the number of a class, 0 to {classes - 1}, as the prompt",
            )
        if prompt is None:
            raise ToprovarError("no prompt given", f"pass --prompt with the number of a class, 0 to {classes - 1}")
        labels = np.array([class_number(prompt, classes), classes][: self._rows], np.int64)
        return EncodedPrompt(prompt, 1, 1), {"labels": labels}

    def _text(
        self,
        facts: Text,
        prompt: str | None,
        negative: str | None,
        text_rows: np.ndarray | None,
        negative_rows: np.ndarray | None,
        text_valid: np.ndarray | None,
        negative_valid: np.ndarray | None,
    ) -> tuple[EncodedPrompt | None, np.ndarray, np.ndarray]:
        """The unconditional rows are as many as the prompt has, from the learned table, unless a negative prompt is
        given."""
        encoded = None
        if text_rows is None:
            encoded, text_rows = self._encode(facts, prompt)
        if negative_rows is None and negative is not None:
            _, negative_rows = self._encode(facts, negative)
        rows = np.zeros((self._rows, facts.tokens, facts.width), np.float32)
        valid = np.zeros((self._rows, facts.tokens), np.float32)
        self._place(text_rows, text_valid, rows, valid, 0, "text")
        if self._rows == 2:
            table = self._unconditional
            if negative_rows is None and table is None:
                valid[1, 0] = 1
            elif negative_rows is None:
                assert table is not None
                count = min(len(text_rows), facts.tokens)
                negative_rows = np.zeros((count, facts.width), np.float32)
                negative_rows[: min(count, len(table))] = table[:count]
            if negative_rows is not None:
                self._place(negative_rows, negative_valid, rows, valid, 1, "negative text")
        return encoded, rows, valid

    def _place(
        self,
        given: np.ndarray,
        given_valid: np.ndarray | None,
        rows: np.ndarray,
        valid: np.ndarray,
        row: int,
        what: str,
    ) -> None:
        T, width = rows.shape[1:]
        if given.ndim != 2 or given.shape[1] != width or not len(given):
            raise ToprovarError(
                f"{what} rows have shape {list(given.shape)}; expected [1 to {T}, {width}]",
                "encode the prompt with the text encoder that the model was trained with",
            )
        if not np.isfinite(given).all():
            raise ToprovarError(f"{what} rows hold non-finite values", "encode the prompt in fp32")
        if len(given) > T:
            log.warning("%s has %d rows; the bundle takes %d, the rest is cut off", what, len(given), T)
        count = min(len(given), T)
        rows[row, :count] = given[:count]
        valid[row, :count] = 1 if given_valid is None else given_valid[:count]
        if not valid[row].any():
            raise ToprovarError(
                f"{what} has {len(given)} rows and no token among the first {count}; expected one or more that are no "
                "padding",
                "encode the prompt again",
            )

    def _encode(self, facts: Text, prompt: str | None) -> tuple[EncodedPrompt, np.ndarray]:
        if self._encoder is None or self._tokenizer is None:
            raise ToprovarError(
                f"bundle {self._bundle.folder} holds no text encoder", "pass text rows made by its text encoder"
            )
        if prompt is None:
            raise ToprovarError("no prompt given", "pass --prompt")
        tokens = self._tokenizer.encode(prompt, self._encoder.max_tokens)
        if tokens.kept < tokens.total:
            log.warning("prompt has %d tokens; the first %d are used", tokens.total, tokens.kept)
        T, width = facts.tokens, facts.width
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
