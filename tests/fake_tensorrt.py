"""A TensorRT whose plans are ONNX models with their weights as inputs, run by ONNX Runtime on host memory.

Names are those of tensorrt_rtx_bindings 1.7; `USED_NAMES` lists them, so that a test holds them against that module.
"""

from __future__ import annotations

from types import SimpleNamespace

import onnxruntime

ELEMENT_TYPES = {"tensor(float)": 1, "tensor(int32)": 6, "tensor(int64)": 7, "tensor(float16)": 10}
SCRATCH_BYTES = 1000


class FakeContext:
    def __init__(self, engine, is_managed) -> None:
        self.engine, self.is_managed = engine, is_managed
        self.addresses, self.shapes, self.scratch, self.profiler = {}, {}, None, None

    def set_tensor_address(self, name, address):
        self.addresses[name] = address
        self.engine.trt.bound += 1
        return address % 256 == 0

    def set_device_memory(self, address, size):
        assert size >= self.engine.device_memory_size_v2
        self.scratch = address

    def set_input_shape(self, name, shape):
        self.shapes[name] = shape
        return True

    def is_stream_capturable(self, stream):
        return self.engine.trt.capturable

    def execute_async_v3(self, stream):
        trt, session = self.engine.trt, self.engine.session
        if not self.is_managed or self.scratch not in trt.api.blocks:
            return False
        addresses, shapes = dict(self.addresses), dict(self.shapes)  # a captured graph keeps these

        def work():
            binding = session.io_binding()
            for node in session.get_inputs():
                shape = shapes.get(node.name, node.shape)
                binding.bind_input(node.name, "cpu", 0, ELEMENT_TYPES[node.type], shape, addresses[node.name])
            for node in session.get_outputs():
                binding.bind_output(node.name, "cpu", 0, ELEMENT_TYPES[node.type], node.shape, addresses[node.name])
            session.run_with_iobinding(binding)

        trt.enqueued += 1
        trt.api.enqueue(work)
        if self.profiler is not None:
            self.profiler.report_layer_time("the only layer", 0.5)
        return True


class FakeEngine:
    def __init__(self, trt, raw) -> None:
        self.trt = trt
        self.session = onnxruntime.InferenceSession(raw, providers=["CPUExecutionProvider"])
        self.nodes = {node.name: node for node in (*self.session.get_inputs(), *self.session.get_outputs())}
        self._outputs = {node.name for node in self.session.get_outputs()}
        self.device_memory_size_v2 = SCRATCH_BYTES + 10 * len(trt.engines)  # each needs more than the one before
        self.num_io_tensors = len(self.nodes)

    def get_tensor_name(self, index):
        return list(self.nodes)[index]

    def get_tensor_shape(self, name):
        return tuple(-1 if isinstance(extent, str) else extent for extent in self.nodes[name].shape)

    def get_tensor_mode(self, name):
        modes = self.trt.TensorIOMode
        return modes.OUTPUT if name in self._outputs else modes.INPUT

    def create_runtime_config(self):
        return FakeConfig(self.trt)

    def create_execution_context(self, how):
        strategy = how.strategy if isinstance(how, FakeConfig) else how
        return FakeContext(self, strategy == self.trt.ExecutionContextAllocationStrategy.USER_MANAGED)


class FakeConfig:
    def __init__(self, trt) -> None:
        self.trt, self.strategy = trt, None

    def set_execution_context_allocation_strategy(self, strategy):
        self.strategy = strategy

    def create_runtime_cache(self):
        return self.trt.cache

    def set_runtime_cache(self, cache):
        assert cache is self.trt.cache


class FakeCache:
    def __init__(self) -> None:
        self.given = None

    def deserialize(self, raw):
        self.given = raw
        return True

    def serialize(self):
        return b"kernels"


class FakeRegistry:
    def __init__(self) -> None:
        self.loaded = []

    def get_creator(self, name, version, namespace):
        return None

    def load_library(self, path):
        self.loaded.append(path)
        return object()


class FakeLogger:
    Severity = SimpleNamespace(INTERNAL_ERROR=0, ERROR=1, WARNING=2)


class FakeProfiler:
    pass


class FakeTensorRt:
    """api: the CUDA runtime that contexts run on. enqueued, bound: calls so far."""

    __version__ = "1.7.1.116"
    ILogger, IProfiler = FakeLogger, FakeProfiler
    TensorIOMode = SimpleNamespace(INPUT=1, OUTPUT=2)
    ExecutionContextAllocationStrategy = SimpleNamespace(USER_MANAGED=2)

    def __init__(self, api, capturable=True) -> None:
        self.api, self.capturable = api, capturable
        self.engines, self.enqueued, self.bound = [], 0, 0
        self.cache, self.registry = FakeCache(), FakeRegistry()

    def get_plugin_registry(self):
        return self.registry

    def Runtime(self, logger):
        def deserialize(raw):
            if raw == b"no plan":
                logger.log(FakeLogger.Severity.ERROR, "magic tag does not match")
                return None
            self.engines.append(FakeEngine(self, raw))
            return self.engines[-1]

        return SimpleNamespace(deserialize_cuda_engine=deserialize)


USED_NAMES = {
    "IExecutionContext": [name for name in vars(FakeContext) if not name.startswith("_")] + ["profiler"],
    "ICudaEngine": [name for name in vars(FakeEngine) if not name.startswith("_")]
    + ["device_memory_size_v2", "num_io_tensors"],
    "IRuntimeConfig": [name for name in vars(FakeConfig) if not name.startswith("_")],
    "IRuntimeCache": ["deserialize", "serialize"],
    "IPluginRegistry": ["get_creator", "load_library"],
    "Runtime": ["deserialize_cuda_engine"],
    "TensorIOMode": ["INPUT", "OUTPUT"],
    "ExecutionContextAllocationStrategy": ["USER_MANAGED"],
}
