"""`toprovar demo`: the whole path on the packaged model, from checkpoint to a report with pictures."""

from __future__ import annotations

import hashlib
import json
import os
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from toprovar.calibrate.measures import psnr_db, ssim
from toprovar.calibrate.methods.settings import MethodSettings
from toprovar.calibrate.statistics import read_prompts
from toprovar.exporter.bundle_writer import export_bundle
from toprovar.exporter.model import Model, load_model
from toprovar.exporter.planned.loop import LoopOptions
from toprovar.exporter.planned.step import StepOptions
from toprovar.runtime.backends.onnxruntime import OnnxRuntimeBackend
from toprovar.runtime.bundle import Bundle, open_bundle
from toprovar.runtime.errors import ToprovarError
from toprovar.runtime.image_files import write_png
from toprovar.runtime.json_files import check_folder, read_json, write_json
from toprovar.runtime.noise import MAX_SEED, check_seed
from toprovar.runtime.pipeline import Pipeline, Result
from toprovar.runtime.plan import load_plan
from toprovar.runtime.version import VERSION
from toprovar.tools import console
from toprovar.tools.calibration import CalibrationRequest, fit_and_write, gather, shipped_prompts
from toprovar.tools.demo_report import DemoReport, PromptResult, write_demo_report

TARGET_SPEEDUP = 2.0  # token-layer work of the demo's planned variant against dense
COMPARED_WITH_TORCH = 2  # pictures whose codes are compared between PyTorch and ONNX Runtime


def demo_prompts() -> list[str]:
    return read_prompts(Path(__file__).parent / "demo_prompts.txt")


class _Stages:
    """Seconds of finished stages, by what they depended on: a second run skips what would come out the same."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._done: dict[str, Any] = {}
        if path.exists():
            try:
                stored = read_json(path)
            except ToprovarError:
                stored = None
            self._done = stored if isinstance(stored, dict) else {}

    def run(self, name: str, key: list[Any], is_whole: Callable[[], bool], work: Callable[[], None]) -> float:
        """Does the work unless it was done for the same key and is whole. Returns: the seconds it took, now or then."""
        identity = hashlib.sha256(json.dumps(key).encode()).hexdigest()
        found = self._done.get(name)
        if isinstance(found, dict) and found.get("identity") == identity and is_whole():
            took = found.get("seconds")
            if isinstance(took, (int, float)):
                console.say(f"{name}: done before, kept")
                return float(took)
        started = time.perf_counter()
        work()
        seconds = time.perf_counter() - started
        self._done[name] = {"identity": identity, "seconds": seconds}
        write_json(self._path, self._done)
        console.say(f"{name}: {seconds:.1f}s")
        return seconds


def run_demo(out: Path, prompts: int, calibration_prompts: int, seed: int) -> dict[str, Any]:
    """Calibrates, exports, draws, compares, reports. Returns: what summary.json holds; every number was measured."""
    started = time.perf_counter()
    check_seed(seed)
    if seed + prompts - 1 > MAX_SEED:
        raise ToprovarError(
            f"seeds {seed} to {seed + prompts - 1} are needed, one per picture; the largest is {MAX_SEED}",
            f"give a seed up to {MAX_SEED - prompts + 1}",
        )
    for count, what, option, there in (
        (prompts, "pictures", "--prompts", demo_prompts()),
        (calibration_prompts, "prompts", "--calibration-prompts", read_prompts(shipped_prompts())),
    ):
        if count > len(there):
            raise ToprovarError(
                f"{option} asks for {count} {what}; the demo has {len(there)} prompts", f"pass {option} {len(there)}"
            )
    check_folder(out / "images")
    model = load_model("demo")
    stages = _Stages(out / "stages.json")
    calibration, folder = out / "calibration", out / "bundle"
    request = CalibrationRequest(
        model="demo",
        out=calibration,
        limit=calibration_prompts,
        settings=MethodSettings(preset="full", target_speedup=TARGET_SPEEDUP),
    )
    key: list[Any] = [VERSION, model.weights_sha256, calibration_prompts, repr(request.settings)]
    seconds = {
        "calibrate": stages.run(
            "calibrate",
            key,
            lambda: _opens(load_plan, calibration / "plan.json"),
            lambda: _ignore(fit_and_write(request, model, gather(request, model))),
        )
    }
    plan_digest = hashlib.sha256((calibration / "plan.json").read_bytes()).hexdigest()
    seconds["export"] = stages.run(
        "export", [*key, plan_digest], lambda: _opens(open_bundle, folder), lambda: _export(model, calibration, folder)
    )
    bundle = open_bundle(folder)
    backend = OnnxRuntimeBackend(bundle)
    pipeline = Pipeline(bundle, backend)
    results = _draw(pipeline, demo_prompts()[:prompts], seed)
    seconds["run_dense"] = sum(sum(dense.latency_ms.values()) for _, _, dense, _ in results) / 1e3
    seconds["run_planned"] = sum(sum(planned.latency_ms.values()) for _, _, _, planned in results) / 1e3
    equal = _same_codes(model, results[:COMPARED_WITH_TORCH])
    summary = _summary(bundle, results, equal, seconds)
    _write_pictures(out, bundle, results)
    write_json(out / "summary.json", summary)
    _report(out, bundle, backend, results, summary)
    console.say(
        f"wrote {out}/report.html, images/ and summary.json in {time.perf_counter() - started:.0f}s: "
        f"TLE {summary['tle_speedup']:.2f} times less, {summary['wall_speedup']:.2f} times as fast, "
        f"SSIM {summary['ssim_mean']:.3f} to dense; "
        f'next: toprovar run {console.quoted(folder)} --prompt "red apple on white"'
    )
    return summary


def _opens(read: Callable[[Path], object], path: Path) -> bool:
    """Whether an earlier run's result is there and undamaged."""
    try:
        read(path)
    except ToprovarError:
        return False
    return True


