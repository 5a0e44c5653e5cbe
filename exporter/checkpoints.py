"""Open a checkpoint in any of its published forms as one lazy, read-only mapping of tensors.

Forms: a safetensors file, a torch file (zip, or the older form before it), shards named by an index JSON, or a folder
that holds exactly one of these. Nothing pickled is ever executed, no file is written, and every way in which a file
can be damaged has a message of its own.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import re
import stat
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath, PureWindowsPath
from types import MappingProxyType
from typing import TYPE_CHECKING

from toprovar.exporter.checkpoint_file import (
    COPY_AGAIN,
    MAX_HEADER_BYTES,
    Contents,
    Entry,
    first_line,
    listed,
    path_status,
    readable_size,
    strict_json,
    unreadable,
)
from toprovar.exporter.int8_rows import ROW_SCALE_SUFFIX, dequantise_rows
from toprovar.exporter.mapped_pages import release_pages
from toprovar.exporter.safetensors_file import open_safetensors
from toprovar.exporter.torch_file import has_torch_magic, open_torch
from toprovar.runtime.errors import EnvironmentFault, ToprovarError
from toprovar.runtime.json_files import DuplicateKeyError

if TYPE_CHECKING:
    import torch

TORCH_SUFFIXES = (".pth", ".pt", ".bin")
CHECKPOINT_SUFFIXES = (".safetensors", *TORCH_SUFFIXES)
INDEX_SUFFIXES = tuple(suffix + ".index.json" for suffix in CHECKPOINT_SUFFIXES)


class LazyTensors(Mapping[str, "torch.Tensor"]):
    """Tensor name -> tensor, in checkpoint order; read on access and not kept.

    Tensors are views of a private memory map: they cost no memory until touched, and writing to one never reaches the
    file (but is seen by the next access of that name: clone first). Int8 rows are dequantised anew on each access.
    """

    def __init__(self, entries: Mapping[str, Entry]) -> None:
        self._entries = dict(entries)

    def __getitem__(self, name: str) -> torch.Tensor:
        return self._entries[name].read()

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, name: object) -> bool:
        return name in self._entries

    def entry(self, name: str) -> Entry:
        """Where a tensor lies and how it is read."""
        return self._entries[name]

    def shape_of(self, name: str) -> tuple[int, ...]:
        """Without reading the tensor."""
        return self._entries[name].shape

    def converted(self, name: str, dtype: torch.dtype) -> torch.Tensor:
        """A tensor in a number format: the mapped bytes themselves where the file has it, else a copy, beside which the
        file's bytes do not stay in memory."""
        tensor = self[name]
        copy = tensor.to(dtype)
        if self._entries[name].is_mapped and copy.data_ptr() != tensor.data_ptr():
            release_pages(tensor)
        return copy

    def file_of(self, name: str) -> Path:
        """The file, a shard where there are several, that holds this tensor."""
        return self._entries[name].file

    def __repr__(self) -> str:
        return f"LazyTensors({len(self)} tensors)"


@dataclass(frozen=True)
class Checkpoint:
    """An opened checkpoint.

    path:     as it was asked for.
    format:   "safetensors", "sharded-safetensors", "torch" or "sharded-torch".
    files:    every file that was read; the index comes before its shards.
    tensors:  tensor name -> tensor, lazy.
    shapes:   tensor name -> shape, in checkpoint order; no data is read for it.
    dtypes:   tensor name -> dtype as `tensors` gives it (float32 for int8 rows).
    metadata: the text pairs of a safetensors header; empty for other forms.
    notes:    what was unwrapped, left out or read at once; one line each, for the log.
    changes:  what was done to the weights since, such as merged adapters; part of the digest.
    """

    path: Path
    format: str
    files: tuple[Path, ...]
    tensors: LazyTensors
    shapes: Mapping[str, tuple[int, ...]]
    dtypes: Mapping[str, torch.dtype]
    metadata: Mapping[str, str]
    notes: tuple[str, ...]
    changes: tuple[str, ...] = ()

    def digest(self) -> str:
        """SHA-256 in hex: that of the file, or of the lines `<digest>  <name>` over several files sorted by name.

        So it can be checked with `sha256sum FILE`, or `sha256sum INDEX SHARD... | sha256sum`. Where the weights were
        changed since, that of the lines of this digest and of the changes.
        """
        digest = self._digest_of_files()
        if self.changes:
            digest = hashlib.sha256("\n".join((digest, *self.changes)).encode()).hexdigest()
        return digest

    def _digest_of_files(self) -> str:
        if len(self.files) == 1:
            return _file_digest(self.files[0])
        root = self.files[0].parent
        names = sorted((file.relative_to(root).as_posix(), file) for file in self.files)
        lines = "".join(f"{_file_digest(file)}  {name}\n" for name, file in names)
        return hashlib.sha256(lines.encode()).hexdigest()


