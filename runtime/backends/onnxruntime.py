"""ONNX Runtime on the CPU or a CUDA GPU: sessions per graph over one copy of the weights, tensors bound in place."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal, Protocol

from toprovar.runtime.buffers import HostMemory, Memory, checked_address
from toprovar.runtime.bundle import Bundle
from toprovar.runtime.errors import EnvironmentFault, ToprovarError
from toprovar.runtime.manifest import Graph, TensorFacts

log = logging.getLogger("toprovar")

Operators = Literal["auto", "library", "body"]

# what ONNX Runtime calls the manifest's types, and their numbers in ONNX
ORT_TYPES = {
    "F32": "tensor(float)",
    "F16": "tensor(float16)",
    "BF16": "tensor(bfloat16)",
    "I64": "tensor(int64)",
    "I32": "tensor(int32)",
    "U8": "tensor(uint8)",
}
ONNX_TYPES = {"F32": 1, "U8": 2, "I32": 6, "I64": 7, "F16": 10, "BF16": 16}


def _usable_cores() -> int:
    """Cores this process may use; a container's share, where the system says so."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def usable_threads(asked: int) -> int:
    """How many threads a backend takes of those asked for: at most one per core, all cores for 0."""
    cores = _usable_cores()
    return min(asked, cores) or cores


def first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:300]


def _extents(name: str, facts: TensorFacts) -> tuple[int | str, ...]:
    """A tensor's shape as a graph writes it: an open axis has a name."""
    return (f"{name}_length", *facts.shape[1:]) if facts.is_open else facts.shape


def _described(tensor: tuple[str, tuple[int | str, ...]] | None) -> str:
    return "no such tensor" if tensor is None else f"{tensor[0]}{list(tensor[1])}"


class Provider(Protocol):
    """What differs between devices."""

    device: str
    description: str

    @property
    def memory(self) -> Memory: ...

    def load_weights(self, bundle: Bundle) -> dict[str, Any]:
        """OrtValues by name, on the device, in buffers that ONNX Runtime does not own."""

    def configure(self, options: Any) -> None:
        """What a session needs besides what all have."""

    def open(self, path: Path, options: Any, is_step: bool) -> Any:
        """A session. Raises: the library's own errors."""

    def run(self, session: Any, addresses: tuple[int, ...], is_fixed: bool, bind: Callable[[], Any]) -> None:
        """addresses: of all that is bound; is_fixed: no axis is open; bind: makes a binding to them."""


class CpuProvider:
    device = "cpu"
    description = ""

    def __init__(self, ort: Any, threads: int) -> None:
        self._ort, self._threads = ort, threads
        self.memory: Memory = HostMemory()

    def load_weights(self, bundle: Bundle) -> dict[str, Any]:
        return {name: self._ort.OrtValue.ortvalue_from_numpy(array) for name, array in bundle.weights().items()}

    def configure(self, options: Any) -> None:
        options.intra_op_num_threads = self._threads
        options.enable_cpu_mem_arena = True
        # sessions run in turn: threads of one that spin for more work take a core from the next one
        # (demo, 2 cores, 10 dense steps: 1026 ms spinning, 773 ms not; beside two busy processes 2.7 s not, 4.1 s
        # when spinning stops only at the end of a step)
        options.add_session_config_entry("session.intra_op.allow_spinning", "0")

    def open(self, path: Path, options: Any, is_step: bool) -> Any:
        return self._ort.InferenceSession(path, options, providers=["CPUExecutionProvider"])

    def run(self, session: Any, addresses: tuple[int, ...], is_fixed: bool, bind: Callable[[], Any]) -> None:
        session.run_with_iobinding(bind())


