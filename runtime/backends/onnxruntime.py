"""ONNX Runtime on the CPU: sessions per graph over one copy of the weights, inputs and outputs bound in place."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from typing import Any

import numpy as np

from toprovar.runtime.buffers import HostMemory, checked_address
from toprovar.runtime.bundle import Bundle
from toprovar.runtime.errors import EnvironmentFault, ToprovarError
from toprovar.runtime.manifest import NUMPY_DTYPES, Graph, TensorFacts

log = logging.getLogger("toprovar")

# what ONNX Runtime calls the manifest's types
ORT_TYPES = {
    "F32": "tensor(float)",
    "F16": "tensor(float16)",
    "BF16": "tensor(bfloat16)",
    "I64": "tensor(int64)",
    "I32": "tensor(int32)",
    "U8": "tensor(uint8)",
}


def _usable_cores() -> int:
    """Cores this process may use; a container's share, where the system says so."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def usable_threads(asked: int) -> int:
    """How many threads a backend takes of those asked for: at most one per core, all cores for 0."""
    cores = _usable_cores()
    return min(asked, cores) or cores


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:300]


def _extents(name: str, facts: TensorFacts) -> tuple[int | str, ...]:
    """A tensor's shape as a graph writes it: an open axis has a name."""
    return (f"{name}_length", *facts.shape[1:]) if facts.is_open else facts.shape


def _described(tensor: tuple[str, tuple[int | str, ...]] | None) -> str:
    return "no such tensor" if tensor is None else f"{tensor[0]}{list(tensor[1])}"


class OnnxRuntimeBackend:
    """Runs a bundle's graphs.

    threads: intra-op threads, at most one per core; 0 takes all cores.
    shared:  a backend of as many threads, on a bundle of the same model; where weights and graphs of both are equal
             byte for byte, they are loaded once.
    Raises: EnvironmentFault if onnxruntime is missing or cannot run the bundle's number format.
    """

    def __init__(self, bundle: Bundle, threads: int = 0, shared: OnnxRuntimeBackend | None = None) -> None:
        try:
            import onnxruntime
        except ImportError:
            raise EnvironmentFault("onnxruntime is not installed", "pip install onnxruntime") from None
        if bundle.manifest.compute == "bf16":
            raise EnvironmentFault(
                "this bundle computes in bf16, which ONNX Runtime has no CPU kernels for",
                "export it again with --dtype fp32",
            )
        self._ort = onnxruntime
        self.memory = HostMemory()
        self._bundle = bundle
        self.threads = usable_threads(threads)
        if threads > self.threads:  # more threads than cores wait for each other: minutes instead of a second
            log.warning("%d threads asked for; %d are used, one per core", threads, self.threads)
        self._weights_sha256: str = bundle.manifest.files[bundle.manifest.weights_file].sha256
        self.weights: dict[str, np.ndarray]
        self._values: dict[str, Any]
        self._sessions: dict[str, Any]  # by digest of the graph
        if shared is not None and (shared._weights_sha256, shared.threads) == (self._weights_sha256, self.threads):
            self.weights, self._values, self._sessions = shared.weights, shared._values, shared._sessions
        else:
            self.weights = bundle.weights()
            self._values = {
                name: onnxruntime.OrtValue.ortvalue_from_numpy(array) for name, array in self.weights.items()
            }
            self._sessions = {}
        self._checked: set[str] = set()

    @property
    def version(self) -> str:
        return f"onnxruntime {self._ort.__version__}"

    def prepare(self, graph: Graph) -> None:
        """Creates the session of a graph, which otherwise happens at its first run."""
        self._session(graph)

    def _session(self, graph: Graph):  # type: ignore[no-untyped-def]
        digest = self._bundle.manifest.files[graph.file].sha256
        if digest not in self._sessions:
            options = self._ort.SessionOptions()
            options.intra_op_num_threads = self.threads
            options.log_severity_level = 3
            options.enable_cpu_mem_arena = True
            # packed copies of the weights would cost their size again per session, and gain 3 % here
            options.add_session_config_entry("session.disable_prepacking", "1")
            # sessions run in turn: threads of one that spin for more work take a core from the next one
            # (demo, 2 cores, 10 dense steps: 1026 ms spinning, 773 ms not; beside two busy processes 2.7 s not, 4.1 s
            # when spinning stops only at the end of a step)
            options.add_session_config_entry("session.intra_op.allow_spinning", "0")
            for name, value in self._values.items():
                options.add_initializer(name, value)
            try:
                session = self._ort.InferenceSession(
                    self._bundle.path(graph.file), options, providers=["CPUExecutionProvider"]
                )
            except Exception as error:  # the library's own classes are not exported
                raise ToprovarError(
                    f"{self._bundle.path(graph.file)} cannot be loaded: {_first_line(error)}",
                    "export the bundle again with this version",
                ) from None
            self._sessions[digest] = session
        if graph.file not in self._checked:
            self._check_signature(graph, self._sessions[digest])
            self._checked.add(graph.file)
        return self._sessions[digest]

    def _check_signature(self, graph: Graph, session) -> None:  # type: ignore[no-untyped-def]
        """Pointers are bound by the manifest's shapes: a graph with others would read or write beyond them."""
        for side, expected, found in (
            ("input", graph.inputs, session.get_inputs()),
            ("output", graph.outputs, session.get_outputs()),
        ):
            real = {node.name: (node.type, tuple(node.shape)) for node in found}
            told = {name: (ORT_TYPES[facts.dtype], _extents(name, facts)) for name, facts in expected.items()}
            for name in sorted(real.keys() | told.keys()):
                if real.get(name) != told.get(name):
                    raise ToprovarError(
                        f"{self._bundle.path(graph.file)} has {side} {name} {_described(real.get(name))}; "
                        f"the manifest says {_described(told.get(name))}",
                        "export the bundle again; graph and manifest come from different exports",
                    )

    def run(self, graph: Graph, inputs: Mapping[str, np.ndarray], outputs: Mapping[str, np.ndarray]) -> None:
        """Runs a graph into given arrays.

        inputs, outputs: contiguous arrays by name, of the shapes and types in the signature; slices of larger buffers
        are used where they lie.
        """
        session = self._session(graph)
        binding = session.io_binding()
        for name, facts in graph.inputs.items():
            address = checked_address(self.memory, inputs[name], name, facts)
            binding.bind_input(name, "cpu", 0, NUMPY_DTYPES[facts.dtype], inputs[name].shape, address)
        for name, facts in graph.outputs.items():
            address = checked_address(self.memory, outputs[name], name, facts)
            binding.bind_output(name, "cpu", 0, NUMPY_DTYPES[facts.dtype], facts.shape, address)
        try:
            session.run_with_iobinding(binding)
        except Exception as error:  # the library's own classes are not exported
            raise ToprovarError(
                f"{self._bundle.path(graph.file)} failed: {_first_line(error)}", "export the bundle again"
            ) from None

