"""`toprovar export` and `toprovar-export`: a bundle, or the bill of one."""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from rich.table import Table

from toprovar.exporter.bundle_writer import BundleGraphs, bill, export_bundle, export_graphs
from toprovar.exporter.lora import NO_ADAPTERS, Adapters
from toprovar.exporter.model import Model, is_published, load_model, published_without_weights
from toprovar.exporter.output_folder import check_out
from toprovar.exporter.plan_transfer import carried_over
from toprovar.exporter.planned.step import StepOptions
from toprovar.runtime.bundle import open_bundle
from toprovar.runtime.errors import ToprovarError
from toprovar.runtime.manifest import GRAPHS_FILE, MANIFEST_FILE
from toprovar.runtime.plan import dense_plan, load_plan
from toprovar.tools import console
from toprovar.tools.engine_building import EngineOptions, build_with_progress, described, engine_bill, engine_facts
from toprovar.tools.options import guidance_with, schedule_with


@dataclass(frozen=True)
class ExportRequest:
    """The command's options; None means the model's own default."""

    model: str
    out: Path
    tokenizer: str | None = None
    plan: Path | None = None
    dtype: str | None = None
    images: int = 1
    text_tokens: int | None = None
    aspect: float | None = None
    budget: str | None = None
    frames: int | None = None
    cfg: str | None = None
    tau: str | None = None
    overwrite: bool = True
    dry_run: bool = False
    graphs_only: bool = False
    engines: EngineOptions = field(default_factory=EngineOptions)
    adapters: Adapters = NO_ADAPTERS


def run_export(request: ExportRequest, quiet: bool = False) -> dict[str, Any]:
    """Exports, or counts with `dry_run`. Returns: what was, or would be, built."""
    started = time.perf_counter()
    engines = request.engines.request()
    if engines.targets and request.graphs_only:
        raise ToprovarError(
            f"--graphs-only writes no weights; engines of {', '.join(engines.targets)} hold the small ones",
            "leave --graphs-only or --target out",
        )
    if not request.dry_run:
        engines.check()
        check_out(request.out, request.overwrite, GRAPHS_FILE if request.graphs_only else MANIFEST_FILE)
    plan = load_plan(request.plan) if request.plan else None
    needs_weights = not (request.dry_run or request.graphs_only)
    if not needs_weights and is_published(request.model) and not Path(request.model).exists():
        if request.adapters.files:
            raise ToprovarError(
                f"--lora needs weights to merge into; {request.model} is a published model's name alone",
                "pass the checkpoint, or leave --lora out",
            )
        model = published_without_weights(request.model)
    else:
        model = load_model(request.model, request.tokenizer, request.adapters)
    schedule = schedule_with(model, request.aspect, request.budget, request.frames)
    if plan is not None and request.aspect is not None and plan.schedule != tuple(schedule):
        plan = carried_over(plan, schedule)
        console.say(f"note: {plan.calib.warnings[-1]}")
    if plan is not None:
        plan.check_backbone(model.backbone, schedule)
        if plan.backbone.weights_sha256 not in ("", model.weights_sha256):
            console.say("warning: the plan was calibrated on other weights of the same shape")
    guidance = guidance_with(model.guidance(schedule), request.cfg, request.tau)
    text_tokens = _text_tokens(model, request.text_tokens)
    dtype = request.dtype or ("bf16" if engines.targets else "fp32")
    options = replace(StepOptions.for_guidance(guidance, model.config.depth, text_tokens, dtype), images=request.images)
    if not needs_weights:
        graphs = BundleGraphs(model, plan or dense_plan(model.backbone, schedule), options)
        if request.dry_run:
            facts = asdict(bill(graphs))
            facts["engines"] = [engine_bill(target, facts) for target in engines.targets]
            if not quiet:
                _print_bill(request.model, facts)
            return facts
        with console.progress("export") as advance:
            facts = export_graphs(
                graphs, request.out, request.overwrite, lambda what, done, total: advance(done, total)
            )
        console.say(
            f"wrote {facts['graphs']} graphs ({facts['graph_bytes'] / 1e6:.1f} MB) and graphs.json to {request.out} "
            f"in {time.perf_counter() - started:.1f}s; there are no weights beside them"
        )
        return facts
    with console.progress("export") as advance:
        manifest = export_bundle(
            model,
            request.out,
            guidance,
            options,
            plan,
            schedule,
            request.overwrite,
            lambda what, done, total: advance(done, total),
            keep_engines=bool(engines.targets),
        )
    summaries = build_with_progress(request.out, engines) if engines.targets else []
    size_bytes = open_bundle(request.out, verify=False).size_bytes
    console.say(
        f"wrote {request.out} ({len(manifest.schedule)} scales, {size_bytes / 1e6:.1f} MB"
        f"{'; ' if summaries else ''}{described(summaries)}) in "
        f'{time.perf_counter() - started:.1f}s; next: toprovar run {console.quoted(request.out)} --prompt "…"'
    )
    return {
        "out": str(request.out),
        "bundle_bytes": size_bytes,
        "weights_bytes": manifest.files[manifest.weights_file].size_bytes,
        "graphs": len([name for name in manifest.files if name.endswith(".onnx")]),
        "variants": list(manifest.variants),
        "engines": [engine_facts(summary) for summary in summaries],
    }


def _text_tokens(model: Model, asked: int | None) -> int:
    """Raises: ToprovarError where prompts are no texts."""
    if asked is None:
        return model.text_tokens
    if model.family.takes_classes:
        raise ToprovarError(
            f"model {model.name} draws classes, which have no tokens; --text-tokens {asked} was given",
            "leave --text-tokens out",
        )
    if model.family.attends_padding and asked != model.text_tokens:
        console.say(
            f"warning: padding takes part in the attention of {model.family.name}; with {asked} text tokens in place "
            f"of {model.text_tokens} it draws other pictures than it was calibrated with"
        )
    return asked


def _print_bill(name: str, facts: dict[str, Any]) -> None:
    table = Table(title=f"export of {name}: nothing was written")
    table.add_column("item")
    table.add_column("amount", justify="right")
    table.add_row("graphs", str(facts["graphs"]))
    table.add_row("graph files", f"{facts['graph_bytes'] / 1e6:.1f} MB")
    table.add_row("weights file", f"{facts['weights_bytes'] / 1e6:.1f} MB")
    table.add_row("K/V cache at run time", f"{facts['cache_bytes'] / 1e6:.1f} MB")
    for row in facts["engines"]:
        table.add_row(f"{row['target']} engines", str(row["engines"]))
        table.add_row(f"{row['target']} memory of one build, about", f"{row['peak_build_bytes'] / 1e6:.0f} MB")
    for row in facts["scales"]:
        table.add_row(f"scale {row['scale']}: tokens, planned mean per layer", f"{row['tokens']}, {row['planned']}")
    console.out.print(table)
