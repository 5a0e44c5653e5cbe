"""VAR's recorded runs: reads them, repeats them on their own indices, and compares every array.

Called by parity.py, which fixes the command line and the verdicts. A file may hold one run without a prefix, or several
under their names.
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

    from toprovar.exporter.hart.quantizer import Quantizer
    from toprovar.exporter.var.config import VarConfig
    from toprovar.exporter.var.transformer import Var

Arrays = dict[str, np.ndarray]

KINDS: Kinds = ((re.compile(r"idx/\d+"), "exact"), (re.compile(r"f_hat"), "codes"), *KINDS_OF_ALL)
SMOOTH_NOTE = "the noise of the smooth variant is not recorded"


@dataclass(frozen=True)
class VarRun:
    """Inputs of one run.

    prefix:   of its arrays' names; empty, or the name and a slash
    sides:    of the schedule's square maps; `indices` has one entry per scale that ran, [B, n*n] int64
    maps:     {scale: recorded input}, fed in where the run is smooth
    recorded: names of the arrays to compare, without the prefix
    """

    prefix: str
    sides: tuple[int, ...]
    labels: np.ndarray
    cfg: float
    smooth: bool
    indices: list[np.ndarray]
    maps: dict[int, np.ndarray]
    recorded: list[str]

    @property
    def name(self) -> str:
        return self.prefix.removesuffix("/")


def compare(file: ParityFile, asked: list[str] | None, backends: list[str] | None, report: Report) -> None:
    """Adds a row per recorded array to the report.

    backends: "torch" and "onnxruntime"; None stands for both.
    Raises:   ToprovarError if the file is incomplete, or a run does not fit the model.
    """
    import torch

    from toprovar.exporter.hart.load import load_quantizer
    from toprovar.exporter.var.load import check_belong_together, load_var
    from toprovar.tools.parity_var_graphs import observe_onnxruntime

    prefixes = runs_in(file, asked)
    weights = {name: torch.from_numpy(array) for name, array in file.weights().items()}
    model = load_var(weights, str(file.path))
    quantizer = load_quantizer(weights, str(file.path))
    check_belong_together(model, quantizer, str(file.path))
    runs = [read_run(file, prefix, model.config) for prefix in prefixes]
    known = [f"{prefix}{name}" for prefix in _present(file) for name in _names(file, prefix)]
    strangers = sorted(set(file.shapes) - set(known) - {f"w/{name}" for name in weights})
    for backend in backends or ("torch", "onnxruntime"):
        observe = {"torch": observe_torch, "onnxruntime": observe_onnxruntime}[backend]
        for run in runs:
            report.rows.extend(_compare_run(file, run, backend, observe(model, quantizer, run)))
        report.rows.extend(absent(backend, "", name, False) for name in strangers)


def _present(file: ParityFile) -> list[str]:
    """Prefixes of the runs: whatever has first indices."""
    return [name.removesuffix("idx/0") for name in file.shapes if name == "idx/0" or name.endswith("/idx/0")]


def _names(file: ParityFile, prefix: str) -> list[str]:
    """Names of a run's arrays without its prefix; those of a run without prefix are all that belong to no other."""
    if prefix:
        return file.names(prefix.removesuffix("/"))
    others = ("w/", *(other for other in _present(file) if other))
    return [name for name in file.shapes if not name.startswith(others)]


def runs_in(file: ParityFile, asked: list[str] | None) -> list[str]:
    """Prefixes of the runs to compare.

    Raises: ToprovarError if there is none, or an asked one is missing.
    """
    present = _present(file)
    if not present:
        raise ToprovarError(f"{file.path} holds no run: no array is named idx/0 or <run>/idx/0", MAKE_AGAIN)
    for name in asked or []:
        if f"{name}/" not in present:
            named = ", ".join(prefix.removesuffix("/") for prefix in present if prefix) or "one without a name"
            raise ToprovarError(
                f"{file.path} has no run {name}; it has {named}", "pass one of them, or leave --run out"
            )
    return [f"{name}/" for name in dict.fromkeys(asked)] if asked else present


