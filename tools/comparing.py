"""`toprovar compare`: plans and methods against dense on one model: work, time, closeness and adherence."""

from __future__ import annotations

import datetime
import hashlib
import json
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from PIL import Image
from rich.table import Table

from toprovar.runtime.errors import ToprovarError
from toprovar.runtime.image_files import write_png
from toprovar.runtime.json_files import check_folder, write_bytes
from toprovar.runtime.noise import MAX_SEED, check_seed
from toprovar.runtime.version import VERSION
from toprovar.tools import console
from toprovar.tools.backends import check_device
from toprovar.tools.evaluation.kept_pictures import is_picture_of, picture_path
from toprovar.tools.evaluation.prompts import Prompt, prompts_digest, prompts_of

if TYPE_CHECKING:
    from toprovar.calibrate.statistics import Statistics
    from toprovar.exporter.model import Model
    from toprovar.runtime.guidance import Guidance
    from toprovar.runtime.pipeline import Result
    from toprovar.runtime.plan import Plan
    from toprovar.tools.comparison.records import Drawn, DrawnJournal
    from toprovar.tools.evaluation.ground_truth import Judge
    from toprovar.tools.evaluation.pictures import BundleMaker

SCHEMA_VERSION = 1
RECORD_VERSION = 1  # of what a journal's lines mean; a change makes older lines unused
SHOWN_PROMPTS = 6
FEWEST_PICTURES = 5  # below this many, medians of times tell little
DENSE = "dense"
JOURNAL_FILE = "pictures.jsonl"
RESULTS_FILE, TABLE_FILE, PAGE_FILE, CHART_NAME = "compare.json", "compare.md", "compare.html", "frontier"


@dataclass(frozen=True)
class ComparisonRequest:
    """The command's options. Of `prompts` and `split` one at most is given; no plan and no method means all methods."""

    model: str
    out: Path
    command: str
    plans: Sequence[Path] = ()
    methods: Sequence[str] = ()
    calibration: Path | None = None
    prompts: Path | None = None
    split: str | None = None
    limit: int | None = None
    threads: int = 0
    device: str = "cpu"
    seed: int = 0
    resume: bool = False

    @property
    def source(self) -> str:
        """Where prompts come from, as results note it."""
        return str(self.prompts.name) if self.prompts is not None else f"{self.split or 'test'} split"


@dataclass(frozen=True)
class Asked:
    """A prompt; scene: what it asks for, where it comes from the scene grammar."""

    index: int
    text: str
    scene: Prompt | None = None


def _asked(request: ComparisonRequest) -> list[Asked]:
    """The prompts. Raises: ToprovarError for a wrong file or split, or fewer prompts than the limit asks for."""
    from toprovar.calibrate.statistics import read_prompts
    from toprovar.tools.evaluation.concepts import read_concepts
    from toprovar.tools.evaluation.ground_truth import ground_truth_folder

    if request.prompts is not None:
        if request.split is not None:
            raise ToprovarError("--prompts and --split are both given", "give one of them")
        every = [Asked(i, text) for i, text in enumerate(read_prompts(request.prompts))]
    else:
        concepts = read_concepts(ground_truth_folder(request.model))
        every = [Asked(p.index, p.text, p) for p in prompts_of(request.split or "test", concepts)]
    if request.limit is not None and request.limit > len(every):
        raise ToprovarError(
            f"--limit asks for {request.limit} prompts; {request.source} has {len(every)}",
            f"pass --limit {len(every)}, or leave it out",
        )
    return every[: request.limit]


def _check_seeds(seed: int, prompts: int) -> None:
    check_seed(seed)
    if seed + prompts - 1 > MAX_SEED:
        raise ToprovarError(
            f"seeds {seed} to {seed + prompts - 1} are needed; the largest is {MAX_SEED}",
            f"give a seed up to {MAX_SEED - prompts + 1}",
        )


def _digest(asked: Sequence[Asked]) -> str:
    scenes = [one.scene for one in asked if one.scene is not None]
    if len(scenes) == len(asked):
        return prompts_digest(scenes)
    return hashlib.sha256("\n".join(one.text for one in asked).encode("utf-8", "surrogatepass")).hexdigest()


