"""Engines of a bundle: which graphs, with which settings, in which order; reused where nothing changed.

Every graph is one plan. What decides its bytes makes its key; a finished plan of the same key is used again. The
manifest takes the new engines in one replacement when all of a target are there.
"""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Callable
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path

from toprovar.exporter.engines import versions
from toprovar.exporter.engines.builder import Job
from toprovar.exporter.engines.child import Children, build_environment, installed_version, run_builder
from toprovar.exporter.engines.engine_store import EngineStore, Finished
from toprovar.exporter.engines.number_formats import allows_tf32
from toprovar.exporter.engines.trtexec import TRTEXEC_FILE, trtexec_page
from toprovar.exporter.engines.weights_as_inputs import MIN_INPUT_BYTES
from toprovar.exporter.output_folder import alone_with
from toprovar.plugins.library import find_library, require_library
from toprovar.runtime.bundle import open_bundle, sha256_of
from toprovar.runtime.errors import EnvironmentFault, ToprovarError
from toprovar.runtime.json_files import check_folder, write_bytes, write_json
from toprovar.runtime.manifest import MANIFEST_FILE, Engine, EngineSet, EngineTarget, FileFacts, Graph, Manifest

RULES = 1  # rises when the same graph and settings would give another plan


@dataclass(frozen=True)
class EngineRequest:
    """What to build.

    capabilities:        of TensorRT-RTX engines; TensorRT builds for the GPU at hand
    scale:               only steps of this scale; None for all graphs
    allow_function_body: build operators from their function bodies where there is no plugin
    jobs:                plans that are built at once; one for TensorRT, whose timing cache is one file
    """

    targets: tuple[EngineTarget, ...]
    capabilities: tuple[str, ...] = versions.DEFAULT_CAPABILITIES
    scale: int | None = None
    allow_function_body: bool = False
    jobs: int = 1

    def check(self) -> None:
        """Raises: EnvironmentFault before long work, if this machine cannot build for a target."""
        for target in self.targets:
            if target == "tensorrt":
                versions.gpu_at_hand()
            versions.installed_module(target)
        if self.targets:
            plugin_library(self.allow_function_body)


@dataclass(frozen=True)
class Plugins:
    """The operator library that plans call. digest: of its sources."""

    path: Path
    digest: str


def plugin_library(allow_function_body: bool) -> Plugins | None:
    """The library to build with; None where function bodies do.

    Raises: EnvironmentFault if it is missing, stale or without TensorRT, and bodies were not asked for.
    """
    if allow_function_body:
        library = find_library()
        if library is None or library.is_stale or not library.has_tensorrt:
            return None
    else:
        try:
            library = require_library(tensorrt=True)
        except EnvironmentFault as error:
            hint = f"{error.hint}; or build without plugins, slower:  --allow-function-body"
            raise EnvironmentFault(error.message, hint) from None
    return Plugins(library.path, library.source_digest)


def peak_build_bytes(largest_graph_bytes: int) -> int:
    """About how much memory the build of one plan takes, which holds no large weights.

    Fitted to TensorRT-RTX 1.7.1 with plugins, bf16: 242 MiB at a graph of 5 kB, 388 at 45 kB (demo), 817 at 163 kB and
    878 at 185 kB (Infinity-2B, dense and planned). Function bodies take less; TensorRT was not measured.
    """
    return 240 * 2**20 + 3600 * largest_graph_bytes


@dataclass(frozen=True)
class BuildSummary:
    """built, reused: plans; plan_bytes: of all engines of the target."""

    target: EngineTarget
    built: int
    reused: int
    plan_bytes: int


def engine_graphs(manifest: Manifest, scale: int | None = None) -> list[Graph]:
    """The graphs that become engines, in the order in which they run.

    scale:  only the steps of this scale
    Raises: ToprovarError for a scale that no step has.
    """
    if scale is None:
        return list(manifest.graphs.values())
    steps = [step for variant in manifest.variants.values() for step in variant if step.scale == scale]
    if not steps:
        last = max(step.scale for step in manifest.variants["dense"])
        raise ToprovarError(f"--scale {scale}: the bundle has steps of scales 0 to {last}", f"choose 0 to {last}")
    return list({step.graph.file: step.graph for step in steps}.values())


