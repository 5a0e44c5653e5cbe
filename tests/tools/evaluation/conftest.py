from __future__ import annotations

import pytest
from evaluation_helpers import ColourJudge, coloured_sprites

from toprovar.tools.train_demo.data import Composer


@pytest.fixture(scope="session")
def composer() -> Composer:
    return Composer(coloured_sprites())


@pytest.fixture(scope="session")
def judge() -> ColourJudge:
    return ColourJudge()
