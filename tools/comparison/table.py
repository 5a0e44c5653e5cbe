"""The generated part of docs/compare.md, made from a result file.

python -m toprovar.tools.comparison.table docs/data/demo_compare.json [--into docs/compare.md] [--chart FILE]
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from toprovar.runtime.json_files import write_bytes
from toprovar.tools import console
from toprovar.tools.comparison.winners import counted, sentence
from toprovar.tools.evaluation.table import read_results, show

BLOCK = "comparison"
KEYS = ("variants", "winners", "prompts", "machine")
HEADER = (
    "plan",
    "TLE planned",
    "TLE taken",
    "wall-clock",
    "steps ms",
    "SSIM",
    "PSNR dB",
    "equal bits",
    "adherence",
    "adherence to dense",
)


def _between(interval: list[float], digits: int, sign: str = "") -> str:
    low, high = interval
    return f"[{low:{sign}.{digits}f}, {high:{sign}.{digits}f}]"


def _taken(tle: Mapping[str, Any]) -> str:
    low, high = tle["interval"]
    return f"{tle['taken']:.2f}" + (f" [{low:.2f}, {high:.2f}]" if high - low > 1e-3 else "")


def row_of(variant: Mapping[str, Any]) -> tuple[str, ...]:
    """A variant as text, in the order of HEADER."""
    tle, steps, ssim, psnr = variant["tle"], variant["steps_ms"], variant["ssim"], variant["psnr_db"]
    bits, adherence = variant["equal_bits"], variant["adherence"]
    is_dense = variant["method"] == "dense" and "plan_sha256" not in variant
    difference = "–"
    if adherence and adherence["to_dense"]:
        to_dense = adherence["to_dense"]
        difference = f"{to_dense['difference']:+.3f} {_between(to_dense['interval'], 3, '+')}"
    return (
        variant["name"],
        f"{tle['expected']:.2f}",
        _taken(tle),
        "1.00" if is_dense else f"{steps['speedup']:.2f} {_between(steps['interval'], 2)}",
        f"{steps['median']:.0f}",
        "–" if is_dense else f"{ssim['mean']:.3f} {_between(ssim['interval'], 3)}",
        "–" if is_dense else f"{psnr['mean']:.1f}",
        "–" if is_dense or bits["share"] is None else f"{bits['share']:.3f}",
        f"{adherence['share']:.3f} {_between(adherence['interval'], 3)}" if adherence else "–",
        difference,
    )


def conditions(document: Mapping[str, Any]) -> str:
    """One paragraph: model, prompts, machine, clock, digests, command."""
    prompts, machine, times = document["prompts"], document["machine"], document["apart_ms_median"]
    guidance, versions = document["model"]["guidance"], machine["versions"]
    values = {
        name: f"{used[0]:g}" if len(set(used)) == 1 else " ".join(f"{value:g}" for value in used)
        for name, used in (("cfg", guidance["cfg"]), ("tau", guidance["tau"]))
    }
    judge = f", judge {document['judge_sha256'][:12]}" if document["judge_sha256"] else ""
    calibration = document["calibration"]
    fitted = f" Methods fitted to {calibration['prompts']} calibration prompts." if calibration else ""
    where = " on its GPU" if machine.get("device") == "cuda" else ""
    return (
        f"Model {document['model']['name']}, {counted(prompts['count'], 'prompt')} ({prompts['source']}), one picture "
        f"each, first seed {document['seed']}, batch 1; cfg {values['cfg']}, tau {values['tau']}; fp32 on "
        f"{machine['cpu']}, {machine['cores']} cores, {machine['threads']} threads, ONNX Runtime "
        f"{versions['onnxruntime']}{where}, toprovar {versions['toprovar']}, {document['date']}. Every prompt is drawn "
        f"dense and by every plan in turn, from the same noise, after one warm-up picture each. Clock: the scale steps "
        f"with sampling and decisions; text ({times['text']:.0f} ms) and decoder ({times['decode']:.0f} ms) are apart. "
        f"Brackets: 95 % intervals over prompts.{fitted} Weights {document['model']['weights_sha256'][:12]}{judge}, "
        f"prompts {prompts['sha256'][:12]}. Command: `{document['command']}`.\n"
    )


def markdown(document: Mapping[str, Any]) -> str:
    """Conditions, table, what wins, and what was left out."""
    lines = ["| " + " | ".join(HEADER) + " |", "|" + " --- |" * len(HEADER)]
    lines += ["| " + " | ".join(row_of(variant)) + " |" for variant in document["variants"]]
    parts = [conditions(document), "\n".join(lines) + "\n"]
    if document["winners"]:
        parts.append("\n".join(f"- {sentence(entry)}" for entry in document["winners"]) + "\n")
    if document["left_out"]:
        out = "; ".join(f"{entry['name']} ({entry['reason']})" for entry in document["left_out"])
        parts.append(f"Left out: {out}.\n")
    return "\n".join(parts)


def with_chart(document: Mapping[str, Any], chart: str) -> str:
    """`markdown` under a picture of the frontier. chart: its address as seen from the page."""
    return (
        f"![SSIM and adherence over token-layer speed-up and over wall-clock speed-up]({chart})\n\n{markdown(document)}"
    )


app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)


@app.command()
def table(
    results: Annotated[Path, typer.Argument(help="JSON file that `toprovar compare` wrote.")],
    into: Annotated[Path | None, typer.Option("--into", help="Page whose generated block is replaced.")] = None,
    chart: Annotated[Path | None, typer.Option("--chart", help="Also draw the frontier there, .png or .svg.")] = None,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Show tracebacks and debug messages.")] = False,
) -> None:
    """Print the table of a result file, or put it into a page."""

    def work() -> None:
        document = read_results(results, KEYS, "toprovar compare")
        content = markdown(document)
        if chart is not None:
            from toprovar.tools.comparison.charts import chart_bytes

            write_bytes(chart, chart_bytes(document, chart.suffix.lstrip(".")))
            console.say(f"wrote {chart}")
            folder = into.parent if into else Path()
            content = with_chart(document, Path(os.path.relpath(chart, folder)).as_posix())
        show(results, into, BLOCK, content)

    code = console.run_command(work, verbose)
    if code:
        raise typer.Exit(code)


if __name__ == "__main__":
    app(prog_name="python -m toprovar.tools.comparison.table")
