"""The steps of a variant as a table: which one comes next for pictures that took certain decisions."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from toprovar.runtime.decisions import Decision, DecisionKind, RhoDecision, SatsDecision, SkipvarDecision
from toprovar.runtime.manifest import Step

ROWS_FIRST = ("pooled_text", "text_mask")  # everything else with rows is time-major


def rows_axis(name: str) -> int:
    """Axis of a step's input or output that counts rows."""
    return 0 if name in ROWS_FIRST else 1


@dataclass(frozen=True)
class StepTable:
    steps: tuple[Step, ...]
    decisions: tuple[Decision, ...] = ()

    def at(self, scale: int, path: str, guided: bool, images: int = 1) -> list[Step]:
        """Steps that pictures on a path can take, by count; without unconditional rows where the path drops them.

        Returns: nothing where the path has ended.
        """
        found = [s for s in self.steps if (s.scale, s.path, s.images) == (scale, path, images)]
        same = [s for s in found if s.guided == guided]
        if not same and guided:
            same = [s for s in found if not s.guided]
        return sorted(same, key=lambda step: step.counts)

    def certain(self, images: int) -> list[Step]:
        """Steps that pictures run whatever is decided, where they start together."""
        size = next(size for size in self.sizes() if size <= images)
        found = [step for step in self.steps if step.images == size]
        return [step for step in found if sum(other.scale == step.scale for other in found) == 1]

    def sizes(self) -> list[int]:
        """Numbers of images that the steps take, the largest first."""
        return sorted({step.images for step in self.steps}, reverse=True)

    def entries(self, scale: int) -> list[str]:
        """Paths that can be entered after a scale."""
        names: list[str] = []
        for decision in self.decisions:
            if isinstance(decision, RhoDecision) and scale in decision.paths:
                names.append(decision.paths[scale])
            elif isinstance(decision, SkipvarDecision) and scale == decision.scale:
                names += [*decision.skip_paths.values(), *decision.uncond_paths.values()]
        return list(dict.fromkeys(names))

    def decision(self, kind: type[DecisionKind]) -> DecisionKind | None:
        return next((decision for decision in self.decisions if isinstance(decision, kind)), None)

    def meetings(self, scales: int, layers: int, images: int, guided: bool) -> Iterator[tuple[Step, tuple[int, ...]]]:
        """Every step with every cache length that it can meet.

        Raises: KeyError with a scale where a reachable state has no step though later scales run on its path.
        """
        sats = self.decision(SatsDecision)
        states = {("", guided, (0,) * layers)}
        for scale in range(scales):
            following = set()
            for path, was_guided, filled in sorted(states):
                for step in self.at(scale, path, was_guided, images):
                    yield step, filled
                    after = tuple(a + b for a, b in zip(filled, step.cached, strict=True))
                    for name in [path, *(self.entries(scale) if not path else [])]:
                        following.add((name, step.guided, after))
                        if sats and scale in sats.scales and step.guided:
                            following.add((name, False, after))
            states = following