def open_checkpoint(path: str | os.PathLike[str], part: str = "transformer") -> Checkpoint:
    """Open a checkpoint file, index or folder; tensor data is mapped, not read.

    part:   "transformer" or "tokenizer": which of them to take from a training checkpoint that holds both
    path:   a `.safetensors`, `.pth`, `.pt` or `.bin` file, a `*.index.json`, or a folder that holds just one of these.
    Raises: ToprovarError that names the file, what was found and what was expected; EnvironmentFault without PyTorch.
    """
    _require_torch()
    asked = Path(path).expanduser()
    file = asked
    if stat.S_ISDIR(path_status(asked).st_mode):
        file = _only_candidate(asked)
    if file.name.endswith(".json"):
        return _open_index(asked, file)
    _refuse_lone_shard(file)
    contents = _open_file(file, part)
    kind = "safetensors" if file.suffix == ".safetensors" else "torch"
    return _checkpoint(asked, kind, (file,), contents)


def check_finite(tensors: Mapping[str, torch.Tensor], what: str = "") -> None:
    """Read every floating tensor and refuse NaN and infinity.

    tensors: tensor name -> tensor; integers and booleans are passed over.
    what:    how the message names their source; a checkpoint's own mapping names its file.
    Raises:  ToprovarError that names the first such tensor, how many of its values aren't finite, and the first one.
    """
    import torch

    for name, tensor in tensors.items():
        if not (tensor.is_floating_point() or tensor.is_complex()):
            continue
        values = tensor.to(torch.float32) if tensor.dtype.itemsize == 1 else tensor  # 8-bit floats have no isfinite
        if torch.isfinite(values.sum()):
            continue  # a sum passes NaN and infinity on, and needs no memory; it may also overflow, so look closer
        finite = torch.isfinite(values)
        if bool(finite.all()):
            continue
        source = what or (str(tensors.file_of(name)) if isinstance(tensors, LazyTensors) else "the checkpoint")
        bad = int(finite.numel() - finite.sum())
        nan = int(torch.isnan(values).sum())
        first = tuple(int(i) for i in (~finite).nonzero()[0])
        raise ToprovarError(
            f"{source}: tensor {name} isn't finite: found {bad} of {finite.numel()} values NaN or infinite "
            f"({nan} NaN, {bad - nan} infinite, first at {list(first)}); expected none",
            "the checkpoint was saved after training diverged or in too narrow a format; use an earlier or wider one",
        )


def _file_digest(path: Path) -> str:
    digest = hashlib.sha256()
    try:
        with path.open("rb") as stream:
            while block := stream.read(1 << 20):
                digest.update(block)
    except OSError as fault:
        raise unreadable(path, fault) from None
    return digest.hexdigest()


