"""One line per judged picture, appended as soon as it is judged, so that an interrupted evaluation goes on."""

from __future__ import annotations

import base64
import json
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

import numpy as np

from toprovar.runtime.errors import ToprovarError
from toprovar.runtime.json_files import write_bytes


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


def _record(text: str) -> tuple[str, Record]:
    facts = json.loads(text)
    places = int(facts["places"])
    features = np.frombuffer(base64.b64decode(facts["features"]), "<f4").reshape(places, -1)
    if not isinstance(facts["verdict"]["right"], dict):
        raise TypeError("a verdict has no answers")
    return str(facts["identity"]), Record(
        int(facts["prompt"]),
        str(facts["variant"]),
        int(facts["seed"]),
        float(facts["steps_ms"]),
        float(facts["ssim"]),
        float(facts["psnr_db"]),
        facts["verdict"],
        features,
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
        """Identity and record of a line. Raises: ValueError, KeyError or TypeError for a line that is cut off."""

    def __init__(self, path: Path, resume: bool) -> None:
        """Raises: ToprovarError if there is a journal already and `resume` is not set."""
        self.path = path
        self.done: dict[str, AnyRecord] = {}
        self.damaged = 0
        if not path.exists():
            return
        if not resume:
            raise ToprovarError(
                f"{path} exists: an earlier {self.what} was begun there",
                "go on with --resume, or choose another folder with --out",
            )
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines(keepends=True)
        whole = []
        for line in lines:
            try:
                identity, record = self.record(line)
            except (ValueError, KeyError, TypeError):  # cut off by an interruption
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
