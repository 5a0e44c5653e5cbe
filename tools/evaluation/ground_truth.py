"""The files beside a demo model's weights that judge it: names, classifier, and what real pictures score."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from toprovar.exporter.model import PACKAGED
from toprovar.runtime.errors import ToprovarError
from toprovar.runtime.json_files import read_json
from toprovar.tools.evaluation import classifier as judges
from toprovar.tools.evaluation import concepts as names
from toprovar.tools.evaluation import frechet
from toprovar.tools.evaluation.table import check_entries

if TYPE_CHECKING:
    from toprovar.tools.evaluation.classifier import DrawingClassifier
    from toprovar.tools.train_demo.captions import Concept

REFERENCE_SCORES = "reference_scores.json"
REFERENCE_SCHEMA_VERSION = 1


@dataclass
class Judge:
    """Names of the concepts, and the classifier that knows them."""

    concepts: list[Concept]
    judge: DrawingClassifier
    judge_sha256: str


@dataclass
class GroundTruth(Judge):
    """references: entries of result files for real pictures, with the prompts and the judge they hold for."""

    features: frechet.Features
    references: dict[str, Any]

    def references_for(self, prompts_sha256: str) -> list[dict[str, Any]]:
        """What real pictures of these very prompts scored under this judge; empty for other prompts."""
        made_for = (self.references.get("prompts_sha256"), self.references.get("judge_sha256"))
        return self.references["entries"] if made_for == (prompts_sha256, self.judge_sha256) else []


def ground_truth_folder(model: str) -> Path:
    """The folder of a named demo model.

    Raises: ToprovarError if the model has no names beside it, so that nothing is known about its prompts.
    """
    folder = PACKAGED.get(model, Path(model))
    folder = folder if folder.is_dir() else folder.parent
    if not (folder / names.FILE).exists():
        raise ToprovarError(
            f"model {model} has no ground truth: {folder / names.FILE} does not exist",
            "pass demo, or a folder that a training of the demo model wrote; compare needs none with --prompts FILE",
        )
    return folder


def load_judge(folder: Path) -> Judge:
    """Raises: ToprovarError if a file is missing or damaged, or the files are not of one training run."""
    concepts = names.read_concepts(folder)
    path = folder / judges.FILE
    judge = judges.load_classifier(path)
    known = judge.concepts.out_features - 1
    if known != len(concepts):
        raise ToprovarError(
            f"{path} knows {known} concepts; {folder / names.FILE} names {len(concepts)}",
            "take both files from the same training run",
        )
    return Judge(concepts, judge, hashlib.sha256(path.read_bytes()).hexdigest())


def load_ground_truth(folder: Path) -> GroundTruth:
    """Raises: as `load_judge`, and where what real pictures score is missing or of another version."""
    found = load_judge(folder)
    features = frechet.read_reference(folder / frechet.FILE, judges.FEATURES)
    references = read_json(folder / REFERENCE_SCORES)
    version = references.get("schema_version") if isinstance(references, dict) else None
    if version is True or version != REFERENCE_SCHEMA_VERSION or not isinstance(references.get("entries"), list):
        raise ToprovarError(
            f"{folder / REFERENCE_SCORES} has schema_version {version}; expected {REFERENCE_SCHEMA_VERSION}",
            "make it again:  python -m toprovar.tools.evaluation.reference",
        )
    check_entries(references["entries"], folder / REFERENCE_SCORES)
    return GroundTruth(found.concepts, found.judge, found.judge_sha256, features, references)
