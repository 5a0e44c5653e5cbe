"""The tables of docs/evaluation.md, made from a result file.

python -m toprovar.tools.evaluation.table docs/data/demo_evaluation.json [--into docs/evaluation.md]
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from toprovar.runtime.errors import ToprovarError
from toprovar.runtime.json_files import read_json, read_text, write_bytes
from toprovar.tools import console
from toprovar.tools.evaluation.prompts import BUCKETS, SCENE_LAYOUTS
from toprovar.tools.evaluation.results import ALL
from toprovar.tools.evaluation.scoring import ASPECTS

MAX_PAGE_BYTES = 4 * 2**20
GROUP_COLUMNS = (*BUCKETS, *SCENE_LAYOUTS, "seen", "held-out style", "held-out pair")


def _share(entry: dict[str, Any] | None) -> str:
    if entry is None:
        return "–"
    low, high = entry["interval"]
    return f"{entry['share']:.3f} [{low:.3f}, {high:.3f}]"


def _signed(value: float, low: float, high: float) -> str:
    return f"{value:+.3f} [{low:+.3f}, {high:+.3f}]"


def _lines(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = ["| " + " | ".join(header) + " |", "|" + " --- |" * len(header)]
    return "\n".join([*lines, *("| " + " | ".join(row) + " |" for row in rows)]) + "\n"


def _scores_table(entries: Sequence[dict[str, Any]]) -> str:
    rows = []
    for entry in entries:
        aspects, frechet = entry["aspects"], entry["frechet"]
        distance = f"{frechet['distance']:.3f} ± {frechet['half_width']:.3f}" if frechet else "–"
        speedup = f"{entry['tle_speedup']:.2f}" if "tle_speedup" in entry else "–"
        rows.append([entry["name"], speedup, *(_share(aspects[a]) for a in (ALL, *ASPECTS)), distance])
    return _lines(["pictures", "TLE", "all right", *ASPECTS, "Fréchet"], rows)


def _groups_table(entries: Sequence[dict[str, Any]]) -> str:
    groups = [group for group in GROUP_COLUMNS if any(group in entry["groups"] for entry in entries)]
    counts = {g: next(e["groups"][g][ALL]["count"] for e in entries if g in e["groups"]) for g in groups}
    header = ["all right", *(f"{group} ({counts[group]})" for group in groups)]
    rows = [
        [entry["name"], *(_share(entry["groups"].get(group, {}).get(ALL)) for group in groups)] for entry in entries
    ]
    return _lines(header, rows)


def _against_table(variants: Sequence[dict[str, Any]]) -> str:
    rows = []
    for entry in variants:
        found = entry["against_dense"]
        if found is None:
            continue
        cells = []
        for aspect in (ALL, "concept", "count"):
            difference = found["differences"][aspect]
            cells.append(
                f"{_signed(difference['difference'], *difference['interval'])}, p {difference['mcnemar_p']:.2g}"
            )
        frechet = entry["frechet"].get("to_dense")
        cells.append(f"{frechet['difference']:+.3f} ± {frechet['half_width']:.3f}" if frechet else "–")
        ssim, psnr = found["ssim"], found["psnr_db"]
        cells += [
            f"{ssim['mean']:.3f} ± {ssim['half_width']:.3f}",
            f"{psnr['mean']:.1f} ± {psnr['half_width']:.1f}",
            f"{entry['tle_speedup']:.2f} / {found['wall_speedup']:.2f}",
        ]
        rows.append([entry["name"], *cells])
    if not rows:
        return ""
    header = ["against dense", "all right", "concept", "count", "Fréchet", "SSIM", "PSNR dB", "TLE / measured speed-up"]
    return _lines(header, rows)


def markdown(document: dict[str, Any]) -> str:
    """Conditions and tables of a result file."""
    guidance = document["model"]["guidance"]
    prompts = document["prompts"]
    entries = [*document["variants"], *document["references"]]
    values = {
        name: f"{used[0]:g}" if len(set(used)) == 1 else " ".join(f"{value:g}" for value in used)
        for name, used in (("cfg", guidance["cfg"]), ("tau", guidance["tau"]))
    }
    crops = {entry["frechet"]["crops"] for entry in entries if entry["frechet"]}
    shown = " or ".join(map(str, sorted(crops)))
    head = (
        f"Split `{document['split']}`, {prompts['count']} of {prompts['of']} prompts, one picture each, first seed "
        f"{document['seed']}; cfg {values['cfg']}, tau {values['tau']}; {document['backend']}; "
        f"weights {document['model']['weights_sha256'][:12]}, judge {document['judge_sha256'][:12]}, prompts "
        f"{prompts['sha256'][:12]}. Brackets: 95 % intervals. Fréchet over {shown} crops. "
        f"Command: `{document['command']}`.\n"
    )
    parts = [head, _scores_table(entries), _groups_table(entries), _against_table(document["variants"])]
    return "\n".join(part for part in parts if part)


def whole(make: Callable[..., str], *arguments: Any, path: Path) -> str:
    """A text made from a file's results. Raises: ToprovarError if something that it shows is not there."""
    try:
        return make(*arguments)
    except (LookupError, TypeError, ValueError, AttributeError, StopIteration) as error:
        raise ToprovarError(
            f"{path} holds no whole results ({type(error).__name__}: {error})", "make the file again, or restore it"
        ) from None