def _only_candidate(folder: Path) -> Path:
    """The one checkpoint file or index in a folder; the shards that an index names don't count beside it."""
    try:
        names = sorted(name for name in os.listdir(folder) if not name.startswith("."))
    except OSError as fault:
        raise unreadable(folder, fault) from None
    indexes = [name for name in names if name.endswith(INDEX_SUFFIXES)]
    loose = [name for name in names if name.endswith(CHECKPOINT_SUFFIXES) and not (folder / name).is_dir()]
    if len(indexes) + len(loose) > 1:
        shards = {shard for name in indexes for shard in _read_index(folder / name).values()}
        loose = [name for name in loose if name not in shards]
    candidates = indexes + loose
    if not candidates:
        raise ToprovarError(
            f"folder {folder} holds no checkpoint: found {listed(names)}; "
            f"expected one file ending in {', '.join(CHECKPOINT_SUFFIXES)} or an index ({INDEX_SUFFIXES[0]})",
            "pass the folder that holds the weights, or the file itself",
        )
    parts = [name for name in loose if re.search(r"-\d{5}-of-\d{5}\.", name)]
    if parts and not indexes and len(parts) == len(loose):
        raise ToprovarError(
            f"folder {folder} holds shards without their index: found {listed(parts)}; "
            f"expected a file ending in {Path(parts[0]).suffix}.index.json",
            "copy the index JSON from where the shards come from",
        )
    if len(candidates) > 1:
        raise ToprovarError(
            f"folder {folder} holds {len(candidates)} checkpoints: found {listed(candidates)}; expected one",
            f"pass one of them:  {folder / candidates[0]}",
        )
    return folder / candidates[0]


_SHARD = re.compile(r"(.*)-(\d{5})-of-(\d{5})(\.\w+)")


def _refuse_lone_shard(file: Path) -> None:
    match = _SHARD.fullmatch(file.name)
    if match and int(match[3]) > 1 and file.exists():
        raise ToprovarError(
            f"checkpoint {file} is one of several shards: found shard {int(match[2])} of {int(match[3])}; "
            "expected the whole checkpoint",
            f"pass the index, {match[1]}{match[4]}.index.json, or the folder",
        )


def _refuse_gap(index: Path, shards: list[str]) -> None:
    """An index that lost some of its lines names fewer shards than their numbers promise."""
    numbers: dict[tuple[str, int, str], set[int]] = {}
    for shard in shards:
        if match := _SHARD.fullmatch(shard):
            numbers.setdefault((match[1], int(match[3]), match[4]), set()).add(int(match[2]))
    for (stem, count, suffix), found in numbers.items():
        missing = sorted(set(range(1, count + 1)) - found)
        if missing:
            raise ToprovarError(
                f"index {index} leaves shard {missing[0]} of {count} out: found {len(found)} of {count} shards named; "
                f"expected {stem}-{missing[0]:05d}-of-{count:05d}{suffix} too",
                "download the index again; it does not belong to these shards",
            )


def _open_file(path: Path, part: str | None) -> Contents:
    """One checkpoint file, told by its name and refused if its first bytes say otherwise."""
    size = readable_size(path)
    if path.suffix not in CHECKPOINT_SUFFIXES:
        raise ToprovarError(
            f"checkpoint {path} has an unknown ending: found {path.suffix or 'none'!r}; "
            f"expected {', '.join(CHECKPOINT_SUFFIXES)}, an index JSON or a folder",
            "rename the file if it is one of these",
        )
    with path.open("rb") as stream:
        head = stream.read(64)
    if head.startswith(b"version https://git-lfs"):
        raise ToprovarError(
            f"checkpoint {path} is a pointer to the weights, not the weights: found a Git LFS pointer of {size} bytes",
            "fetch the file itself:  git lfs pull",
        )
    if path.suffix == ".safetensors":
        if has_torch_magic(head):
            raise ToprovarError(
                f"checkpoint {path} holds a torch file: found magic {head[:4]!r}; expected a safetensors header",
                f"rename it to {path.with_suffix('.pth').name}",
            )
        if re.match(rb"\x80[\x02-\x05]", head) and head[8:9] != b"{":
            raise ToprovarError(
                f"checkpoint {path} is a plain pickle, which is never loaded: found {head[:8]!r}; expected a "
                "safetensors header",
                "save the tensors with safetensors.torch.save_file, where the pickle is trusted",
            )
        return open_safetensors(path, size)
    return open_torch(path, size, head, part=part)


