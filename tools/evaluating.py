"""`toprovar evaluate`: pictures of the demo model, dense and by plans, judged against what their prompts ask for."""

from __future__ import annotations

import hashlib
import importlib
import io
import json
import os
import platform
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from PIL import Image
from rich.table import Table

from toprovar.runtime.errors import ToprovarError
from toprovar.runtime.guidance import Guidance
from toprovar.runtime.image_files import write_png
from toprovar.runtime.json_files import check_folder, write_bytes, write_json
from toprovar.runtime.noise import MAX_SEED, check_seed
from toprovar.runtime.version import VERSION
from toprovar.tools import console
from toprovar.tools.backends import check_device
from toprovar.tools.evaluation.kept_pictures import is_picture_of, picture_path
from toprovar.tools.evaluation.prompts import SPLITS, Prompt, prompts_digest, prompts_of
from toprovar.tools.options import guidance_with, in_range, numbers

if TYPE_CHECKING:
    from toprovar.exporter.model import Model
    from toprovar.runtime.plan import Plan
    from toprovar.tools.evaluation.ground_truth import GroundTruth
    from toprovar.tools.evaluation.journal import Journal, Record
    from toprovar.tools.evaluation.pictures import Maker

SCHEMA_VERSION = 1
RECORD_VERSION = 1  # of what a journal's lines mean; a change makes older lines unused
SHEET_PROMPTS = 24
JOURNAL_FILE, RESULTS_FILE, TABLE_FILE, SHEET_FILE = "pictures.jsonl", "evaluation.json", "evaluation.md", "sheet.png"


@dataclass(frozen=True)
class EvaluationRequest:
    """The command's options. prompts: only the first N; calibration: folder with statistics for presets."""

    model: str
    out: Path
    command: str
    plans: Sequence[str] = ()
    calibration: Path | None = None
    split: str = "test"
    prompts: int | None = None
    backend: Literal["onnxruntime", "pytorch"] = "onnxruntime"
    device: str = "cpu"
    threads: int = 0
    cfg: str | None = None
    tau: str | None = None
    seed: int = 0
    resume: bool = False


def _check(request: EvaluationRequest, prompts: int) -> None:
    check_seed(request.seed)
    if request.split not in SPLITS:
        raise ToprovarError(f"unknown split {request.split}", f"choose from: {', '.join(SPLITS)}")
    if request.seed + prompts - 1 > MAX_SEED:
        raise ToprovarError(
            f"seeds {request.seed} to {request.seed + prompts - 1} are needed; the largest is {MAX_SEED}",
            f"give a seed up to {MAX_SEED - prompts + 1}",
        )
    if request.backend == "onnxruntime":
        check_device(request.device)
    if request.calibration is not None and not request.calibration.is_dir():
        raise ToprovarError(
            f"--calibration {request.calibration} is no folder", "make it:  toprovar calibrate demo -o FOLDER"
        )
    if request.calibration is not None and (request.cfg is not None or request.tau is not None):
        raise ToprovarError(
            "--calibration holds statistics of the model's own guidance; --cfg and --tau change it",
            "leave --calibration out: presets are then calibrated with the guidance given",
        )


def _chosen(request: EvaluationRequest, every: list[Prompt]) -> list[Prompt]:
    if request.prompts is not None and request.prompts > len(every):
        raise ToprovarError(
            f"--prompts asks for {request.prompts}; the split {request.split} has {len(every)}",
            f"pass --prompts {len(every)}, or leave it out",
        )
    return every[: request.prompts]


def _identity(key: list[Any], plan: Plan | None, prompt: Prompt, seed: int) -> str:
    facts = [key, plan.model_dump(mode="json", by_alias=True) if plan else None, prompt.text, prompt.held_out, seed]
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()


