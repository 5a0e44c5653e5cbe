"""`toprovar profile`: where the time of a picture goes, per scale, per layer and per kind of operator."""

from __future__ import annotations

import platform
import statistics
import time
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from rich.table import Table

from toprovar.runtime.bundle import Bundle, open_bundle
from toprovar.runtime.json_files import check_folder, write_json
from toprovar.runtime.manifest import Step
from toprovar.runtime.noise import check_seed
from toprovar.runtime.pipeline import Pipeline, Result
from toprovar.runtime.version import VERSION
from toprovar.runtime.weights import WeightsFile
from toprovar.tools import console
from toprovar.tools.backends import BackendChoice
from toprovar.tools.roofline import Work, step_work
from toprovar.tools.running import default_prompt, default_variant
from toprovar.tools.traces import aggregated, layers_of_nodes

if TYPE_CHECKING:
    from toprovar.tools.backends import RunningBackend

PROFILE_FILE = "profile.json"
TRACES_FOLDER = "traces"
TRACED_RUNS = 3  # after one that is dropped
BOUNDARY = (
    "a scale: from its inputs on the host to its graph being done, with decisions, without reading results back; "
    "text, prompt graph and decoder apart"
)


@dataclass(frozen=True)
class ProfileRequest:
    """variant: None is planned where the bundle has it; text_rows: instead of a prompt; peaks: of the machine, for
    roofline times."""

    bundle: Path
    out: Path
    variant: str | None = None
    prompt: str | None = None
    text_rows: np.ndarray | None = None
    runs: int = 5
    seed: int = 0
    command: str = ""
    choice: BackendChoice = field(default_factory=BackendChoice)
    peak_tflops: float | None = None
    peak_gbps: float | None = None


def run_profile(request: ProfileRequest, quiet: bool = False) -> dict[str, Any]:
    """Times warm runs as they are, then runs again with the backend's profiler on. Writes and returns the facts."""
    check_seed(request.seed)
    check_folder(request.out)
    bundle = open_bundle(request.bundle)
    variant = request.variant or default_variant(bundle)
    pipeline = Pipeline(bundle, request.choice.open(bundle))
    steps = pipeline.steps(variant)
    first_ms, results = _timed(pipeline, variant, request)
    backend = pipeline.backend
    facts: dict[str, Any] = {
        "schema_version": 1,
        "tool_version": VERSION,
        "command": request.command,
        "bundle_sha256": bundle.digest,
        "variant": variant,
        "seed": request.seed,
        "conditions": _conditions(bundle, backend, request),  # type: ignore[arg-type]
        "first_call_ms": first_ms,
        "parts": {name: _summary([result.latency_ms[name] for result in results]) for name in results[0].latency_ms},
        "scales": _scales(bundle, steps, results, request),
        "traces": _traced(bundle, variant, request),
    }
    write_json(request.out / PROFILE_FILE, facts)
    if not quiet:
        console.say(f"wrote {request.out / PROFILE_FILE}: scales, operators and layers; traces are beside it")
    return facts


def _generate(pipeline: Pipeline, variant: str, request: ProfileRequest) -> Result:
    prompt = None
    if request.text_rows is None:
        prompt = default_prompt(pipeline.bundle) if request.prompt is None else request.prompt
    return pipeline.generate(prompt, request.seed, variant, text_rows=request.text_rows)


def _timed(pipeline: Pipeline, variant: str, request: ProfileRequest) -> tuple[float, list[Result]]:
    """Returns: ms of the first call, loading included; the warm results."""
    begin = time.perf_counter()
    _generate(pipeline, variant, request)
    first_ms = (time.perf_counter() - begin) * 1e3
    results = []
    with console.progress("profile") as advance:
        for done in range(request.runs):
            results.append(_generate(pipeline, variant, request))
            advance(done + 1, request.runs)
    return first_ms, results


def _conditions(bundle: Bundle, backend: RunningBackend, request: ProfileRequest) -> dict[str, Any]:
    manifest = bundle.manifest
    height, width = manifest.schedule[-1]
    return {
        "model": manifest.model.model_dump(mode="json"),
        "tokens_of_last_scale": [height, width],
        "compute": manifest.compute,
        "rows": manifest.rows,
        "device": backend.device,
        "operators": backend.operators,
        "cuda_graph": request.choice.cuda_graph and backend.device == "cuda",
        "threads": backend.threads,
        "cpu": platform.processor() or platform.machine(),
        "versions": {"toprovar": VERSION, "backend": backend.version},
        "runs": request.runs,
        "boundary": BOUNDARY,
        "peaks": {"tflops": request.peak_tflops, "gbps": request.peak_gbps},
    }


