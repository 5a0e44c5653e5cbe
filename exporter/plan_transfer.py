"""A plan carried over to the maps of another aspect: the same shares of tokens at the same scales and layers.

Templates of one budget have the same number of scales and nearly the same number of tokens, so what was learned at one
holds about as well at another; it was not measured there, and the plan says so.
"""

from __future__ import annotations

from toprovar.exporter.schedules import TEMPLATES, Schedule
from toprovar.runtime.errors import ToprovarError
from toprovar.runtime.plan import COUNT_GRID, MIN_PRUNED_TOKENS, Plan


def template_text(schedule: Schedule) -> str:
    """A schedule in words: its template where it is one, and its last map."""
    height, width = schedule[-1]
    name = next(
        (name for name, maps in TEMPLATES.items() if len(schedule) > 2 and maps[: len(schedule)] == schedule), ""
    )
    return f"{name} (height over width), {height}x{width} tokens" if name else f"maps up to {height}x{width} tokens"


def carried_over(plan: Plan, schedule: Schedule) -> Plan:
    """The plan on other maps, by scale index. Counts grow and shrink with the map, rounded up to the plan's grid.

    A map that becomes too small to prune runs whole. What was measured of pictures is left out.
    Raises: ToprovarError if the schedules have different numbers of scales, or the plan does not survive.
    """
    if len(schedule) != plan.scales:
        raise ToprovarError(
            f"plan has {plan.scales} scales, the schedule asked for {len(schedule)}; a plan carries over to another "
            "aspect, not to another budget",
            "calibrate at this budget, or export at the plan's",
        )
    areas = [height * width for height, width in schedule]

    def scaled(scale: int, count: int) -> int:
        before, after = plan.tokens(scale), areas[scale]
        if count in (0, before):
            return count and after
        if plan.grid == COUNT_GRID and after < MIN_PRUNED_TOKENS:
            return after
        return min(-(-count * after // (before * plan.grid)) * plan.grid, after)

    def kept(keep: dict[int, tuple[int, ...]]) -> dict[int, tuple[int, ...]]:
        return {k: tuple(scaled(k, count) for count in counts) for k, counts in keep.items()}

    origin = plan.calib.template or template_text(plan.schedule)
    warning = f"counts come from template {origin}, scaled to {template_text(schedule)}; nothing was measured there"
    moved = plan.model_copy(
        update={
            "schedule": schedule,
            "keep": kept(plan.keep),
            "ladder": {k: tuple(sorted({scaled(k, rung) for rung in rungs})) for k, rungs in plan.ladder.items()},
            "paths": {
                name: path if path.keep is None else path.model_copy(update={"keep": kept(path.keep)})
                for name, path in plan.paths.items()
            },
            "calib": plan.calib.model_copy(
                update={
                    "template": origin,
                    "expected_speedup": None,
                    "measured_ssim": None,
                    "warnings": (*plan.calib.warnings, warning),
                }
            ),
        }
    )
    ramp = {k: weights for k, weights in moved.code_weight.ramp.items() if moved.is_pruned(k)}
    moved = moved.model_copy(update={"code_weight": moved.code_weight.model_copy(update={"ramp": ramp})})
    moved.check()
    return moved
