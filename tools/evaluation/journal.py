"""One line per judged picture, appended as soon as it is judged, so that an interrupted evaluation goes on."""

from __future__ import annotations

import base64
import json
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Generic, TypeVar

import numpy as np
from pydantic import Field, StrictBool, StrictStr

from toprovar.runtime.errors import ToprovarError
from toprovar.runtime.json_files import parse_json, write_bytes
from toprovar.runtime.parts import Count, Part


@dataclass(frozen=True)
class Record:
    """A judged picture. ssim, psnr_db: to the dense picture of the same noise; features: [places, F] float32.

    verdict: `Verdict.facts()`.
    """

    prompt: int
    variant: str
    seed: int
    steps_ms: float
    ssim: float
    psnr_db: float
    verdict: Mapping[str, Any]
    features: np.ndarray

    @property
    def right(self) -> Mapping[str, bool]:
        return self.verdict["right"]


def _line(identity: str, record: Record) -> str:
    facts = {
        "identity": identity,
        "prompt": record.prompt,
        "variant": record.variant,
        "seed": record.seed,
        "steps_ms": round(record.steps_ms, 3),
        "ssim": round(record.ssim, 6),
        "psnr_db": round(record.psnr_db, 4),
        "verdict": record.verdict,
        "places": len(record.features),
        "features": base64.b64encode(record.features.astype("<f4").tobytes()).decode(),
    }
    return json.dumps(facts, allow_nan=False) + "\n"


class _Verdict(Part):
    """`Verdict.facts()`."""

    concepts: Annotated[tuple[Count, ...], Field(min_length=1)]
    in_top5: tuple[StrictBool, ...]
    style: StrictStr
    pattern: StrictStr
    colours: tuple[StrictStr, ...]
    arrangement: StrictStr
    swapped: StrictBool
    right: Annotated[dict[str, StrictBool], Field(min_length=1)]


class _Line(Part):
    """One line, as `_line` writes it."""

    identity: StrictStr
    prompt: Count
    variant: StrictStr
    seed: Count
    steps_ms: Annotated[float, Field(gt=0, strict=True)]
    ssim: Annotated[float, Field(ge=-1, le=1, strict=True)]
    psnr_db: Annotated[float, Field(strict=True)]
    verdict: _Verdict
    places: Annotated[Count, Field(ge=1)]
    features: StrictStr


def _record(text: str) -> tuple[str, Record]:
    """Raises: ToprovarError or ValueError if the line is no whole record."""
    line = _Line.model_validate(parse_json(text, "line"))
    features = np.frombuffer(base64.b64decode(line.features, validate=True), "<f4").reshape(line.places, -1)
    if not features.size or not np.isfinite(features).all():
        raise ValueError("features are missing or not finite")
    verdict = line.verdict.model_dump(mode="json")
    return line.identity, Record(
        line.prompt, line.variant, line.seed, line.steps_ms, line.ssim, line.psnr_db, verdict, features
    )


AnyRecord = TypeVar("AnyRecord")


class LineJournal(ABC, Generic[AnyRecord]):
    """Records by identity: whatever decided a picture and its verdict. Other records stay in the file, unused."""

    what = ""  # what was begun there, in messages

    @staticmethod
    @abstractmethod
    def line(identity: str, record: AnyRecord) -> str:
        """A line of JSON, with its end."""

    @staticmethod
    @abstractmethod
    def record(text: str) -> tuple[str, AnyRecord]:
        """Identity and record. Raises: ValueError, KeyError, TypeError or ToprovarError if the line is no whole one."""

    def __init__(self, path: Path, resume: bool) -> None:
        """Raises: ToprovarError if there is a journal already and `resume` is not set."""
        self.path = path
        self.done: dict[str, AnyRecord] = {}
        self.damaged = 0
        if path.is_symlink() and not path.exists():
            raise ToprovarError(f"{path} is a symbolic link to nothing", "remove it, or choose another --out")
        if not path.exists():
            return
        if not resume:
            raise ToprovarError(
                f"{path} exists: an earlier {self.what} was begun there",
                "go on with --resume, or choose another folder with --out",
            )
        try:
            raw = path.read_bytes()
        except OSError as error:
            raise ToprovarError(
                f"{path} cannot be read: {error.strerror}", "choose another folder with --out, or mend it"
            ) from None
        lines = raw.decode("utf-8", "replace").splitlines(keepends=True)
        whole = []
        for line in lines:
            try:
                identity, record = self.record(line)
            except (ValueError, KeyError, TypeError, ToprovarError):  # cut off by an interruption, or not ours
                self.damaged += 1
                continue
            self.done[identity] = record
            whole.append(line if line.endswith("\n") else line + "\n")
        if whole != lines:
            write_bytes(path, "".join(whole).encode())

    def add(self, identity: str, record: AnyRecord) -> None:
        """Appends a record. Raises: ToprovarError if the file cannot be written."""
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            line = self.line(identity, record)
            with self.path.open("a", encoding="utf-8") as file:
                file.write(line)
        except OSError as error:
            raise ToprovarError(
                f"{self.path} cannot be written: {error.strerror}", "free space, then --resume"
            ) from None
        self.done[identity] = self.record(line)[1]  # as rounded there, so that a resumed run gives the same numbers


class Journal(LineJournal[Record]):
    """Of `toprovar evaluate`."""

    what = "evaluation"
    line = staticmethod(_line)
    record = staticmethod(_record)
