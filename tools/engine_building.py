"""Engines on the command line: options of `toprovar export` that ask for them, and `toprovar rebuild`."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from pathlib import Path
from typing import Any, get_args

from toprovar.exporter.engines.engine_set import BuildSummary, EngineRequest, build_engines, peak_build_bytes
from toprovar.exporter.engines.versions import DEFAULT_CAPABILITIES, capabilities_from
from toprovar.runtime.bundle import open_bundle
from toprovar.runtime.errors import ToprovarError
from toprovar.runtime.manifest import EngineTarget, Manifest
from toprovar.tools import console

GRAPHS_TARGET = "onnxruntime"  # its engines are the graphs themselves


@dataclass(frozen=True)
class EngineOptions:
    """What was typed. targets: onnxruntime too; capabilities: a list with commas."""

    targets: Sequence[str] = ()
    capabilities: str | None = None
    allow_function_body: bool = False
    jobs: int = 1

    def request(self, scale: int | None = None, default: tuple[str, ...] = DEFAULT_CAPABILITIES) -> EngineRequest:
        """Raises: ToprovarError for an unknown target, and for capabilities that do not apply."""
        targets = engine_targets(self.targets)
        if self.capabilities is not None and "tensorrt-rtx" not in targets:
            raise ToprovarError(
                f"--compute-capability {self.capabilities} is for --target tensorrt-rtx; "
                "TensorRT builds for the GPU at hand",
                "leave it out, or add --target tensorrt-rtx",
            )
        capabilities = default if self.capabilities is None else capabilities_from(self.capabilities)
        return EngineRequest(targets, capabilities, scale, self.allow_function_body, self.jobs)


def engine_targets(names: Sequence[str]) -> tuple[EngineTarget, ...]:
    """Targets that need engines, each once. Raises: ToprovarError naming an unknown one, and the nearest."""
    known = (GRAPHS_TARGET, *get_args(EngineTarget))
    for name in names:
        if name not in known:
            nearest = get_close_matches(name.lower(), known, 1, cutoff=0)[0]
            raise ToprovarError(
                f"--target {name!r} is unknown; expected {', '.join(known)}", f"did you mean {nearest}?"
            )
    return tuple(name for name in dict.fromkeys(names) if name != GRAPHS_TARGET)  # type: ignore[misc]


def build_with_progress(bundle: Path, request: EngineRequest) -> list[BuildSummary]:
    with console.progress("engines") as advance:
        return build_engines(bundle, request, advance)


def described(summaries: Sequence[BuildSummary]) -> str:
    """ "13 tensorrt-rtx engines of 62.1 MB, 2 of them built before" """
    parts = []
    for summary in summaries:
        text = f"{summary.built + summary.reused} {summary.target} engines of {summary.plan_bytes / 1e6:.1f} MB"
        parts.append(text + (f", {summary.reused} of them built before" if summary.reused else ""))
    return "; ".join(parts)


def run_rebuild(bundle: Path, options: EngineOptions, scale: int | None = None) -> dict[str, Any]:
    """Builds engines of an existing bundle; without targets, those that it has. Returns: what was built."""
    started = time.perf_counter()
    if options.targets:
        request = options.request(scale)
    else:
        request = _former(bundle, open_bundle(bundle, verify=False, engines=False).manifest, options, scale)
    if not request.targets:
        raise ToprovarError(
            "--target onnxruntime has no engines: its graphs are in every bundle", "name another target"
        )
    summaries = build_with_progress(bundle, request)
    console.say(
        f"wrote {described(summaries)} into {bundle} in {time.perf_counter() - started:.1f}s; "
        f"next: toprovar inspect {console.quoted(bundle)}"
    )
    return {"out": str(bundle), "engines": [engine_facts(summary) for summary in summaries]}


def _former(bundle: Path, manifest: Manifest, options: EngineOptions, scale: int | None) -> EngineRequest:
    """A request for the targets that a bundle has, for the GPUs that they were built for."""
    if not manifest.engines:
        raise ToprovarError(f"{bundle} has no engines to rebuild", "name what to build with --target tensorrt-rtx")
    rtx = manifest.engines.get("tensorrt-rtx")
    default = rtx.compute_capabilities if rtx else DEFAULT_CAPABILITIES
    named = replace(options, targets=tuple(manifest.engines))
    return named.request(scale, default)


def engine_facts(summary: BuildSummary) -> dict[str, Any]:
    return {
        "target": summary.target,
        "built": summary.built,
        "reused": summary.reused,
        "plan_bytes": summary.plan_bytes,
    }


def engine_bill(target: EngineTarget, bill: dict[str, Any]) -> dict[str, Any]:
    """What a dry run says of a target's engines. bill: of the graphs."""
    peak = peak_build_bytes(bill["largest_graph_bytes"])
    return {"target": target, "engines": bill["graphs"], "graph_bytes": bill["graph_bytes"], "peak_build_bytes": peak}
