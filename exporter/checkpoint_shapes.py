"""Reads sizes off a checkpoint's names and shapes; each family's config.py says which."""

from __future__ import annotations

import re
from collections.abc import Mapping

from toprovar.runtime.errors import ToprovarError


class CheckpointShapes:
    """The shapes of a file that should hold a transformer of some family.

    family: as messages name it, "Infinity"
    file:   what to check where a tensor is missing; instead: what may have been passed for it
    """

    def __init__(
        self,
        shapes: Mapping[str, tuple[int, ...]],
        family: str,
        file: str = "the transformer",
        instead: str = "the tokenizer",
    ) -> None:
        self.shapes, self.family, self.file, self.instead = shapes, family, file, instead

    def __contains__(self, name: str) -> bool:
        return name in self.shapes

    def of(self, name: str, axes: int) -> tuple[int, ...]:
        """A tensor's shape. Raises: ToprovarError if it is missing, empty or has another number of axes."""
        no_such = f"not {'an' if self.family[0] in 'AEIOU' else 'a'} {self.family} checkpoint"
        if name not in self.shapes:
            raise ToprovarError(
                f"{no_such}: tensor {name} is missing ({len(self.shapes)} tensors present)",
                f"check that the file is {self.file} and not {self.instead}",
            )
        found = tuple(self.shapes[name])
        if len(found) != axes or 0 in found:
            raise ToprovarError(
                f"{no_such}: tensor {name} has shape {list(found)}; expected {axes} axes, none empty",
                "the checkpoint belongs to another model, or was changed",
            )
        return found

    def layers(self, prefix: str) -> int:
        """How many layers `prefix.{i}.` are there. Raises: ToprovarError for a gap."""
        numbers = {int(m[1]) for name in self.shapes if (m := re.match(re.escape(prefix) + r"\.(\d+)\.", name))}
        missing = set(range(len(numbers))) - numbers
        if missing:
            raise ToprovarError(
                f"{self.family} checkpoint without tensors of {prefix}.{min(missing)}: "
                f"found layers up to {max(numbers)}",
                "pass the whole checkpoint of this model (all shards)",
            )
        return len(numbers)

    def heads(self, told: int | None, hint: str) -> tuple[int, bool]:
        """Number of heads, and whether attention is cosine attention, whose learned factor tells it.

        told:   for the other kind
        Raises: ToprovarError if nothing tells
        """
        name = "blocks.0.attn.scale_mul_1H11"
        if name in self.shapes:
            found = self.of(name, 4)[1]
            if told not in (None, found):
                raise ToprovarError(
                    f"{self.family} checkpoint with {found} heads, as {name} tells; {told} were named",
                    "leave heads out of its model.json",
                )
            return found, True
        if told is None:
            raise ToprovarError(
                f"{self.family} checkpoint without {name}: its number of heads cannot be told from shapes", hint
            )
        return told, False