def _ignore(value: object) -> None:
    del value


def _export(model: Model, calibration: Path, folder: Path) -> None:
    plan = load_plan(calibration / "plan.json")
    guidance = model.guidance()
    options = StepOptions.for_guidance(guidance, model.config.depth, model.text_tokens)
    with console.progress("export") as advance:
        export_bundle(
            model, folder, guidance, options, plan, on_progress=lambda what, done, total: advance(done, total)
        )


Drawn = tuple[str, int, Result, Result]


def _draw(pipeline: Pipeline, prompts: list[str], seed: int) -> list[Drawn]:
    """Dense and planned in turn, after one warm-up of each, so that both meet the same machine."""
    for variant in ("dense", "planned"):
        pipeline.prepare(variant)
        pipeline.generate(prompts[0], seed, variant)
    drawn = []
    with console.progress("draw") as advance:
        for i, prompt in enumerate(prompts):
            dense, planned = (pipeline.generate(prompt, seed + i, variant) for variant in ("dense", "planned"))
            drawn.append((prompt, seed + i, dense, planned))
            advance(i + 1, len(prompts))
    return drawn


def _same_codes(model: Model, drawn: list[Drawn]) -> bool:
    """Whether PyTorch draws the very same bits as ONNX Runtime did, dense, for some of the pictures."""
    guidance = model.guidance()
    for prompt, seed, dense, _ in drawn:
        asked = model.family.prompt(model, [prompt], guidance)
        run = model.family.generate(model, asked, model.schedule, guidance, [seed], LoopOptions())
        same = [np.array_equal(mine[0].numpy(), theirs) for mine, theirs in zip(run.bits, dense.bits, strict=True)]
        if not all(same):
            return False
    return True


def _pictures(result: Result) -> np.ndarray:
    assert result.image is not None
    return result.image


