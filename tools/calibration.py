"""`toprovar calibrate`: statistics, plan, report."""

from __future__ import annotations

import math
import shutil
import tempfile
import time
from collections.abc import Collection
from dataclasses import dataclass, field
from pathlib import Path

from toprovar.calibrate.fitting import check_model_fits, check_settings, fit_plan
from toprovar.calibrate.methods import METHODS
from toprovar.calibrate.methods.settings import MethodSettings
from toprovar.calibrate.methods.toprovar import fit_depth
from toprovar.calibrate.report import write_report
from toprovar.calibrate.statistics import Statistics, collect_statistics, read_prompts
from toprovar.calibrate.targets import plan_for_ssim
from toprovar.exporter.lora import NO_ADAPTERS, Adapters
from toprovar.exporter.model import Model, load_model
from toprovar.exporter.prompts import use_embeddings
from toprovar.runtime.embeddings import read_embeddings
from toprovar.runtime.errors import ToprovarError
from toprovar.runtime.guidance import Guidance
from toprovar.runtime.json_files import check_folder, read_json
from toprovar.runtime.noise import MAX_SEED, check_seed
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
    frames: int | None = None
    cfg: str | None = None
    tau: str | None = None
    seed: int = 0
    target_ssim: float | None = None
    resume: bool = True
    embeddings: Path | None = None
    adapters: Adapters = NO_ADAPTERS


DEFAULT_PROMPTS = 12  # shipped ones that plans are fitted to where no calibration is given
SHIPPED = {"demo": "prompts.txt", "mixed": "prompts_mixed.txt"}  # lists that come with the package


def shipped_prompts(name: str = "demo") -> Path:
    """A list of prompts that comes with the package: demo, in the demo model's words; mixed, 64 for other models."""
    import toprovar.calibrate

    return Path(toprovar.calibrate.__path__[0]) / SHIPPED[name]


def check_request(request: CalibrationRequest) -> list[str]:
    """Refuses what can be refused before a model is loaded. Returns: the prompts."""
    check_seed(request.seed)
    numbers = {name: getattr(request.settings, name) for name in ("tau", "beta", "alpha_max", "target_speedup")}
    for name, value in {**numbers, "target_ssim": request.target_ssim}.items():
        if value is not None and not math.isfinite(value):
            option = {"tau": "--rho-threshold"}.get(name, "--" + name.replace("_", "-"))
            raise ToprovarError(f"{option}: {value} is not a finite number", "see toprovar calibrate --help")
    check_settings(request.method, request.settings)
    if request.target_ssim is not None and request.settings.target_speedup is not None:
        raise ToprovarError("--target-ssim and --target-speedup are both given", "give one of them")
    if request.target_ssim is not None and not METHODS[request.method].is_tunable:
        raise ToprovarError(
            f"method {request.method} has one strength; it cannot be fitted to a target", "leave --target-ssim out"
        )
    prompts = asked_prompts(request)
    last = request.seed + len(prompts) - 1
    if last > MAX_SEED:
        raise ToprovarError(
            f"seeds {request.seed} to {last} are needed, one per prompt; the largest is {MAX_SEED}",
            f"give a seed up to {MAX_SEED - len(prompts) + 1}",
        )
    check_folder(request.out / "stats")
    return prompts


def asked_prompts(request: CalibrationRequest) -> list[str]:
    """Those of --prompts, or all that --embeddings holds. Raises: ToprovarError if a prompt has no rows there."""
    if request.embeddings is None:
        return read_prompts(prompt_file(request.prompts))[: request.limit]
    embeddings = read_embeddings(request.embeddings)
    if request.prompts is None:
        return list(embeddings.prompts)[: request.limit]
    prompts = read_prompts(prompt_file(request.prompts))[: request.limit]
    for prompt in prompts:
        embeddings.index_of(prompt)
    return prompts


def prompt_file(named: Path | None) -> Path:
    """A file, or a shipped list by its name; a file of that name comes first."""
    if named is None:
        return shipped_prompts()
    if str(named) in SHIPPED and not named.exists():
        return shipped_prompts(str(named))
    return named