class OnnxRuntimeBackend:
    """Runs a bundle's graphs.

    threads:    intra-op threads on the CPU, at most one per core; 0 takes all cores
    shared:     a backend of as many threads, on a bundle of the same model; where weights and graphs of both are equal
                byte for byte, they are loaded once
    device:     "cpu" or "cuda"
    operators:  what runs the nodes of the domain toprovar: "library" the operator library, "body" their ONNX function
                bodies; "auto" the library on a GPU where one was built, else the bodies
    cuda_graph: steps are captured at their first run and replayed from then on
    tf32:       lets float32 products on a GPU drop 13 bits of their factors
    profile_to: a folder for one trace of ONNX Runtime's profiler per graph; nothing is captured then
    Raises: EnvironmentFault, before anything is allocated, if onnxruntime, its CUDA provider, a GPU or the operator
            library is missing, or the device cannot run the bundle's number format.
    """

    def __init__(
        self,
        bundle: Bundle,
        threads: int = 0,
        shared: OnnxRuntimeBackend | None = None,
        *,
        device: str = "cpu",
        operators: Operators = "auto",
        cuda_graph: bool = True,
        tf32: bool = False,
        profile_to: Path | None = None,
    ) -> None:
        try:
            import onnxruntime
        except ImportError:
            raise EnvironmentFault("onnxruntime is not installed", "pip install onnxruntime") from None
        if bundle.manifest.compute == "bf16" and device == "cpu":
            raise EnvironmentFault(
                "this bundle computes in bf16, which ONNX Runtime has no CPU kernels for",
                "run it with --device cuda, or export it again with --dtype fp32",
            )
        self._ort, self._bundle, self._profile_to = onnxruntime, bundle, profile_to
        self.threads = usable_threads(threads)
        if threads > self.threads:  # more threads than cores wait for each other: minutes instead of a second
            log.warning("%d threads asked for; %d are used, one per core", threads, self.threads)
        weights_sha256 = bundle.manifest.files[bundle.manifest.weights_file].sha256
        self._key = (weights_sha256, self.threads, device, operators, cuda_graph, tf32, profile_to)
        self._checked: set[str] = set()
        self._step_files = {step.graph.file for steps in bundle.manifest.variants.values() for step in steps}
        self._provider: Provider
        self._library: Path | None
        self._values: dict[str, Any]
        self._sessions: dict[str, Any]  # by digest of the graph
        if shared is not None and shared._key == self._key:
            self._provider, self._library = shared._provider, shared._library
            self._values, self._sessions = shared._values, shared._sessions
        else:
            self._provider, self._library = self._start(device, operators, cuda_graph, tf32)
            self._values, self._sessions = self._provider.load_weights(bundle), {}
        self.memory = self._provider.memory

    def _start(self, device: str, operators: Operators, cuda_graph: bool, tf32: bool) -> tuple[Provider, Path | None]:
        if device == "cpu":
            return CpuProvider(self._ort, self.threads), operator_library("cpu", operators)
        if device != "cuda":
            raise ValueError(f"device {device!r}; expected cpu or cuda")
        from toprovar.runtime.backends.onnxruntime_cuda import CudaProvider, check_cuda

        api = check_cuda(self._ort)
        library = operator_library("cuda", operators)
        captures = cuda_graph and self._profile_to is None
        return CudaProvider(self._ort, api, captures=captures, tf32=tf32), library

    @property
    def device(self) -> str:
        return self._provider.device

    @property
    def operators(self) -> str:
        """What runs the nodes of the domain toprovar."""
        return "body" if self._library is None else "library"

    @property
    def version(self) -> str:
        details = [self._provider.description] if self._provider.description else []
        details += ["operator library"] if self._library else []
        return f"onnxruntime {self._ort.__version__}" + (f" ({', '.join(details)})" if details else "")

    def prepare(self, graph: Graph) -> None:
        """Creates the session of a graph, which otherwise happens at its first run."""
        self._session(graph)

    def _session(self, graph: Graph) -> Any:
        digest = self._bundle.manifest.files[graph.file].sha256
        if digest not in self._sessions:
            options = self._ort.SessionOptions()
            options.log_severity_level = 3
            # packed copies of the weights would cost their size again per session, and gain 3 % here
            options.add_session_config_entry("session.disable_prepacking", "1")
            self._provider.configure(options)
            if self._library is not None:
                options.register_custom_ops_library(str(self._library))
            if self._profile_to is not None:
                options.enable_profiling = True
                options.profile_file_prefix = str(self._profile_to / Path(graph.file).stem)
            for name, value in self._values.items():
                options.add_initializer(name, value)
            path = self._bundle.path(graph.file)
            try:
                self._sessions[digest] = self._provider.open(path, options, graph.file in self._step_files)
            except ToprovarError:
                raise
            except Exception as error:  # the library's own classes are not exported
                raise ToprovarError(
                    f"{path} cannot be loaded: {first_line(error)}", "export the bundle again with this version"
                ) from None
        if graph.file not in self._checked:
            self._check_signature(graph, self._sessions[digest])
            self._checked.add(graph.file)
        return self._sessions[digest]

    def _check_signature(self, graph: Graph, session: Any) -> None:
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

    def run(self, graph: Graph, inputs: Mapping[str, Any], outputs: Mapping[str, Any]) -> None:
        """Runs a graph into given buffers.

        inputs, outputs: buffers of this backend's memory by name, of the shapes and types in the signature; slices of
        larger ones are used where they lie.
        """
        session = self._session(graph)
        sides = ((graph.inputs, inputs), (graph.outputs, outputs))
        addresses = tuple(
            checked_address(self.memory, given[name], name, facts)
            for told, given in sides
            for name, facts in told.items()
        )

        def bind() -> Any:
            binding, device, place = session.io_binding(), self._provider.device, iter(addresses)
            for name, facts in graph.inputs.items():
                binding.bind_input(name, device, 0, ONNX_TYPES[facts.dtype], inputs[name].shape, next(place))
            for name, facts in graph.outputs.items():
                binding.bind_output(name, device, 0, ONNX_TYPES[facts.dtype], facts.shape, next(place))
            return binding

        is_fixed = not any(facts.is_open for facts in graph.inputs.values())
        try:
            self._provider.run(session, addresses, is_fixed, bind)
        except Exception as error:  # the library's own classes are not exported
            hint = "export the bundle again"
            if self.device == "cuda":
                hint = "a smaller step may fit where memory ran out; --no-cuda-graph runs steps without capturing them"
            raise ToprovarError(f"{self._bundle.path(graph.file)} failed: {first_line(error)}", hint) from None

    def end_profiling(self) -> dict[str, Path]:
        """Closes the traces. Returns: {graph file: trace} of the sessions that were opened."""
        files = {facts.sha256: name for name, facts in self._bundle.manifest.files.items()}
        return {files[digest]: Path(session.end_profiling()) for digest, session in self._sessions.items()}


def operator_library(device: str, operators: Operators) -> Path | None:
    """The operator library's file, or None where function bodies run.

    Raises: EnvironmentFault if the library is asked for and missing, stale, or built without what the device needs.
    """
    if operators == "body" or (operators == "auto" and device == "cpu"):
        return None
    from toprovar.plugins.library import find_library, require_library

    if operators == "auto" and find_library() is None:
        log.warning(
            "no operator library was built: operators run as their ONNX bodies, several times slower on a GPU; "
            "build it with: toprovar plugins build"
        )
        return None
    library = require_library(cuda=device == "cuda")
    if "onnxruntime" not in library.hosts:
        raise EnvironmentFault(
            f"{library.path} was built without the ONNX Runtime host", "build it again:  toprovar plugins build"
        )
    return library.path