def check_entries(entries: Sequence[Any], path: Path) -> None:
    """Raises: ToprovarError unless each could be a row of the tables."""
    for made in (_scores_table, _groups_table):
        whole(made, entries, path=path)


def read_results(path: Path, keys: Sequence[str], what: str) -> Any:
    """A result file. Raises: ToprovarError if it is none of this version, which has `keys`."""
    document = read_json(path)
    if not isinstance(document, dict) or document.get("schema_version") != 1 or not set(keys) <= set(document):
        raise ToprovarError(f"{path} holds no results of {what}", "pass the JSON file that it wrote")
    return document


def marks(name: str) -> tuple[str, str]:
    """The comments around a generated block of a page."""
    return f"<!-- {name}: begin, generated -->\n", f"<!-- {name}: end -->\n"


def block_of(page: Path, name: str) -> str:
    """What stands in a page's generated block. Raises: ToprovarError if the page has no such block."""
    text = read_text(page, str(page), MAX_PAGE_BYTES)
    begin, end = marks(name)
    if text.count(begin) != 1 or text.count(end) != 1 or text.index(begin) > text.index(end):
        raise ToprovarError(f"{page} has no generated block named {name}", f"write its two comments: {begin.strip()}")
    return text.split(begin)[1].split(end)[0]


def write_block(page: Path, name: str, content: str) -> None:
    """Replaces a page's generated block. Raises: as `block_of`."""
    old = block_of(page, name)
    begin, end = marks(name)
    text = read_text(page, str(page), MAX_PAGE_BYTES)
    write_bytes(page, text.replace(begin + old + end, begin + content + end).encode())


def show(results: Path, into: Path | None, name: str, content: str) -> None:
    """Prints a generated text, or puts it into a page."""
    if into is None:
        sys.stdout.write(content)
    else:
        write_block(into, name, content)
        console.say(f"wrote the block {name} of {into} from {results}")


app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)


@app.command(cls=console.Single)
def table(
    results: Annotated[Path, typer.Argument(help="JSON file that `toprovar evaluate` wrote.")],
    into: Annotated[Path | None, typer.Option("--into", help="Page whose generated block is replaced.")] = None,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Show tracebacks and debug messages.")] = False,
) -> None:
    """Print the tables of a result file, or put them into a page."""

    def work() -> None:
        document = read_results(results, ("variants", "references", "prompts"), "toprovar evaluate")
        show(results, into, "evaluation", whole(markdown, document, path=results))

    code = console.run_command(work, verbose)
    if code:
        raise typer.Exit(code)


if __name__ == "__main__":
    app(prog_name="python -m toprovar.tools.evaluation.table")
