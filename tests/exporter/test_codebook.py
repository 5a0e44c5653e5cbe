from __future__ import annotations

import pytest

pytest.importorskip("torch", reason="needs PyTorch: pip install 'toprovar[torch]'")

from toprovar.exporter.codebook import smoothing_index


@pytest.mark.parametrize(("scales", "expected"), [(10, "0 0 1 1 1 2 2 3 3 3"), (14, "0 0 0 1 1 1 1 2 2 2 2 3 3 3")])
def test_published_schedules_take_the_published_convolutions(scales: int, expected: str) -> None:
    assert [smoothing_index(s, scales) for s in range(scales)] == [int(k) for k in expected.split()]
