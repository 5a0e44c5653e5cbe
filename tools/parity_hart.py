"""HART's recorded runs: reads them, repeats them on their own indices and noise, and compares every array.

Called by parity.py, which fixes the command line and the verdicts.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from toprovar.runtime.errors import ToprovarError
from toprovar.tools.parity_file import MAKE_AGAIN, ParityFile
from toprovar.tools.parity_inputs import read_array, read_indices, read_number, read_sides
from toprovar.tools.parity_report import KINDS as KINDS_OF_ALL
from toprovar.tools.parity_report import Kinds, Report, Row, absent, compare_array

if TYPE_CHECKING:
    from torch import Tensor

    from toprovar.exporter.codebook import Quantizer
    from toprovar.exporter.hart.config import HartConfig
    from toprovar.exporter.hart.transformer import Hart

Arrays = dict[str, np.ndarray]

KINDS: Kinds = (
    (re.compile(r"idx/\d+|diff/timestep_map"), "exact"),
    (re.compile(r"diff/betas|diff/cfg"), "codes"),
    (re.compile(r"diff/z"), "activation"),
    (re.compile(r"diff/out"), "diffusion"),
    (re.compile(r"f_hat"), "latent"),
    *KINDS_OF_ALL,
)
SMOOTH_NOTE = "the noise of the smooth variant is not recorded"


@dataclass(frozen=True)
class HartRun:
    """Inputs of one run.

    sides:      of the schedule's square maps; `indices` has one entry per scale that ran
    text:       [B, T, text width]; mask [B, T] bool; positions [B, T]
    indices:    per scale that ran [B, n*n] int64
    start:      [B*n*n, d] and steps [count, 2*B*n*n, d], noise of the residual head; None where it did not run
    maps:       {scale: recorded input}, fed in where the run is smooth
    recorded:   names of the arrays to compare, without the run's prefix
    """

    name: str
    sides: tuple[int, ...]
    cfg: float
    top_p: float
    smooth: bool
    text: np.ndarray
    mask: np.ndarray
    positions: np.ndarray
    indices: list[np.ndarray]
    start: np.ndarray | None
    steps: np.ndarray | None
    maps: dict[int, np.ndarray]
    recorded: list[str]


def compare(file: ParityFile, asked: list[str] | None, backends: list[str] | None, report: Report) -> None:
    """Adds a row per recorded array to the report.

    backends: "torch" and "onnxruntime"; None stands for both.
    Raises:   ToprovarError if the file is incomplete, or the graphs lack what the run asks for.
    """
    import torch

    from toprovar.exporter.codebook import check_belong_together, load_quantizer
    from toprovar.exporter.hart.load import load_hart

    names = runs_in(file, asked)
    weights = {name: torch.from_numpy(array) for name, array in file.weights().items()}
    model = load_hart(weights, str(file.path), heads=_heads(file))
    quantizer = load_quantizer(weights, str(file.path))
    check_belong_together(model.config.vocabulary, model.config.code_channels, quantizer, str(file.path))
    runs = [read_run(file, name, model.config) for name in names]
    tables, strangers = _diffusion_arrays(file), {"w", *_present(file)}
    for backend in backends or ("torch", "onnxruntime"):
        observe = {"torch": observe_torch, "onnxruntime": observe_onnxruntime}[backend]
        for run in runs:
            report.rows.extend(_compare_run(file, run, backend, observe(model, quantizer, run)))
        for array in sorted(file.shapes):
            if array in tables and backend == "torch":
                report.rows.append(compare_array(backend, "", array, tables[array], file.read(array), KINDS))
            elif array not in tables and array.partition("/")[0] not in strangers:
                report.rows.append(absent(backend, "", array, False))


def _heads(file: ParityFile) -> int | None:
    heads = file.meta.get("heads")
    return heads if type(heads) is int and heads > 0 else None


def _diffusion_arrays(file: ParityFile) -> Arrays:
    from toprovar.exporter.hart.residual import diffusion_tables

    count = math.prod(file.shapes.get("diff/timestep_map", file.shapes.get("diff/betas", (0,))))
    if not 0 < count <= 1000:
        return {}
    tables = diffusion_tables(count)
    return {"diff/timestep_map": tables.times, "diff/betas": tables.betas}


# -- reading -----------------------------------------------------------------------------------------------------------


INPUTS = ("text", "mask", "position_ids")


def _present(file: ParityFile) -> list[str]:
    """Runs are what has indices, or a text of its own."""
    ends = ("/idx/0", "/text")
    found = [name.removesuffix(end) for name in file.shapes for end in ends if name.endswith(end) and name[:2] != "w/"]
    return list(dict.fromkeys(found))


def _input_name(file: ParityFile, run: str, key: str) -> str:
    """Where an input of the run lies: under its own name, or that of the only other run that has one."""
    own = f"{run}/{key}"
    if own in file.shapes:
        return own
    others = [name for name in file.shapes if name.endswith(f"/{key}") and name[:2] != "w/"]
    return others[0] if len(others) == 1 else own


def runs_in(file: ParityFile, asked: list[str] | None) -> list[str]:
    """Names of the runs to compare.

    Raises: ToprovarError if there is none, or an asked one is missing.
    """
    present = _present(file)
    if not present:
        raise ToprovarError(f"{file.path} holds no run: no array is named <run>/idx/0 or <run>/text", MAKE_AGAIN)
    for name in asked or []:
        if name not in present:
            raise ToprovarError(f"{file.path} has no run {name}; it has {', '.join(present)}", "pass one of them")
    return list(dict.fromkeys(asked)) if asked else present


def read_run(file: ParityFile, name: str, config: HartConfig) -> HartRun:
    """Reads one run and checks it against the model's sizes.

    Raises: ToprovarError naming the key or array that is missing or does not fit.
    """
    own = file.meta.get(name)
    settings: dict[str, Any] = {**file.meta, **(own if isinstance(own, dict) else {})}
    sides = read_sides(file, settings.get("patch_nums"))
    text = read_array(file, _input_name(file, name, "text"), (None, None, config.text_width))
    B, T, _ = text.shape
    mask = read_array(file, _input_name(file, name, "mask"), (B, T)).astype(bool)
    if not mask.any(axis=1).all():
        raise ToprovarError(f"{file.path}: array {name}/mask has a prompt without a token of its own", MAKE_AGAIN)
    ran = sum(f"{name}/idx/{scale}" in file.shapes for scale in range(len(sides)))
    if not ran:
        raise ToprovarError(f"{file.path} has no array {name}/idx/0, the first indices of the run", MAKE_AGAIN)
    indices = [
        read_indices(file, f"{name}/idx/{scale}", (B, sides[scale] ** 2), config.vocabulary) for scale in range(ran)
    ]
    smooth = bool(settings.get("more_smooth", settings.get("smooth", name.startswith("smooth"))))
    start, steps = None, None
    noises = sorted((n for n in file.names(name) if re.fullmatch(r"diff/noise/\d+", n)), key=lambda n: int(n[11:]))
    if noises and ran == len(sides):
        if len(noises) < 2 or noises != [f"diff/noise/{i}" for i in range(len(noises))]:
            raise ToprovarError(
                f"{file.path} has {len(noises)} arrays {name}/diff/noise/<step>, last {noises[-1]}; expected the start "
                "and one per step, numbered from 0",
                MAKE_AGAIN,
            )
        rows, d = B * sides[-1] ** 2, config.code_channels
        start = read_array(file, f"{name}/{noises[0]}", (rows, d))
        steps = np.stack([read_array(file, f"{name}/{noise}", (2 * rows, d)) for noise in noises[1:]])
    maps = {}
    if smooth:
        for scale in range(1, ran):
            side = sides[scale]
            maps[scale] = read_array(file, f"{name}/next/{scale}", (B, config.code_channels, side, side))
    return HartRun(
        name=name,
        sides=sides,
        cfg=read_number(file, settings, "cfg", 0, 1000),
        top_p=read_number(file, settings, "top_p", 0, 1, default=0.0),
        smooth=smooth,
        text=text,
        mask=mask,
        positions=read_array(file, _input_name(file, name, "position_ids"), (B, T)).astype(np.int64),
        indices=indices,
        start=start,
        steps=steps,
        maps=maps,
        recorded=[array for array in file.names(name) if array not in INPUTS and array not in noises],
    )


# -- repeating ---------------------------------------------------------------------------------------------------------


class _RecordedNoise:
    """The residual head's noise of a run; its indices are forced."""

    def __init__(self, run: HartRun) -> None:
        self.run = run

    def indices(self, scale: int, tokens: int, vocabulary: int) -> Tensor:
        raise AssertionError("indices are forced")

    smoothing = indices

    def residual_start(self, tokens: int, channels: int) -> Tensor:
        import torch

        return torch.from_numpy(self.run.start)

    def residual_steps(self, tokens: int, channels: int, rows: int) -> Tensor:
        import torch

        return torch.from_numpy(self.run.steps)


