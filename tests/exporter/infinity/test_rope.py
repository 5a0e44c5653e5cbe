from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest

from toprovar.exporter.infinity.rope import rope_angles, rope_table
from toprovar.exporter.schedules import TEMPLATES, schedule_for, token_counts


def positions(height: int, last: int) -> np.ndarray:
    """Row positions of an own schedule (one column wide) whose last map is `last` tall, read off the angles."""
    angles = rope_angles(4, ((height, 1), (last, 1)))  # head width 4: one frequency of 1 per axis
    return angles[:height, 0]


def test_half_way_cases_go_to_the_even_neighbour() -> None:
    # y * 2.5 = 2.5, 7.5 -> 2, 8
    assert positions(2, 5).tolist() == [0, 2]
    assert positions(4, 10).tolist() == [0, 2, 5, 8]


def test_every_half_way_case_follows_float32() -> None:
    combinations = 0
    for template in TEMPLATES.values():
        for axis in (0, 1):
            last = template[-1][axis]
            for size in (entry[axis] for entry in template):
                exact = [Fraction(y * last, size) for y in range(size)]
                combinations += any(value.denominator == 2 for value in exact)
                single = np.rint(np.arange(size, dtype=np.float32) * np.float32(last / size))
                assert (positions(size, last) == single).all()
    assert combinations == 66  # of ratio, scale and axis, counted in exact fractions


def test_fifty_four_rows_at_ratio_three_differ_from_float64() -> None:
    found = positions(54, 111)
    double = np.rint(np.arange(54) * (111 / 54))
    assert (found != double).any()
    assert np.abs(found - double).max() == 1


@pytest.mark.parametrize("head_width", [16, 96, 104, 112, 120, 128])
@pytest.mark.parametrize("name", ["1.000", "3.000", "0.571"])
def test_angles_are_those_of_pytorch_up_to_its_power(head_width: int, name: str) -> None:
    torch = pytest.importorskip("torch", reason="needs PyTorch, whose rounding is the reference")
    template = TEMPLATES[name]
    half = head_width // 2
    frequencies = 1.0 / (10000.0 ** (torch.arange(0, half, 2)[: half // 2].float() / half))
    rows = []
    for height, width in template:
        y = torch.outer(torch.round(torch.arange(height) * (template[-1][0] / height)), frequencies)
        x = torch.outer(torch.round(torch.arange(width) * (template[-1][1] / width)), frequencies)
        grid = torch.cat([y[:, None].expand(height, width, -1), x[None].expand(height, width, -1)], dim=-1)
        rows.append(grid.flatten(0, 1))
    # PyTorch's float32 power is correctly rounded on one processor and one unit off on the next (seen on AVX-512 and
    # AVX2 machines): one unit of the frequency and one of the product remain
    np.testing.assert_allclose(rope_angles(head_width, template), torch.cat(rows).numpy(), rtol=2 * 2.0**-23, atol=0)


def test_smaller_budgets_are_prefixes_of_the_largest() -> None:
    whole = rope_table(16, schedule_for(1.5, "1M"))
    small = schedule_for(1.5, "0.06M")
    table = rope_table(16, small)
    assert table.shape == (2, sum(token_counts(small)), 8)
    assert (table == whole[:, : table.shape[1]]).all()


def test_table_holds_cosines_then_sines() -> None:
    table = rope_table(8, ((1, 1), (2, 2)))
    assert table.dtype == np.float32
    assert (table[0, 0] == 1).all()
    assert (table[1, 0] == 0).all()
    assert np.abs((table**2).sum(0) - 1).max() <= 1e-6