def _summary(bundle: Bundle, drawn: list[Drawn], equal: bool, seconds: dict[str, float]) -> dict[str, Any]:
    plan = bundle.plan()
    manifest = bundle.manifest
    speedups = [dense.latency_ms["steps"] / planned.latency_ms["steps"] for _, _, dense, planned in drawn]
    return {
        "tle_speedup": plan.tle_speedup if plan else 1.0,
        "wall_speedup": statistics.median(speedups),
        "ssim_mean": statistics.mean(ssim(_pictures(p), _pictures(d)) for _, _, d, p in drawn),
        "psnr_mean": statistics.mean(psnr_db(_pictures(p), _pictures(d)) for _, _, d, p in drawn),
        "codes_equal_torch_vs_onnxruntime": equal,
        "codes_compared": min(COMPARED_WITH_TORCH, len(drawn)),
        "bundle_bytes": bundle.size_bytes,
        "weights_bytes": manifest.files[manifest.weights_file].size_bytes,
        "seconds": {name: round(value, 3) for name, value in seconds.items()},
        "steps_ms_median": {
            "dense": statistics.median(d.latency_ms["steps"] for _, _, d, _ in drawn),
            "planned": statistics.median(p.latency_ms["steps"] for _, _, _, p in drawn),
        },
        "graphs": sum(name.endswith(".onnx") for name in manifest.files),
        "pictures": len(drawn),
    }


def _write_pictures(out: Path, bundle: Bundle, drawn: list[Drawn]) -> None:
    for i, (prompt, seed, dense, planned) in enumerate(drawn):
        for variant, result in (("dense", dense), ("planned", planned)):
            facts = {
                "prompt": prompt,
                "seed": str(seed),
                "variant": variant,
                "bundle_sha256": bundle.digest,
                "software": f"toprovar {VERSION}",
            }
            write_png(out / "images" / f"{i:02d}_{variant}.png", _pictures(result), facts)
    facts = {"bundle_sha256": bundle.digest, "prompts": " | ".join(prompt for prompt, *_ in drawn)}
    write_png(out / "images" / "overview.png", overview(drawn), facts)


def overview(drawn: list[Drawn], columns: int = 4, gap: int = 8) -> np.ndarray:
    """Contact sheet: per prompt the dense picture above the planned one. Returns: [H, W, 3] uint8 on white."""
    height, width = _pictures(drawn[0][2]).shape[:2]
    rows = -(-len(drawn) // columns)
    sheet = np.full((rows * (2 * height + gap) - gap, columns * (width + gap) - gap, 3), 255, np.uint8)
    for i, (_, _, dense, planned) in enumerate(drawn):
        top, left = i // columns * (2 * height + gap), i % columns * (width + gap)
        for j, result in enumerate((dense, planned)):
            sheet[top + j * height : top + (j + 1) * height, left : left + width] = _pictures(result)
    return sheet


def _report(
    out: Path, bundle: Bundle, backend: OnnxRuntimeBackend, drawn: list[Drawn], summary: dict[str, Any]
) -> None:
    plan = bundle.plan()
    results = []
    for prompt, seed, dense, planned in drawn:
        kept, entropy = {}, {}
        for step in planned.steps:
            if step.kept:
                mask = np.zeros(step.map[0] * step.map[1], bool)
                mask[next(iter(step.kept.values()))] = True
                kept[step.scale] = mask.reshape(step.map)
            if step.entropy_nats:
                entropy[step.scale] = next(iter(step.entropy_nats.values())).reshape(step.map)
        results.append(
            PromptResult(
                prompt=prompt,
                seed=seed,
                dense=_pictures(dense),
                planned=_pictures(planned),
                ssim=ssim(_pictures(planned), _pictures(dense)),
                psnr_db=psnr_db(_pictures(planned), _pictures(dense)),
                kept=kept,
                entropy_nats=entropy,
                dense_ms=[step.latency_ms for step in dense.steps],
                planned_ms=[step.latency_ms for step in planned.steps],
            )
        )
    facts = {
        "machine": f"{platform.machine()}, {os.cpu_count()} cores, {backend.threads} threads",
        "python": platform.python_version(),
        "backend": backend.version,
        "toprovar": VERSION,
        "number format": bundle.manifest.compute,
        "clock": "step graphs with sampling; text encoder, prompt graph and decoder apart",
        "timing": f"one warm run of each of {len(drawn)} prompts per variant, in turn; medians over prompts",
    }
    write_demo_report(out / "report.html", DemoReport(results=results, summary=summary, facts=facts, plan=plan))