def read_run(file: ParityFile, prefix: str, config: VarConfig) -> VarRun:
    """Reads one run and checks it against the model's sizes.

    Raises: ToprovarError naming the key or array that is missing or does not fit.
    """
    own = file.meta.get(prefix.removesuffix("/"))
    settings: dict[str, Any] = {**file.meta, **(own if isinstance(own, dict) else {})}
    sides = read_sides(file, settings.get("patch_nums"))
    config.check_sides(sides, f"{file.path}: meta.patch_nums")
    labels = settings.get("labels")
    fits = isinstance(labels, list) and labels and all(type(n) is int and 0 <= n <= config.classes for n in labels)
    if not fits:
        raise ToprovarError(
            f"{file.path}: meta.labels is {repr(labels)[:80]}; expected whole numbers from 0 to {config.classes}",
            MAKE_AGAIN,
        )
    B, ran = len(labels), sum(f"{prefix}idx/{scale}" in file.shapes for scale in range(len(sides)))
    indices = [
        read_indices(file, f"{prefix}idx/{scale}", (B, sides[scale] ** 2), config.vocabulary) for scale in range(ran)
    ]
    smooth = bool(settings.get("more_smooth", False))
    maps = {}
    if smooth:
        for scale in range(1, ran):
            shape = (B, config.code_channels, sides[scale], sides[scale])
            maps[scale] = read_array(file, f"{prefix}next/{scale}", shape)
    cfg = read_number(file, settings, "cfg", 0, 1000)
    return VarRun(prefix, sides, np.array(labels, np.int64), cfg, smooth, indices, maps, _names(file, prefix))


def observe_torch(model: Var, quantizer: Quantizer, run: VarRun) -> Arrays:
    """The PyTorch loop, teacher-forced; what it computed under the names of the parity files."""
    import torch

    from toprovar.exporter.var.generate import Sampling, generate

    wanted = {array.rpartition("/")[0] for array in run.recorded}
    seen: Arrays = {}

    def observe(name: str, scale: int, tensor: Tensor) -> None:
        if name[0] in "kv" and f"cache_{name}" in run.recorded:  # grows from scale to scale: the last one stays
            seen[f"cache_{name}"] = tensor.permute(1, 2, 0, 3).numpy()
        elif name in wanted:
            seen[f"{name}/{scale}"] = tensor.numpy()
        if name == f"block{model.config.depth - 1}" and "blockN" in wanted:
            seen[f"blockN/{scale}"] = tensor.numpy()

    with torch.inference_mode():
        prompt = model.prompt(torch.from_numpy(run.labels))
    done = generate(
        model,
        quantizer,
        prompt,
        run.sides,
        Sampling(run.cfg, top_k=0, top_p=0.0),
        forced_indices=[torch.from_numpy(array) for array in run.indices],
        forced_maps={scale: torch.from_numpy(array) for scale, array in run.maps.items()},
        observe=observe,
    )
    return {**seen, "f_hat": done.latent.numpy(), "cond_BD": prompt.condition.numpy()}


def _compare_run(file: ParityFile, run: VarRun, backend: str, seen: Arrays) -> list[Row]:
    rows = []
    for name in run.recorded:
        kind = name.rpartition("/")[0]
        if kind == "idx" and backend == "torch":
            rows.append(Row(backend, run.name, name, "forced", note="drawn by the reference's own generator"))
        elif run.smooth and kind == "next":
            rows.append(Row(backend, run.name, name, "forced", note=SMOOTH_NOTE))
        elif run.smooth and name == "f_hat":
            rows.append(Row(backend, run.name, name, "not seen", note=SMOOTH_NOTE))
        elif name in seen:
            row = compare_array(backend, run.name, name, seen[name], file.read(f"{run.prefix}{name}"), KINDS)
            if kind == "idx" and row.verdict == "pass":
                row = Row(backend, run.name, name, "forced", note="fed in through the noise")
            rows.append(row)
        else:
            rows.append(absent(backend, run.name, name, any(pattern.fullmatch(name) for pattern, _ in KINDS)))
    return rows
