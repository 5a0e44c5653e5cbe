"""The names the demo model was trained on, as a small file beside its weights: evaluation needs no drawings.

The order is that of the data pack, and so of the classifier's answers.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

from toprovar.runtime.errors import ToprovarError
from toprovar.runtime.json_files import read_json, write_json
from toprovar.runtime.plan import model_from_json
from toprovar.tools.train_demo.captions import FAMILIES, Concept

FILE = "concepts.json"
SCHEMA_VERSION = 1
_STYLES = {style for family in FAMILIES for style in family}

Word = Annotated[str, Field(min_length=1, max_length=100)]


class _Entry(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    name: Word
    styles: Annotated[tuple[Word, ...], Field(min_length=1, max_length=16)]
    tags: Annotated[tuple[Word, ...], Field(max_length=64)]


class _Document(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    schema_version: Literal[1] = 1
    concepts: Annotated[tuple[_Entry, ...], Field(min_length=1, max_length=10_000)]


def write_concepts(folder: Path, concepts: Sequence[Concept]) -> Path:
    """Writes `concepts.json`. Returns: its path."""
    path = folder / FILE
    entries = [{"name": c.name, "styles": list(c.styles), "tags": list(c.tags)} for c in concepts]
    write_json(path, {"schema_version": SCHEMA_VERSION, "concepts": entries})
    return path


def read_concepts(folder: Path) -> list[Concept]:
    """Raises: ToprovarError if `concepts.json` is missing, of another form, names a concept twice or an unknown
    style."""
    path = folder / FILE
    document = model_from_json(_Document, read_json(path), str(path))
    seen: set[str] = set()
    for entry in document.concepts:
        if entry.name in seen:
            raise ToprovarError(f"{path} names the concept {entry.name!r} twice", "restore the file of the package")
        seen.add(entry.name)
        if unknown := sorted(set(entry.styles) - _STYLES):
            raise ToprovarError(
                f"{path}: concept {entry.name!r} has the style {unknown[0]!r}; expected {', '.join(sorted(_STYLES))}",
                "restore the file of the package",
            )
    return [Concept(entry.name, entry.tags, entry.styles) for entry in document.concepts]
