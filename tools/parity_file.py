"""Reads a parity file: a .npz with a reference model's weights, settings and what it computed.

Sizes are bounded and declared sizes are checked before anything is decompressed; nothing is unpickled. A file of any
size of the format is read: widths from the weights, schedule and settings from `meta`, runs from the names of arrays.
"""

from __future__ import annotations

import math
import zipfile
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import ValidationError

from toprovar.exporter.families import Family, recognise_family
from toprovar.runtime.errors import ToprovarError
from toprovar.runtime.guidance import Guidance, per_scale
from toprovar.runtime.json_files import parse_json

MAX_FILE_BYTES = 2**30
MAX_EXPANDED_BYTES = 4 * 2**30  # random weights and activations hardly compress; more than this is no parity file
MAX_META_CHARACTERS = 2**24
MAX_ENTRIES = 100_000
MAX_SCALES = 64
MAX_MAP_SIDE = 4096
MAX_TOKENS = 2**18  # the largest published schedule has 11 269
ARRAY_KINDS = "fiub"
NEGATIVE_ARRAYS = ("neg_text", "negative_text", "text_neg", "text_negative", "neg", "negative")
NEGATIVE_LENS = ("neg_lens", "negative_lens", "lens_neg", "lens_negative")
MAKE_AGAIN = "write the file again with the recorder of the reference model"

Schedule = tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class ParityFile:
    """An opened file. shapes: of every array but `meta`; read() decompresses one array at a time."""

    path: Path
    shapes: dict[str, tuple[int, ...]]
    meta: dict[str, Any]
    family: Family

    def read(self, name: str) -> np.ndarray:
        """An array in row-major order; every float as fp32.

        Raises: ToprovarError if the file has no such array or its bytes are damaged.
        """
        if name not in self.shapes:
            raise ToprovarError(f"{self.path} has no array {name}; it holds {len(self.shapes)} others", MAKE_AGAIN)
        return _load(self.path, [name])[name]

    def weights(self) -> dict[str, np.ndarray]:
        """Parameters under their checkpoint names."""
        arrays = _load(self.path, [name for name in self.shapes if name.startswith("w/")])
        return {name[2:]: array for name, array in arrays.items()}

    def names(self, prefix: str) -> list[str]:
        """Names of the arrays below `prefix/`, without it."""
        return [name[len(prefix) + 1 :] for name in self.shapes if name.startswith(f"{prefix}/")]


def open_parity_file(path: Path) -> ParityFile:
    """Checks the container, every array's header and `meta`; reads no array.

    Raises: ToprovarError for the first fault: missing, too large, no zip, damaged, an object array, no usable meta,
            weights of no known family.
    """
    shapes = _headers(path)
    if "meta" not in shapes:
        raise ToprovarError(f"{path} has no entry meta; found {len(shapes)} arrays, none with the settings", MAKE_AGAIN)
    meta = _meta(path)
    del shapes["meta"]
    weights = {name[2:]: shape for name, shape in shapes.items() if name.startswith("w/")}
    if not weights:
        raise ToprovarError(
            f"{path} holds no weights: none of its {len(shapes)} arrays is named w/<parameter>", MAKE_AGAIN
        )
    return ParityFile(path, shapes, meta, recognise_family(weights, str(path)))


def _damaged(path: Path, what: str) -> ToprovarError:
    return ToprovarError(f"{path} is damaged: {what}", "copy the file again")


def _headers(path: Path) -> dict[str, tuple[int, ...]]:
    """{array: shape}, read from the headers inside the zip; refuses what is not plainly an array of numbers."""
    try:
        size = path.stat().st_size
        if size > MAX_FILE_BYTES:
            raise ToprovarError(f"{path} has {size} bytes; expected at most {MAX_FILE_BYTES} for a parity file")
        if path.is_dir():
            raise ToprovarError(f"{path} is a folder; expected a parity file (.npz)", "name the file inside it")
        with zipfile.ZipFile(path) as archive:
            return _headers_in(path, archive)
    except FileNotFoundError:
        raise ToprovarError(f"{path} does not exist", "check the path") from None
    except zipfile.BadZipFile as error:
        if path.stat().st_size == 0:
            raise ToprovarError(f"{path} is empty; expected a parity file (.npz)", "copy the file again") from None
        raise ToprovarError(
            f"{path} is no readable .npz: {str(error).lower()}",
            "copy the file again, or check that it is the right one",
        ) from None
    except OSError as error:
        raise ToprovarError(f"{path} cannot be read: {error.strerror or error}", "check its permissions") from None


