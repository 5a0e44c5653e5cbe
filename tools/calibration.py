"""`toprovar calibrate`: statistics, plan, report."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from pathlib import Path

from toprovar.calibrate.fitting import fit_plan
from toprovar.calibrate.methods.settings import MethodSettings
from toprovar.calibrate.methods.toprovar import fit_depth
from toprovar.calibrate.report import write_report
from toprovar.calibrate.statistics import Statistics, collect_statistics, read_prompts
from toprovar.exporter.model import Model, load_model
from toprovar.runtime.errors import ToprovarError
from toprovar.runtime.noise import check_seed
from toprovar.runtime.plan import Plan, save_plan
from toprovar.runtime.version import VERSION
from toprovar.tools import console
from toprovar.tools.options import guidance_with, schedule_with


@dataclass(frozen=True)
class CalibrationRequest:
    """The command's options; None means the model's own default."""

    model: str
    out: Path
    tokenizer: str | None = None
    prompts: Path | None = None
    limit: int | None = None
    method: str = "toprovar"
    settings: MethodSettings = field(default_factory=MethodSettings)
    aspect: float | None = None
    budget: str | None = None
    cfg: str | None = None
    tau: str | None = None
    seed: int = 0


def shipped_prompts() -> Path:
    """The list of prompts that comes with the package."""
    import toprovar.calibrate

    return Path(toprovar.calibrate.__path__[0]) / "prompts.txt"


def gather(request: CalibrationRequest, model: Model) -> Statistics:
    """Runs the prompts that are not measured yet."""
    check_seed(request.seed)
    prompts = read_prompts(request.prompts or shipped_prompts())[: request.limit]
    if request.out.exists() and not request.out.is_dir():
        raise ToprovarError(f"{request.out} is a file; expected a folder", "choose another --out")
    schedule = schedule_with(model, request.aspect, request.budget)
    guidance = guidance_with(model.guidance(schedule), request.cfg, request.tau)
    with console.progress("calibrate") as advance:
        return collect_statistics(model, schedule, guidance, prompts, request.seed, request.out / "stats", advance)


def fit_and_write(request: CalibrationRequest, model: Model, stats: Statistics) -> Plan:
    """Plan and report from statistics; both files are complete or absent."""
    plan = fit_plan(request.method, stats, model.backbone, request.settings)
    save_plan(plan, request.out / "plan.json")
    depth = fit_depth(stats, request.settings)
    facts = {
        "model": model.name,
        "weights sha256": model.weights_sha256[:16],
        "prompts": str(len(stats.prompts)),
        "first seed": str(request.seed),
        "toprovar": VERSION,
    }
    write_report(request.out / "report.html", stats, plan, depth.per_prompt, facts)
    for warning in plan.calib.warnings:
        console.say(f"warning: {warning}")
    return plan


def run_calibration(request: CalibrationRequest) -> Plan:
    started = time.perf_counter()
    model = load_model(request.model, request.tokenizer)
    stats = gather(request, model)
    plan = fit_and_write(request, model, stats)
    console.say(
        f"wrote {request.out}/plan.json (D = {plan.D.value}, TLE {plan.tle_speedup:.2f} times less) and report.html "
        f"in {time.perf_counter() - started:.0f}s; "
        f"next: toprovar-export {request.model} --plan {request.out}/plan.json -o bundle"
    )
    return plan
