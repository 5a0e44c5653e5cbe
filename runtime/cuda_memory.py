"""Buffers on a CUDA GPU: raw addresses, one stream, copies through the CUDA runtime.

The calls come from `cuda-bindings`, which needs nothing but the driver; ONNX Runtime's own OrtValues cannot copy
slices or strided rows, know no bfloat16 on the host side, and lie in an arena that takes up to twice what is asked for.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from math import prod
from typing import Any

import numpy as np

from toprovar.runtime.buffers import NAMES_OF_DTYPES
from toprovar.runtime.errors import EnvironmentFault
from toprovar.runtime.manifest import DTYPE_BYTES, NUMPY_DTYPES, Dtype

ALIGNMENT = 256  # bytes; what TensorRT asks of addresses, and what cudaMalloc gives


class DeviceBuffer:
    """A contiguous tensor on the GPU. Whoever made it owns the memory."""

    __slots__ = ("_slices", "address", "dtype", "shape")

    def __init__(self, address: int, shape: tuple[int, ...], dtype: Dtype) -> None:
        self.address, self.shape, self.dtype = address, shape, dtype
        self._slices: dict[tuple[int | None, int | None], DeviceBuffer] = {}

    @property
    def size_bytes(self) -> int:
        return prod(self.shape) * DTYPE_BYTES[self.dtype]

    def __getitem__(self, rows: slice) -> DeviceBuffer:
        # a step takes hundreds of slices, and the same ones for each picture: made anew they cost 5 µs each
        key = rows.start, rows.stop
        if key not in self._slices or rows.step is not None:
            self._slices[key] = self._sliced(rows)
        return self._slices[key]

    def _sliced(self, rows: slice) -> DeviceBuffer:
        start, stop, step = rows.indices(self.shape[0])
        if step != 1:
            raise ValueError("only neighbouring rows of a buffer are a buffer")
        row_bytes = prod(self.shape[1:]) * DTYPE_BYTES[self.dtype]
        return DeviceBuffer(self.address + start * row_bytes, (max(stop - start, 0), *self.shape[1:]), self.dtype)


def load_cuda() -> Any:
    """The CUDA runtime calls of cuda-bindings, with a GPU behind them.

    Raises: EnvironmentFault if the package, the driver or a GPU is missing.
    """
    try:
        from cuda.bindings import runtime
    except ImportError:
        raise EnvironmentFault("cuda-bindings is not installed", "pip install cuda-bindings") from None
    status, count = runtime.cudaGetDeviceCount()
    if int(status) or not count:
        raise EnvironmentFault(
            f"there is no usable CUDA GPU here: {_named(status) if int(status) else 'none is visible'}",
            "install NVIDIA's driver and check with: nvidia-smi",
        )
    return runtime


def compute_capability(api: Any, device: int = 0) -> str:
    """Such as "8.9"."""
    kind = api.cudaDeviceAttr
    parts = (kind.cudaDevAttrComputeCapabilityMajor, kind.cudaDevAttrComputeCapabilityMinor)
    return ".".join(str(checked(api.cudaDeviceGetAttribute(part, device))) for part in parts)


def checked(answer: tuple[Any, ...]) -> Any:
    """What a CUDA call gave besides its status. Raises: EnvironmentFault naming the status if that is an error."""
    status, *values = answer
    if int(status):
        raise EnvironmentFault(f"a CUDA call failed: {_named(status)}", "check the GPU with: nvidia-smi")
    return values[0] if values else None


def _named(status: Any) -> str:
    return getattr(status, "name", f"error {int(status)}")


class CudaMemory:
    """Memory of one GPU.

    api:    as `load_cuda` gives it
    Raises: EnvironmentFault if the GPU's memory is exhausted, or a copy fails.
    """

    def __init__(self, api: Any, device: int = 0) -> None:
        self.api, self.device = api, device
        checked(api.cudaSetDevice(device))
        self.stream = int(checked(api.cudaStreamCreateWithFlags(api.cudaStreamNonBlocking)))
        self._blocks: dict[int, list[int]] = {}  # addresses by size
        self._buffers: dict[tuple[int, tuple[int, ...], Dtype], DeviceBuffer] = {}
        self._taken: dict[int, int] = {}
        self.allocated_bytes = 0

    @contextmanager
    def scope(self) -> Iterator[None]:
        before = dict(self._taken)
        try:
            yield
        finally:
            self._taken = before

    def empty(self, shape: Sequence[int], dtype: Dtype) -> DeviceBuffer:
        size = max(-(-prod(shape) * DTYPE_BYTES[dtype] // ALIGNMENT), 1) * ALIGNMENT
        blocks, taken = self._blocks.setdefault(size, []), self._taken.get(size, 0)
        if taken == len(blocks):
            blocks.append(self.reserve(size))
        self._taken[size] = taken + 1
        key = blocks[taken], tuple(shape), dtype
        if key not in self._buffers:
            self._buffers[key] = DeviceBuffer(*key)
        return self._buffers[key]

    def reserve(self, size_bytes: int) -> int:
        """Memory that is not handed out again. Returns: its address."""
        status, address = self.api.cudaMalloc(size_bytes)
        if int(status):
            _, free, total = self.api.cudaMemGetInfo()
            raise EnvironmentFault(
                f"the GPU's memory is exhausted: {size_bytes / 1e6:.0f} MB more are needed, {free / 1e6:.0f} MB of "
                f"{total / 1e6:.0f} MB are free ({_named(status)})",
                "end other programs on the GPU, draw fewer images at once, or export with --dtype bf16",
            )
        self.allocated_bytes += size_bytes
        return int(address)

    def release(self, address: int, size_bytes: int) -> None:
        """Frees what was reserved, once all that was asked for is done."""
        self.wait()
        checked(self.api.cudaFree(address))
        self.allocated_bytes -= size_bytes

    def place(self, array: np.ndarray) -> DeviceBuffer:
        array = np.ascontiguousarray(array)
        buffer = self.empty(array.shape, NAMES_OF_DTYPES[array.dtype])
        self.upload(array, buffer.address)
        return buffer

    def upload(self, array: np.ndarray, address: int) -> None:
        """Copies a contiguous array's bytes."""
        if array.nbytes:
            kind = self.api.cudaMemcpyKind.cudaMemcpyHostToDevice
            checked(self.api.cudaMemcpyAsync(address, array.ctypes.data, array.nbytes, kind, self.stream))

    def read(self, buffer: DeviceBuffer) -> np.ndarray:
        """bfloat16 comes as uint16 bits."""
        array: np.ndarray = np.empty(buffer.shape, NUMPY_DTYPES.get(buffer.dtype, np.uint16))
        if array.nbytes:
            kind = self.api.cudaMemcpyKind.cudaMemcpyDeviceToHost
            checked(self.api.cudaMemcpyAsync(array.ctypes.data, buffer.address, array.nbytes, kind, self.stream))
        self.wait()
        return array

    def gather(self, rows: Sequence[tuple[DeviceBuffer, int]], axis: int, out: DeviceBuffer) -> None:
        kind = self.api.cudaMemcpyKind.cudaMemcpyDeviceToDevice
        outer = prod(out.shape[:axis])
        inner = prod(out.shape[axis + 1 :]) * DTYPE_BYTES[out.dtype]  # bytes of one part
        if not outer * inner:
            return
        for j, (source, i) in enumerate(rows):
            pitches = out.shape[axis] * inner, source.shape[axis] * inner
            start, end = source.address + i * inner, out.address + j * inner
            checked(self.api.cudaMemcpy2DAsync(end, pitches[0], start, pitches[1], inner, outer, kind, self.stream))

    def dtype_of(self, buffer: DeviceBuffer) -> Dtype:
        return buffer.dtype

    def address_of(self, buffer: DeviceBuffer) -> int:
        return buffer.address

    def wait(self) -> None:
        """Until everything that was asked for is done."""
        checked(self.api.cudaStreamSynchronize(self.stream))
