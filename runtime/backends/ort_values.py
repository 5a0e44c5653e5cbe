"""OrtValues over memory that is ours, through the DLPack protocol.

ONNX Runtime takes shared initializers only in buffers that it does not own, and Python makes such values of host arrays
alone; DLPack is the way to say "this address, this shape, this type" for any device.
Source: DLPack 1.0, dlpack.h.
"""

from __future__ import annotations

import ctypes
from typing import Any

from toprovar.runtime.manifest import Dtype

CPU, CUDA = 1, 2  # DLDeviceType
# (DLDataTypeCode, bits): 0 signed, 1 unsigned, 2 float, 4 bfloat
CODES = {"F32": (2, 32), "F16": (2, 16), "BF16": (4, 16), "I64": (0, 64), "I32": (0, 32), "U8": (1, 8)}


class _Tensor(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    )


class _Managed(ctypes.Structure):
    _fields_ = (("tensor", _Tensor), ("context", ctypes.c_void_p), ("deleter", ctypes.c_void_p))


@ctypes.CFUNCTYPE(None, ctypes.c_void_p)
def _keep(_: int | None) -> None:
    """Nothing is to be freed: the descriptions below stay, and the memory is its owner's."""


_new_capsule = ctypes.pythonapi.PyCapsule_New
_new_capsule.restype = ctypes.py_object
_new_capsule.argtypes = (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)
_described: list[Any] = []  # ONNX Runtime keeps pointers to descriptions as long as its values live


def value_over(
    ort: Any, address: int, shape: tuple[int, ...], dtype: Dtype, device_type: int, device_id: int = 0
) -> Any:
    """An OrtValue that reads and writes at an address; the memory must outlive it. device_type: CPU or CUDA."""
    extents = (ctypes.c_int64 * max(len(shape), 1))(*shape)
    tensor = _Tensor(address, device_type, device_id, len(shape), *CODES[dtype], 1, extents, None, 0)
    managed = _Managed(tensor, None, ctypes.cast(_keep, ctypes.c_void_p))
    _described.append((managed, extents))
    return ort.OrtValue.from_dlpack(_new_capsule(ctypes.addressof(managed), b"dltensor", None))
