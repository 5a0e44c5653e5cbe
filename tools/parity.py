"""Compares this project's models with recorded runs of the reference implementations.

    python -m toprovar.tools.parity FILE.npz [--run a] [--backend torch|onnxruntime] [--json]

Every run of the file is repeated with the recorded bits fed back, once in PyTorch and once as exported graphs in ONNX
Runtime, and every recorded array is compared. Exit codes: 0 all arrays agree, 1 one does not or nothing was compared,
2 wrong usage or input.
"""

from __future__ import annotations

import importlib
import math
import sys
from dataclasses import asdict
from enum import Enum
from pathlib import Path
from typing import Annotated

import numpy as np
import typer

from toprovar.exporter.families import Family
from toprovar.exporter.infinity.load import load_infinity, load_tokenizer
from toprovar.exporter.model import require_torch
from toprovar.runtime.errors import EXIT_ANSWER_IS_NO, EXIT_OK, ToprovarError
from toprovar.tools import console
from toprovar.tools.parity_file import MAKE_AGAIN, ParityFile, RecordedRun, open_parity_file, read_run, runs_in
from toprovar.tools.parity_observe import Arrays, observe_onnxruntime, observe_torch
from toprovar.tools.parity_report import KINDS, Report, Row, absent, compare_array
from toprovar.tools.parity_tokenizer import (
    clamped_alike,
    inputs_of,
    observe_tokenizer_onnxruntime,
    observe_tokenizer_torch,
)

BACKENDS = ("torch", "onnxruntime")

# Families with a module of their own: `compare(file, runs, backends, report)` there; backends is None for all it has.
FAMILY_MODULES = {
    Family.HART: "toprovar.tools.parity_hart",
    Family.INFINITYSTAR: "toprovar.tools.parity_infinitystar",
    Family.VAR: "toprovar.tools.parity_var",
    Family.VQ_TOKENIZER: "toprovar.tools.parity_decoders",
    Family.VIDEO_TOKENIZER: "toprovar.tools.parity_decoders",
}


# -- comparing ---------------------------------------------------------------------------------------------------------


def _fitted_rope(found: np.ndarray, expected: np.ndarray) -> np.ndarray:
    """Our [2, tokens, c/2] as the file holds it: [2, 1, 1, 1, padded tokens, c/2] is padded with zeros."""
    rows = expected.shape[-2] if expected.ndim >= 2 else 0
    if rows > found.shape[1]:
        padding = np.zeros((2, rows - found.shape[1], found.shape[2]), found.dtype)
        found = np.concatenate([found, padding], axis=1)
    return found[:, :rows].reshape(2, *(1,) * (expected.ndim - 3), rows, -1) if expected.ndim >= 3 else found


def _certain_bits(logits: np.ndarray, run: RecordedRun, bits: np.ndarray) -> tuple[np.ndarray, int]:
    """The bits that logits and top-p leave no choice about, the given ones elsewhere; and how many are certain.

    logits: [B, L, 2*bits]. Log-odds within rounding of the limit count as open.
    """
    odds = logits[..., 1::2].astype(np.float64) - logits[..., 0::2]
    limit = run.guidance.bit_limit
    slack = 1e-4 * max(float(np.abs(logits).max()), 1.0)
    one, zero = odds >= limit + slack, odds <= -limit - slack
    return np.where(one, 1, np.where(zero, 0, bits)).astype(np.uint8), int(one.sum() + zero.sum())


def _compare_run(file: ParityFile, run: RecordedRun, backend: str, seen: Arrays) -> list[Row]:
    rows = []
    shifted = "next/0" in run.recorded  # counted by the scale that leaves it, not by the one that reads it
    for name in run.recorded:
        kind, _, scale = name.rpartition("/")
        source = f"next/{int(scale) + 1}" if shifted and kind == "next" and scale.isdigit() else name
        expected = file.read(f"{run.name}/{name}")
        if kind == "bits" and name in seen:
            implied, certain = _certain_bits(seen[f"logits/{scale}"], run, seen[name])
            if not certain and backend == "torch":
                rows.append(Row(backend, run.name, name, "forced", note="no bit is certain under this top-p"))
                continue
            expected = expected.reshape(implied.shape)
            row = compare_array(backend, run.name, name, implied, expected)
            rows.append(_with_note(row, f"{certain} of {expected.size} certain by top-p, the others fed in"))
        elif source in seen:
            row = compare_array(backend, run.name, name, seen[source], expected)
            if row.verdict == "fail" and kind == "blockN" and f"blockN mixed/{scale}" in seen:
                mixed = compare_array(backend, run.name, name, seen[f"blockN mixed/{scale}"], expected)
                row = _with_note(mixed, "after mixing") if mixed.verdict == "pass" else row
            if row.note.startswith("shape") and name.startswith("cache_"):
                row = _available_keys(row, backend, run, name, seen[source], expected)
            rows.append(row)
        else:
            known = any(pattern.fullmatch(name) for pattern, _ in KINDS)
            rows.append(absent(backend, run.name, name, known))
    return rows


