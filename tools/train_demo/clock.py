"""Wall-clock budgets: how many steps fit, and where in the schedule a step stands."""

from __future__ import annotations

import math
import time


class Budget:
    """Counts steps against seconds. The step count comes from measured steps and is corrected as training runs.

    seconds:    time for the steps, compilation included.
    max_steps:  stop earlier, for rehearsals; None for no limit.
    """

    def __init__(self, seconds: float, max_steps: int | None = None) -> None:
        self.seconds = seconds
        self.max_steps = max_steps
        self.started = time.monotonic()
        self.step = 0
        self._marks: list[tuple[int, float]] = []

    @property
    def elapsed_s(self) -> float:
        return time.monotonic() - self.started

    def mark(self) -> None:
        """Records that the device has really finished all steps so far; call after a synchronisation."""
        self._marks.append((self.step, time.monotonic()))

    @property
    def step_s(self) -> float | None:
        """Seconds per step between the last marks (up to ten apart), None before two marks."""
        if len(self._marks) < 2:
            return None
        (first, start), (last, end) = self._marks[max(0, len(self._marks) - 10)], self._marks[-1]
        return (end - start) / max(1, last - first)

    @property
    def expected_steps(self) -> int:
        """Steps that this stage will have made when it ends; 10 000 while unknown."""
        if self.step_s is None:
            return self.max_steps or 10_000
        last, at = self._marks[-1]
        left = self.seconds - (at - self.started)
        steps = last + max(1, int(left / self.step_s))
        return min(steps, self.max_steps) if self.max_steps else steps

    @property
    def progress(self) -> float:
        """0 at the first step, 1 at the last."""
        return min(1.0, self.step / max(1, self.expected_steps))

    @property
    def over(self) -> bool:
        return self.elapsed_s >= self.seconds or (self.max_steps is not None and self.step >= self.max_steps)


def warm_cosine(progress: float, step: int, warmup_steps: int, floor: float) -> float:
    """Learning-rate factor: linear warm-up by step, then a half cosine from 1 to `floor` over progress 0..1."""
    warm = min(1.0, (step + 1) / max(1, warmup_steps))
    return warm * (floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * min(1.0, progress))))
