"""The one weights file of a bundle: a safetensors file whose layout is known before it is written.

Graphs point into it by offset, so the layout comes first; tensors are then streamed one at a time, which keeps
memory at one tensor whatever the model's size. Large tensors come first and the header is padded, so every matrix
starts at a multiple of 64 bytes.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from toprovar.runtime.errors import ToprovarError

WEIGHTS_FILE = "weights.safetensors"
ALIGNMENT = 64
Thunks = dict[str, Callable[[], Any]]  # names and lazily computed tensors
ITEM_BYTES = {"F32": 4, "F16": 2, "BF16": 2, "I64": 8, "U8": 1}


@dataclass(frozen=True)
class WeightSpec:
    """dtype in safetensors' spelling; shape."""

    dtype: str
    shape: tuple[int, ...]

    @property
    def size_bytes(self) -> int:
        return prod(self.shape) * ITEM_BYTES[self.dtype]


@dataclass(frozen=True)
class WeightsLayout:
    """Where each tensor lies. offsets are from the start of the file."""

    specs: dict[str, WeightSpec]
    offsets: dict[str, int]
    header: bytes

    @property
    def size_bytes(self) -> int:
        return len(self.header) + sum(spec.size_bytes for spec in self.specs.values())


def layout_weights(specs: Mapping[str, WeightSpec]) -> WeightsLayout:
    """Aligned tensors first, then the rest; by name inside each group, so the same specs give the same bytes."""
    order = sorted(specs, key=lambda name: (specs[name].size_bytes % ALIGNMENT != 0, name))
    entries, starts, position = {}, {}, 0
    for name in order:
        spec = specs[name]
        entries[name] = {
            "dtype": spec.dtype,
            "shape": list(spec.shape),
            "data_offsets": [position, position + spec.size_bytes],
        }
        starts[name] = position
        position += spec.size_bytes
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-(len(text) + 8) % ALIGNMENT)
    header = len(text).to_bytes(8, "little") + text
    offsets = {name: len(header) + start for name, start in starts.items()}
    return WeightsLayout({name: specs[name] for name in order}, offsets, header)


def write_weights(path: Path, layout: WeightsLayout, tensor: Callable[[str], np.ndarray]) -> None:
    """Streams the tensors in layout order into a file of a folder that is not published yet (output_folder.py).

    tensor: gives the array of a name; bf16 as uint16 bits.
    Raises: ToprovarError if the disk is full.
    """
    try:
        with open(path, "wb") as file:
            file.write(layout.header)
            for name, spec in layout.specs.items():
                array = np.ascontiguousarray(tensor(name))
                if array.nbytes != spec.size_bytes or tuple(array.shape) != spec.shape:
                    raise AssertionError(f"{name}: {array.shape} {array.dtype} does not fit {spec}")
                file.write(array.reshape(-1).view(np.uint8).data)
    except OSError as error:
        raise ToprovarError(
            f"{path} cannot be written: {error.strerror}", f"{layout.size_bytes} bytes are needed; choose another --out"
        ) from None