def _with_note(row: Row, note: str) -> Row:
    return Row(**{**asdict(row), "note": row.note or note})


def _available_keys(
    row: Row, backend: str, run: RecordedRun, name: str, found: np.ndarray, expected: np.ndarray
) -> Row:
    """The graphs do not give out the keys of the last scale: compares the earlier ones, if that is the difference."""
    last = math.prod(run.schedule[-1])
    if backend != "onnxruntime" or expected.ndim != 4 or not 0 < expected.shape[2] - found.shape[2] <= last:
        return row
    if not found.shape[2]:
        return absent(backend, run.name, name, True)
    part = compare_array(backend, run.name, name, found, expected[:, :, : found.shape[2]])
    return _with_note(part, f"first {found.shape[2]} of {expected.shape[2]} keys; the last scale's stay inside")


# -- files -------------------------------------------------------------------------------------------------------------


def compare_file(path: Path, runs: list[str] | None = None, backends: list[str] | None = None) -> Report:
    """Repeats the runs of a parity file and compares every recorded array.

    runs:     names to compare; all that have arrays if None
    backends: "torch" and "onnxruntime"; both if None. One that compared nothing fails the report if it was asked for.
    Raises:   ToprovarError if the file is unreadable, incomplete or of a family without support.
    """
    require_torch()
    file = open_parity_file(path)
    report = Report(str(path), file.family.value)
    if file.family is Family.INFINITY:
        _compare_infinity(file, runs, backends or list(BACKENDS), report)
    elif file.family is Family.BIT_TOKENIZER:
        if runs:
            raise ToprovarError(
                f"{path} holds a tokenizer, which has no runs; found --run {runs[0]}", "leave --run out"
            )
        _compare_tokenizer(file, backends or list(BACKENDS), report)
    elif file.family in FAMILY_MODULES:
        importlib.import_module(FAMILY_MODULES[file.family]).compare(file, runs, backends, report)
    else:
        readable = [Family.INFINITY, Family.BIT_TOKENIZER, *FAMILY_MODULES]
        raise ToprovarError(
            f"{path} holds a model of family {file.family.value}, which is not supported yet; parity reads "
            f"{', '.join(family.value for family in readable)}",
            "compare a file of one of these families",
        )
    for backend in backends or []:
        if not any(row.backend == backend and row.verdict in ("pass", "fail") for row in report.rows):
            report.empty.append(backend)
    if not report.compared:
        report.empty = report.empty or list(backends or BACKENDS)
    return report


def _compare_infinity(file: ParityFile, asked: list[str] | None, backends: list[str], report: Report) -> None:
    import torch

    names = runs_in(file, asked)
    weights = {name: torch.from_numpy(array) for name, array in file.weights().items()}
    model = load_infinity(weights, str(file.path), patchify=_is_patchify(file))
    config = model.config
    runs = [read_run(file, n, config.depth, config.bits, config.text_width, config.text_length) for n in names]
    for run in runs:
        if len(run.schedule) > config.levels:
            raise ToprovarError(
                f"{file.path}: run {run.name} has {len(run.schedule)} scales; lvl_embed.weight has {config.levels} rows"
            )
    for backend in backends:
        observe = {"torch": observe_torch, "onnxruntime": observe_onnxruntime}[backend]
        for run in runs:
            seen = observe(model, run)
            if "rope" in file.shapes and run is runs[0]:
                expected = file.read("rope")
                report.rows.append(compare_array(backend, "", "rope", _fitted_rope(seen["rope"], expected), expected))
            report.rows.extend(_compare_run(file, run, backend, seen))
        strangers = {n for n in file.shapes if n != "rope" and n.partition("/")[0] not in {"w", *file.meta}}
        report.rows.extend(absent(backend, "", name, False) for name in sorted(strangers))


def _is_patchify(file: ParityFile) -> bool:
    """Raises: ToprovarError if meta and the weights disagree about the bits of a token."""
    bits = (0, *file.shapes.get("w/word_embed.weight", ()))[-1]
    channels = file.meta.get("d_vae", 0)
    patchify = bool(file.meta.get("patchify", channels * 4 == bits if type(channels) is int else False))
    if type(channels) is int and channels and bits != channels * (4 if patchify else 1):
        raise ToprovarError(
            f"{file.path}: word_embed.weight takes {bits} bits; meta.d_vae {channels} and meta.patchify "
            f"{file.meta.get('patchify')} give {channels * (4 if patchify else 1)}",
            "settings and weights belong to two models; write the file again",
        )
    if patchify and bits % 4:
        raise ToprovarError(f"{file.path}: meta.patchify is set, but {bits} bits per token are no multiple of 4")
    return patchify