def observe_torch(model: Hart, quantizer: Quantizer, run: HartRun) -> Arrays:
    """The PyTorch loop, teacher-forced; what it computed under the names of the parity files."""
    import torch

    from toprovar.exporter.hart.generate import generate, guidance_of
    from toprovar.exporter.planned.loop import LoopOptions

    wanted = {array.rpartition("/")[0] if array[-1].isdigit() else array for array in run.recorded}
    seen: Arrays = {}

    def observe(name: str, scale: int, tensor: Tensor) -> None:
        if name.startswith("diff/"):
            seen[name] = tensor.numpy()
        elif name[0] in "kv" and f"cache_{name}" in run.recorded:
            seen[f"cache_{name}"] = tensor.permute(1, 2, 0, 3).numpy()
        elif name in wanted:
            seen[f"{name}/{scale}"] = tensor.numpy()
        if name == f"block{model.config.depth - 1}" and "blockN" in wanted:
            seen[f"blockN/{scale}"] = tensor.numpy()

    with torch.inference_mode():
        prompt = model.prompt(*(torch.from_numpy(array) for array in (run.text, run.mask, run.positions)))
    guidance = guidance_of(len(run.sides), run.cfg, top_p=run.top_p)
    done = generate(
        model,
        quantizer,
        prompt,
        run.sides,
        guidance,
        noise=_RecordedNoise(run),
        forced_indices=[torch.from_numpy(array) for array in run.indices],
        forced_maps={scale: torch.from_numpy(array) for scale, array in run.maps.items()},
        options=LoopOptions(scales=len(run.indices), observe=observe),
        residual=run.start is not None,
    )
    seen["f_hat"] = done.codes.numpy()
    seen["diff/cfg"] = np.float64(guidance.cfg[-1] - 1).reshape(())
    return seen