def _read_index(path: Path) -> dict[str, str]:
    """Tensor name -> shard name, a relative path inside the index's folder with forward slashes."""
    size = readable_size(path)
    if size > MAX_HEADER_BYTES:
        raise ToprovarError(
            f"index {path} is too large: found {size} bytes; expected at most {MAX_HEADER_BYTES}", COPY_AGAIN
        )
    raw = path.read_bytes()
    try:
        index = strict_json(raw)
    except DuplicateKeyError as fault:
        raise ToprovarError(f"index {path} names {fault.key!r} twice; expected every key once", COPY_AGAIN) from None
    except (ValueError, RecursionError) as fault:
        raise ToprovarError(f"index {path} isn't JSON: found {raw[:24]!r} ({first_line(fault)})", COPY_AGAIN) from None
    shards = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(shards, dict) or not shards or not all(isinstance(shard, str) for shard in shards.values()):
        raise ToprovarError(
            f"index {path} names no shards: found {listed(list(index)) if isinstance(index, dict) else 'no object'}; "
            "expected a 'weight_map' of tensor names to file names",
            "pass the *.index.json that lies beside the shards",
        )
    for name, shard in shards.items():
        _check_shard_name(path, name, shard)
    return shards


def _check_shard_name(index: Path, name: str, shard: str) -> None:
    posix, windows = PurePosixPath(shard), PureWindowsPath(shard)
    inside = not (posix.is_absolute() or windows.drive or windows.root or ".." in windows.parts)
    if not inside:
        raise ToprovarError(
            f"index {index} leaves its folder: found shard {shard!r} for {name}; expected a name inside the folder",
            "put the shards beside the index and name them without a path",
        )
    if "\\" in shard or "\0" in shard or posix.suffix not in CHECKPOINT_SUFFIXES or posix.as_posix() != shard:
        raise ToprovarError(
            f"index {index} names an odd shard: found {shard!r} for {name}; expected a relative path with forward "
            f"slashes ending in {', '.join(CHECKPOINT_SUFFIXES)}",
            "correct the shard's name in the index",
        )


def _open_index(asked: Path, index: Path) -> Checkpoint:
    """Join the shards that an index names, after checking that both agree about every key."""
    wanted = _read_index(index)
    shards = list(dict.fromkeys(wanted.values()))
    kinds = {"safetensors" if shard.endswith(".safetensors") else "torch" for shard in shards}
    if len(kinds) > 1:
        raise ToprovarError(
            f"index {index} mixes formats: found {listed(shards)}; expected safetensors or torch shards only",
            "convert the shards to one format",
        )
    _refuse_gap(index, shards)
    for shard in shards:
        if not (index.parent / shard).is_file() and not (index.parent / shard).is_symlink():
            count = sum(other == shard for other in wanted.values())
            raise ToprovarError(
                f"shard {index.parent / shard} is missing: index {index} expects {len(shards)} shards, "
                f"{count} tensors in this one",
                "download the missing shard into the folder of the index",
            )
    opened = {shard: _open_file(index.parent / shard, None) for shard in shards}

    home: dict[str, str] = {}
    for shard, contents in opened.items():
        for name in contents.entries:
            if name in home:
                raise ToprovarError(
                    f"tensor {name} is in two shards of {index}: found it in {home[name]} and {shard}; expected one",
                    "download the shards again; they come from different checkpoints",
                )
            home[name] = shard
    for name, shard in wanted.items():
        if home.get(name) != shard:
            instead = f" (it is in {home[name]})" if name in home else ""
            raise ToprovarError(
                f"shard {index.parent / shard} lacks tensor {name}, which index {index} expects there{instead}: "
                f"found {listed(list(opened[shard].entries))}",
                "download index and shards again; they come from different checkpoints",
            )

    joined = Contents({name: opened[shard].entries[name] for name, shard in wanted.items()})
    for contents in opened.values():
        joined.notes += contents.notes
        for key, value in contents.metadata.items():
            joined.metadata.setdefault(key, value)
    if unnamed := [name for name in home if name not in wanted]:
        joined.notes.append(f"left out {len(unnamed)} tensors that {index.name} doesn't name: {listed(unnamed)}")
    files = (index, *(index.parent / shard for shard in shards))
    return _checkpoint(asked, f"sharded-{kinds.pop()}", files, joined)