class _Evaluation:
    """Draws and judges what the journal lacks."""

    def __init__(
        self,
        request: EvaluationRequest,
        model: Model,
        guidance: Guidance,
        truth: GroundTruth,
        plans: dict[str, Plan],
        prompts: list[Prompt],
        journal: Journal,
    ) -> None:
        self.request, self.model, self.guidance, self.truth = request, model, guidance, truth
        self.plans: dict[str, Plan | None] = {"dense": None, **plans}
        self.prompts, self.journal = prompts, journal
        self.backend = ""
        # timings of several backends or machines do not belong into one median, pictures of one seed do
        key = [
            RECORD_VERSION, VERSION, model.weights_sha256, [list(size) for size in model.schedule],
            guidance.model_dump(mode="json"), request.backend, request.device, truth.judge_sha256,
        ]  # fmt: skip
        self.identities = {
            (prompt.index, name): _identity(key, plan, prompt, request.seed + prompt.index)
            for prompt in prompts
            for name, plan in self.plans.items()
        }

    def _is_done(self, prompt: Prompt, variant: str) -> bool:
        identity = self.identities[prompt.index, variant]
        record = self.journal.done.get(identity)
        if record is None or not self._fits(record, prompt, variant):
            return False
        return prompt.index >= SHEET_PROMPTS or is_picture_of(
            picture_path(self.request.out, prompt.index, variant), identity
        )

    def _fits(self, record: Record, prompt: Prompt, variant: str) -> bool:
        """Whether a record says of itself what its identity stands for; a hand may have changed it."""
        told = (record.prompt, record.variant, record.seed, record.features.shape[1])
        return told == (prompt.index, variant, self.request.seed + prompt.index, len(self.truth.features.mean))

    def missing(self) -> list[tuple[Prompt, list[str]]]:
        found = [(prompt, [name for name in self.plans if not self._is_done(prompt, name)]) for prompt in self.prompts]
        return [(prompt, names) for prompt, names in found if names]

    def maker(self) -> Maker:
        from toprovar.tools.evaluation.pictures import BundleMaker, TorchMaker

        plans = {name: plan for name, plan in self.plans.items() if plan is not None}
        if self.request.backend == "pytorch":
            return TorchMaker(self.model, self.guidance, plans, self.request.device)
        return BundleMaker(
            self.model, self.request.out / "bundles", self.guidance, plans, self.request.threads, self.request.device
        )

    def run(self) -> None:
        """Every picture is judged and written down before the next one is drawn; dense and plans in turn."""
        missing = self.missing()
        if not missing:
            return
        maker = self.maker()
        first = missing[0][0]
        for name in self.plans:  # the first call loads and compiles
            maker.make(first.text, self.request.seed, name)
        total = len(self.prompts) * len(self.plans)
        done = total - sum(len(names) for _, names in missing)
        with console.progress("evaluate") as advance:
            for prompt, names in missing:
                seed = self.request.seed + prompt.index
                dense = maker.make(prompt.text, seed, "dense")
                for name in names:
                    picture = dense if name == "dense" else maker.make(prompt.text, seed, name)
                    self._judge(prompt, name, seed, picture.image, dense.image, picture.steps_ms)
                    done += 1
                    advance(done, total)

    def _judge(
        self, prompt: Prompt, name: str, seed: int, image: np.ndarray, dense: np.ndarray, steps_ms: float
    ) -> None:
        from toprovar.calibrate.measures import psnr_db, ssim
        from toprovar.tools.evaluation.journal import Record
        from toprovar.tools.evaluation.scoring import verdict_of

        verdict = verdict_of(image, prompt.scene, self.truth.judge, self.request.model)
        if prompt.index < SHEET_PROMPTS:
            facts = {
                "prompt": prompt.text,
                "seed": str(seed),
                "variant": name,
                "identity": self.identities[prompt.index, name],
                "software": f"toprovar {VERSION}",
            }
            write_png(picture_path(self.request.out, prompt.index, name), image, facts)
        record = Record(
            prompt=prompt.index,
            variant=name,
            seed=seed,
            steps_ms=steps_ms,
            ssim=ssim(image, dense),
            psnr_db=psnr_db(image, dense),
            verdict=verdict.facts(),
            features=verdict.features,
        )
        self.journal.add(self.identities[prompt.index, name], record)

    def records(self, variant: str) -> list[Record]:
        return [self.journal.done[self.identities[prompt.index, variant]] for prompt in self.prompts]

    def document(self, total: int) -> dict[str, Any]:
        from toprovar.tools.evaluation.results import INTERVALS, variant_facts

        request = self.request
        dense = self.records("dense")
        digest = prompts_digest(self.prompts)
        variants = []
        for name, plan in self.plans.items():
            about: dict[str, Any] = {"name": name, "tle_speedup": round(plan.tle_speedup, 4) if plan else 1.0}
            if plan is not None:
                stored = json.dumps(plan.model_dump(mode="json", by_alias=True), sort_keys=True)
                about["plan"] = {
                    "method": plan.method,
                    "preset": plan.preset,
                    "sha256": hashlib.sha256(stored.encode()).hexdigest(),
                }
            records = self.records(name)
            base = dense if plan is not None else None
            features = self.truth.features
            variants.append(variant_facts(records, base, self.prompts, self.truth.concepts, features, about))
        whole = request.split == "test" and len(self.prompts) == total
        return {
            "schema_version": SCHEMA_VERSION,
            "tool_version": VERSION,
            "command": request.command,
            "model": {
                "name": self.model.name,
                "weights_sha256": self.model.weights_sha256,
                "schedule": [list(size) for size in self.model.schedule],
                "guidance": self.guidance.model_dump(mode="json"),
            },
            "judge_sha256": self.truth.judge_sha256,
            "split": request.split,
            "seed": request.seed,
            "prompts": {
                "count": len(self.prompts), "of": total, "sha256": digest, "list": [p.text for p in self.prompts],
            },
            "backend": _backend_facts(request),
            "machine": f"{platform.machine()}, {os.cpu_count()} cores",
            "intervals": INTERVALS,
            "variants": variants,
            "references": self.truth.references_for(digest) if whole else [],
        }  # fmt: skip

    def write_sheet(self, path: Path) -> None:
        from toprovar.tools.evaluation.contact_sheet import contact_sheet

        shown = self.prompts[:SHEET_PROMPTS]
        pictures = [
            {name: np.asarray(Image.open(picture_path(self.request.out, prompt.index, name)).convert("RGB"))
             for name in self.plans}
            for prompt in shown
        ]  # fmt: skip
        right = [
            {name: self.journal.done[self.identities[prompt.index, name]].right for name in self.plans}
            for prompt in shown
        ]
        buffer = io.BytesIO()
        sheet = contact_sheet([prompt.text for prompt in shown], pictures, right)
        sheet.quantize(256).save(buffer, "PNG", optimize=True)
        write_bytes(path, buffer.getvalue())


