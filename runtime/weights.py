"""Where each tensor lies in a bundle's weights file, for backends that bring the bytes to a GPU as they are."""

from __future__ import annotations

import json
from dataclasses import dataclass
from math import prod
from pathlib import Path

import numpy as np

from toprovar.runtime.errors import ToprovarError
from toprovar.runtime.manifest import DTYPE_BYTES, Dtype, tensor_rows

MAX_HEADER_BYTES = 100_000_000  # what the safetensors format allows


@dataclass(frozen=True)
class StoredTensor:
    """offset: of the first byte in the file."""

    dtype: Dtype
    shape: tuple[int, ...]
    offset: int

    @property
    def size_bytes(self) -> int:
        return prod(self.shape) * DTYPE_BYTES[self.dtype]


class WeightsFile:
    """A safetensors file, mapped: its bytes are read when they are copied.

    Raises: ToprovarError if the file contradicts itself.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        if path.stat().st_size == 0:
            raise self._fault("it is empty")  # which cannot be mapped
        self._bytes = np.memmap(path, np.uint8, "r")
        self.tensors = self._read()

    def _read(self) -> dict[str, StoredTensor]:
        size = int.from_bytes(self._bytes[:8].tobytes(), "little")
        if len(self._bytes) < 8 or size > min(len(self._bytes) - 8, MAX_HEADER_BYTES):
            raise self._fault(f"its header of {size} bytes does not fit into {len(self._bytes)} bytes")
        try:
            header = json.loads(self._bytes[8 : 8 + size].tobytes())
            tensors = {
                name: StoredTensor(facts["dtype"], tuple(facts["shape"]), 8 + size + facts["data_offsets"][0])
                for name, facts in header.items()
                if name != "__metadata__"
            }
            for name, tensor in tensors.items():
                if header[name]["data_offsets"][1] - header[name]["data_offsets"][0] != tensor.size_bytes:
                    raise self._fault(f"tensor {name} has another size than its shape says")
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise self._fault(f"its header is damaged ({type(error).__name__})") from None
        for name, tensor in tensors.items():
            if tensor.offset < 8 + size or tensor.offset + tensor.size_bytes > len(self._bytes):
                raise self._fault(f"tensor {name} lies outside")
        return tensors

    def _fault(self, reason: str) -> ToprovarError:
        return ToprovarError(f"{self.path} is not readable as safetensors: {reason}", "export the bundle again")

    def rows(self, name: str) -> StoredTensor:
        """A tensor, or some of its rows where the name says so ("rope_cos[5:14]").

        Raises: ToprovarError if there is no such tensor, or it has fewer rows.
        """
        tensor, rows = tensor_rows(name)
        if tensor not in self.tensors:
            raise ToprovarError(f"{self.path} holds no tensor {tensor}", "export the bundle again")
        stored = self.tensors[tensor]
        if rows is None:
            return stored
        if not stored.shape or rows[1] > stored.shape[0]:
            raise ToprovarError(
                f"{self.path}: rows {rows[0]} to {rows[1]} of {tensor} are asked for; it is {list(stored.shape)}",
                "export the bundle again",
            )
        row_bytes = stored.size_bytes // stored.shape[0]
        return StoredTensor(stored.dtype, (rows[1] - rows[0], *stored.shape[1:]), stored.offset + rows[0] * row_bytes)

    def data(self, tensor: StoredTensor) -> np.ndarray:
        """The bytes of a tensor. Returns: [size_bytes] uint8, not copied."""
        return self._bytes[tensor.offset : tensor.offset + tensor.size_bytes]
