"""Every step that a plan may need: one per scale, path, rows and count, with the cache lengths it can meet.

A cache length that earlier decisions leave open becomes an open first axis of that graph; all others are static. So the
number of graphs grows with what a scale can be, not with how it was reached.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from toprovar.runtime.decisions import SatsDecision
from toprovar.runtime.plan import RESIDUALS, Plan


@dataclass(frozen=True)
class Route:
    """One step to prepare.

    plan:      the plan on its path, with the counts of the rung in `keep`
    path:      "" for the main path
    guided:    whether unconditional rows run too
    past:      keys each layer finds in its cache; the most it can find where `open_past`
    is_last:   nothing runs behind it
    """

    plan: Plan
    scale: int
    path: str = ""
    guided: bool = True
    past: tuple[int, ...] = ()
    open_past: bool = False
    is_last: bool = False

    @property
    def counts(self) -> tuple[int, ...]:
        return self.plan.counts(self.scale)

    def key(self, gate_whole_layers: bool = False) -> tuple[object, ...]:
        """What determines the graph: routes of equal keys share it."""
        plan, scale = self.plan, self.scale
        gates = plan.gated_layers(scale, self.counts, gate_whole_layers)
        restored = plan.restored_layers(scale)
        scores = bool(gates) or plan.carries_score(scale)
        return (
            scale, self.counts, self.past, self.open_past, self.guided, self.is_last,
            tuple(gates),
            plan.score.model_dump_json() if scores else "",
            plan.restore.model_dump_json() if restored else "",
            plan.residual_scale(scale) if restored else None,
            tuple(plan.residual_layers(scale)),
            plan.score.granularity if plan.residual_layers(scale) else "",
            tuple(plan.source_layers(scale)),
            plan.rho_layers(scale), plan.carries_score(scale), plan.carries_codes(scale), plan.measures_gap(scale),
            plan.code_weight.ramp.get(scale),
        )  # fmt: skip


@dataclass
class _Open:
    plan: Plan
    pasts: set[tuple[int, ...]] = field(default_factory=set)
    continues: bool = False


def routes(
    plan: Plan, guided: bool, along: Callable[[int], int] = lambda scale: 0, has_cache: bool = True
) -> list[Route]:
    """All steps of a plan, in order of scale.

    guided: whether there are unconditional rows at all; along: further keys that a scale leaves in every layer's cache;
    has_cache: False where scales leave none
    """
    layers = plan.backbone.layers
    plans = {"": plan} | {name: plan.on_path(name) for name in plan.paths}
    sats = plan.decision(SatsDecision)
    states = {("", guided, (0,) * layers)}
    found: list[Route] = []
    for scale in range(plan.scales):
        steps: dict[tuple[str, bool, tuple[int, ...]], _Open] = {}
        following = set()
        for path, was_guided, past in sorted(states):
            own = plans[path]
            if scale in own.skip_scales:
                continue
            now_guided = was_guided and own.is_guided(scale)
            for counts in own.choices(scale):
                chosen = own.model_copy(update={"keep": {**own.keep, scale: counts}}) if scale in own.ladder else own
                step = steps.setdefault((path, now_guided, counts), _Open(chosen))
                step.pasts.add(past)
                left = [count + along(scale) if has_cache else 0 for count in counts]
                filled = tuple(a + b for a, b in zip(past, left, strict=True))
                for name in [path, *(own.entries(scale) if not path else [])]:
                    runs_on = scale + 1 < plan.scales and scale + 1 not in plans[name].skip_scales
                    step.continues = step.continues or runs_on
                    following.add((name, now_guided, filled))
                    if sats and scale in sats.scales and now_guided:
                        following.add((name, False, filled))
        for (path, rows, _), step in steps.items():
            most = tuple(max(lengths) for lengths in zip(*step.pasts, strict=True))
            found.append(Route(step.plan, scale, path, rows, most, len(step.pasts) > 1, not step.continues))
        states = following
    return found


def residual_names(plan: Plan, scale: int, layer: int, source: int | None = None) -> list[str]:
    """Names of a layer's residual tensors, one or one per sub-layer, as left behind by scale `source`."""
    if plan.restore.kind not in RESIDUALS:
        return []
    start = f"residual_{scale if source is None else source:02d}_{layer:02d}"
    return [f"{start}_{part}" for part in plan.backbone.sublayers] if plan.score.granularity == "sublayer" else [start]
