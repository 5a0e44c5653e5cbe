"""Sweeps what ToProVAR's paper leaves open on the packaged demo model, against plain scale exits.

    python -m toprovar.tools.sweep --calibration DIR --out FILE.json [--prompts FILE] [--limit N] [--seed S] [--json]
    python -m toprovar.tools.sweep --table FILE.json [--group NAME]

Every prompt runs dense once and then by every plan with the same noise; pictures and bits are compared with the dense
ones. Intervals are 95 % percentile bootstraps over prompts, and differences are paired by prompt. A token-layer
speed-up (TLE) is dense over planned token-layer work; it is no measured time.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import platform
import shlex
import sys
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import numpy as np
import typer

from toprovar.calibrate.fitting import fit_plan
from toprovar.calibrate.methods.settings import MethodSettings
from toprovar.calibrate.methods.toprovar import fit_depth
from toprovar.calibrate.statistics import Statistics, prompts_digest, read_prompts
from toprovar.exporter.model import Model, load_model
from toprovar.exporter.prompts import encode_prompt
from toprovar.exporter.schedules import Schedule
from toprovar.runtime.errors import ToprovarError
from toprovar.runtime.guidance import Guidance
from toprovar.runtime.json_files import read_json, write_bytes, write_json
from toprovar.runtime.noise import check_seed, uniform_noise
from toprovar.runtime.pipeline import picture_from_image
from toprovar.runtime.plan import COUNT_GRID, MIN_PRUNED_TOKENS, Backbone, Plan, Restore, Score
from toprovar.runtime.version import VERSION
from toprovar.tools import console
from toprovar.tools.calibration import read_calibration, shipped_prompts
from toprovar.tools.compact_json import compact_json
from toprovar.tools.demo import demo_prompts
from toprovar.tools.evaluation.closeness import equal_shares, picture_distances
from toprovar.tools.evaluation.intervals import RESAMPLES, bootstrap_interval

if TYPE_CHECKING:
    from torch import Tensor

    from toprovar.exporter.planned.loop import Observer
    from toprovar.exporter.planned.scores import Rank

SCHEMA_VERSION = 1
FURTHER_PROMPTS = 8  # the last ones of calibrate/prompts.txt; a calibration with a limit takes the first ones
GENTLE, STRONG = 1.7, 2.1  # TLE targets of the controlled variants; an exit after scale 8 saves 1.68 times
GRID = {  # {target: {D: numbers of Global layers that reach it}}
    GENTLE: {5: (1, 2, 3, 4), 6: (1, 2, 3), 7: (1, 2)},
    STRONG: {5: (1, 2, 3), 6: (1, 2), 7: (1,)},
}
VERSIONS_OF = ("numpy", "torch", "scikit-image")

Ranking = Literal["lowest", "highest", "random_layer", "random_scale", "variance"]


@dataclass(frozen=True)
class Variant:
    """A plan and how its tokens are ranked; `versus` names the variant it is compared with, prompt by prompt."""

    name: str
    group: str
    plan: Plan
    rank: Ranking = "lowest"
    versus: str = ""


# -- plans with one thing turned ---------------------------------------------------------------------------------------


def plan_at(
    backbone: Backbone,
    schedule: Schedule,
    depth: int,
    global_layers: Sequence[int],
    target: float | None,
    restore: Literal["identity", "cached_residual"] = "cached_residual",
    resample: Literal["bilinear", "area"] = "bilinear",
    skip: Sequence[int] = (),
) -> Plan:
    """The same share of tokens in every layer that is not Global at every scale after `depth`.

    target:  token-layer speed-up, met from above within one block of 64 tokens; None keeps no token there
    Raises:  ToprovarError if the target is out of reach or layer 0, whose entropy ranks for those behind, is not Global
    """
    tokens = [height * width for height, width in schedule]
    layers = backbone.layers
    scales = [k for k in range(len(tokens)) if k not in skip]
    gated = [
        (k, layer)
        for k in scales
        for layer in range(layers)
        if k > depth and tokens[k] >= MIN_PRUNED_TOKENS and layer not in global_layers
    ]
    blocks = dict.fromkeys(gated, 0)
    if target is not None:
        prunable = sum(tokens[k] for k, _ in gated)
        budget = layers * sum(tokens) / target - (layers * sum(tokens[k] for k in scales) - prunable)
        if budget < 0:
            raise ToprovarError(f"target speed-up {target:g} is out of reach at D = {depth}, Global {global_layers}")
        share = min(budget / prunable, 1.0)
        blocks = {(k, layer): int(share * tokens[k] / COUNT_GRID) for k, layer in gated}
        # what rounding left over goes to the largest remainders, in order
        remainder = sorted(gated, key=lambda cell: (-(share * tokens[cell[0]] / COUNT_GRID % 1), cell))
        spare = int(budget / COUNT_GRID - sum(blocks.values()))
        for cell in [cell for cell in remainder if (blocks[cell] + 1) * COUNT_GRID <= tokens[cell[0]]][:spare]:
            blocks[cell] += 1
    keep, sources = {}, {}
    for k in sorted({k for k, _ in gated}):
        counts = [blocks[k, layer] * COUNT_GRID if (k, layer) in blocks else tokens[k] for layer in range(layers)]
        source, dense = {}, 0
        for layer, count in enumerate(counts):
            if count == tokens[k]:
                dense = layer
            elif count:
                source[layer] = dense
        keep[k], sources[k] = tuple(counts), source
    plan = Plan(
        tool_version=VERSION,
        backbone=backbone,
        schedule=schedule,
        method="toprovar",
        preset="sweep",
        skip_scales=tuple(skip),
        score=Score(kind="entropy", source_layer=sources),
        keep=keep,
        restore=Restore(
            kind=restore, resample=resample, ref_scale=min(keep) - 1 if restore == "cached_residual" else None
        ),
    )
    plan.check()
    return plan


def exit_plan(backbone: Backbone, schedule: Schedule, last: int) -> Plan:
    """Dense up to scale `last`, nothing after it."""
    skip = tuple(range(last + 1, len(schedule)))
    return Plan(tool_version=VERSION, backbone=backbone, schedule=schedule, method="exit", skip_scales=skip)


def with_source(plan: Plan, source: int) -> Plan:
    """The plan with one layer's entropy ranking for all."""
    score = {k: dict.fromkeys(gated, source) for k, gated in plan.score.source_layer.items()}
    changed = plan.model_copy(update={"score": Score(kind="entropy", source_layer=score)})
    changed.check()
    return changed