def _groups(asked: Sequence[Asked]) -> dict[str, int]:
    """How many prompts are of each complexity; empty where nothing is known about them."""
    groups: dict[str, int] = {}
    for one in asked:
        if one.scene is not None:
            groups[one.scene.bucket] = groups.get(one.scene.bucket, 0) + 1
    return groups


def _plan_facts(plan: Plan) -> dict[str, Any]:
    return plan.model_dump(mode="json", by_alias=True)


class _Comparison:
    """Draws what the journal lacks, and sums it up."""

    def __init__(
        self,
        request: ComparisonRequest,
        model: Model,
        guidance: Guidance,
        truth: Judge | None,
        plans: dict[str, Plan],
        asked: list[Asked],
        journal: DrawnJournal,
    ) -> None:
        from toprovar.runtime.backends.onnxruntime import usable_threads

        self.request, self.model, self.guidance, self.truth = request, model, guidance, truth
        self.plans: dict[str, Plan | None] = {DENSE: None, **plans}
        self.asked, self.journal = asked, journal
        self.threads = usable_threads(request.threads)
        # times of several machines or thread counts do not belong into one median
        key = [
            RECORD_VERSION, VERSION, model.weights_sha256, [list(size) for size in model.schedule],
            guidance.model_dump(mode="json"), self.threads, truth.judge_sha256 if truth else "",
        ]  # fmt: skip
        key += [request.device] if request.device != "cpu" else []
        self.identities = {
            (one.index, name): hashlib.sha256(
                json.dumps([key, _plan_facts(plan) if plan else None, one.text, request.seed + one.index]).encode()
            ).hexdigest()
            for one in asked
            for name, plan in self.plans.items()
        }

    def _is_done(self, one: Asked, name: str) -> bool:
        identity = self.identities[one.index, name]
        if identity not in self.journal.done:
            return False
        return one.index >= SHOWN_PROMPTS or is_picture_of(picture_path(self.request.out, one.index, name), identity)

    def missing(self) -> list[tuple[Asked, list[str]]]:
        found = [(one, [name for name in self.plans if not self._is_done(one, name)]) for one in self.asked]
        return [(one, names) for one, names in found if names]

    def run(self) -> None:
        """All variants of a prompt are drawn in turn, another one first every time, and judged after the last.

        Judging in between would put other work between two timed pictures.
        """
        from toprovar.tools.evaluation.pictures import BundleMaker

        missing = self.missing()
        if not missing:
            return
        plans = {name: plan for name, plan in self.plans.items() if plan is not None}
        maker = BundleMaker(
            self.model, self.request.out / "bundles", self.guidance, plans, self.request.threads, self.request.device
        )
        names = list(self.plans)
        total = len(self.asked) * len(names)
        done = total - sum(len(wanted) for _, wanted in missing)
        with console.progress("warm up") as advance:
            for i, name in enumerate(names):
                _picture(maker, missing[0][0], self.request.seed, name)
                advance(i + 1, len(names))
        with console.progress("compare") as advance:
            for one, wanted in missing:
                seed = self.request.seed + one.index
                turn = one.index % len(names)
                results = {
                    name: _picture(maker, one, seed, name)
                    for name in (*names[turn:], *names[:turn])
                    if name == DENSE or name in wanted
                }
                for name in wanted:
                    self._keep(one, name, seed, results[name], results[DENSE])
                    done += 1
                    advance(done, total)

    def _keep(self, one: Asked, name: str, seed: int, result: Result, dense: Result) -> None:
        from toprovar.tools.comparison.records import drawn_from
        from toprovar.tools.evaluation.scoring import verdict_of

        image, dense_image, identity = result.picture, dense.picture, self.identities[one.index, name]
        assert image is not None
        assert dense_image is not None
        right = None
        if self.truth is not None and one.scene is not None:
            right = verdict_of(image, one.scene.scene, self.truth.judge, self.request.model).right
        if one.index < SHOWN_PROMPTS:
            facts = {
                "prompt": one.text, "seed": str(seed), "variant": name, "identity": identity,
                "software": f"toprovar {VERSION}",
            }  # fmt: skip
            write_png(picture_path(self.request.out, one.index, name), image, facts)
        facts_of = {"prompt": one.index, "variant": name, "seed": seed}
        layers = self.model.backbone.layers
        self.journal.add(identity, drawn_from(result, dense, image, dense_image, layers, facts_of, right))

    def records(self, name: str) -> list[Drawn]:
        return [self.journal.done[self.identities[one.index, name]] for one in self.asked]

    def document(self, left_out: list[dict[str, str]], stats: Statistics | None) -> dict[str, Any]:
        from toprovar.calibrate.statistics import prompts_digest as calibration_digest
        from toprovar.tools.comparison.machine import machine_facts
        from toprovar.tools.comparison.numbers import INTERVALS, variant_facts
        from toprovar.tools.comparison.winners import SLACK, find_winners

        dense = self.records(DENSE)
        variants = []
        for name, plan in self.plans.items():
            about: dict[str, Any] = {"name": name, "method": plan.method if plan else DENSE}
            if plan is not None:
                stored = json.dumps(_plan_facts(plan), sort_keys=True)
                about |= {
                    "preset": plan.preset,
                    "plan_sha256": hashlib.sha256(stored.encode()).hexdigest(),
                    "settings": dict(plan.calib.settings),
                    "warnings": list(plan.calib.warnings),
                }
            variants.append(variant_facts(self.records(name), dense, plan, about, len(self.model.schedule)))
        everything = [record for name in self.plans for record in self.records(name)]
        return {
            "schema_version": SCHEMA_VERSION,
            "tool_version": VERSION,
            "command": self.request.command,
            "date": datetime.date.today().isoformat(),
            "machine": machine_facts(self.threads, self.request.device),
            "model": {
                "name": self.model.name,
                "weights_sha256": self.model.weights_sha256,
                "schedule": [list(size) for size in self.model.schedule],
                "guidance": self.guidance.model_dump(mode="json"),
            },
            "judge_sha256": self.truth.judge_sha256 if self.truth else None,
            "prompts": {
                "source": self.request.source,
                "split": None if self.request.prompts is not None else self.request.split or "test",
                "count": len(self.asked),
                "groups": _groups(self.asked),
                "sha256": _digest(self.asked),
                "list": [one.text for one in self.asked],
            },
            "seed": self.request.seed,
            "calibration": None
            if stats is None
            else {
                "prompts": len(stats.prompts),
                "prompts_sha256": calibration_digest(stats.prompts),
                "stats_sha256": stats.digest,
                "prompts_shared": len(set(stats.prompts) & {one.text for one in self.asked}),
            },
            "intervals": INTERVALS,
            "apart_ms_median": {
                "text": round(statistics.median(record.text_ms for record in everything), 3),
                "decode": round(statistics.median(record.decode_ms for record in everything), 3),
            },
            "variants": variants,
            "left_out": left_out,
            "slack": SLACK,
            "winners": find_winners(variants),
        }

    def pictures(self) -> dict[str, list[np.ndarray]]:
        shown = self.asked[:SHOWN_PROMPTS]
        return {
            name: [
                np.asarray(Image.open(picture_path(self.request.out, one.index, name)).convert("RGB")) for one in shown
            ]
            for name in self.plans
        }