def _headers_in(path: Path, archive: zipfile.ZipFile) -> dict[str, tuple[int, ...]]:
    entries = archive.infolist()
    if len(entries) > MAX_ENTRIES:
        raise ToprovarError(f"{path} has {len(entries)} entries; expected at most {MAX_ENTRIES}", MAKE_AGAIN)
    expanded = sum(entry.file_size for entry in entries)
    if expanded > MAX_EXPANDED_BYTES:
        raise ToprovarError(
            f"{path} expands to {expanded} bytes; expected at most {MAX_EXPANDED_BYTES}", "split the runs over files"
        )
    shapes: dict[str, tuple[int, ...]] = {}
    for entry in entries:
        name = entry.filename.removesuffix(".npy")
        if name in shapes or name == entry.filename:
            fault = "stands twice in the file" if name in shapes else "is no .npy array"
            raise ToprovarError(f"{path}: entry {entry.filename} {fault}", MAKE_AGAIN)
        shape, dtype, header_bytes = _header(path, archive, entry)
        wanted = "U" if name == "meta" else ARRAY_KINDS
        if dtype.kind not in wanted or (name == "meta" and math.prod(shape) != 1):
            expected = "one JSON string" if name == "meta" else "floats, integers or booleans"
            raise ToprovarError(f"{path}: array {name} holds {list(shape)} of {dtype}; expected {expected}", MAKE_AGAIN)
        declared = math.prod(shape) * dtype.itemsize
        if declared != entry.file_size - header_bytes:
            raise _damaged(
                path,
                f"array {name} {list(shape)} needs {declared} bytes, the entry has {entry.file_size - header_bytes}",
            )
        shapes[name] = shape
    return shapes


def _header(path: Path, archive: zipfile.ZipFile, entry: zipfile.ZipInfo) -> tuple[tuple[int, ...], np.dtype[Any], int]:
    """Shape, dtype and header size of one entry."""
    try:
        with archive.open(entry) as file:
            version = np.lib.format.read_magic(file)
            read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
            shape, _, dtype = read(file)
            return shape, dtype, file.tell()
    except (ValueError, RuntimeError, NotImplementedError, EOFError, zlib.error, zipfile.BadZipFile) as error:
        raise _damaged(path, f"entry {entry.filename}: {str(error).splitlines()[0].lower()}") from None


def _load(path: Path, names: list[str]) -> dict[str, np.ndarray]:
    """Arrays by name, row-major; every float as fp32."""
    arrays, name = {}, "(directory)"
    try:
        with np.load(path, allow_pickle=False) as archive:
            for name in names:
                array = np.asarray(archive[name])
                arrays[name] = np.ascontiguousarray(array, np.float32 if array.dtype.kind == "f" else array.dtype)
        return arrays
    except (ValueError, RuntimeError, NotImplementedError, EOFError, OSError, zlib.error, zipfile.BadZipFile) as error:
        raise _damaged(path, f"array {name}: {str(error).splitlines()[0].lower()}") from None


def _meta(path: Path) -> dict[str, Any]:
    text = str(_load(path, ["meta"])["meta"].reshape(()))
    if len(text) > MAX_META_CHARACTERS:
        raise ToprovarError(f"{path}: meta has {len(text)} characters; expected at most {MAX_META_CHARACTERS}")
    meta = parse_json(text, f"{path}: meta")
    if not isinstance(meta, dict):
        raise ToprovarError(f"{path}: meta is a JSON {type(meta).__name__}; expected an object", MAKE_AGAIN)
    return meta


# -- runs of the transformer -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class RecordedRun:
    """Inputs and settings of one run.

    scales:   how many of the schedule's scales ran
    text:     per image its rows [T_b, text width]; `negative` likewise, or None for the learned unconditional rows
    bits:     per scale that ran [B, L, bits] uint8
    recorded: names of the arrays to compare, without the run's prefix
    """

    name: str
    schedule: Schedule
    scales: int
    guidance: Guidance
    text: list[np.ndarray]
    negative: list[np.ndarray] | None
    bits: list[np.ndarray]
    recorded: list[str]

    @property
    def images(self) -> int:
        return len(self.text)

    @property
    def is_guided(self) -> bool:
        return self.guidance.uses_unconditional_row

    def unconditional(self, learned: np.ndarray) -> list[np.ndarray]:
        """Text of the unconditional rows; none without guidance. learned: `cfg_uncond`, whose first T_b rows count."""
        if not self.is_guided:
            return []
        return self.negative if self.negative is not None else [learned[: len(rows)] for rows in self.text]