def demo_variants(stats: Statistics, backbone: Backbone) -> tuple[list[Variant], list[dict[str, str]]]:
    """What is swept on the demo model, and the fitted plans that are out of reach, with the message."""
    schedule = stats.schedule
    order = np.argsort(-np.log(stats.singular_ratio).mean(0), kind="stable").tolist()  # largest sigma1/sigma2 first
    found: dict[str, Variant] = {}

    def add(name: str, group: str, plan: Plan, versus: str = "", rank: Ranking = "lowest") -> None:
        found[name] = Variant(name, group, plan, rank, versus)

    def at(depth: int, layers: Sequence[int], target: float | None, **options: Any) -> Plan:
        return plan_at(backbone, schedule, depth, layers, target, **options)

    for last in (5, 6, 7, 8):
        add(f"exit after {last}", "exit", exit_plan(backbone, schedule, last))
    base = {target: f"D6 G2 @{target}" for target in GRID}
    plain = {GENTLE: "exit after 8", STRONG: "exit after 7"}
    for target, depths in GRID.items():
        for depth, counts in depths.items():
            for count in counts:
                name = f"D{depth} G{count} @{target}"
                versus = plain[target] if name == base[target] else base[target]
                add(name, "grid", at(depth, order[:count], target), versus)
    for depth, versus in ((6, base[STRONG]), (7, f"D7 G2 @{GENTLE}")):
        add(f"D{depth} G2, keep 0", "grid", at(depth, order[:2], None), versus)

    ends, middle, smallest = [0, backbone.layers - 1], [0, backbone.layers // 2], [0, order[-1]]
    for target in GRID:
        add(f"Global {ends} @{target}", "layers", at(6, ends, target), base[target])
    for pair in (middle, smallest):
        add(f"Global {pair} @{GENTLE}", "layers", at(6, pair, GENTLE), base[GENTLE])

    for target in GRID:
        identity = at(6, order[:2], target, restore="identity")
        add(f"identity @{target}", "restore", identity, base[target])
        add(f"area @{target}", "restore", at(6, order[:2], target, resample="area"), base[target])

    ranked = [base[GENTLE], base[STRONG], f"D5 G1 @{GENTLE}", f"identity @{GENTLE}"]
    rules: tuple[Ranking, ...] = ("highest", "random_layer", "random_scale", "variance")
    for versus in ranked:
        for rank in rules:
            add(f"{versus}, {rank.replace('_', ' per ')}", "ranking", found[versus].plan, versus, rank)

    for versus in (f"D5 G3 @{GENTLE}", f"Global {middle} @{GENTLE}"):
        add(f"{versus}, source 0", "source", with_source(found[versus].plan, 0), versus)

    unreachable = []
    asked: list[tuple[Literal["full", "paper"], float | None, str]] = [
        ("full", None, ""),
        ("full", 1.5, "exit after 8"),
        ("full", 2.0, "exit after 7"),
        ("full", 2.3, "exit after 7"),
        ("full", 2.5, ""),
        ("full", 3.0, ""),
        ("paper", None, "exit after 7"),
        ("paper", 3.0, "exit after 7"),
    ]
    for preset, speedup, versus in asked:
        name = f"{preset}, default" if speedup is None else f"{preset}, target {speedup:g}"
        try:
            settings = MethodSettings(preset=preset, target_speedup=speedup)
            add(name, "fitted", fit_plan("toprovar", stats, backbone, settings), versus)
        except ToprovarError as error:
            unreachable.append({"name": name, "message": error.message})
    last_scale = len(schedule) - 1
    add(
        f"D7 G2 @{STRONG} and exit after {last_scale - 1}",
        "combined",
        at(7, order[:2], STRONG, skip=(last_scale,)),
        base[STRONG],
    )
    return list(found.values()), unreachable


# -- running -----------------------------------------------------------------------------------------------------------


def ranking(kind: Ranking, seed: int) -> tuple[Rank, Observer]:
    """A rule for one run of `generate`, and the observer that feeds it.

    lowest, highest: of the plan's entropy; random_layer: a fresh draw in every layer; random_scale: one draw per scale,
    so that all layers agree on the order as they do under one entropy map; variance: largest squared distance of the
    layer's input from its mean over tokens (the statistic of FastVAR, once per block).
    """
    import torch

    from toprovar.exporter.planned.scores import lowest_scores

    generator = torch.Generator().manual_seed(seed)
    scale_now = 0
    entering: list[Tensor] = []

    def observe(name: str, scale: int, tensor: Tensor) -> None:
        nonlocal scale_now
        if kind == "variance" and (name == "in" or name.startswith("block")):
            entering[:] = [tensor]
        scale_now = scale

    def rank(score: Tensor, count: int) -> Tensor:
        if kind == "highest":
            score = -score
        elif kind == "variance":
            x = entering[0][0]  # [N, C], conditional row
            score = -(x - x.mean(0)).square().sum(-1)
        elif kind in ("random_layer", "random_scale"):
            if kind == "random_scale":
                generator.manual_seed(1000 * seed + scale_now)
            score = torch.rand(len(score), generator=generator)
        return lowest_scores(score, count)

    return rank, observe


Measured = dict[str, dict[str, Any]]


def measure(
    model: Model,
    schedule: Schedule,
    guidance: Guidance,
    prompt: str,
    seed: int,
    variants: Sequence[Variant],
    on_variant: Callable[[], None] = lambda: None,
) -> Measured:
    """Per variant: SSIM, PSNR in dB and the share of equal bits per scale (None where skipped), against dense."""
    import torch

    from toprovar.exporter.infinity.generate import generate

    if model.tokenizer is None:
        raise ToprovarError("the sweep needs the tokenizer, to judge pictures", "name one in the model's model.json")
    tokenizer = model.tokenizer
    rows = encode_prompt(model, prompt, guidance)
    noise = [
        torch.from_numpy(uniform_noise(seed, k, height * width, model.config.bits))[None]
        for k, (height, width) in enumerate(schedule)
    ]

    def picture(codes: Tensor) -> np.ndarray:
        return picture_from_image(tokenizer.decode(codes)[0].numpy())

    after: dict[int, Tensor] = {}
    dense = generate(
        model.transformer,
        rows,
        schedule,
        guidance,
        lambda scale, _: noise[scale],
        on_scale=lambda scale, codes: after.update({scale: codes}),
    )
    full = picture(dense.codes)
    found: Measured = {}
    for variant in variants:
        plan = variant.plan
        if plan.keep:
            rank, observe = ranking(variant.rank, seed)
            run = generate(
                model.transformer,
                rows,
                schedule,
                guidance,
                lambda scale, _: noise[scale],
                plan=plan,
                rank=rank,
                observe=observe,
            )
            codes, bits = run.codes, run.bits
        else:  # an exit shares every step with the dense run
            codes, bits = after[plan.run_scales[-1]], dense.bits[: len(plan.run_scales)]
        image = picture(codes)
        drawn = [tensor[0].numpy() for tensor in bits]
        equal = equal_shares(drawn, [tensor[0].numpy() for tensor in dense.bits])
        found[variant.name] = {
            **picture_distances(image, full),
            "equal_bits": [round(share, 6) for share in equal] + [None] * (len(schedule) - len(bits)),
        }
        on_variant()
    return found


def measure_all(
    model: Model,
    schedule: Schedule,
    guidance: Guidance,
    prompts: Sequence[str],
    seed: int,
    variants: Sequence[Variant],
    partial: Path,
) -> list[Measured]:
    """Every prompt, those kept in `partial` from an interrupted run excepted. Prompt i runs with seed + i."""
    import torch

    plans = [[v.name, v.rank, v.plan.model_dump(mode="json", by_alias=True)] for v in variants]
    key = [VERSION, model.weights_sha256, [list(size) for size in schedule], guidance.model_dump(mode="json"), plans]
    identities = [
        hashlib.sha256(json.dumps([key, prompt, seed + i]).encode()).hexdigest() for i, prompt in enumerate(prompts)
    ]
    done: dict[str, Measured] = {}
    if partial.exists():
        stored = read_json(partial)
        done = stored if isinstance(stored, dict) else {}
    missing = [i for i, identity in enumerate(identities) if identity not in done]
    total = len(prompts) * len(variants)
    finished = itertools.count((len(prompts) - len(missing)) * len(variants) + 1)
    stop = threading.Event()
    # one thread per prompt: small matrices gain nothing from more, and sums come out the same on any number of cores
    pool = ThreadPoolExecutor(os.cpu_count(), initializer=torch.set_num_threads, initargs=(1,))
    with console.progress("sweep") as advance:

        def on_variant() -> None:
            if stop.is_set():
                raise KeyboardInterrupt
            advance(next(finished), total)

        runs = {
            pool.submit(measure, model, schedule, guidance, prompts[i], seed + i, variants, on_variant): identities[i]
            for i in missing
        }
        try:
            for run in as_completed(runs):
                done[runs[run]] = run.result()
                write_json(partial, done)
        finally:
            stop.set()
            pool.shutdown(cancel_futures=True)
    return [done[identity] for identity in identities]


# -- numbers -----------------------------------------------------------------------------------------------------------


def variant_facts(variants: Sequence[Variant], measured: Sequence[Measured]) -> list[dict[str, Any]]:
    """One entry per variant, numbers over prompts."""
    values = {v.name: np.array([prompt[v.name]["ssim"] for prompt in measured]) for v in variants}
    facts = []
    for variant in variants:
        plan, own = variant.plan, values[variant.name]
        shares = zip(*(prompt[variant.name]["equal_bits"] for prompt in measured), strict=True)
        entry: dict[str, Any] = {
            "name": variant.name,
            "group": variant.group,
            "tle_speedup": round(plan.tle_speedup, 4),
            "ssim_mean": round(float(own.mean()), 6),
            "ssim_interval": bootstrap_interval(own),
            "ssim_min": round(float(own.min()), 6),
            "psnr_db_mean": round(float(np.mean([prompt[variant.name]["psnr_db"] for prompt in measured])), 4),
            "equal_bits": [None if share[0] is None else round(float(np.mean(share)), 6) for share in shares],
            "versus": None,
            "ssim": own.tolist(),
            "plan": {
                "rank": variant.rank,
                "restore": plan.restore.kind if plan.keep else None,
                "resample": plan.restore.resample if plan.restore.kind == "cached_residual" else None,
                "skip_scales": list(plan.skip_scales),
                "keep": {str(k): list(counts) for k, counts in plan.keep.items()},
                "score_source": {
                    str(k): {str(gated): source for gated, source in pairs.items()}
                    for k, pairs in plan.score.source_layer.items()
                },
            },
        }
        if variant.versus in values:
            difference = own - values[variant.versus]
            entry["versus"] = {
                "name": variant.versus,
                "ssim_difference": round(float(difference.mean()), 6),
                "interval": bootstrap_interval(difference),
            }
        facts.append(entry)
    return facts


def sweep_prompts() -> list[str]:
    """The demo's prompts and the last ones of the calibration list."""
    return [*demo_prompts(), *read_prompts(shipped_prompts())[-FURTHER_PROMPTS:]]


def run_sweep(
    calibration: Path,
    out: Path,
    prompts: Sequence[str],
    seed: int,
    command: str,
    date: str | None = None,
    groups: Sequence[str] = (),
) -> dict[str, Any]:
    """Measures, writes `out`, and returns what it holds. groups: only these; empty for all."""
    check_seed(seed)
    model = load_model("demo")
    schedule, guidance = model.schedule, model.guidance()
    stats = read_calibration(calibration, model)
    variants, unreachable = demo_variants(stats, model.backbone)
    known = list(dict.fromkeys(variant.group for variant in variants))
    for group in groups:
        if group not in known:
            raise ToprovarError(f"unknown group {group}", f"choose from: {', '.join(known)}")
    if groups:
        variants = [variant for variant in variants if variant.group in groups]
    partial = out.with_name(f".{out.name}.partial")
    measured = measure_all(model, schedule, guidance, prompts, seed, variants, partial)
    depth = fit_depth(stats, MethodSettings())
    document: dict[str, Any] = {
        "schema_version": SCHEMA_VERSION,
        "command": command,
        **({"date": date} if date else {}),
        "versions": {
            "toprovar": VERSION,
            "python": platform.python_version(),
            **{name: metadata.version(name) for name in VERSIONS_OF},
        },
        "model": {
            "name": model.name,
            "weights_sha256": model.weights_sha256,
            "layers": model.backbone.layers,
            "schedule": [list(size) for size in schedule],
            "guidance": guidance.model_dump(mode="json"),
        },
        "calibration": {
            "prompts": len(stats.prompts),
            "prompts_sha256": prompts_digest(stats.prompts),
            "prompts_shared_with_sweep": len(set(stats.prompts) & set(prompts)),
            "stats_sha256": stats.digest,
            "rho_mean": np.round(stats.rho.mean(0), 4).tolist(),
            "truncated_ssim_mean": [
                None if np.isnan(value) else round(float(value), 4) for value in stats.truncated_ssim.mean(0)
            ],
            "singular_ratio_median": np.round(np.median(stats.singular_ratio, 0), 2).tolist(),
            "tau": round(depth.tau, 4),
            "direction": depth.direction,
            "D": depth.value,
            "D_per_prompt": depth.per_prompt,
        },
        "prompts": {
            "count": len(prompts),
            "sha256": prompts_digest(prompts),
            "first_seed": seed,
            "list": list(prompts),
        },
        "interval": f"95 % percentile bootstrap over prompts, {RESAMPLES} resamples, PCG64 seed 0",
        "unreachable": unreachable if not groups or "fitted" in groups else [],
        "variants": variant_facts(variants, measured),
    }
    write_bytes(out, compact_json(document).encode())
    partial.unlink(missing_ok=True)
    return document


# -- showing -----------------------------------------------------------------------------------------------------------

COLUMNS = (
    "group",
    "variant",
    "TLE",
    "SSIM [95 %]",
    "min",
    "PSNR dB",
    "equal bits, last scale run",
    "SSIM difference [95 %]",
)


def table_rows(document: dict[str, Any], groups: Sequence[str] = ()) -> list[tuple[str, ...]]:
    """The variants as text, a row each, in the order of COLUMNS. groups: only these; empty for all."""
    rows: list[tuple[str, ...]] = []
    for entry in document["variants"]:
        if groups and entry["group"] not in groups:
            continue
        low, high = entry["ssim_interval"]
        last = [share for share in entry["equal_bits"] if share is not None][-1]
        versus = entry["versus"]
        difference = ""
        if versus:
            edges = [f"{edge:+.3f}" for edge in versus["interval"]]
            difference = f"{versus['ssim_difference']:+.3f} [{edges[0]}, {edges[1]}] to {versus['name']}"
        rows.append(
            (
                entry["group"],
                entry["name"],
                f"{entry['tle_speedup']:.2f}",
                f"{entry['ssim_mean']:.3f} [{low:.3f}, {high:.3f}]",
                f"{entry['ssim_min']:.3f}",
                f"{entry['psnr_db_mean']:.1f}",
                f"{last:.3f}",
                difference,
            )
        )
    return rows


def markdown_table(document: dict[str, Any], groups: Sequence[str] = ()) -> str:
    """The table of the docs. groups: only these; empty for all."""
    lines = ["| " + " | ".join(COLUMNS) + " |", "|" + "|".join(" --- " for _ in COLUMNS) + "|"]
    lines += ["| " + " | ".join(row) + " |" for row in table_rows(document, groups)]
    return "\n".join(lines) + "\n"


def print_table(document: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    screen = Console(width=None if sys.stdout.isatty() else 190, highlight=False)
    table = Table(title=f"{document['prompts']['count']} prompts against dense, same noise")
    for i, column in enumerate(COLUMNS):
        table.add_column(escape(column), justify="right" if 2 <= i <= 6 else "left")
    group = ""
    for row in table_rows(document):
        if group and row[0] != group:
            table.add_section()
        group = row[0]
        table.add_row(*map(escape, row))
    screen.print(table)
    for missing in document["unreachable"]:
        screen.print(f"{missing['name']}: {missing['message']}", markup=False)


app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)


@app.command(cls=console.Single)
def sweep(
    calibration: Annotated[
        Path | None, typer.Option("--calibration", help="Folder that `toprovar calibrate demo` wrote.")
    ] = None,
    out: Annotated[Path | None, typer.Option("--out", "-o", help="JSON file to write.")] = None,
    prompts: Annotated[
        Path | None,
        typer.Option("--prompts", help="Text file, one prompt per line. Default: 8 of the demo, 8 shipped ones."),
    ] = None,
    limit: Annotated[int | None, typer.Option("--limit", min=1, help="Use only the first N prompts.")] = None,
    seed: Annotated[int, typer.Option("--seed", help="Seed of the first prompt; prompt i runs with seed + i.")] = 7,
    group: Annotated[
        list[str] | None, typer.Option("--group", help="Only this group of variants; repeatable. Default: all.")
    ] = None,
    date: Annotated[str | None, typer.Option("--date", help="Date to note in the file. Default: none.")] = None,
    table: Annotated[
        Path | None, typer.Option("--table", help="Print the Markdown table of a written file; runs nothing.")
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON document on stdout and nothing else there.")
    ] = False,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Show tracebacks and debug messages.")] = False,
) -> None:
    """Sweep what ToProVAR's paper leaves open on the demo model: same noise, SSIM to dense, bootstrap intervals."""

    def work() -> None:
        if table is not None:
            sys.stdout.write(markdown_table(read_json(table), group or ()))
            return
        if calibration is None or out is None:
            raise ToprovarError(
                "--calibration and --out are needed",
                "make one first:  toprovar calibrate demo -o out/calibration --limit 12",
            )
        chosen = (read_prompts(prompts) if prompts else sweep_prompts())[:limit]
        command = shlex.join(["python", "-m", "toprovar.tools.sweep", *sys.argv[1:]])
        document = run_sweep(calibration, out, chosen, seed, command, date, group or ())
        if as_json:
            console.print_json(document)
        else:
            print_table(document)
        console.say(f"wrote {out} ({len(document['variants'])} variants, {len(chosen)} prompts)")

    code = console.run_command(work, verbose)
    if code:
        raise typer.Exit(code)


def main() -> None:
    app(prog_name="python -m toprovar.tools.sweep")


if __name__ == "__main__":
    main()