def _picture(maker: BundleMaker, one: Asked, seed: int, name: str) -> Result:
    result = maker.draw(one.text, seed, name)
    if result.picture is None:
        raise ToprovarError("the model has no tokenizer, so it makes no picture", "name one in its model.json")
    return result


def dry_run(request: ComparisonRequest, quiet: bool = False) -> dict[str, Any]:
    """What a comparison would draw. Nothing is written, no network is loaded."""
    from toprovar.runtime.plan import load_plan
    from toprovar.tools.comparison.lineup import lineup

    contestants = lineup(request.plans, request.methods)
    asked = _asked(request)
    _check_seeds(request.seed, len(asked))
    variants: list[dict[str, Any]] = [{"name": DENSE, "tle_speedup": 1.0}]
    for one in contestants:
        variants.append(
            {
                "name": one.name,
                "tle_speedup": round(load_plan(one.path).expected_speedup, 4)
                if one.path
                else one.settings.target_speedup,
                "is_fitted": one.path is None,
            }
        )
    facts = {
        "prompts": len(asked),
        "source": request.source,
        "groups": _groups(asked),
        "prompts_sha256": _digest(asked),
        "variants": variants,
        "pictures": len(asked) * len(variants),
        "out": str(request.out),
    }
    if not quiet:
        table = Table(title="comparison: nothing was drawn")
        table.add_column("item")
        table.add_column("amount", justify="right")
        table.add_row(f"prompts, {request.source}", str(len(asked)))
        for variant in variants[1:]:
            speedup = variant["tle_speedup"]
            aim = f"TLE {speedup:.2f} times less" if speedup else "its own strength"
            table.add_row(variant["name"], f"to be fitted: {aim}" if variant["is_fitted"] else aim)
        table.add_row("pictures", str(facts["pictures"]))
        console.out.print(table)
    return facts