def runs_in(file: ParityFile, asked: list[str] | None) -> list[str]:
    """Names of the runs to compare: those asked for, or every run whose arrays the file holds.

    Raises: ToprovarError if an asked run is unknown or its arrays were left out, or if there is none at all.
    """
    described = [name for name, value in file.meta.items() if isinstance(value, dict) and "lens" in value]
    present = [name for name in described if file.names(name)]
    for name in asked or []:
        if name not in described:
            raise ToprovarError(
                f"{file.path} describes no run {name}; it describes {', '.join(described) or 'none'}",
                "pass one of them",
            )
        if name not in present:
            raise ToprovarError(
                f"{file.path} describes run {name} in its meta, but holds no array of it (runs with arrays: "
                f"{', '.join(present) or 'none'})",
                "pass a run that has arrays, or the larger file with all of them",
            )
    if not present:
        raise ToprovarError(f"{file.path} holds no run: no entry of its meta has lens and arrays", MAKE_AGAIN)
    return list(asked) if asked else present


class _Settings:
    """The dictionary of one run, with messages that name the place."""

    def __init__(self, file: ParityFile, run: str) -> None:
        self.place = f"{file.path}: meta.{run}"
        self.values: dict[str, Any] = file.meta[run]

    def fault(self, key: str, expected: str) -> ToprovarError:
        found = repr(self.values.get(key))
        return ToprovarError(f"{self.place}.{key} is {found[:80]}; expected {expected}", MAKE_AGAIN)

    def numbers(self, key: str, scales: int, ran: int) -> tuple[float, ...]:
        """One number, one per scale, or one per scale that ran."""
        if key not in self.values:
            raise ToprovarError(f"{self.place} has no {key}", MAKE_AGAIN)
        value = self.values[key]
        items = value if isinstance(value, list) else [value]
        if not items or not all(isinstance(v, int | float) and not isinstance(v, bool) for v in items):
            raise self.fault(key, "numbers, one per scale")
        if len(items) == ran < scales and ran > 1:
            items = items + items[-1:] * (scales - ran)
        return per_scale(tuple(float(v) for v in items), scales, f"{self.place}.{key}")

    def whole(self, key: str, default: list[int] | None, lowest: int, highest: int) -> list[int]:
        """A list of whole numbers, or one, inside bounds."""
        value: Any = self.values.get(key, default)
        items: list[int] = value if isinstance(value, list) else [value]
        if not items or not all(type(v) is int and lowest <= v <= highest for v in items):
            raise self.fault(key, f"whole numbers from {lowest} to {highest}")
        return items


def schedule_of(file: ParityFile, value: Any, place: str) -> Schedule:
    """A schedule of (h, w) or (t, h, w) entries with t = 1."""
    fault = ToprovarError(
        f"{file.path}: {place} is {repr(value)[:80]}; expected up to {MAX_SCALES} maps [h, w] or [1, h, w], sides 1 to "
        f"{MAX_MAP_SIDE}",
        MAKE_AGAIN,
    )
    if not isinstance(value, list) or not 0 < len(value) <= MAX_SCALES:
        raise fault
    maps = []
    for entry in value:
        if not isinstance(entry, list) or not all(type(n) is int and 1 <= n <= MAX_MAP_SIDE for n in entry):
            raise fault
        if len(entry) not in (2, 3) or (len(entry) == 3 and entry[0] != 1):
            raise fault
        maps.append((entry[-2], entry[-1]))
    total = sum(h * w for h, w in maps)
    if total > MAX_TOKENS:
        raise ToprovarError(f"{file.path}: {place} has {total} tokens; expected at most {MAX_TOKENS}", MAKE_AGAIN)
    return tuple(maps)