def _summary(samples_ms: list[float]) -> dict[str, Any]:
    """Median, p90 (nearest rank) and count."""
    ordered = sorted(samples_ms)
    p90 = ordered[max(0, -(-9 * len(ordered) // 10) - 1)]
    return {"median_ms": statistics.median(ordered), "p90_ms": p90, "count": len(ordered), "samples_ms": samples_ms}


def _scales(
    bundle: Bundle, steps: tuple[Step, ...], results: list[Result], request: ProfileRequest
) -> list[dict[str, Any]]:
    weights = WeightsFile(bundle.path(bundle.manifest.weights_file)).tensors
    rows = []
    for index, record in enumerate(results[0].steps):
        step = next(
            step
            for step in steps
            if (step.scale, step.counts, step.guided, step.images) == (record.scale, record.counts, record.guided, 1)
        )
        summary = _summary([result.steps[index].latency_ms for result in results])
        work = step_work(bundle.manifest, weights, step)
        tokens = prod(record.map)
        rows.append(
            {
                "scale": record.scale,
                "map": list(record.map),
                "kept_ratio": sum(record.counts) / (tokens * len(record.counts)),
                **summary,
                **_against_floor(work, summary["median_ms"], request),
            }
        )
    return rows


def _against_floor(work: Work | None, median_ms: float, request: ProfileRequest) -> dict[str, Any]:
    """What is known of a scale's work; nothing that is not."""
    if work is None:
        return {}
    facts: dict[str, Any] = {
        "flops": work.flops,
        "bytes": work.bytes,
        "achieved_tflops": work.flops / median_ms / 1e9,
        "achieved_gbps": work.bytes / median_ms / 1e6,
    }
    if request.peak_tflops and request.peak_gbps:
        floor_ms = work.floor_ms(request.peak_tflops, request.peak_gbps)
        facts |= {"roofline_ms": floor_ms, "roofline_share": floor_ms / median_ms}
    return facts


def _traced(bundle: Bundle, variant: str, request: ProfileRequest) -> dict[str, Any]:
    """{graph: operators and layers}, from runs with the profiler on, which are slower and not among the times above."""
    folder = request.out / TRACES_FOLDER
    folder.mkdir(parents=True, exist_ok=True)
    backend = request.choice.open(bundle, profile_to=folder)
    pipeline = Pipeline(bundle, backend)
    for _ in range(1 + TRACED_RUNS):
        _generate(pipeline, variant, request)
    layer_times = getattr(backend, "layer_times", None)
    if layer_times is not None:
        return {
            file: {
                "layers_of_engine": [
                    {"layer": name, "ms": statistics.median(ms[1:] or ms)} for name, ms in times.items()
                ]
            }
            for file, times in layer_times().items()
        }
    found = {}
    for file, trace in backend.end_profiling().items():  # type: ignore[union-attr]
        found[file] = {**aggregated(trace, layers_of_nodes(bundle.path(file))), "trace": trace.name}
    return found


def print_profile(facts: dict[str, Any]) -> None:
    conditions = facts["conditions"]
    title = f"{facts['variant']}, {conditions['compute']}, {conditions['versions']['backend']}"
    table = Table(title=f"{title}: {conditions['runs']} warm runs")
    for name in ("scale", "map", "kept", "median ms", "p90", "TFLOP/s", "GB/s", "floor ms"):
        table.add_column(name, justify="right")
    for row in facts["scales"]:
        table.add_row(
            str(row["scale"]),
            "x".join(map(str, row["map"])),
            f"{row['kept_ratio']:.2f}",
            f"{row['median_ms']:.2f}",
            f"{row['p90_ms']:.2f}",
            f"{row['achieved_tflops']:.2f}" if "achieved_tflops" in row else "",
            f"{row['achieved_gbps']:.1f}" if "achieved_gbps" in row else "",
            f"{row['roofline_ms']:.3f}" if "roofline_ms" in row else "",
        )
    console.out.print(table)
    total: dict[str, float] = {}
    for file, traced in facts["traces"].items():
        if file.startswith("step_"):
            for row in traced.get("operators", ()):
                total[row["kind"]] = total.get(row["kind"], 0.0) + row["ms"]
    if total:
        table = Table(title="operators of all steps, profiler on, ms per picture")
        table.add_column("operator")
        table.add_column("ms", justify="right")
        for kind, ms in sorted(total.items(), key=lambda pair: -pair[1])[:12]:
            table.add_row(kind, f"{ms:.2f}")
        console.out.print(table)
    console.out.print(f"first call {facts['first_call_ms']:.0f} ms; the clock covers {conditions['boundary']}")
