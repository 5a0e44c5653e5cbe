"""Scale schedules of Infinity: which token maps are drawn, for every aspect template and pixel budget.

Source: FoundationVision/Infinity, infinity/utils/dynamic_resolution.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from toprovar.runtime.errors import ToprovarError

Schedule = tuple[tuple[int, int], ...]

BUDGET_SCALES = {"0.06M": 7, "0.25M": 10, "0.60M": 12, "1M": 13}


def _schedule(text: str) -> Schedule:
    pairs = []
    for item in text.split():
        height, _, width = item.partition("x")
        pairs.append((int(height), int(width or height)))
    return tuple(pairs)


# Height over width >= 1; the flat templates are the transposes.
_TALL = {
    "1.000": _schedule("1 2 4 6 8 12 16 20 24 32 40 48 64"),
    "1.250": _schedule("1 2 3 5x4 10x8 15x12 20x16 25x20 30x24 35x28 45x36 55x44 70x56"),
    "1.333": _schedule("1 2 4x3 8x6 12x9 16x12 20x15 24x18 28x21 36x27 48x36 60x45 72x54"),
    "1.500": _schedule("1 2 3x2 6x4 9x6 15x10 21x14 27x18 33x22 39x26 48x32 63x42 78x52"),
    "1.750": _schedule("1 2 3 7x4 11x6 14x8 21x12 28x16 35x20 42x24 56x32 70x40 84x48"),
    "2.000": _schedule("1 2 4x2 6x3 10x5 16x8 22x11 30x15 38x19 46x23 60x30 74x37 90x45"),
    "2.500": _schedule("1 2 5x2 10x4 15x6 20x8 25x10 30x12 40x16 50x20 65x26 80x32 100x40"),
    "3.000": _schedule("1 2 6x2 9x3 15x5 21x7 27x9 36x12 45x15 54x18 72x24 90x30 111x37"),
}


def _templates() -> dict[str, Schedule]:
    templates = dict(_TALL)
    for name, schedule in _TALL.items():
        if name != "1.000":
            templates[f"{int(1000 / float(name)) / 1000:.3f}"] = tuple((w, h) for h, w in schedule)
    return templates


TEMPLATES = _templates()  # height / width -> the 13 maps of the 1M budget


def nearest_template(aspect: float) -> str:
    """Name of the template whose height/width is nearest to `aspect` (plain difference, as the reference)."""
    if not 0 < aspect < float("inf"):
        raise ToprovarError(f"aspect {aspect} is not a positive number", "give height over width, such as 1.5")
    return min(TEMPLATES, key=lambda name: abs(float(name) - aspect))


def schedule_for(aspect: float = 1.0, budget: str = "1M") -> Schedule:
    """The (h, w) token maps of a budget; smaller budgets are prefixes of the 1M one."""
    if budget not in BUDGET_SCALES:
        raise ToprovarError(f"unknown budget {budget}; expected one of {', '.join(BUDGET_SCALES)}")
    return TEMPLATES[nearest_template(aspect)][: BUDGET_SCALES[budget]]


def parent_schedule(schedule: Schedule) -> Schedule:
    """The 1M schedule of the same template, which fixes the RoPE positions whatever the budget in use.

    A schedule that is no prefix of a template is its own parent: its last map fixes the positions.
    """
    if len(schedule) <= max(BUDGET_SCALES.values()):
        for template in TEMPLATES.values():
            if template[: len(schedule)] == schedule and len(schedule) >= 3:
                return template
    return schedule


def square(sides: Sequence[int]) -> Schedule:
    """Square maps of these sides."""
    return tuple((side, side) for side in sides)


def check_growing(sides: Sequence[int], name: str) -> None:
    """Raises: ToprovarError unless each map is larger than the one before."""
    for scale, (before, side) in enumerate(pairwise(sides), 1):
        if side <= before:
            raise ToprovarError(
                f"model {name}: sides {list(sides)}; side {side} of scale {scale} follows {before}, expected a larger "
                "one",
                "name the sides that it was trained with in its model.json",
            )


def token_counts(schedule: Schedule) -> list[int]:
    return [h * w for h, w in schedule]