def _compare_tokenizer(file: ParityFile, backends: list[str], report: Report) -> None:
    import torch

    model = load_tokenizer({n: torch.from_numpy(a) for n, a in file.weights().items()}, str(file.path))
    names = [n for n in file.shapes if not n.startswith("w/") and n not in inputs_of()]
    if "dec/x" in names and "dec/z" not in file.shapes:
        raise ToprovarError(f"{file.path} has no array dec/z, the latent that dec/x was decoded from", MAKE_AGAIN)
    for backend in backends:
        observe = {"torch": observe_tokenizer_torch, "onnxruntime": observe_tokenizer_onnxruntime}[backend]
        seen = observe(model, file)
        for name in names:
            if name not in seen:
                report.rows.append(absent(backend, "", name, any(p.fullmatch(name) for p, _ in KINDS)))
                continue
            found, expected, note = seen[name], file.read(name), ""
            if name == "dec/x":
                found, expected, note = clamped_alike(found, expected, backend)
            report.rows.append(_with_note(compare_array(backend, "", name, found, expected), note))


# -- command line ------------------------------------------------------------------------------------------------------


class BackendName(str, Enum):
    torch = "torch"
    onnxruntime = "onnxruntime"


def _print_table(report: Report) -> None:
    from rich.console import Console
    from rich.table import Table

    screen = Console(width=None if sys.stdout.isatty() else 140, highlight=False)
    table = Table(title=f"{Path(report.file).name} ({report.family})")
    for column in ("backend", "array"):
        table.add_column(column, no_wrap=True)
    for column in ("max abs error", "largest", "tolerance"):
        table.add_column(column, justify="right", no_wrap=True)
    table.add_column("verdict", no_wrap=True)
    table.add_column("note")
    styles = {"pass": "green", "fail": "bold red", "unknown": "yellow"}
    for row in report.rows:
        numbers = ["" if v is None else f"{v:.3g}" for v in (row.max_abs_error, row.largest, row.tolerance)]
        name = f"{row.run}/{row.array}" if row.run else row.array
        table.add_row(row.backend, name, *numbers, row.verdict, row.note, style=styles.get(row.verdict))
    screen.print(table)


def _summary(report: Report) -> str:
    unknown = len({(row.run, row.array) for row in report.rows if row.verdict == "unknown"})
    ignored = f"; {unknown} arrays of unknown name left out" if unknown else ""
    if report.empty:
        return f"{report.file}: nothing was compared by {' or '.join(report.empty)}{ignored}"
    if report.failed:
        worst = report.failed[0]
        name = f"{worst.run}/{worst.array}" if worst.run else worst.array
        return (
            f"{report.file}: {len(report.failed)} of {report.compared} differ, first {name} ({worst.backend}){ignored}"
        )
    return f"{report.file}: all {report.compared} comparisons pass{ignored}"


app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)


@app.command(cls=console.Single)
def parity(
    file: Annotated[Path, typer.Argument(help="Parity file (.npz): weights, settings and recorded arrays.")],
    run: Annotated[list[str] | None, typer.Option("--run", help="Run to compare; repeatable. Default: all.")] = None,
    backend: Annotated[
        list[BackendName] | None, typer.Option("--backend", help="What to compare; repeatable. Default: both.")
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON document on stdout and nothing else there.")
    ] = False,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Show tracebacks and debug messages.")] = False,
) -> None:
    """Compare models with recorded runs of the reference implementations.

    Every run of the file is repeated with the recorded bits fed back, in PyTorch and as exported graphs in ONNX
    Runtime, and every recorded array is compared. Exit code 1 if one differs or nothing was compared.
    """
    passed = False

    def work() -> None:
        nonlocal passed
        report = compare_file(file, run or None, [b.value for b in backend or []] or None)
        passed = report.passed
        if as_json:
            console.print_json(report.document())
        else:
            _print_table(report)
            print(_summary(report))

    code = console.run_command(work, verbose)
    if code == EXIT_OK and not passed:
        code = EXIT_ANSWER_IS_NO
    if code:
        raise typer.Exit(code)


def main() -> None:
    app(prog_name="python -m toprovar.tools.parity")


if __name__ == "__main__":
    main()