def read_run(file: ParityFile, name: str, depth: int, bits: int, text_width: int, text_length: int) -> RecordedRun:
    """Reads one run and checks it against the model's sizes.

    Raises: ToprovarError naming the key or array that is missing or does not fit.
    """
    settings = _Settings(file, name)
    own = "sched" in settings.values
    schedule = schedule_of(
        file, settings.values.get("sched", file.meta.get("sched")), f"meta.{name}.sched" if own else "meta.sched"
    )
    scales = settings.whole("scales_run", [len(schedule)], 1, len(schedule))[0]
    # 1 in an insertion list is read by the reference and has no effect
    insertion = tuple(j for j in settings.whole("insertion", [0], -depth, 1) if j != 1)
    cut = settings.values.get("top_p", 0.0)
    cfg, tau = (settings.numbers(key, len(schedule), scales) for key in ("cfg", "tau"))
    try:
        guidance = Guidance(cfg=cfg, tau=tau, top_p=cut or 0.0, insertion=insertion)
    except ValidationError as error:
        first = error.errors()[0]
        raise settings.fault(str(first["loc"][0]), first["msg"].lower()) from None
    lens = settings.whole("lens", None, 1, text_length)
    text_name, text = _text(file, settings, name, ("text",), text_width)
    if text is None:
        raise ToprovarError(f"{file.path} has no array {name}/text, the text rows of the run", MAKE_AGAIN)
    negative_name, rows = _text(file, settings, name, NEGATIVE_ARRAYS, text_width)
    negative = None
    if rows is not None:
        negative_lens, place = _negative_lens(file, settings, rows, lens, negative_name)
        if len(negative_lens) != len(lens):
            raise ToprovarError(f"{place} gives {len(negative_lens)} prompts; the run has {len(lens)}", MAKE_AGAIN)
        negative = _split(file, negative_name, rows, negative_lens, place)
    return RecordedRun(
        name=name,
        schedule=schedule,
        scales=scales,
        guidance=guidance,
        text=_split(file, text_name, text, lens, f"meta.{name}.lens"),
        negative=negative,
        bits=[_bits(file, name, s, (len(lens), math.prod(schedule[s]), bits)) for s in range(scales)],
        recorded=[array for array in file.names(name) if f"{name}/{array}" not in (text_name, negative_name)],
    )


def _text(
    file: ParityFile, settings: _Settings, run: str, keys: tuple[str, ...], width: int
) -> tuple[str, np.ndarray | None]:
    """(array name, rows [sum of lens, width]): under the run's own name, or where its settings say it lies."""
    for key in keys:
        name, alias = f"{run}/{key}", settings.values.get(key)
        if name not in file.shapes and isinstance(alias, str):
            name = alias
        if name in file.shapes:
            rows = file.read(name)
            if rows.ndim == 3 and rows.shape[0] == 1:
                rows = rows[0]
            if rows.ndim != 2 or rows.shape[1] != width or rows.dtype.kind != "f":
                raise ToprovarError(
                    f"{file.path}: array {name} is {rows.dtype}{list(rows.shape)}; expected float text rows of width "
                    f"{width}",
                    MAKE_AGAIN,
                )
            return name, rows
        if isinstance(alias, str):
            raise ToprovarError(f"{settings.place}.{key} names array {alias}, which the file does not hold", MAKE_AGAIN)
    return "", None


def _negative_lens(
    file: ParityFile, settings: _Settings, rows: np.ndarray, lens: list[int], name: str
) -> tuple[list[int], str]:
    for key in NEGATIVE_LENS:
        if key in settings.values:
            return settings.whole(key, None, 1, len(rows)), f"{settings.place}.{key}"
    if len(lens) == 1:
        return [len(rows)], name
    if sum(lens) == len(rows):
        return lens, name
    raise ToprovarError(
        f"{settings.place} has no {NEGATIVE_LENS[0]}; {name} has {len(rows)} rows for {len(lens)} prompts", MAKE_AGAIN
    )


def _split(file: ParityFile, name: str, rows: np.ndarray, lens: list[int], place: str) -> list[np.ndarray]:
    if sum(lens) != len(rows):
        raise ToprovarError(
            f"{file.path}: {name} has {len(rows)} rows; {place} is {lens}, which sums to {sum(lens)}", MAKE_AGAIN
        )
    return np.split(rows, np.cumsum(lens)[:-1])


def _bits(file: ParityFile, run: str, scale: int, shape: tuple[int, ...]) -> np.ndarray:
    name = f"{run}/bits/{scale}"
    bits = file.read(name)
    if bits.shape != shape and bits.size == math.prod(shape) and bits.shape[0] == shape[0]:
        bits = bits.reshape(shape)  # [B, h, w, bits]
    if bits.shape != shape:
        raise ToprovarError(
            f"{file.path}: array {name} has shape {list(bits.shape)}; expected {list(shape)}", MAKE_AGAIN
        )
    if not np.isin(bits, (0, 1)).all():
        raise ToprovarError(f"{file.path}: array {name} holds values other than 0 and 1", MAKE_AGAIN)
    return bits.astype(np.uint8)
