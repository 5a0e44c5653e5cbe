"""`toprovar bench`: the variants of a bundle against each other, interleaved so that a drifting machine hits both."""

from __future__ import annotations

import os
import platform
import statistics
import time
from pathlib import Path
from typing import Any

from rich.table import Table

from toprovar.runtime.bundle import open_bundle
from toprovar.runtime.noise import check_seed
from toprovar.runtime.pipeline import Pipeline
from toprovar.runtime.version import VERSION
from toprovar.tools import console
from toprovar.tools.backends import BackendChoice
from toprovar.tools.running import default_prompt


def run_bench(
    folder: Path, prompt: str | None, runs: int, seed: int, choice: BackendChoice = BackendChoice()
) -> dict[str, Any]:
    """Medians per variant. The clock covers the step graphs, sampling included; text, prompt and decoder apart."""
    check_seed(seed)
    bundle = open_bundle(folder)
    backend = choice.open(bundle)
    pipeline = Pipeline(bundle, backend)
    prompt = default_prompt(bundle) if prompt is None else prompt
    variants = list(bundle.manifest.variants)
    first: dict[str, float] = {}
    for variant in variants:
        begin = time.perf_counter()
        pipeline.generate(prompt, seed, variant)
        first[variant] = (time.perf_counter() - begin) * 1e3
    samples: dict[str, list[dict[str, float]]] = {variant: [] for variant in variants}
    per_scale: dict[str, list[list[float]]] = {variant: [] for variant in variants}
    with console.progress("bench") as advance:
        for i in range(runs):
            for variant in variants:
                result = pipeline.generate(prompt, seed, variant)
                samples[variant].append(result.latency_ms)
                per_scale[variant].append([step.latency_ms for step in result.steps])
            advance(i + 1, runs)
    facts: dict[str, Any] = {
        "bundle_sha256": bundle.digest,
        "conditions": {
            "runs": runs,
            "device": backend.device,
            "operators": backend.operators,
            "threads": backend.threads,
            "cpu": platform.processor() or platform.machine(),
            "cores": os.cpu_count(),
            "versions": {"toprovar": VERSION, "backend": backend.version},
            "clock": "step graphs with sampling; text, prompt graph and decoder apart",
        },
        "variants": {},
    }
    for variant in variants:
        steps = [sample["steps"] for sample in samples[variant]]
        facts["variants"][variant] = {
            "first_call_ms": first[variant],
            "steps_ms_median": statistics.median(steps),
            "steps_ms_p90": sorted(steps)[max(0, -(-9 * len(steps) // 10) - 1)],
            "decode_ms_median": statistics.median(sample["decode"] for sample in samples[variant]),
            "scale_ms_median": [statistics.median(scale) for scale in zip(*per_scale[variant], strict=True)],
            "steps_ms": steps,
        }
    if "planned" in variants:
        ratios = [d / p for d, p in zip(*(facts["variants"][v]["steps_ms"] for v in ("dense", "planned")), strict=True)]
        facts["wall_speedup"] = statistics.median(ratios)
        plan = bundle.plan()
        facts["tle_speedup"] = plan.expected_speedup if plan else None
    return facts


def print_bench(facts: dict[str, Any]) -> None:
    conditions = facts["conditions"]
    where = f"{conditions['threads']} threads" if conditions["device"] == "cpu" else conditions["versions"]["backend"]
    table = Table(title=f"median of {conditions['runs']} warm runs, {where}, ms")
    table.add_column("variant")
    for name in ("first call", "steps", "p90", "decode"):
        table.add_column(name, justify="right")
    for variant, row in facts["variants"].items():
        values = ("first_call_ms", "steps_ms_median", "steps_ms_p90", "decode_ms_median")
        table.add_row(variant, *(f"{row[value]:.0f}" for value in values))
    console.out.print(table)
    if "wall_speedup" in facts:
        wall, work = facts["wall_speedup"], facts["tle_speedup"]
        less = "" if work is None else f", TLE {work:.2f} times less"
        console.out.print(f"planned: {wall:.2f} times as fast over the steps{less}")
