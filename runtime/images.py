"""What pictures that took the same decisions carry from step to step: cache, codes, residuals, prompt."""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy

import numpy as np

from toprovar.runtime.manifest import COMPUTE_DTYPES, NUMPY_DTYPES, Manifest, Step
from toprovar.runtime.table import StepTable, rows_axis


def joined_prompts(tensors: Sequence[dict[str, np.ndarray]], rows: int) -> dict[str, np.ndarray]:
    """Prompt tensors of a batch: conditional rows of all pictures, then unconditional ones.

    tensors: what the prompt graph gave for each picture, with `rows` rows each
    """
    order = [(half, one) for half in range(rows) for one in tensors]
    return {
        name: np.concatenate([np.take(one[name], [half], rows_axis(name)) for half, one in order], rows_axis(name))
        for name in tensors[0]
    }


class Images:
    """B pictures of a batch on one path.

    places:    which pictures of the batch
    guided:    whether unconditional rows run; rows are conditional first
    prompt:    tensors of the prompt graph, rows of all pictures
    cache:     per kind and layer [S_max, R, H, D]; the first `filled` keys of a layer are there
    residuals: by name, left by earlier scales
    carried:   [B, N] score that the step before made; own_codes: its codes; before_last: codes before it
    gap:       distance of conditional and unconditional logits at the step before, per picture
    """

    def __init__(self, manifest: Manifest, table: StepTable, places: list[int], prompt: dict[str, np.ndarray]) -> None:
        self.places, self.path, self.prompt = places, "", prompt
        self.guided = manifest.rows == 2
        self.codes = np.zeros((len(places), *manifest.code_shape), np.float32)
        self.before_last = self.codes
        self.residuals: dict[str, np.ndarray] = {}
        self.carried: np.ndarray | None = None
        self.own_codes: np.ndarray | None = None
        self.gap: list[float] | None = None
        layers = manifest.model.layers
        self._head = (manifest.model.heads, manifest.model.width // manifest.model.heads)
        self._dtype = NUMPY_DTYPES[COMPUTE_DTYPES[manifest.compute]]
        last = max(step.scale for step in table.steps)
        self._room = [
            max([s.past[i] if s.scale == last else s.past[i] + s.counts[i] for s in table.steps if not _ends(s)] + [1])
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

    def _buffer(self, layer: int) -> np.ndarray:
        return np.empty((self._room[layer], self.rows, *self._head), self._dtype)

    def take(self, picks: list[int], guided: bool) -> Images:
        """Some of the pictures; guided False leaves their unconditional rows behind. The caches are copied once."""
        if picks == list(range(self.count)) and guided == self.guided:
            return self
        rows = picks + [i + self.count for i in picks] if guided else picks
        part = copy(self)
        part.places, part.guided = [self.places[i] for i in picks], guided
        part.prompt = {name: np.take(array, rows, rows_axis(name)) for name, array in self.prompt.items()}
        part.residuals = {name: np.take(array, rows, rows_axis(name)) for name, array in self.residuals.items()}
        part.codes, part.before_last = self.codes[picks], self.before_last[picks]
        part.carried = None if self.carried is None else self.carried[picks]
        part.own_codes = None if self.own_codes is None else self.own_codes[picks]
        part.gap = None if self.gap is None else [self.gap[i] for i in picks]
        part.filled = list(self.filled)
        part.cache = {}
        for kind, buffers in self.cache.items():
            part.cache[kind] = [part._buffer(layer) for layer in range(len(buffers))]
            for layer, (mine, theirs) in enumerate(zip(part.cache[kind], buffers, strict=True)):
                used = self.filled[layer]
                np.take(theirs[:used], rows, 1, out=mine[:used])
        return part


def _ends(step: Step) -> bool:
    """Whether nothing is cached by a step, since none comes after it."""
    return not any(name.startswith("k_new_") for name in step.graph.outputs)