def run_comparison(request: ComparisonRequest) -> dict[str, Any]:
    """Draws, judges and writes table, chart and page. Returns: what compare.json holds.

    Raises: ToprovarError before anything is drawn if an option, a plan, the prompts or the folder is wrong.
    """
    from toprovar.exporter.model import load_model
    from toprovar.tools.calibration import statistics_for
    from toprovar.tools.compact_json import compact_json
    from toprovar.tools.comparison.charts import chart_bytes
    from toprovar.tools.comparison.lineup import fit_all, lineup, load_files, needs_of
    from toprovar.tools.comparison.page import compare_page
    from toprovar.tools.comparison.records import DrawnJournal
    from toprovar.tools.comparison.table import markdown
    from toprovar.tools.evaluation.ground_truth import ground_truth_folder, load_judge

    started = time.perf_counter()
    contestants = lineup(request.plans, request.methods)
    asked = _asked(request)
    check_device(request.device)
    _check_seeds(request.seed, len(asked))
    check_folder(request.out / "pictures")
    journal = DrawnJournal(request.out / JOURNAL_FILE, request.resume)
    if journal.damaged:
        console.say(f"warning: {journal.damaged} unfinished line of {journal.path} was dropped; its picture is redrawn")
    truth = load_judge(ground_truth_folder(request.model)) if request.prompts is None else None
    model = load_model(request.model)
    guidance = model.guidance()
    files = load_files(contestants, model)
    stats = None
    if len(files) < len(contestants):
        stats = statistics_for(model, guidance, request.calibration, request.out, needs_of(contestants))
    is_asked = bool(request.plans or request.methods)
    plans, left_out = fit_all(contestants, files, model, stats, is_asked)
    for entry in left_out:
        console.say(f"left out: {entry['name']}: {entry['reason']}")
    if len(asked) < FEWEST_PICTURES:
        console.say(f"warning: {len(asked)} pictures per plan; medians of times need {FEWEST_PICTURES} or more")
    comparison = _Comparison(request, model, guidance, truth, plans, asked, journal)
    comparison.run()
    document = comparison.document(left_out, stats)
    out = request.out
    write_bytes(out / TABLE_FILE, markdown(document).encode())
    for kind in ("svg", "png"):
        write_bytes(out / f"{CHART_NAME}.{kind}", chart_bytes(document, kind))
    write_bytes(out / PAGE_FILE, compare_page(document, comparison.pictures()))
    write_bytes(out / RESULTS_FILE, compact_json(document).encode())
    console.say(
        f"wrote {out}/{RESULTS_FILE}, {TABLE_FILE}, {CHART_NAME}.svg, .png and {PAGE_FILE} ({len(plans)} plans, "
        f"{len(asked)} prompts) in {time.perf_counter() - started:.0f}s; next: open {console.quoted(out / PAGE_FILE)}"
    )
    return document


def print_comparison(document: dict[str, Any]) -> None:
    """The numbers without intervals on stdout, and what wins."""
    from toprovar.tools.comparison.winners import sentence

    table = Table(title=f"{document['prompts']['count']} prompts against dense, same noise")
    table.add_column("plan")
    for name in ("TLE", "wall-clock", "steps ms", "SSIM", "PSNR dB", "equal bits", "adherence"):
        table.add_column(name, justify="right")
    for variant in document["variants"]:
        bits, adherence = variant["equal_bits"]["share"], variant["adherence"]
        table.add_row(
            variant["name"],
            f"{variant['tle']['taken']:.2f}",
            f"{variant['steps_ms']['speedup']:.2f}",
            f"{variant['steps_ms']['median']:.0f}",
            f"{variant['ssim']['mean']:.3f}",
            f"{variant['psnr_db']['mean']:.1f}",
            "–" if bits is None else f"{bits:.3f}",
            f"{adherence['share']:.3f}" if adherence else "–",
        )
    console.out.print(table)
    for entry in document["winners"]:
        console.out.print(sentence(entry))