def build_engines(
    folder: Path, request: EngineRequest, on_progress: Callable[[float, int], None] = lambda done, total: None
) -> list[BuildSummary]:
    """Builds the engines of a bundle, or those that are missing or changed, and writes them into its manifest.

    on_progress: (engines done, with the fraction of the one under way; engines in all)
    Raises:      ToprovarError or EnvironmentFault; finished engines are kept for the next call.
    """
    request.check()
    check_folder(folder)
    if not folder.is_dir():
        open_bundle(folder)  # says what it is
    summaries = []
    with alone_with(folder):
        for number, target in enumerate(request.targets):
            manifest = open_bundle(folder, engines=False).manifest
            count = len(engine_graphs(manifest, request.scale))

            def advance(done: float, before: int = number * count, total: int = count * len(request.targets)) -> None:
                on_progress(before + done, total)

            with build_environment(target) as environment:
                summaries.append(_TargetBuild(folder, manifest, target, request, environment).run(advance))
    return summaries


class _TargetBuild:
    """One target's engines."""

    def __init__(
        self,
        folder: Path,
        manifest: Manifest,
        target: EngineTarget,
        request: EngineRequest,
        environment: dict[str, str],
    ) -> None:
        self.folder, self.manifest, self.target, self.request = folder, manifest, target, request
        self.environment = environment
        self.children = Children()
        self.store = EngineStore(folder, target)
        self.plugins = plugin_library(request.allow_function_body)
        self.version = installed_version(target, environment)
        gpu = versions.gpu_at_hand() if target == "tensorrt" else None
        self.capabilities = (gpu.capability,) if gpu else request.capabilities
        self.place = gpu.name if gpu else ""

    def run(self, advance: Callable[[float], None]) -> BuildSummary:
        graphs = engine_graphs(self.manifest, self.request.scale)
        others = self._others({graph.file for graph in graphs})
        known = self.store.finished(self.manifest)
        self.store.work.mkdir(parents=True, exist_ok=True)
        advance(0)
        items, missing = [], []
        for graph in graphs:
            old = known.get(self._key(graph))
            if old is not None and old.engine.graph == graph.file:
                items.append(old)
            else:
                missing.append(graph)
        reused = len(items)
        items += self._build_all(missing, lambda done: advance(reused + done))
        self._publish([*items, *others])
        advance(len(graphs))
        plan_bytes = sum(item.facts.size_bytes for item in items)
        return BuildSummary(self.target, len(items) - reused, reused, plan_bytes)

    def _build_all(self, graphs: list[Graph], advance: Callable[[float], None]) -> list[Finished]:
        """Builds several at a time. The first fault, or an interrupt, ends all; what is finished is noted by then."""
        fractions = dict.fromkeys((graph.file for graph in graphs), 0.0)
        lock = threading.Lock()

        def tell(graph: Graph, fraction: float) -> None:
            with lock:
                fractions[graph.file] = fraction
                advance(sum(fractions.values()))

        def build(graph: Graph) -> Finished:
            item = self._build(graph, lambda fraction: tell(graph, fraction))
            with lock:
                self.store.note(item)
            tell(graph, 1.0)
            return item

        jobs = 1 if versions.has_timing_cache(self.target) else self.request.jobs
        with ThreadPoolExecutor(jobs) as pool:
            try:
                works = [pool.submit(build, graph) for graph in graphs]
                for work in wait(works, return_when=FIRST_EXCEPTION).done:
                    work.result()  # raises what it raised
                return [work.result() for work in works]
            except BaseException:
                pool.shutdown(wait=False, cancel_futures=True)
                self.children.end()
                raise

    def _others(self, graphs: set[str]) -> list[Finished]:
        """Engines of other scales, which stay. Raises: ToprovarError if they were built otherwise, or are not whole."""
        engines = self.manifest.engines.get(self.target)
        if self.request.scale is None or engines is None:
            return []
        kept = [engine for engine in engines.engines if engine.graph not in graphs]
        found = (engines.builder_version, engines.compute_capabilities, engines.plugin_sha256)
        if kept and found != (self.version, self.capabilities, self._plugin_digest()):
            raise ToprovarError(
                f"the other engines of {self.folder} were built by {engines.builder_version} for "
                f"{', '.join(engines.compute_capabilities)}, plugins {_short(engines.plugin_sha256)}; this build is by "
                f"{self.version} for {', '.join(self.capabilities)}, plugins {_short(self._plugin_digest())}",
                "leave --scale out: all engines of a target are built alike",
            )
        others = [Finished(engine=engine, facts=self.manifest.files[engine.file]) for engine in kept]
        for other in others:
            if self.store.place(other) is None:
                raise ToprovarError(
                    f"{other.engine.file} of {self.folder}, which --scale leaves as it is, is missing or was changed",
                    "leave --scale out: it is built again, and whole engines are kept",
                )
        return others

    def _plugin_digest(self) -> str | None:
        return self.plugins.digest if self.plugins else None

    def _key(self, graph: Graph) -> str:
        """Digest of all that decides a plan's bytes. Small weights are inside a plan, so their file counts."""
        facts = {
            "rules": RULES,
            "graph": self.manifest.files[graph.file].sha256,
            "weights": self.manifest.files[self.manifest.weights_file].sha256,
            "target": self.target,
            "builder": self.version,
            "capabilities": self.capabilities,
            "gpu": self.place,
            "plugins": self._plugin_digest(),
            "allow_function_body": self.request.allow_function_body,
            "min_input_bytes": MIN_INPUT_BYTES,
            "allow_tf32": allows_tf32(self.manifest, graph),
        }
        return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()

    def _build(self, graph: Graph, on_fraction: Callable[[float], None]) -> Finished:
        file = self.store.name(graph.file)
        plan = self.store.work_plan(file).absolute()  # the child has another current folder
        cache = self.store.timing_cache() if versions.has_timing_cache(self.target) else None
        job = Job(
            target=self.target,
            graph=str((self.folder / graph.file).absolute()),
            plan=str(plan),
            capabilities=self.capabilities if self.target == "tensorrt-rtx" else (),
            allow_tf32=allows_tf32(self.manifest, graph),
            open_inputs={name: facts.shape for name, facts in graph.inputs.items() if facts.is_open},
            plugin_library=str(self.plugins.path) if self.plugins else None,
            allow_function_body=self.request.allow_function_body,
            timing_cache=str(cache.absolute()) if cache else None,
        )
        built = run_builder(job, self.environment, on_fraction, self.children)
        engine = Engine(
            file=file,
            graph=graph.file,
            weights=built.weights,
            plugin_layers=built.plugin_layers,
            inlined=built.inlined,
            key=self._key(graph),
        )
        return Finished(engine=engine, facts=FileFacts(size_bytes=plan.stat().st_size, sha256=sha256_of(plan)))

    def _publish(self, items: list[Finished]) -> None:
        """Swaps the engines in and replaces the manifest."""
        order = list(self.manifest.graphs)
        items = sorted(items, key=lambda item: order.index(item.engine.graph))
        engines = EngineSet(
            target=self.target,
            builder_version=self.version,
            compute_capabilities=self.capabilities,
            plugin_sha256=self._plugin_digest(),
            engines=tuple(item.engine for item in items),
        )
        prefix = self.store.name("").rsplit("/", 1)[0] + "/"
        files = {name: facts for name, facts in self.manifest.files.items() if not name.startswith(prefix)}
        files |= self.store.commit(items)
        sets = {**self.manifest.engines, self.target: engines}
        manifest = self.manifest.model_copy(update={"engines": dict(sorted(sets.items()))})
        page = trtexec_page(manifest).encode()
        write_bytes(self.folder / TRTEXEC_FILE, page)
        files[TRTEXEC_FILE] = FileFacts(size_bytes=len(page), sha256=hashlib.sha256(page).hexdigest())
        manifest = manifest.model_copy(update={"files": dict(sorted(files.items()))})
        manifest = Manifest.model_validate(manifest.model_dump(mode="json"))
        write_json(self.folder / MANIFEST_FILE, manifest.model_dump(mode="json"))
        self.store.clear_work()


def _short(digest: str | None) -> str:
    return digest[:12] if digest else "none"