def _checkpoint(asked: Path, kind: str, files: tuple[Path, ...], contents: Contents) -> Checkpoint:
    entries = _without_wrapper(_paired_rows(contents.entries), contents.notes)
    return Checkpoint(
        path=asked,
        format=kind,
        files=files,
        tensors=LazyTensors(entries),
        shapes=MappingProxyType({name: entry.shape for name, entry in entries.items()}),
        dtypes=MappingProxyType({name: entry.dtype for name, entry in entries.items()}),
        metadata=MappingProxyType(contents.metadata),
        notes=tuple(contents.notes),
    )


WRAPPERS = ("module.", "_orig_mod.", "_fsdp_wrapped_module.")


def _without_wrapper(entries: dict[str, Entry], notes: list[str]) -> dict[str, Entry]:
    """Without the prefix that a training wrapper or compiler put before every name."""
    for prefix in WRAPPERS * 2:  # one may stand inside another
        if entries and all(name.startswith(prefix) for name in entries):
            notes.append(f"took {prefix!r} off every name")
            entries = {name.removeprefix(prefix): entry for name, entry in entries.items()}
    return entries


def _paired_rows(entries: Mapping[str, Entry]) -> dict[str, Entry]:
    """Entries with every int8 tensor and its `.row_scale` joined to one float32 entry."""
    import torch

    joined = {}
    for name, entry in entries.items():
        if name.endswith(ROW_SCALE_SUFFIX):
            owner = entries.get(name.removesuffix(ROW_SCALE_SUFFIX))
            if owner is None or owner.dtype != torch.int8:
                found = f"one of {owner.dtype}" if owner else "none"
                raise ToprovarError(
                    f"{entry.file}: row scale {name} has no int8 tensor "
                    f"{name.removesuffix(ROW_SCALE_SUFFIX)} beside it: found {found}",
                    "save the int8 tensor and its scale together",
                )
            continue
        if entry.dtype == torch.int8:
            scale = entries.get(name + ROW_SCALE_SUFFIX)
            _check_pair(name, entry, scale)
            entry = Entry(entry.file, entry.shape, torch.float32, _dequantiser(name, entry, scale))
        joined[name] = entry
    return joined


def _check_pair(name: str, entry: Entry, scale: Entry | None) -> None:
    hint = "save the int8 tensor with its scale [rows] float32 under the same name + " + ROW_SCALE_SUFFIX
    if scale is None:
        raise ToprovarError(
            f"{entry.file}: int8 tensor {name} {entry.shape} has no scale: expected {name + ROW_SCALE_SUFFIX}", hint
        )
    rows = entry.shape[:1]
    if not rows or scale.shape != rows or str(scale.dtype) != "torch.float32":
        raise ToprovarError(
            f"{scale.file}: row scale {name + ROW_SCALE_SUFFIX} doesn't fit int8 tensor {name} {entry.shape}: "
            f"found {scale.dtype} {scale.shape}, expected torch.float32 {rows or '(rows,)'}",
            hint,
        )


def _dequantiser(name: str, entry: Entry, scale: Entry | None) -> Callable[[], torch.Tensor]:
    def read() -> torch.Tensor:
        assert scale is not None  # checked by _check_pair
        row_scale = scale.read()
        check_finite({name + ROW_SCALE_SUFFIX: row_scale}, str(scale.file))
        return dequantise_rows(entry.read(), row_scale)

    return read


def _require_torch() -> None:
    if importlib.util.find_spec("torch") is None:
        raise EnvironmentFault(
            "reading a checkpoint needs PyTorch, which isn't installed", "install it:  pip install 'toprovar[torch]'"
        )