def _backend_facts(request: EvaluationRequest) -> str:
    module = importlib.import_module({"onnxruntime": "onnxruntime", "pytorch": "torch"}[request.backend])
    return f"{request.backend} {module.__version__.partition('+')[0]} on {request.device}, fp32"


def dry_run(request: EvaluationRequest, quiet: bool = False) -> dict[str, Any]:
    """What an evaluation would draw. Nothing is written, no network is loaded."""
    from toprovar.runtime.plan import load_plan
    from toprovar.tools.evaluation.concepts import read_concepts
    from toprovar.tools.evaluation.ground_truth import ground_truth_folder
    from toprovar.tools.evaluation.plans import plan_sources

    sources = plan_sources(request.plans)
    _check(request, request.prompts or 1)
    every = prompts_of(request.split, read_concepts(ground_truth_folder(request.model)))
    prompts = _chosen(request, every)
    _check(request, len(prompts))
    check_folder(request.out / "pictures")
    for values, name, is_open in ((request.cfg, "--cfg", False), (request.tau, "--tau", True)):
        if values is not None:
            in_range(numbers(values, name), name, 0, is_open)
    buckets: dict[str, int] = {}
    for prompt in prompts:
        for group in (prompt.bucket, f"held-out {prompt.held_out}" if prompt.held_out else "seen"):
            buckets[group] = buckets.get(group, 0) + 1
    speedups: dict[str, float | None] = {"dense": 1.0}
    for source in sources:
        speedups[source.name] = load_plan(source.path).tle_speedup if source.path else None
    work = sum(1 / (speedup or 1.0) for speedup in speedups.values())
    facts: dict[str, Any] = {
        "split": request.split,
        "prompts": len(prompts),
        "prompts_sha256": prompts_digest(prompts),
        "groups": buckets,
        "variants": [{"name": name, "tle_speedup": speedup} for name, speedup in speedups.items()],
        "pictures": len(prompts) * len(speedups),
        "dense_pictures_of_work": round(work * len(prompts), 1),
        "out": str(request.out),
    }
    if not quiet:
        table = Table(title="evaluation: nothing was drawn")
        table.add_column("item")
        table.add_column("amount", justify="right")
        for group, count in buckets.items():
            table.add_row(f"prompts, {group}", str(count))
        for name, speedup in speedups.items():
            shown = f"TLE {speedup:.2f} times less" if speedup else "to be calibrated"
            table.add_row(f"variant {name}", shown)
        table.add_row("pictures", str(facts["pictures"]))
        table.add_row("as many dense pictures, at most", str(facts["dense_pictures_of_work"]))
        console.out.print(table)
    return facts


