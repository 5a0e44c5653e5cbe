"""InfinityStar's recorded runs: reads them, repeats them on their own bits, and compares every array.

Called by parity.py, which fixes the command line and the verdicts.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from toprovar.exporter.infinitystar.rope import map_angles, text_angles
from toprovar.exporter.infinitystar.schedule import VideoSchedule, check_detail_size
from toprovar.runtime.errors import ToprovarError
from toprovar.runtime.guidance import Guidance, Projection
from toprovar.tools.parity_file import (
    MAKE_AGAIN,
    MAX_MAP_SIDE,
    MAX_SCALES,
    MAX_TOKENS,
    NEGATIVE_ARRAYS,
    ParityFile,
)
from toprovar.tools.parity_inputs import read_array, read_number
from toprovar.tools.parity_report import KINDS as KINDS_OF_ALL
from toprovar.tools.parity_report import Kinds, Report, Row, absent, compare_array

if TYPE_CHECKING:
    from torch import Tensor

    from toprovar.exporter.infinitystar.config import InfinityStarConfig
    from toprovar.exporter.infinitystar.transformer import InfinityStar

Arrays = dict[str, np.ndarray]

KINDS: Kinds = (
    (re.compile(r"rope_text|rope/\d+"), "rope"),
    (re.compile(r"(in|block(N|\d+))/text"), "activation"),
    (re.compile(r"prob/\d+"), "probability"),
    (re.compile(r"codes"), "codes"),
    *KINDS_OF_ALL,
)
ROPE_TEXT = "rope_text"
MAX_ENTRIES = 16 * MAX_SCALES  # maps of all clips
MAX_REPETITIONS = 100


@dataclass(frozen=True)
class StarRun:
    """Inputs of one run.

    text:     [T, text width]; negative likewise, or None for the learned rows
    bits:     per pass that ran [1, L, bits] uint8
    recorded: names of the arrays to compare, without the run's prefix
    """

    name: str
    schedule: VideoSchedule
    guidance: Guidance
    text: np.ndarray
    negative: np.ndarray | None
    bits: list[np.ndarray]
    recorded: list[str]

    @property
    def guided(self) -> bool:
        return self.guidance.uses_unconditional_row


def compare(file: ParityFile, asked: list[str] | None, backends: list[str] | None, report: Report) -> None:
    """Adds a row per recorded array to the report.

    backends: "torch" and "onnxruntime"; None stands for both.
    Raises:   ToprovarError if the file is incomplete or contradicts itself.
    """
    import torch

    from toprovar.exporter.infinitystar.load import load_infinitystar
    from toprovar.tools.parity_infinitystar_graphs import observe_onnxruntime

    names = runs_in(file, asked)
    weights = {name: torch.from_numpy(array) for name, array in file.weights().items()}
    model = load_infinitystar(weights, str(file.path))
    runs = [read_run(file, name, model.config) for name in names]
    strangers = {"w", *_present(file)}
    for backend in backends or ("torch", "onnxruntime"):
        observe = {"torch": observe_torch, "onnxruntime": observe_onnxruntime}[backend]
        for run in runs:
            report.rows.extend(_compare_run(file, run, backend, observe(model, run)))
        for array in sorted(file.shapes):
            if array == ROPE_TEXT and backend == "torch":
                report.rows.append(_compare_rope_text(file, model.config.head_width))
            elif array.partition("/")[0] not in strangers:
                report.rows.append(absent(backend, "", array, array == ROPE_TEXT))


def _compare_rope_text(file: ParityFile, head_width: int) -> Row:
    expected = file.read(ROPE_TEXT)
    angles = text_angles(expected.shape[-2] if expected.ndim > 1 else 1, head_width)
    return compare_array("torch", "", ROPE_TEXT, np.stack([np.cos(angles), np.sin(angles)]), expected, KINDS)


# -- reading -----------------------------------------------------------------------------------------------------------


def _present(file: ParityFile) -> list[str]:
    """Runs are what has bits, or a text of its own."""
    ends = ("/bits/0", "/text")
    found = [
        name.removesuffix(end)
        for name in file.shapes
        for end in ends
        if name.endswith(end) and name[:2] != "w/" and "/" not in name.removesuffix(end)
    ]
    return list(dict.fromkeys(found))


def runs_in(file: ParityFile, asked: list[str] | None) -> list[str]:
    """Names of the runs to compare.

    Raises: ToprovarError if there is none, or an asked one is missing.
    """
    present = _present(file)
    if not present:
        raise ToprovarError(f"{file.path} holds no run: no array is named <run>/bits/0 or <run>/text", MAKE_AGAIN)
    for name in asked or []:
        if name not in present:
            raise ToprovarError(f"{file.path} has no run {name}; it has {', '.join(present)}", "pass one of them")
    return list(dict.fromkeys(asked)) if asked else present


def read_run(file: ParityFile, name: str, config: InfinityStarConfig) -> StarRun:
    """Reads one run and checks it against the model's sizes.

    Raises: ToprovarError naming the key or array that is missing or does not fit.
    """
    own = file.meta.get(name)
    settings: dict[str, Any] = {**file.meta, **(own if isinstance(own, dict) else {})}
    schedule = _schedule(file, settings)
    text_name = f"{name}/text"
    if text_name not in file.shapes:
        others = [other for other in _present(file) if f"{other}/text" in file.shapes]
        text_name = f"{others[0]}/text" if len(others) == 1 else text_name
    text = read_array(file, text_name, (None, config.text_width))
    negatives = [key for key in NEGATIVE_ARRAYS if f"{name}/{key}" in file.shapes]
    negative = read_array(file, f"{name}/{negatives[0]}", (None, config.text_width)) if negatives else None
    for what, rows in (("text", text), ("negative text", negative)):
        if rows is not None and len(rows) > config.text_length:
            raise ToprovarError(
                f"{file.path}: {what} of run {name} has {len(rows)} rows; cfg_uncond has {config.text_length}",
                MAKE_AGAIN,
            )
    passes = schedule.passes()
    ran = sum(f"{name}/bits/{step.index}" in file.shapes for step in passes)
    if not ran:
        raise ToprovarError(f"{file.path} has no array {name}/bits/0, the first bits of the run", MAKE_AGAIN)
    bits = [_bits(file, f"{name}/bits/{s.index}", (1, s.tokens, config.bits(s.is_semantic))) for s in passes[:ran]]
    inputs = ("text", *negatives)
    return StarRun(
        name=name,
        schedule=schedule,
        guidance=_guidance(file, name, settings, schedule),
        text=text,
        negative=negative,
        bits=bits,
        recorded=[array for array in file.names(name) if array not in inputs],
    )


def _schedule(file: ParityFile, settings: dict[str, Any]) -> VideoSchedule:
    sched = settings.get("sched")
    if not isinstance(sched, list) or not 0 < len(sched) <= MAX_ENTRIES or not all(map(_is_map, sched)):
        raise ToprovarError(
            f"{file.path}: meta.sched is {repr(sched)[:80]}; expected 1 to {MAX_ENTRIES} maps [t, h, w] with sides "
            f"from 1 to {MAX_MAP_SIDE}",
            MAKE_AGAIN,
        )
    if max(math.prod(entry) for entry in sched) > MAX_TOKENS:
        raise ToprovarError(
            f"{file.path}: meta.sched has a map of more than {MAX_TOKENS} tokens; expected no such map", MAKE_AGAIN
        )
    repetitions = []
    for key in ("image_rep", "video_rep"):
        value = settings.get(key)
        if value is None and key == "video_rep" and max(entry[0] for entry in sched) == 1:
            value = settings["image_rep"]  # an image alone
        if not isinstance(value, list) or not all(type(n) is int and 1 <= n <= MAX_REPETITIONS for n in value):
            raise ToprovarError(
                f"{file.path}: meta.{key} is {repr(value)[:80]}; expected numbers from 1 to {MAX_REPETITIONS}",
                MAKE_AGAIN,
            )
        repetitions.append(tuple(value))
    semantic = int(read_number(file, settings, "semantic_scales", 0, MAX_SCALES))
    entries = tuple((t, h, w) for t, h, w in sched)
    try:
        schedule = VideoSchedule(entries, repetitions[0], repetitions[1], semantic)
        if "detail_scale_min_tokens" in settings:
            check_detail_size(schedule, int(read_number(file, settings, "detail_scale_min_tokens", 0, MAX_TOKENS)))
    except ToprovarError as error:
        raise ToprovarError(f"{file.path}: {error.message}", MAKE_AGAIN) from None
    return schedule


def _is_map(entry: Any) -> bool:
    return isinstance(entry, list) and len(entry) == 3 and all(type(n) is int and 1 <= n <= MAX_MAP_SIDE for n in entry)


def _guidance(file: ParityFile, name: str, settings: dict[str, Any], schedule: VideoSchedule) -> Guidance:
    """Adaptive projected guidance where the settings have its threshold or share, else classic guidance."""
    lists = {}
    for key, lowest in (("scale", 0.0), ("tau", 1e-3)):
        value = settings.get(key)
        items = value if isinstance(value, list) and value else [value]
        items = items[: len(schedule.entries)]  # the reference takes longer lists
        numbers = [read_number(file, {key: item}, key, lowest, 1000) for item in items]
        lists[key] = schedule.per_pass(numbers, f"{file.path}: meta.{name}.{key}")
    projection = None
    if "norm_threshold" in settings or "eta" in settings:
        projection = Projection(
            norm_threshold=read_number(file, settings, "norm_threshold", 0, 1000, default=0.0),
            eta=read_number(file, settings, "eta", 0, 1000, default=0.0),
        )
    return Guidance(cfg=lists["scale"], tau=lists["tau"], top_p=0, projection=projection)


def _bits(file: ParityFile, name: str, shape: tuple[int, ...]) -> np.ndarray:
    bits = file.read(name)
    if bits.size != math.prod(shape) or bits.shape[-1:] != shape[-1:]:
        raise ToprovarError(
            f"{file.path}: array {name} has shape {list(bits.shape)}; expected {list(shape)}", MAKE_AGAIN
        )
    if not np.isin(bits, (0, 1)).all():
        raise ToprovarError(f"{file.path}: array {name} holds values other than 0 and 1", MAKE_AGAIN)
    return bits.reshape(shape).astype(np.uint8)


# -- repeating ---------------------------------------------------------------------------------------------------------


def observe_torch(model: InfinityStar, run: StarRun) -> Arrays:
    """The PyTorch loop, teacher-forced; what it computed under the names of the parity files."""
    import torch

    from toprovar.exporter.infinitystar.codes import latent_video
    from toprovar.exporter.infinitystar.generate import generate
    from toprovar.exporter.planned.loop import LoopOptions

    wanted = {array.partition("/")[0] for array in run.recorded}
    seen = expected_angles(run, model.config.head_width)

    def observe(name: str, where: int | str, tensor: Tensor) -> None:
        if name in wanted and name != "next":
            seen[f"{name}/{where}"] = tensor.numpy()
        if name == "logits":
            seen[f"prob/{where}"] = chances(tensor.numpy())

    negatives = None if run.negative is None else [torch.from_numpy(run.negative)]
    with torch.inference_mode():
        prompt = model.prompt([torch.from_numpy(run.text)], negatives, run.guided, observe)
    observe("in", "text", prompt.embedded)
    if f"block{model.config.depth - 1}/text" in seen:
        seen["blockN/text"] = seen[f"block{model.config.depth - 1}/text"]
    given = [torch.from_numpy(array) for array in run.bits]
    done = generate(
        model,
        prompt,
        run.schedule,
        run.guidance,
        given_bits=given,
        options=LoopOptions(scales=len(given), observe=observe),
    )
    seen["codes"] = recorded_part(latent_video(done.codes, run.schedule).numpy(), run)
    return seen


def chances(logits: np.ndarray) -> np.ndarray:
    """Of zero and one, [pairs, 2]. logits: [1, L, 2*bits]."""
    pairs = logits.reshape(-1, 2)
    chance = np.exp(pairs - pairs.max(-1, keepdims=True))
    return chance / chance.sum(-1, keepdims=True)


def expected_angles(run: StarRun, head_width: int) -> Arrays:
    """Cosines and sines of the passes that ran."""
    found = {}
    for step in run.schedule.passes()[: len(run.bits)]:
        angles = map_angles(step, run.schedule.last, head_width)
        found[f"rope/{step.index}"] = np.stack([np.cos(angles), np.sin(angles)])
    return found


def recorded_part(latent: np.ndarray, run: StarRun) -> np.ndarray:
    """The frames of the clips that were begun. latent: [1, d, F, H, W]."""
    last = run.schedule.passes()[len(run.bits) - 1]
    return latent[:, :, : last.first_frame + last.frames]


def _compare_run(file: ParityFile, run: StarRun, backend: str, seen: Arrays) -> list[Row]:
    rows = []
    for name in run.recorded:
        kind, _, where = name.rpartition("/")
        expected = file.read(f"{run.name}/{name}")
        if kind == "bits" and backend == "torch":
            rows.append(Row(backend, run.name, name, "forced", note="drawn by the reference's own generator"))
        elif name in seen:
            found = seen[name]
            if where == "text" and expected.ndim == found.ndim and len(expected) < len(found):
                found = found[: len(expected)]  # the conditional rows alone
            row = compare_array(backend, run.name, name, found, expected, KINDS)
            if kind == "bits" and row.verdict == "pass":
                row = Row(backend, run.name, name, "forced", note="fed in through the noise")
            rows.append(row)
        else:
            known = any(pattern.fullmatch(name) for pattern, _ in KINDS)
            rows.append(absent(backend, run.name, name, known))
    return rows