def observe_onnxruntime(model: Hart, quantizer: Quantizer, run: HartRun) -> Arrays:
    """The exported bundle, teacher-forced; what it computed under the names of the parity files."""
    from toprovar.exporter.hart.config import STEPS
    from toprovar.exporter.hart.family import HartFamily
    from toprovar.exporter.hart.generate import guidance_of
    from toprovar.exporter.model import ModelFile
    from toprovar.tools.parity_index_graphs import Recorded, observe_bundle

    B, T, _ = run.text.shape
    valid = np.zeros((2 * B, T), np.float32)
    valid[:B], valid[B:, 0] = run.mask, 1
    positions = np.concatenate([run.positions, np.zeros_like(run.positions)]).astype(np.float32)
    further: Arrays = {}
    if run.start is not None and run.steps is not None:
        # rows to [n*n, B, d]; of the steps' noise the conditional half, without the last step's
        start = run.start.reshape(B, -1, run.start.shape[-1])
        steps = run.steps[:-1, : len(run.start)].reshape(len(run.steps) - 1, *start.shape)
        further = {"residual_start": start.swapaxes(0, 1), "residual_noise": steps.swapaxes(1, 2)}
    recorded = Recorded(
        told={
            "text_rows": np.concatenate([run.text, 0 * run.text]),
            "text_valid": valid,
            "text_positions": positions,
        },
        guidance=guidance_of(len(run.sides), run.cfg, top_p=run.top_p),
        sides=run.sides,
        indices=run.indices,
        maps=run.maps,
        text_tokens=T,
        further=further,
    )
    family = HartFamily(bool(further), STEPS if run.steps is None else len(run.steps))
    settings = ModelFile(transformer="parity", sides=run.sides)
    return observe_bundle(family, model, quantizer, settings, recorded, {"raw", "logits", "next", "diff/z", "diff/out"})


def _compare_run(file: ParityFile, run: HartRun, backend: str, seen: Arrays) -> list[Row]:
    rows = []
    for name in run.recorded:
        kind = name.rpartition("/")[0]
        expected = file.read(f"{run.name}/{name}")
        note = ""
        if name == "diff/out" and name in seen and len(seen[name]) * 2 == len(expected):
            expected, note = expected[: len(seen[name])], "conditional rows; the graph has no others"
        if kind == "idx" and backend == "torch":
            rows.append(Row(backend, run.name, name, "forced", note="drawn by the reference's own generator"))
        elif run.smooth and kind == "next":
            rows.append(Row(backend, run.name, name, "forced", note=SMOOTH_NOTE))
        elif run.smooth and name == "f_hat":
            rows.append(Row(backend, run.name, name, "not seen", note=SMOOTH_NOTE))
        elif name in seen:
            row = compare_array(backend, run.name, name, seen[name], expected, KINDS)
            if kind == "idx" and row.verdict == "pass":
                row = Row(backend, run.name, name, "forced", note="fed in through the noise")
            rows.append(replace(row, note=row.note or note))
        else:
            known = any(pattern.fullmatch(name) for pattern, _ in KINDS)
            rows.append(absent(backend, run.name, name, known))
    return rows
