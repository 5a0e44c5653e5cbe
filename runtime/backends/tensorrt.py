"""TensorRT and TensorRT-RTX: a bundle's engines on one GPU, over one upload of the weights.

Everything that can be wrong is found before memory of the GPU is taken: the manifest, the plans' digests, the operator
library, TensorRT's version, the GPU. Contexts share one arena, since steps run in turn; weights and cache slices are
bound by address; a step's kernels are captured at its first run and replayed from then on.
"""

from __future__ import annotations

import hashlib
import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from toprovar.plugins.library import PluginLibrary, require_library
from toprovar.runtime.backends.tensorrt_module import TITLES, kernel_cache_path, load_module, new_log, new_profiler
from toprovar.runtime.buffers import checked_address
from toprovar.runtime.bundle import Bundle, rebuild_command
from toprovar.runtime.cuda_memory import ALIGNMENT, CudaMemory, checked, compute_capability, load_cuda
from toprovar.runtime.errors import EnvironmentFault, ToprovarError
from toprovar.runtime.json_files import write_bytes
from toprovar.runtime.manifest import Engine, EngineSet, EngineTarget, Graph, tensor_rows
from toprovar.runtime.weights import WeightsFile

log = logging.getLogger("toprovar")

MAX_GRAPHS = 4  # captured per step: one for each set of addresses; what comes after is enqueued
_registered: dict[EngineTarget, Path] = {}  # a library's plugins can be registered once in a process


def engines_of(bundle: Bundle, target: EngineTarget) -> EngineSet:
    """Raises: ToprovarError if the bundle has no engines of a target, or a plan is not as it was written."""
    manifest = bundle.manifest
    if target not in manifest.engines:
        raise ToprovarError(
            f"bundle {bundle.folder} has no engines for {TITLES[target]}"
            + (f"; it has {', '.join(manifest.engines)}" if manifest.engines else ""),
            f"build them:  {rebuild_command(bundle.folder, target)}",
        )
    return manifest.engines[target]


def check_library(bundle: Bundle, engines: EngineSet) -> PluginLibrary | None:
    """The operator library that the plans call, or None where they call none.

    Raises: EnvironmentFault if it is missing or was built from other sources than the plans expect.
    """
    if engines.plugin_sha256 is None:
        return None
    library = require_library(tensorrt=True)
    if library.source_digest != engines.plugin_sha256:
        raise EnvironmentFault(
            f"engines of {bundle.folder} call plugins of sources {engines.plugin_sha256[:12]}; {library.path} is of "
            f"{library.source_digest[:12]}",
            f"build the engines again:  {rebuild_command(bundle.folder, engines.target)}",
        )
    return library


def check_version(bundle: Bundle, engines: EngineSet, trt: Any) -> None:
    """Raises: EnvironmentFault if the plans were built by another version than the one installed."""
    if trt.__version__ != engines.builder_version:
        title = TITLES[engines.target]
        raise EnvironmentFault(
            f"engines of {bundle.folder} were built by {title} {engines.builder_version}; this machine has {title} "
            f"{trt.__version__}",
            f"build them again:  {rebuild_command(bundle.folder, engines.target)}",
        )


def check_gpu(bundle: Bundle, engines: EngineSet, api: Any) -> str:
    """Returns: the GPU's compute capability. Raises: EnvironmentFault if the plans are for others."""
    found = compute_capability(api)
    if found not in engines.compute_capabilities:
        raise EnvironmentFault(
            f"engines of {bundle.folder} are for compute capability {', '.join(engines.compute_capabilities)}; "
            f"this GPU has {found}",
            f"build them again:  {rebuild_command(bundle.folder, engines.target)}"
            + (f" --compute-capability {found.replace('.', '')}" if engines.target == "tensorrt-rtx" else ""),
        )
    return found


@dataclass
class _Loaded:
    """A graph's engine and context. bound: addresses as the context has them; captured: graphs by all addresses."""

    engine: Any
    context: Any
    scratch_bytes: int
    bound: dict[str, int] = field(default_factory=dict)
    captured: dict[tuple[int, ...], Any] = field(default_factory=dict)
    can_capture: bool = True