def _check_fit(settings: MethodSettings, scales: int, layers: int) -> None:
    """Refuses, before any prompt runs, what no plan of this model can have."""
    if settings.scale_depth is not None and settings.scale_depth >= scales:
        raise ToprovarError(
            f"--scale-depth is {settings.scale_depth}; the schedule has scales 0 to {scales - 1}",
            f"give 0 to {scales - 1}",
        )
    if settings.global_layers is not None and settings.global_layers > layers:
        raise ToprovarError(
            f"--global-layers is {settings.global_layers}; the model has {layers} layers", f"give 1 to {layers}"
        )


def gather(request: CalibrationRequest, model: Model) -> Statistics:
    """Runs the prompts that are not measured yet."""
    prompts = check_request(request)
    schedule = schedule_with(model, request.aspect, request.budget, request.frames)
    guidance = guidance_with(model.guidance(schedule), request.cfg, request.tau)
    _check_fit(request.settings, len(schedule), model.config.depth)
    check_model_fits(request.method, request.settings, len(schedule), model.config.depth)
    with console.progress("calibrate") as advance:
        return collect_statistics(
            model, schedule, guidance, prompts, request.seed, request.out / "stats", advance,
            METHODS[request.method].needs, request.resume,
        )  # fmt: skip


def fit_and_write(request: CalibrationRequest, model: Model, stats: Statistics) -> Plan:
    """Plan and report from statistics; both files are complete or absent."""
    if request.target_ssim is None:
        plan = fit_plan(request.method, stats, model.backbone, request.settings)
    else:
        guidance = guidance_with(model.guidance(stats.schedule), request.cfg, request.tau)
        with console.progress("fit to SSIM") as advance:
            plan = plan_for_ssim(request.method, model, guidance, stats, request.settings, request.target_ssim, advance)
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
    check_request(request)
    model = load_model(request.model, request.tokenizer, request.adapters)
    if request.embeddings is not None:
        use_embeddings(model, read_embeddings(request.embeddings))
    stats = gather(request, model)
    plan = fit_and_write(request, model, stats)
    depth = "" if plan.D.value is None else f"D = {plan.D.value}, "
    close = "" if plan.calib.measured_ssim is None else f", SSIM {plan.calib.measured_ssim:.3f}"
    console.say(
        f"wrote {request.out}/plan.json ({depth}TLE {plan.expected_speedup:.2f} times less{close}) and report.html "
        f"in {time.perf_counter() - started:.0f}s; "
        f"next: toprovar-export {console.quoted(request.model)} "
        f"--plan {console.quoted(request.out / 'plan.json')} -o bundle"
    )
    return plan


def read_calibration(folder: Path, model: Model, further: Collection[str] = ()) -> Statistics:
    """The statistics of a calibration of this model, read without touching the folder.

    further: names of statistics.FURTHER to measure too where the folder lacks them
    Raises: ToprovarError if there are none, or they are of another model, size or guidance.
    """
    index = folder / "stats" / "index.json"
    if not index.exists():
        raise ToprovarError(
            f"{folder} holds no statistics; expected stats/index.json",
            f"make them:  toprovar calibrate {console.quoted(model.name)} -o {console.quoted(folder)} --limit 12",
        )
    facts = read_json(index)
    expected = {
        "weights_sha256": model.weights_sha256,
        "schedule": [list(size) for size in model.schedule],
        "guidance": model.guidance().model_dump(mode="json"),
    }
    for name, value in expected.items():
        if facts["model"][name] != value:
            raise ToprovarError(
                f"{index} was measured with another {name}: found {facts['model'][name]}, expected {value}",
                f"calibrate again:  toprovar calibrate {console.quoted(model.name)} -o {console.quoted(folder)}",
            )
    with tempfile.TemporaryDirectory() as copy:
        shutil.copytree(folder / "stats", Path(copy) / "stats")
        return collect_statistics(
            model,
            model.schedule,
            model.guidance(),
            facts["prompts"],
            facts["first_seed"],
            Path(copy) / "stats",
            further=further,
        )


def statistics_for(
    model: Model, guidance: Guidance, calibration: Path | None, out: Path, further: Collection[str] = ()
) -> Statistics:
    """Those of a calibration, or of the first shipped prompts, measured into `out`/calibration; resumes there.

    Raises: as `read_calibration`.
    """
    if calibration is not None:
        return read_calibration(calibration, model, further)
    prompts = read_prompts(shipped_prompts())[:DEFAULT_PROMPTS]
    with console.progress("calibrate") as advance:
        folder = out / "calibration" / "stats"
        return collect_statistics(model, model.schedule, guidance, prompts, 0, folder, advance, further)