def run_evaluation(request: EvaluationRequest) -> dict[str, Any]:
    """Draws, judges and writes results, table and sheet. Returns: what evaluation.json holds.

    Raises: ToprovarError before anything is drawn if an option, a plan, the ground truth or the folder is wrong.
    """
    from toprovar.exporter.model import load_model
    from toprovar.tools.calibration import statistics_for
    from toprovar.tools.evaluation.ground_truth import ground_truth_folder, load_ground_truth
    from toprovar.tools.evaluation.journal import Journal
    from toprovar.tools.evaluation.plans import plan_sources, plans_from
    from toprovar.tools.evaluation.table import markdown

    started = time.perf_counter()
    sources = plan_sources(request.plans)
    _check(request, request.prompts or 1)
    truth = load_ground_truth(ground_truth_folder(request.model))
    every = prompts_of(request.split, truth.concepts)
    prompts = _chosen(request, every)
    _check(request, len(prompts))
    check_folder(request.out / "pictures")
    journal = Journal(request.out / JOURNAL_FILE, request.resume)
    if journal.damaged:
        lines = "line was" if journal.damaged == 1 else "lines were"
        console.say(
            f"warning: {journal.damaged} unfinished {lines} dropped from {journal.path}; what is missing is redrawn"
        )
    model = load_model(request.model)
    guidance = guidance_with(model.guidance(), request.cfg, request.tau)
    plans = plans_from(sources, model, lambda: statistics_for(model, guidance, request.calibration, request.out))
    evaluation = _Evaluation(request, model, guidance, truth, plans, prompts, journal)
    evaluation.run()
    document = evaluation.document(len(every))
    write_json(request.out / RESULTS_FILE, document)
    write_bytes(request.out / TABLE_FILE, markdown(document).encode())
    evaluation.write_sheet(request.out / SHEET_FILE)
    shares = ", ".join(f"{v['name']} {v['aspects']['all']['share']:.3f}" for v in document["variants"])
    console.say(
        f"wrote {request.out}/{RESULTS_FILE}, {TABLE_FILE} and {SHEET_FILE} ({len(prompts)} prompts; all right: "
        f"{shares}) in {time.perf_counter() - started:.0f}s; "
        f"next: python -m toprovar.tools.evaluation.table {console.quoted(request.out / RESULTS_FILE)}"
    )
    return document


def print_evaluation(document: dict[str, Any]) -> None:
    """The scores as a table on stdout, a column per kind of pictures."""
    from toprovar.tools.evaluation.scoring import ASPECTS

    entries = [*document["variants"], *document["references"]]
    table = Table(title=f"share right of {document['prompts']['count']} prompts, split {document['split']} [95 %]")
    table.add_column("")
    for entry in entries:
        table.add_column(entry["name"], justify="right")

    def row(name: str, cell: Callable[[dict[str, Any]], str]) -> None:
        table.add_row(name, *(cell(entry) for entry in entries))

    def share(entry: dict[str, Any], aspect: str) -> str:
        found = entry["aspects"][aspect]
        if not found:
            return ""
        low, high = found["interval"]
        return f"{found['share']:.3f} {low:.2f}–{high:.2f}"

    for aspect in ("all", *ASPECTS):
        row(aspect, lambda entry, aspect=aspect: share(entry, aspect))  # type: ignore[misc]
    row(
        "Fréchet",
        lambda e: f"{e['frechet']['distance']:.3f} ± {e['frechet']['half_width']:.3f}" if e["frechet"] else "",
    )
    row("SSIM to dense", lambda e: f"{e['against_dense']['ssim']['mean']:.3f}" if e.get("against_dense") else "")
    row("TLE", lambda e: f"{e['tle_speedup']:.2f}" if "tle_speedup" in e else "")
    row("steps, ms", lambda e: f"{e['steps_ms_median']:.0f}" if "steps_ms_median" in e else "")
    console.out.print(table)