class TensorRtBackend:
    """Runs a bundle's engines.

    target:     "tensorrt" or "tensorrt-rtx"
    cuda_graph: steps are captured at their first run and replayed from then on
    profile:    notes the time of every layer (`layer_times`); nothing is captured then
    Raises: ToprovarError or EnvironmentFault, before memory of the GPU is taken, naming what does not fit: no engines,
            a missing or stale operator library, another version of TensorRT, no GPU, another GPU.
    """

    def __init__(self, bundle: Bundle, target: EngineTarget, *, cuda_graph: bool = True, profile: bool = False) -> None:
        self._bundle, self._engines = bundle, engines_of(bundle, target)
        library = check_library(bundle, self._engines)
        self._trt = load_module(target)
        check_version(bundle, self._engines, self._trt)
        api = load_cuda()
        self._capability = check_gpu(bundle, self._engines, api)
        self._log = new_log(self._trt)
        if library is not None:
            self._register(library.path, target)
        # from here on memory of the GPU is taken
        self.memory = CudaMemory(api)
        self._weights = _UploadedWeights(bundle, self._engines, self.memory)
        self._runtime = self._trt.Runtime(self._log)
        self._cache = _KernelCache(kernel_cache_path(self._trt, self._capability)) if target == "tensorrt-rtx" else None
        self._captures = cuda_graph and not profile
        self._profilers: dict[str, Any] | None = {} if profile else None
        self._loaded: dict[str, _Loaded] = {}
        self._scratch = 0, 0  # address, bytes
        self._step_files = {step.graph.file for steps in bundle.manifest.variants.values() for step in steps}
        self.threads = 1
        self.device = "cuda"

    @property
    def version(self) -> str:
        name = self._engines.target
        return f"{name} {self._trt.__version__} (compute capability {self._capability})"

    @property
    def operators(self) -> str:
        """What runs the nodes of the domain toprovar."""
        return "library" if self._engines.plugin_layers else "body"

    def _register(self, path: Path, target: EngineTarget) -> None:
        if _registered.setdefault(target, path) != path:
            raise EnvironmentFault(
                f"plugins of {_registered[target]} are registered in this process; {path} cannot be added",
                "run one bundle a process",
            )
        registry, known = self._trt.get_plugin_registry(), next(iter(self._engines.plugin_layers), "")
        if registry.get_creator(known, "1", "toprovar") is None and registry.load_library(str(path)) is None:
            del _registered[target]
            raise EnvironmentFault(
                f"{TITLES[target]} cannot load the plugins of {path}: {self._log.last_error or 'it says no reason'}",
                "build the library again:  toprovar plugins build",
            )

    # -- engines ---------------------------------------------------------------------------------------------------

    def prepare(self, graph: Graph) -> None:
        """Loads a graph's engine, which otherwise happens at its first run."""
        self._load(graph)

    def _load(self, graph: Graph) -> _Loaded:
        if graph.file in self._loaded:
            return self._loaded[graph.file]
        plan = self._engines.engine_of(graph.file)
        if plan is None:
            raise ToprovarError(
                f"bundle {self._bundle.folder} has no {TITLES[self._engines.target]} engine of {graph.file}",
                f"build it:  {rebuild_command(self._bundle.folder, self._engines.target)}",
            )
        raw = self._plan_bytes(plan)
        begin = time.perf_counter()
        engine = self._runtime.deserialize_cuda_engine(raw)
        if engine is None:
            raise self._refused(plan, "cannot be loaded")
        self._check_signature(graph, plan, engine)
        context = self._context(engine)
        if context is None:
            raise self._refused(plan, "gives no context")
        if self._profilers is not None:
            context.profiler = self._profilers.setdefault(graph.file, new_profiler(self._trt))
        loaded = _Loaded(engine, context, engine.device_memory_size_v2)
        loaded.can_capture = self._captures and graph.file in self._step_files
        self._loaded[graph.file] = loaded
        self._share_scratch(loaded)
        for name in plan.weights:
            self._bind(loaded, name, self._weights.addresses[name])
        log.debug("%s loaded in %.2f s", plan.file, time.perf_counter() - begin)
        return loaded

    def _plan_bytes(self, plan: Engine) -> bytes:
        path, facts = self._bundle.path(plan.file), self._bundle.manifest.files[plan.file]
        try:
            raw = path.read_bytes()
        except OSError as error:
            raise ToprovarError(f"{path} cannot be read: {error.strerror}", "copy the bundle again") from None
        if hashlib.sha256(raw).hexdigest() != facts.sha256:
            raise ToprovarError(
                f"{path} was changed: its sha256 differs from the manifest",
                "copy the bundle again, or build its engines again",
            )
        return raw

    def _refused(self, plan: Engine, what: str) -> ToprovarError:
        return ToprovarError(
            f"{self._bundle.path(plan.file)} {what}: {self._log.last_error or 'TensorRT says no reason'}",
            f"build it again:  {rebuild_command(self._bundle.folder, self._engines.target)}",
        )

    def _context(self, engine: Any) -> Any:
        strategy = self._trt.ExecutionContextAllocationStrategy.USER_MANAGED
        if self._cache is None:
            return engine.create_execution_context(strategy)
        config = engine.create_runtime_config()
        config.set_execution_context_allocation_strategy(strategy)
        self._cache.attach(config)
        return engine.create_execution_context(config)

    def _check_signature(self, graph: Graph, plan: Engine, engine: Any) -> None:
        """Pointers are bound by the manifest's shapes: an engine with others would read or write beyond them."""
        mode = self._trt.TensorIOMode
        found = {engine.get_tensor_name(i) for i in range(engine.num_io_tensors)}
        expected = {**graph.inputs, **graph.outputs, **{name: None for name in plan.weights}}
        for name in sorted(found ^ expected.keys()):
            where = "lacks" if name in expected else "has"
            raise ToprovarError(
                f"{self._bundle.path(plan.file)} {where} a tensor {name}, against the manifest",
                f"build it again:  {rebuild_command(self._bundle.folder, self._engines.target)}",
            )
        for name in sorted(found):
            facts = graph.outputs.get(name) or graph.inputs.get(name) or self._weights.facts[name]
            is_output = name in graph.outputs
            shape = tuple(engine.get_tensor_shape(name))
            told = (-1, *facts.shape[1:]) if getattr(facts, "is_open", False) else facts.shape
            if shape != told or (engine.get_tensor_mode(name) == mode.OUTPUT) != is_output:
                raise ToprovarError(
                    f"{self._bundle.path(plan.file)} has {name} {list(shape)}; the manifest says {list(told)}",
                    f"build it again:  {rebuild_command(self._bundle.folder, self._engines.target)}",
                )

    def _share_scratch(self, loaded: _Loaded) -> None:
        """One arena of the largest size for all contexts. It grows where a later engine needs more; what was captured
        in the smaller one is captured again."""
        address, size = self._scratch
        if loaded.scratch_bytes > size:
            if address:
                self.memory.release(address, size)
            size = loaded.scratch_bytes
            address = self.memory.reserve(size)
            self._scratch = address, size
            for other in self._loaded.values():
                other.context.set_device_memory(address, size)
                other.captured.clear()
        elif size:
            loaded.context.set_device_memory(address, size)

    def _bind(self, loaded: _Loaded, name: str, address: int) -> None:
        if loaded.bound.get(name) == address:
            return
        if address % ALIGNMENT:
            raise ToprovarError(
                f"{name} would lie at a multiple of {address & -address} bytes; "
                f"TensorRT takes multiples of {ALIGNMENT}",
                "a model whose width times its bytes per value is a multiple of 256 fits",
            )
        if not loaded.context.set_tensor_address(name, address):
            raise ToprovarError(
                f"TensorRT refuses the address of {name}: {self._log.last_error}", "rebuild the engines"
            )
        loaded.bound[name] = address

    # -- running ---------------------------------------------------------------------------------------------------

    def run(self, graph: Graph, inputs: Mapping[str, Any], outputs: Mapping[str, Any]) -> None:
        """Runs a graph into given buffers of this backend's memory; waits until it is done."""
        loaded = self._load(graph)
        addresses = {}
        for name, facts in graph.inputs.items():
            addresses[name] = checked_address(self.memory, inputs[name], name, facts)
        for name, facts in graph.outputs.items():
            addresses[name] = checked_address(self.memory, outputs[name], name, facts)
        open_shapes = {name: inputs[name].shape for name, facts in graph.inputs.items() if facts.is_open}
        key = tuple(addresses.values())
        api, stream = self.memory.api, self.memory.stream
        if not open_shapes and key in loaded.captured:
            checked(api.cudaGraphLaunch(loaded.captured[key], stream))
        else:
            for name, address in addresses.items():
                self._bind(loaded, name, address)
            for name, shape in open_shapes.items():
                if not loaded.context.set_input_shape(name, shape):
                    raise ToprovarError(f"{graph.file} takes no {name} of shape {list(shape)}", "rebuild the engines")
            self._enqueue(graph, loaded)
            if loaded.can_capture and not open_shapes and len(loaded.captured) < MAX_GRAPHS:
                self._capture(graph, loaded, key)
        self.memory.wait()
        if self._cache is not None:
            self._cache.save()

    def _enqueue(self, graph: Graph, loaded: _Loaded) -> None:
        if not loaded.context.execute_async_v3(self.memory.stream):
            raise ToprovarError(
                f"{graph.file} failed in TensorRT: {self._log.last_error or 'it says no reason'}", "rebuild the engines"
            )

    def _capture(self, graph: Graph, loaded: _Loaded, key: tuple[int, ...]) -> None:
        """Captures what was just run; nothing is run again. The first run is not captured: it may still compile."""
        api, stream = self.memory.api, self.memory.stream
        self.memory.wait()
        if hasattr(loaded.context, "is_stream_capturable") and not loaded.context.is_stream_capturable(stream):
            log.warning("%s runs without a captured graph: TensorRT cannot capture it", graph.file)
            loaded.can_capture = False
            return
        checked(api.cudaStreamBeginCapture(stream, api.cudaStreamCaptureMode.cudaStreamCaptureModeThreadLocal))
        try:
            self._enqueue(graph, loaded)
        finally:
            status, captured = api.cudaStreamEndCapture(stream)
        checked((status,))
        loaded.captured[key] = checked(api.cudaGraphInstantiate(captured, 0))

    def layer_times(self) -> dict[str, dict[str, list[float]]]:
        """{graph file: {layer: ms of each run}}, where `profile` was asked for."""
        return {file: profiler.times_ms for file, profiler in (self._profilers or {}).items()}


