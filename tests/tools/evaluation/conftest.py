from __future__ import annotations

import pytest
from evaluation_helpers import ColourJudge, coloured_sprites, write_judged_model

from toprovar.exporter.model import PACKAGED
from toprovar.tools.evaluation.concepts import read_concepts
from toprovar.tools.train_demo.data import Composer


@pytest.fixture(scope="session")
def composer() -> Composer:
    return Composer(coloured_sprites())


@pytest.fixture(scope="session")
def judge() -> ColourJudge:
    return ColourJudge()


@pytest.fixture(scope="session")
def judged_folder(tmp_path_factory):
    """A small model with random weights and files to judge it by, over the packaged names."""
    return write_judged_model(tmp_path_factory.mktemp("judged") / "tiny", read_concepts(PACKAGED["demo"]))
