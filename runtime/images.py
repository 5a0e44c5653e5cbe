"""What pictures that took the same decisions carry from step to step: cache, codes, residuals, prompt."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import copy
from typing import Any

import numpy as np

from toprovar.runtime.buffers import Memory
from toprovar.runtime.manifest import COMPUTE_DTYPES, Manifest, Step
from toprovar.runtime.table import StepTable, rows_axis


def joined_prompts(memory: Memory, tensors: Sequence[Mapping[str, Any]], rows: int) -> dict[str, Any]:
    """Prompt tensors of a batch: conditional rows of all pictures, then unconditional ones.

    tensors: buffers that the prompt graph filled for each picture, with `rows` rows each
    """
    if len(tensors) == 1:
        return dict(tensors[0])
    joined = {}
    for name, first in tensors[0].items():
        axis = rows_axis(name)
        shape = [*first.shape]
        shape[axis] = rows * len(tensors)
        joined[name] = memory.empty(shape, memory.dtype_of(first))
        memory.gather([(one[name], half) for half in range(rows) for one in tensors], axis, joined[name])
    return joined


class Images:
    """B pictures of a batch on one path. All tensors are buffers of the backend's memory.

    places:    which pictures of the batch
    guided:    whether unconditional rows run; rows are conditional first
    prompt:    tensors of the prompt graph, rows of all pictures
    cache:     per kind and layer [S_max, R, H, D]; the first `filled` keys of a layer are there
    residuals: by name, left by earlier scales
    carried:   [B, N] score that the step before made; own_codes: its codes; before_last: codes before it
    gap:       distance of conditional and unconditional logits at the step before, per picture
    """

    def __init__(
        self, memory: Memory, manifest: Manifest, table: StepTable, places: list[int], prompt: dict[str, Any]
    ) -> None:
        self._memory = memory
        self.places, self.path, self.prompt = places, "", prompt
        self.guided = manifest.rows == 2
        self.codes = memory.place(np.zeros((len(places), *manifest.code_shape), np.float32))
        self.before_last = self.codes
        self.residuals: dict[str, Any] = {}
        self.carried: Any = None
        self.own_codes: Any = None
        self.gap: list[float] | None = None
        layers = manifest.model.layers
        self._head = manifest.head
        self._dtype = COMPUTE_DTYPES[manifest.compute]
        last = max(step.scale for step in table.steps)
        self._room = [
            max([1, *(s.past[i] + (s.counts[i] + s.along) * (s.scale != last) for s in table.steps if not _ends(s))])
            for i in range(layers)
        ]
        self.filled = [0] * layers
        self.cache = {kind: [self._buffer(layer) for layer in range(layers)] for kind in "kv"}

    @property
    def count(self) -> int:
        return len(self.places)

    @property
    def rows(self) -> int:
        return self.count * (2 if self.guided else 1)

    def _buffer(self, layer: int) -> Any:
        return self._memory.empty((self._room[layer], self.rows, *self._head), self._dtype)

    def take(self, picks: list[int], guided: bool) -> Images:
        """Some of the pictures; guided False leaves their unconditional rows behind. The caches are copied once."""
        if picks == list(range(self.count)) and guided == self.guided:
            return self
        rows = picks + [i + self.count for i in picks] if guided else picks
        part = copy(self)
        part.places, part.guided = [self.places[i] for i in picks], guided
        part.prompt = {name: self._taken(buffer, rows, rows_axis(name)) for name, buffer in self.prompt.items()}
        part.residuals = {name: self._taken(buffer, rows, rows_axis(name)) for name, buffer in self.residuals.items()}
        part.codes, part.before_last = self._taken(self.codes, picks), self._taken(self.before_last, picks)
        part.carried = None if self.carried is None else self._taken(self.carried, picks)
        part.own_codes = None if self.own_codes is None else self._taken(self.own_codes, picks)
        part.gap = None if self.gap is None else [self.gap[i] for i in picks]
        part.filled = list(self.filled)
        part.cache = {}
        for kind, buffers in self.cache.items():
            part.cache[kind] = [part._buffer(layer) for layer in range(len(buffers))]
            for layer, (mine, theirs) in enumerate(zip(part.cache[kind], buffers, strict=True)):
                used = self.filled[layer]
                self._memory.gather([(theirs[:used], row) for row in rows], 1, mine[:used])
        return part

    def _taken(self, buffer: Any, picks: list[int], axis: int = 0) -> Any:
        shape = [*buffer.shape]
        shape[axis] = len(picks)
        taken = self._memory.empty(shape, self._memory.dtype_of(buffer))
        self._memory.gather([(buffer, pick) for pick in picks], axis, taken)
        return taken


def _ends(step: Step) -> bool:
    """Whether nothing is cached by a step, since none comes after it."""
    return not any(name.startswith("k_new_") for name in step.graph.outputs)