class _UploadedWeights:
    """All weights that engines take, uploaded once, each at a multiple of 256 bytes.

    addresses, facts: by the names that engines use: tensors of the weights file, or rows of them.
    """

    def __init__(self, bundle: Bundle, engines: EngineSet, memory: CudaMemory) -> None:
        file = WeightsFile(bundle.path(bundle.manifest.weights_file))
        names = dict.fromkeys(name for engine in engines.engines for name in engine.weights)
        self.facts = {name: file.rows(name) for name in names}
        whole = {tensor: file.rows(tensor) for tensor in dict.fromkeys(tensor_rows(name)[0] for name in names)}
        # rows are an offset into their tensor where that is aligned, and a copy of their own otherwise
        inside = {n: f.offset - whole[tensor_rows(n)[0]].offset for n, f in self.facts.items()}
        own = {name: self.facts[name] for name in names if inside[name] % ALIGNMENT}
        places, size = {}, 0
        for name, tensor in {**whole, **own}.items():
            places[name] = size
            size += -(-tensor.size_bytes // ALIGNMENT) * ALIGNMENT
        start = memory.reserve(max(size, ALIGNMENT))
        for name, tensor in {**whole, **own}.items():
            memory.upload(file.data(tensor), start + places[name])
        memory.wait()
        self.addresses = {
            name: start + (places[name] if name in own else places[tensor_rows(name)[0]] + inside[name])
            for name in names
        }


class _KernelCache:
    """TensorRT-RTX compiles kernels when contexts are made; this keeps them on disk."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._cache: Any = None
        self._written = path.read_bytes() if path.is_file() else b""

    def attach(self, config: Any) -> None:
        """The first config makes the cache; later ones share it."""
        if self._cache is None:
            self._cache = config.create_runtime_cache()
            if self._written and not self._cache.deserialize(self._written):
                log.warning("%s is of no use to this TensorRT-RTX; kernels are compiled again", self.path)
        config.set_runtime_cache(self._cache)
        self._is_new = True

    def save(self) -> None:
        """Writes what contexts have added since the last time."""
        if self._cache is None or not self._is_new:
            return
        self._is_new = False
        raw = bytes(self._cache.serialize())
        if raw != self._written:
            try:
                self.path.parent.mkdir(parents=True, exist_ok=True)
                write_bytes(self.path, raw)
            except (OSError, ToprovarError) as error:
                log.warning("compiled kernels are not kept: %s", error)
            self._written = raw
