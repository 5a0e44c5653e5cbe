"""Calls of the operator library's C functions (core/c_api.h) with raw pointers, for NumPy and PyTorch alike."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from toprovar.plugins.library import load, require_library

if TYPE_CHECKING:
    import numpy as np

# ONNX's numbers of element types
FLOAT32, INT32, INT64, FLOAT16, BFLOAT16 = 1, 6, 7, 10, 16
NUMPY_TYPES = {"float32": FLOAT32, "int32": INT32, "int64": INT64, "float16": FLOAT16}
ERROR_BYTES = 1024


class OperatorError(ValueError):
    """A call that an operator refused: shapes, types or attributes that don't fit; the message names them."""


@dataclass(frozen=True)
class RawTensor:
    """A dense row-major tensor. type: ONNX's number of its element type."""

    pointer: int
    shape: tuple[int, ...]
    type: int


class _Tensor(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("rank", ctypes.c_int32),
        ("type", ctypes.c_int32),
    )


class _Attribute(ctypes.Structure):
    _fields_ = (("name", ctypes.c_char_p), ("value", ctypes.c_double))


class _Call(ctypes.Structure):
    _fields_ = (
        ("name", ctypes.c_char_p),
        ("inputs", ctypes.POINTER(_Tensor)),
        ("input_count", ctypes.c_int32),
        ("outputs", ctypes.POINTER(_Tensor)),
        ("output_count", ctypes.c_int32),
        ("attributes", ctypes.POINTER(_Attribute)),
        ("attribute_count", ctypes.c_int32),
    )


class Call:
    """One use of an operator: prepared once, run on the processor or a GPU.

    Raises: OperatorError with the library's words, in all methods.
    """

    def __init__(
        self,
        native: ctypes.CDLL,
        kind: str,
        inputs: Sequence[RawTensor],
        outputs: Sequence[RawTensor],
        attributes: Mapping[str, float],
    ) -> None:
        self._native = native
        self._inputs, self._outputs = _tensors(inputs), _tensors(outputs)
        pairs = [_Attribute(name.encode(), float(value)) for name, value in attributes.items()]
        self._attributes = (_Attribute * len(pairs))(*pairs)
        self._call = _Call(
            kind.encode(), self._inputs, len(inputs), self._outputs, len(outputs), self._attributes, len(pairs)
        )

    def scratch_bytes(self) -> int:
        """Scratch memory that a run on a GPU needs."""
        found = ctypes.c_size_t()
        self._done(self._native.toprovarScratchBytes, ctypes.byref(found))
        return found.value

    def run_on_cpu(self) -> None:
        self._done(self._native.toprovarRun, b"cpu", None, None)

    def run_on_cuda(self, scratch: int, stream: int) -> None:
        """Launches on CUDA's current device. scratch: pointer to `scratch_bytes` bytes, 0 where none are needed."""
        self._done(self._native.toprovarRun, b"cuda", ctypes.c_void_p(scratch), ctypes.c_void_p(stream))

    def _done(self, function: Any, *arguments: Any) -> None:
        error = ctypes.create_string_buffer(ERROR_BYTES)
        if function(ctypes.byref(self._call), *arguments, error, ctypes.c_size_t(ERROR_BYTES)):
            raise OperatorError(error.value.decode(errors="replace"))


def run_on_cpu(
    kind: str,
    inputs: Sequence[np.ndarray],
    outputs: Sequence[np.ndarray],
    path: Path | None = None,
    **attributes: float,
) -> None:
    """Runs an operator on arrays, into given arrays; all C-contiguous.

    path: the library; the one that `require_library` finds if left out
    Raises: OperatorError if the operator refuses; ValueError for an array that is not contiguous.
    """
    native = load(path) if path is not None else found_library()
    Call(
        native, kind, [raw_from_array(x) for x in inputs], [raw_from_array(x) for x in outputs], attributes
    ).run_on_cpu()


@lru_cache(maxsize=1)
def found_library() -> ctypes.CDLL:
    """The library that `require_library` finds, loaded once per process."""
    return load(require_library().path)


def raw_from_array(array: np.ndarray) -> RawTensor:
    if not array.flags.c_contiguous:
        raise ValueError(f"an array {list(array.shape)} is not contiguous")
    if array.dtype.name not in NUMPY_TYPES:
        raise ValueError(f"an array is {array.dtype}; expected {', '.join(NUMPY_TYPES)}")
    return RawTensor(array.ctypes.data if math.prod(array.shape) else 0, array.shape, NUMPY_TYPES[array.dtype.name])


def _tensors(given: Sequence[RawTensor]) -> Any:
    return (_Tensor * len(given))(
        *(_Tensor(x.pointer, (ctypes.c_int64 * len(x.shape))(*x.shape), len(x.shape), x.type) for x in given)
    )
