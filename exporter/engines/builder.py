"""Builds one engine: the program of a child process, so that an abort inside the builder ends nothing else.

    python -m toprovar.exporter.engines.builder REPORT_FD      job as one JSON line on standard input

Reports are JSON lines on the descriptor: {"fraction": 0.3} while it works, then {"done": {...}} or {"fault": {...}}.
Standard error is free for what the libraries print. child.py starts it.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
import time
import traceback
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from toprovar.exporter.engines import versions
from toprovar.exporter.engines.weights_as_inputs import weights_as_inputs
from toprovar.runtime.errors import EnvironmentFault, ToprovarError
from toprovar.runtime.json_files import write_bytes
from toprovar.runtime.manifest import EngineTarget

BODY_HINT = "build the library for TensorRT:  toprovar plugins build; or pass --allow-function-body, which is slower"
REPORT_EVERY_S = 0.1
_DIE_WITH_PARENT = 1  # PR_SET_PDEATHSIG


@dataclass(frozen=True)
class Job:
    """What decides one plan, and where it goes.

    graph, plan:         paths; the weights file lies beside the graph
    capabilities:        "8.9", …, for TensorRT-RTX
    allow_tf32:          fp32 products may round their factors to 10 bits
    open_inputs:         {input: shape} whose first axis may be anything from 0 to its extent
    plugin_library:      path, or None
    allow_function_body: build operators without a plugin from their function bodies
    timing_cache:        file to read and write, or None
    """

    target: EngineTarget
    graph: str
    plan: str
    capabilities: tuple[str, ...] = ()
    allow_tf32: bool = False
    open_inputs: dict[str, tuple[int, ...]] | None = None
    plugin_library: str | None = None
    allow_function_body: bool = False
    timing_cache: str | None = None


@dataclass(frozen=True)
class Built:
    """What a child tells about its plan: see `toprovar.runtime.manifest.Engine`."""

    weights: tuple[str, ...]
    plugin_layers: dict[str, int]
    inlined: dict[str, int]
    builder_version: str


class _Reports:
    """The way back to the parent."""

    def __init__(self, descriptor: int) -> None:
        self._file = os.fdopen(descriptor, "w", encoding="ascii", buffering=1)
        self._told = 0.0

    def send(self, **message: Any) -> None:
        self._file.write(json.dumps(message) + "\n")

    def fraction(self, value: float) -> None:
        now = time.monotonic()
        if now - self._told >= REPORT_EVERY_S:
            self._told = now
            self.send(fraction=round(value, 3))


class _Phases:
    """Nested phases as one number: a step that is under way counts as far as the phase inside it has come."""

    def __init__(self) -> None:
        self._open: dict[str, list[Any]] = {}  # name -> [parent, steps, done, fraction inside]
        self.fraction = 0.0

    def start(self, name: str, parent: str | None, steps: int) -> None:
        self._open[name] = [parent, max(steps, 1), 0, 0.0]

    def step(self, name: str, index: int) -> None:
        if name in self._open:
            phase = self._open[name]
            phase[2], phase[3] = min(index + 1, phase[1]), 0.0
            self._rise(name)

    def finish(self, name: str) -> None:
        self._open.pop(name, None)

    def _rise(self, name: str) -> None:
        seen = set()
        while name not in seen:
            seen.add(name)
            parent, steps, done, inside = self._open[name]
            value = min((done + inside) / steps, 1.0)
            if parent not in self._open:
                self.fraction = max(self.fraction, value)
                return
            self._open[parent][3] = value
            name = parent


def build(job: Job, reports: _Reports) -> Built:
    """Parses, builds and writes one plan.

    Raises: ToprovarError if the graph is refused, EnvironmentFault if this machine cannot build it.
    """
    trt = versions.import_module(job.target)
    title = f"{versions.TITLES[job.target]} {trt.__version__}"
    graph = Path(job.graph)
    logger = _logger(trt)
    model, weights = _model(graph)
    wanted = plugin_nodes(model)
    if job.plugin_library is not None:
        _load_plugins(trt, job.plugin_library)
    _check_creators(trt, graph, model, wanted, job)
    builder = trt.Builder(logger)
    network = builder.create_network(versions.network_flags(trt))
    parser = trt.OnnxParser(network, logger)
    if not parser.parse(model.SerializeToString()):
        raise ToprovarError(
            f"{graph} is refused by {title}: {_parse_errors(parser) or logger.last}",
            "export the bundle again with this version; if that does not help, choose another --target",
        )
    taken = _plugin_layers(trt, network, wanted)
    inlined = Counter(kind for name, kind in wanted.items() if name not in taken)
    if inlined and not job.allow_function_body:
        raise ToprovarError(
            f"{graph} wants {len(wanted)} plugin layers; {title} took {len(taken)} and would inline "
            f"{_counted(inlined)}",
            BODY_HINT,
        )
    config = builder.create_builder_config()
    versions.configure(trt, config, job.target, job.capabilities, job.allow_tf32)
    if job.open_inputs:
        profile = builder.create_optimization_profile()
        for name, shape in job.open_inputs.items():
            profile.set_shape(name, (0, *shape[1:]), tuple(shape), tuple(shape))
        config.add_optimization_profile(profile)
    cache = _timing_cache(config, job)
    config.progress_monitor = monitor = _monitor(trt, reports)
    plan = builder.build_serialized_network(network, config)
    if plan is None:
        raise ToprovarError(
            f"{graph} cannot be built by {title}: {logger.last or 'no reason given'}",
            "choose another --target, or other capabilities",
        )
    del monitor  # must outlive the build
    _write(Path(job.plan), plan)
    if cache is not None and job.timing_cache:
        _write(Path(job.timing_cache), cache.serialize())
    return Built(weights, dict(sorted(Counter(taken.values()).items())), dict(sorted(inlined.items())), trt.__version__)


def plugin_nodes(model: Any) -> dict[str, str]:
    """{node: operator} of the nodes that want a plugin: those with a plugin_namespace, in subgraphs too."""
    found = {}
    for node in _nodes(model.graph):
        attributes = {attribute.name: attribute for attribute in node.attribute}
        if "plugin_namespace" in attributes and attributes["plugin_namespace"].s:
            found[node.name] = node.op_type
    return found


def _nodes(graph: Any) -> Iterator[Any]:
    for node in graph.node:
        yield node
        for attribute in node.attribute:
            for inner in (attribute.g, *attribute.graphs):
                yield from _nodes(inner)


def _model(graph: Path) -> tuple[Any, tuple[str, ...]]:
    import onnx

    model = onnx.load(str(graph), load_external_data=False)
    return model, weights_as_inputs(model, graph.parent)


def _load_plugins(trt: Any, path: str) -> None:
    if trt.get_plugin_registry().load_library(path) is None:
        raise EnvironmentFault(
            f"operator library {path} cannot be loaded by {trt.__name__} {trt.__version__}",
            "build it again:  toprovar plugins build",
        )


def _check_creators(trt: Any, graph: Path, model: Any, wanted: dict[str, str], job: Job) -> None:
    """Every wanted plugin has a creator; said before parsing, which would inline in silence."""
    if job.allow_function_body:
        return
    if wanted and job.plugin_library is None:
        raise EnvironmentFault(
            f"{graph} wants plugins ({_counted(Counter(wanted.values()))}); there is no operator library", BODY_HINT
        )
    registry = trt.get_plugin_registry()
    for node in _nodes(model.graph):
        if node.name in wanted:
            named = {a.name: a.s.decode() for a in node.attribute if a.name in ("plugin_namespace", "plugin_version")}
            namespace, version = named["plugin_namespace"], named.get("plugin_version", "1")
            if registry.get_creator(node.op_type, version, namespace) is None:
                raise EnvironmentFault(
                    f"operator library {job.plugin_library} has no plugin {namespace}::{node.op_type}, version "
                    f"{version}, which {graph} wants",
                    BODY_HINT,
                )


def _plugin_layers(trt: Any, network: Any, wanted: dict[str, str]) -> dict[str, str]:
    """{node: operator} of the nodes that became plugin layers; a layer bears the name of its node."""
    layers = [network.get_layer(i) for i in range(network.num_layers)]
    names = [layer.name for layer in layers if layer.type == trt.LayerType.PLUGIN_V3]
    if strange := [name for name in names if name not in wanted]:
        raise ToprovarError(
            f"plugin layer {strange[0]} belongs to no node that wants a plugin", "export the bundle again"
        )
    return {name: wanted[name] for name in names}


def _write(path: Path, memory: Any) -> None:
    try:
        write_bytes(path, memoryview(memory).tobytes())
    except ToprovarError as error:
        raise ToprovarError(
            error.message, "free some space, or mend its permissions; finished engines are kept"
        ) from None


def _counted(kinds: Counter[str]) -> str:
    return ", ".join(f"{count} {kind}" for kind, count in sorted(kinds.items()))


def _parse_errors(parser: Any) -> str:
    told = []
    for index in range(parser.num_errors):
        error = parser.get_error(index)
        place = f"node {error.node_name()} ({error.node_operator()}): " if error.node_name() else ""
        told.append(place + error.desc())
    return "; ".join(told[:3])


def _timing_cache(config: Any, job: Job) -> Any:
    if job.timing_cache is None or not versions.has_timing_cache(job.target):
        return None
    path = Path(job.timing_cache)
    cache = config.create_timing_cache(path.read_bytes() if path.exists() else b"")
    config.set_timing_cache(cache, ignore_mismatch=True)  # one of another GPU is of no use, and no fault
    return cache


def _logger(trt: Any) -> Any:
    class Logger(trt.ILogger):
        """Errors go to standard error, at once: after an abort they are all that is left."""

        def __init__(self) -> None:
            trt.ILogger.__init__(self)
            self.last = ""

        def log(self, severity: Any, message: str) -> None:
            if severity in (trt.ILogger.Severity.INTERNAL_ERROR, trt.ILogger.Severity.ERROR):
                self.last = message
                print(message, file=sys.stderr, flush=True)

    return Logger()


def _monitor(trt: Any, reports: _Reports) -> Any:
    class Monitor(trt.IProgressMonitor):
        def __init__(self) -> None:
            trt.IProgressMonitor.__init__(self)
            self.phases = _Phases()

        def phase_start(self, phase_name: str, parent_phase: str | None, num_steps: int) -> None:
            self.phases.start(phase_name, parent_phase, num_steps)

        def phase_finish(self, phase_name: str) -> None:
            self.phases.finish(phase_name)

        def step_complete(self, phase_name: str, step: int) -> bool:
            self.phases.step(phase_name, step)
            reports.fraction(self.phases.fraction)
            return True

    return Monitor()


def _describe(target: EngineTarget) -> Built:
    return Built((), {}, {}, versions.import_module(target).__version__)


def _one_line(kind: type[BaseException], error: BaseException, place: TracebackType | None) -> None:
    """A fault of ours as one line, for the parent to pass on."""
    where = traceback.extract_tb(place)[-1]
    print(f"{kind.__name__}: {error} ({Path(where.filename).name}, line {where.lineno})", file=sys.stderr)


def main() -> None:
    sys.excepthook = _one_line
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_DIE_WITH_PARENT, signal.SIGKILL)
    reports = _Reports(int(sys.argv[1]))
    given = json.loads(sys.stdin.readline())
    try:
        built = _describe(given["target"]) if len(given) == 1 else build(Job(**given), reports)
    except ToprovarError as error:
        reports.send(fault={"message": error.message, "hint": error.hint, "exit_code": error.exit_code})
    except MemoryError:
        raise SystemExit("out of memory") from None
    else:
        reports.send(done=asdict(built))


if __name__ == "__main__":
    main()
