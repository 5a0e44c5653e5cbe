"""VAR's recorded runs: reads them, repeats them on their own indices, and compares every array.

Called by parity.py, which fixes the command line and the verdicts.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
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
    from toprovar.exporter.var.config import VarConfig
    from toprovar.exporter.var.transformer import Var

Arrays = dict[str, np.ndarray]

KINDS: Kinds = (
    (re.compile(r"idx/\d+"), "exact"),
    (re.compile(r"f_hat"), "codes"),
    *KINDS_OF_ALL,
)
SMOOTH_NOTE = "the noise of the smooth variant is not recorded"


@dataclass(frozen=True)
class VarRun:
    """Inputs of one run.

    name:     prefix of its arrays; empty for a file of one run without a prefix
    sides:    of the schedule's square maps; `indices` has one entry per scale that ran
    labels:   [B] int64
    indices:  per scale that ran [B, n*n] int64
    maps:     {scale: recorded input}, fed in where the run is smooth
    recorded: names of the arrays to compare, without the run's prefix
    """

    name: str
    sides: tuple[int, ...]
    cfg: float
    smooth: bool
    labels: np.ndarray
    indices: list[np.ndarray]
    maps: dict[int, np.ndarray]
    recorded: list[str]

    def array(self, name: str) -> str:
        """Under which name the file holds an array of the run."""
        return _join(self.name, name)


def compare(file: ParityFile, asked: list[str] | None, backends: list[str] | None, report: Report) -> None:
    """Adds a row per recorded array to the report.

    backends: "torch" and "onnxruntime"; None stands for both.
    Raises:   ToprovarError if the file is incomplete.
    """
    import torch

    from toprovar.exporter.codebook import check_belong_together, load_quantizer
    from toprovar.exporter.var.generate import check_sides
    from toprovar.exporter.var.load import load_var

    names = runs_in(file, asked)
    weights = {name: torch.from_numpy(array) for name, array in file.weights().items()}
    heads = file.meta.get("heads")
    model = load_var(weights, str(file.path), heads=heads if type(heads) is int and heads > 0 else None)
    quantizer = load_quantizer(weights, str(file.path))
    check_belong_together(model.config.vocabulary, model.config.code_channels, quantizer, str(file.path))
    runs = [read_run(file, name, model.config) for name in names]
    for run in runs:
        check_sides(model, run.sides, f"{file.path}: meta.patch_nums")
    present = runs_in(file, None)
    strangers = [] if "" in present else [n for n in file.shapes if n.partition("/")[0] not in ("w", *present)]
    for backend in backends or ("torch", "onnxruntime"):
        for run in runs:
            observe = {"torch": observe_torch, "onnxruntime": observe_onnxruntime}[backend]
            seen = observe(model, quantizer, run)
            report.rows.extend(_compare_run(file, run, backend, seen))
        report.rows.extend(absent(backend, "", name, False) for name in sorted(strangers))


# -- reading -----------------------------------------------------------------------------------------------------------


def _join(run: str, name: str) -> str:
    return f"{run}/{name}" if run else name


def runs_in(file: ParityFile, asked: list[str] | None) -> list[str]:
    """Names of the runs to compare: prefixes of `idx/0`; a file of one run may have none.

    Raises: ToprovarError if there is none, or an asked one is missing.
    """
    found = [match[1] or "" for name in file.shapes if (match := re.fullmatch(r"(?:(?!w/)([^/]+)/)?idx/0", name))]
    if not found:
        raise ToprovarError(f"{file.path} holds no run: no array is named idx/0 or <run>/idx/0", MAKE_AGAIN)
    for name in asked or []:
        if name not in found:
            known = ", ".join(run or "one without a name" for run in found)
            raise ToprovarError(
                f"{file.path} has no run {name}; it has {known}", "leave --run out, or pass one of them"
            )
    return list(dict.fromkeys(asked)) if asked else found


def read_run(file: ParityFile, name: str, config: VarConfig) -> VarRun:
    """Reads one run and checks it against the model's sizes.

    Raises: ToprovarError naming the key or array that is missing or does not fit.
    """
    own = file.meta.get(name)
    settings: dict[str, Any] = {**file.meta, **(own if isinstance(own, dict) else {})}
    sides = read_sides(file, settings.get("patch_nums"))
    labels = settings.get("labels")
    if (
        not isinstance(labels, list)
        or not labels
        or not all(type(label) is int and 0 <= label <= config.classes for label in labels)
    ):
        raise ToprovarError(
            f"{file.path}: meta.labels is {repr(labels)[:80]}; expected classes from 0 to {config.classes - 1}, or the "
            f"null class {config.classes}",
            MAKE_AGAIN,
        )
    B, indices = len(labels), []
    for scale, side in enumerate(sides):
        if _join(name, f"idx/{scale}") not in file.shapes:
            break
        indices.append(read_indices(file, _join(name, f"idx/{scale}"), (B, side**2), config.vocabulary))
    smooth, maps = bool(settings.get("more_smooth", False)), {}
    if smooth:
        for scale in range(1, len(indices)):
            shape = (B, config.code_channels, sides[scale], sides[scale])
            maps[scale] = read_array(file, _join(name, f"next/{scale}"), shape)
    recorded = file.names(name) if name else [array for array in file.shapes if not array.startswith("w/")]
    return VarRun(
        name=name,
        sides=sides,
        cfg=read_number(file, settings, "cfg", 0, 1000),
        smooth=smooth,
        labels=np.array(labels, np.int64),
        indices=indices,
        maps=maps,
        recorded=recorded,
    )


# -- repeating ---------------------------------------------------------------------------------------------------------


def observe_torch(model: Var, quantizer: Quantizer, run: VarRun) -> Arrays:
    """The PyTorch loop, teacher-forced; what it computed under the names of the parity files."""
    import torch

    from toprovar.exporter.planned.loop import LoopOptions
    from toprovar.exporter.var.generate import generate, guidance_of

    seen: Arrays = {}

    def observe(name: str, scale: int, tensor: Tensor) -> None:
        if name[0] in "kv":
            if f"cache_{name}" in run.recorded:
                seen[f"cache_{name}"] = tensor.permute(1, 2, 0, 3).numpy()
            return
        names = [name, "blockN"] if name == f"block{model.config.depth - 1}" else [name]
        seen.update({f"{n}/{scale}": tensor.numpy() for n in names if f"{n}/{scale}" in run.recorded})

    with torch.inference_mode():
        prompt = model.prompt(torch.from_numpy(run.labels))
    done = generate(
        model,
        quantizer,
        prompt,
        run.sides,
        guidance_of(len(run.sides), run.cfg),
        forced_indices=[torch.from_numpy(array) for array in run.indices],
        forced_maps={scale: torch.from_numpy(array) for scale, array in run.maps.items()},
        options=LoopOptions(scales=len(run.indices), observe=observe),
    )
    seen["f_hat"] = done.codes.numpy()
    return seen


def observe_onnxruntime(model: Var, quantizer: Quantizer, run: VarRun) -> Arrays:
    """The exported bundle, teacher-forced; what it computed under the names of the parity files."""
    from toprovar.exporter.model import ModelFile
    from toprovar.exporter.var.family import VarFamily
    from toprovar.exporter.var.generate import guidance_of
    from toprovar.tools.parity_index_graphs import Recorded, observe_bundle

    labels = np.concatenate([run.labels, np.full_like(run.labels, model.config.classes)])
    guidance = guidance_of(len(run.sides), run.cfg)
    recorded = Recorded({"labels": labels}, guidance, run.sides, run.indices, run.maps)
    settings = ModelFile(transformer="parity", sides=run.sides)
    return observe_bundle(VarFamily(), model, quantizer, settings, recorded, {"raw", "logits", "next", "in"})


def _compare_run(file: ParityFile, run: VarRun, backend: str, seen: Arrays) -> list[Row]:
    rows = []
    for name in run.recorded:
        kind = name.rpartition("/")[0]
        known = any(pattern.fullmatch(name) for pattern, _ in KINDS)
        if kind == "idx" and known and backend == "torch":
            rows.append(Row(backend, run.name, name, "forced", note="drawn by the reference's own generator"))
        elif run.smooth and kind == "next":
            rows.append(Row(backend, run.name, name, "forced", note=SMOOTH_NOTE))
        elif run.smooth and name == "f_hat":
            rows.append(Row(backend, run.name, name, "not seen", note=SMOOTH_NOTE))
        elif name in seen:
            row = compare_array(backend, run.name, name, seen[name], file.read(run.array(name)), KINDS)
            if kind == "idx" and row.verdict == "pass":
                row = Row(backend, run.name, name, "forced", note="fed in through the noise")
            rows.append(row)
        else:
            rows.append(absent(backend, run.name, name, known))
    return rows
