"""Prompts encoded beforehand: one safetensors file of text rows, so that calibrating and running need no text encoder.

Tensors: `rows` [sum of counts, width] F32, `row_counts` [P] I64, `token_counts` [P] I64 (what each prompt has before it
is cut), `valid` [sum of counts] U8 (0 on padding that an encoder keeps), and with a negative prompt `negative_rows`
[n, width] F32 and `negative_valid` [n] U8. Metadata: `prompt_embeddings`, a JSON object of `schema_version`, `prompts`,
`negative` and `encoder`; one entry, because the order of several is not kept.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import numpy as np

from toprovar.runtime.errors import ToprovarError
from toprovar.runtime.json_files import parse_json, write_bytes

EMBEDDINGS_SCHEMA_VERSION = 1
METADATA = "prompt_embeddings"
MAX_FILE_BYTES = 64 * 2**30
MAX_PROMPTS = 1_000_000
MAX_ROWS = 512  # of one prompt: what the longest text side of any family reads
MAX_WIDTH = 65536

_AGAIN = "make it again:  toprovar encode-prompts PROMPTS.txt --encoder FOLDER --kind t5 --out FILE"


@dataclass(frozen=True)
class PromptEmbeddings:
    """P prompts and their text rows.

    prompts:      as they were given
    rows:         per prompt [T, width] float32
    valid:        per prompt [T] bool; False on padding rows
    token_counts: tokens each prompt has; more than its valid rows where it was cut
    encoder:      what made the rows: kind, weights digest, number format, limits
    negative:     text, rows and validity of the negative prompt, or None
    """

    prompts: tuple[str, ...]
    rows: tuple[np.ndarray, ...]
    valid: tuple[np.ndarray, ...]
    token_counts: tuple[int, ...]
    encoder: Mapping[str, Any] = field(default_factory=dict)
    negative: tuple[str, np.ndarray, np.ndarray] | None = None
    name: str = "the embeddings"
    sha256: str = ""

    @property
    def width(self) -> int:
        return int(self.rows[0].shape[1])

    def index_of(self, prompt: str) -> int:
        """Raises: ToprovarError with the nearest prompt if this one is not there."""
        if prompt in self.prompts:
            return self.prompts.index(prompt)
        nearest = get_close_matches(prompt, self.prompts, 1)
        raise ToprovarError(
            f"{self.name} holds no prompt {prompt!r}; it has {len(self.prompts)} others",
            f"did you mean {nearest[0]!r}?" if nearest else "pick one by its number: --index 0 is the first",
        )

    def select(self, prompt: str | None, index: int | None) -> int:
        """The prompt that was asked for, by text or by number; the only one where neither is given.

        Raises: ToprovarError if it is not there, or several could be meant.
        """
        if prompt is not None and index is not None:
            raise ToprovarError("--prompt and --index are both given", "give one of them")
        if prompt is not None:
            return self.index_of(prompt)
        if index is None and len(self.prompts) == 1:
            return 0
        last = len(self.prompts) - 1
        if index is None:
            raise ToprovarError(
                f"{self.name} holds {len(self.prompts)} prompts", f"pick one: --index 0 to {last}, or its text"
            )
        if not 0 <= index <= last:
            raise ToprovarError(f"{self.name} has no prompt {index}; it has 0 to {last}", f"give --index 0 to {last}")
        return index


def write_embeddings(path: Path, embeddings: PromptEmbeddings) -> None:
    """Complete or absent. Raises: ToprovarError if the place cannot be written."""
    from safetensors.numpy import save

    tensors = {
        "rows": np.ascontiguousarray(np.concatenate(embeddings.rows), np.float32),
        "row_counts": np.array([len(rows) for rows in embeddings.rows], np.int64),
        "token_counts": np.array(embeddings.token_counts, np.int64),
        "valid": np.concatenate(embeddings.valid).astype(np.uint8),
    }
    negative = None
    if embeddings.negative is not None:
        negative, tensors["negative_rows"], valid = embeddings.negative
        tensors["negative_valid"] = valid.astype(np.uint8)
    facts = {
        "schema_version": EMBEDDINGS_SCHEMA_VERSION,
        "prompts": embeddings.prompts,
        "negative": negative,
        "encoder": dict(embeddings.encoder),
    }
    write_bytes(path, save(tensors, {METADATA: json.dumps(facts, allow_nan=False)}))


def read_embeddings(path: Path) -> PromptEmbeddings:
    """Raises: ToprovarError if the file is missing, damaged, too large, of another kind, or contradicts itself."""
    from safetensors import SafetensorError, safe_open

    if not path.is_file():
        raise ToprovarError(f"embeddings {path} {'is a folder' if path.is_dir() else 'does not exist'}", _AGAIN)
    size = path.stat().st_size
    if size > MAX_FILE_BYTES:
        raise ToprovarError(f"embeddings {path} has {size} bytes; expected at most {MAX_FILE_BYTES}", _AGAIN)
    try:
        with safe_open(path, "np") as file:
            text = (file.metadata() or {}).get(METADATA)
            slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118  it is no dict
            shapes = {name: (found.get_dtype(), *found.get_shape()) for name, found in slices.items()}
            facts = _checked_facts(path, text, shapes)
            tensors = {name: file.get_tensor(name) for name in shapes}
        digest = hashlib.sha256()
        with path.open("rb") as stream:
            while block := stream.read(1 << 20):
                digest.update(block)
    except (SafetensorError, OSError, ValueError) as fault:
        reason = (str(fault).strip().splitlines() or [type(fault).__name__])[0][:200]
        raise ToprovarError(f"embeddings {path} cannot be read as safetensors: {reason}", _AGAIN) from None
    prompts, encoder, negative = facts["prompts"], facts["encoder"], facts["negative"]
    counts = _checked_counts(path, prompts, shapes, tensors)
    ends = np.cumsum(counts)[:-1]
    return PromptEmbeddings(
        prompts=tuple(prompts),
        rows=tuple(np.split(tensors["rows"], ends)),
        valid=tuple(np.split(tensors["valid"].astype(bool), ends)),
        token_counts=tuple(int(n) for n in tensors["token_counts"]),
        encoder=encoder,
        negative=None
        if negative is None
        else (str(negative), tensors["negative_rows"], tensors["negative_valid"].astype(bool)),
        name=str(path),
        sha256=digest.hexdigest(),
    )


_NEEDED = {"rows": ("F32", 2), "row_counts": ("I64", 1), "token_counts": ("I64", 1), "valid": ("U8", 1)}
_FURTHER = {"negative_rows": ("F32", 2), "negative_valid": ("U8", 1)}


def _checked_facts(path: Path, text: str | None, shapes: Mapping[str, tuple[Any, ...]]) -> dict[str, Any]:
    """The metadata, before any tensor is read."""
    if text is None:
        raise ToprovarError(f"{path} holds no encoded prompts: found tensors {', '.join(sorted(shapes)[:5])}", _AGAIN)
    facts = parse_json(text, f"the metadata of {path}")
    if not isinstance(facts, dict) or facts.get("schema_version") != EMBEDDINGS_SCHEMA_VERSION:
        found = facts.get("schema_version") if isinstance(facts, dict) else facts
        raise ToprovarError(
            f"embeddings {path} has schema version {found}; expected {EMBEDDINGS_SCHEMA_VERSION}", _AGAIN
        )
    if set(facts) != {"schema_version", "prompts", "negative", "encoder"} or not isinstance(facts["encoder"], dict):
        raise _contradiction(path, f"its metadata has {', '.join(facts)}")
    if (facts["negative"] is None) != ("negative_rows" not in shapes):
        raise _contradiction(path, "negative prompt and negative rows do not stand together")
    wanted = {**_NEEDED, **(_FURTHER if set(_FURTHER) & set(shapes) else {})}
    for name, (dtype, axes) in wanted.items():
        found = shapes.get(name, ())
        if len(found) != axes + 1 or found[0] != dtype:
            raise _contradiction(
                path, f"tensor {name} is {list(found) or 'missing'}; expected {dtype} with {axes} axes"
            )
    return facts


def _checked_counts(path: Path, prompts: Any, shapes: Mapping[str, tuple[Any, ...]], tensors: Any) -> Sequence[int]:
    """Rows of each prompt. Raises: ToprovarError for sizes or values that no writer of ours makes."""
    if not isinstance(prompts, list) or not all(isinstance(prompt, str) for prompt in prompts):
        raise _contradiction(path, "its prompts are no list of texts")
    counts = tensors["row_counts"]
    if not 1 <= len(prompts) <= MAX_PROMPTS or not len(counts) == len(prompts) == len(tensors["token_counts"]):
        raise _contradiction(
            path, f"{len(prompts)} prompts, {len(counts)} row counts, {len(tensors['token_counts'])} token counts"
        )
    rows, width = shapes["rows"][1:]
    if counts.min() < 1 or counts.max() > MAX_ROWS:
        raise _contradiction(path, f"a prompt has {counts.min()} to {counts.max()} rows; expected 1 to {MAX_ROWS}")
    if counts.sum() != rows or shapes["valid"][1] != rows or not 1 <= width <= MAX_WIDTH:
        raise _contradiction(path, f"rows {[rows, width]} for {int(counts.sum())} counted ones")
    if "negative_rows" in shapes and (
        shapes["negative_rows"][2] != width
        or shapes["negative_valid"][1] != shapes["negative_rows"][1]
        or not 1 <= shapes["negative_rows"][1] <= MAX_ROWS
    ):
        raise _contradiction(path, f"negative rows {list(shapes['negative_rows'][1:])} beside rows of width {width}")
    for name in ("rows", "negative_rows"):
        if name in tensors and not np.isfinite(tensors[name]).all():
            raise ToprovarError(f"embeddings {path}: {name} hold non-finite values", "encode in fp32: --dtype fp32")
    return [int(n) for n in counts]


def _contradiction(path: Path, what: str) -> ToprovarError:
    return ToprovarError(f"embeddings {path} contradict themselves: {what}", _AGAIN)
