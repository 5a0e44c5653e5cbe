"""Where the tensors of a run lie. The loop slices and gathers them without knowing whether they are arrays or on a GPU.

A backend has one memory. What the loop must look at comes to the host by `read`; nothing else does.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import numpy as np

from toprovar.runtime.manifest import NUMPY_DTYPES, Dtype, TensorFacts

NAMES_OF_DTYPES: dict[np.dtype[Any], Dtype] = {
    np.dtype(numpy_dtype): name for name, numpy_dtype in NUMPY_DTYPES.items()
}


class Buffer(Protocol):
    """A contiguous tensor. A slice of its first axis is a buffer too and copies nothing."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    def __getitem__(self, rows: slice, /) -> Any: ...  # the same kind of buffer; arrays say so less exactly


class Memory(Protocol):
    """Makes buffers and copies them."""

    def scope(self) -> AbstractContextManager[None]:
        """What is made inside may be handed out again after it, in the same order: a run that does the same as the one
        before gets the same addresses, which captured graphs hold on to."""

    def empty(self, shape: Sequence[int], dtype: Dtype) -> Any:
        """A buffer whose values are not set."""

    def place(self, array: np.ndarray) -> Any:
        """A buffer with an array's values; the array must not change while the buffer is used."""

    def read(self, buffer: Any) -> np.ndarray:
        """The values on the host, once everything that was asked for before is done."""

    def gather(self, rows: Sequence[tuple[Any, int]], axis: int, out: Any) -> None:
        """Fills `out` along an axis: its j-th part is the i-th part of a source, for each (source, i) of `rows`.

        The extents of the other axes are those of `out`.
        """

    def dtype_of(self, buffer: Any) -> Dtype:
        """The type in the manifest's spelling."""

    def address_of(self, buffer: Any) -> int:
        """Where the first byte lies. Raises: ValueError if the buffer is not contiguous."""


class HostMemory:
    """Buffers are NumPy arrays, and freed as such."""

    def scope(self) -> AbstractContextManager[None]:
        return nullcontext()

    def empty(self, shape: Sequence[int], dtype: Dtype) -> np.ndarray:
        return np.empty(tuple(shape), NUMPY_DTYPES[dtype])

    def place(self, array: np.ndarray) -> np.ndarray:
        return np.ascontiguousarray(array)

    def read(self, buffer: np.ndarray) -> np.ndarray:
        return buffer

    def gather(self, rows: Sequence[tuple[np.ndarray, int]], axis: int, out: np.ndarray) -> None:
        for j, (source, i) in enumerate(rows):
            np.moveaxis(out, axis, 0)[j] = np.moveaxis(source, axis, 0)[i]

    def dtype_of(self, buffer: np.ndarray) -> Dtype:
        """Raises: ValueError for a type that no graph takes."""
        if buffer.dtype not in NAMES_OF_DTYPES:
            raise ValueError(f"an array of {buffer.dtype} is no graph's input or output")
        return NAMES_OF_DTYPES[buffer.dtype]

    def address_of(self, buffer: np.ndarray) -> int:
        if not buffer.flags.c_contiguous:
            raise ValueError(f"an array of shape {list(buffer.shape)} is not contiguous")
        return buffer.ctypes.data


def checked_address(memory: Memory, buffer: Any, name: str, facts: TensorFacts) -> int:
    """Address of a buffer that is to be a graph's input or output.

    Raises: ValueError if shape or type are not those of the signature: the graph would read or write beyond it.
    """
    shape = tuple(buffer.shape)
    fits = shape == facts.shape or (facts.is_open and shape[1:] == facts.shape[1:] and shape[0] <= facts.shape[0])
    if not fits or memory.dtype_of(buffer) != facts.dtype:
        raise ValueError(
            f"{name}: {memory.dtype_of(buffer)}{list(shape)} given, {facts.dtype}{list(facts.shape)} expected"
        )
    return memory.address_of(buffer)
