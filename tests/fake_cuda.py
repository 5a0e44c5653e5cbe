# ruff: noqa: N815  names are CUDA's
"""A CUDA runtime whose GPU is host memory, and an ONNX Runtime whose CUDA provider is its CPU one.

The calls have the shape of cuda-bindings 13: status first, then values. Addresses are real, so that slices, strided
copies and bound pointers are what they would be on a GPU.
"""

from __future__ import annotations

import ctypes
from enum import IntEnum
from types import SimpleNamespace

import numpy as np


class Status(IntEnum):
    cudaSuccess = 0
    cudaErrorMemoryAllocation = 2
    cudaErrorInvalidValue = 1


class Kind(IntEnum):
    cudaMemcpyHostToDevice = 1
    cudaMemcpyDeviceToHost = 2
    cudaMemcpyDeviceToDevice = 3


class CaptureMode(IntEnum):
    cudaStreamCaptureModeThreadLocal = 1


class Attribute(IntEnum):
    cudaDevAttrComputeCapabilityMajor = 75
    cudaDevAttrComputeCapabilityMinor = 76


class FakeCuda:
    """calls: names of the calls made; limit_bytes: memory of the GPU; reads: addresses that were copied to the host."""

    cudaMemcpyKind = Kind
    cudaDeviceAttr = Attribute
    cudaStreamCaptureMode = CaptureMode
    cudaStreamNonBlocking = 1

    def __init__(self, limit_bytes: int = 1 << 30, capability: tuple[int, int] = (8, 9)) -> None:
        self.calls: list[str] = []
        self.reads: list[tuple[int, int]] = []
        self.limit_bytes, self.capability = limit_bytes, capability
        self.blocks: dict[int, np.ndarray] = {}
        self.captured: list | None = None

    def enqueue(self, work):
        """What a library does with a kernel: runs it, or notes it where the stream is captured."""
        if self.captured is None:
            work()
        else:
            self.captured.append(work)

    def cudaStreamBeginCapture(self, stream, mode):
        self.captured = []
        return (Status.cudaSuccess,)

    def cudaStreamEndCapture(self, stream):
        captured, self.captured = self.captured, None
        return Status.cudaSuccess, captured

    def cudaGraphInstantiate(self, graph, flags):
        return Status.cudaSuccess, list(graph)

    def cudaGraphLaunch(self, graph, stream):
        self.calls.append("cudaGraphLaunch")
        for work in graph:
            work()
        return (Status.cudaSuccess,)

    def cudaFree(self, address):
        del self.blocks[address]
        return (Status.cudaSuccess,)

    def cudaSetDevice(self, device):
        self.calls.append("cudaSetDevice")
        return (Status.cudaSuccess,)

    def cudaStreamCreateWithFlags(self, flags):
        return Status.cudaSuccess, 77

    def cudaDeviceGetAttribute(self, attribute, device):
        return Status.cudaSuccess, self.capability[attribute - Attribute.cudaDevAttrComputeCapabilityMajor]

    def cudaMemGetInfo(self):
        used = sum(block.nbytes for block in self.blocks.values())
        return Status.cudaSuccess, self.limit_bytes - used, self.limit_bytes

    def cudaMalloc(self, size):
        self.calls.append("cudaMalloc")
        if sum(block.nbytes for block in self.blocks.values()) + size > self.limit_bytes:
            return Status.cudaErrorMemoryAllocation, None
        block = np.full(size + 256, 0xA5, np.uint8)  # as memory is: full of something
        address = -(-block.ctypes.data // 256) * 256
        self.blocks[address] = block
        return Status.cudaSuccess, address

    def _holds(self, address, size):
        """Whether all bytes lie in one block: a copy beyond it would be an error on a GPU too."""
        return any(start <= address and address + size <= start + len(b) - 256 for start, b in self.blocks.items())

    def cudaMemcpyAsync(self, to, source, size, kind, stream):
        self.calls.append(kind.name)
        on_device = to if kind == Kind.cudaMemcpyHostToDevice else source
        if stream != 77 or not self._holds(on_device, size):
            return (Status.cudaErrorInvalidValue,)
        if kind == Kind.cudaMemcpyDeviceToHost:
            self.reads.append((source, size))
        ctypes.memmove(to, source, size)
        return (Status.cudaSuccess,)

    def cudaMemcpy2DAsync(self, to, to_pitch, source, source_pitch, width, height, kind, stream):
        self.calls.append(kind.name)
        if kind != Kind.cudaMemcpyDeviceToDevice or width > min(to_pitch, source_pitch):
            return (Status.cudaErrorInvalidValue,)
        for address, pitch in ((to, to_pitch), (source, source_pitch)):
            if not self._holds(address, pitch * (height - 1) + width):
                return (Status.cudaErrorInvalidValue,)
        for row in range(height):
            ctypes.memmove(to + row * to_pitch, source + row * source_pitch, width)
        return (Status.cudaSuccess,)

    def cudaStreamSynchronize(self, stream):
        return (Status.cudaSuccess,)


class _Binding:
    """An IOBinding that takes "cuda" and means host memory."""

    def __init__(self, binding) -> None:
        self.real = binding

    def bind_input(self, name, device, *rest):
        assert device == "cuda"
        self.real.bind_input(name, "cpu", *rest)

    def bind_output(self, name, device, *rest):
        assert device == "cuda"
        self.real.bind_output(name, "cpu", *rest)


class _Session:
    def __init__(self, real, settings) -> None:
        self.real, self.settings, self.runs = real, settings, []
        self.get_inputs, self.get_outputs = real.get_inputs, real.get_outputs

    def get_providers(self):
        return ["CUDAExecutionProvider", "CPUExecutionProvider"]

    def io_binding(self):
        return _Binding(self.real.io_binding())

    def run_with_iobinding(self, binding, options=None):
        self.runs.append(None if options is None else options.get_run_config_entry("gpu_graph_id"))
        self.real.run_with_iobinding(binding.real)


def fake_onnxruntime(**changes):
    """The onnxruntime module with a CUDA provider; sessions are kept in `opened`."""
    import onnxruntime

    opened: list[_Session] = []

    def session(path, options, providers, enable_fallback=1):
        if providers == ["CPUExecutionProvider"]:
            return onnxruntime.InferenceSession(path, options, providers=providers)
        (name, settings), _ = providers
        assert name == "CUDAExecutionProvider"
        assert not enable_fallback
        real = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
        opened.append(_Session(real, settings))
        return opened[-1]

    public = {name: getattr(onnxruntime, name) for name in dir(onnxruntime) if not name.startswith("__")}
    public |= {
        "InferenceSession": session,
        "__version__": "1.31.1",
        "get_available_providers": lambda: ["CUDAExecutionProvider", "CPUExecutionProvider"],
        "create_and_register_allocator_v2": lambda *arguments: None,
        "opened": opened,
    }
    return SimpleNamespace(**{**public, **changes})
