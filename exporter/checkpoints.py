"""Open a checkpoint in any of its published forms as one lazy, read-only mapping of tensors.

Forms: a safetensors file, a torch file (zip, or the older form before it), shards named by an index JSON, or a folder
that holds exactly one of these. Nothing pickled is ever executed, no file is written, and every way in which a file
can be damaged has a message of its own.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import math
import mmap
import os
import pickle
import re
import stat
import struct
import zipfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath, PureWindowsPath
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from toprovar.exporter.int8_rows import ROW_SCALE_SUFFIX, dequantise_rows
from toprovar.runtime.errors import EnvironmentFault, ToprovarError

if TYPE_CHECKING:
    import torch

MAX_HEADER_BYTES = 100_000_000  # safetensors header, index JSON, and the pickled record of a torch file
MAX_LISTED = 8

TORCH_SUFFIXES = (".pth", ".pt", ".bin")
CHECKPOINT_SUFFIXES = (".safetensors", *TORCH_SUFFIXES)
INDEX_SUFFIXES = tuple(suffix + ".index.json" for suffix in CHECKPOINT_SUFFIXES)

_COPY_AGAIN = "download or copy the file again and compare its size with the source"
_SAVE_TENSORS = "save the tensors alone, where the file is trusted:  torch.save(model.state_dict(), 'weights.pth')"

# safetensors dtype -> (name in torch, bytes per element); the 4- and 6-bit types have no torch dtype of their own.
_DTYPES = {
    "BOOL": ("bool", 1),
    "U8": ("uint8", 1),
    "I8": ("int8", 1),
    "F8_E4M3": ("float8_e4m3fn", 1),
    "F8_E5M2": ("float8_e5m2", 1),
    "I16": ("int16", 2),
    "U16": ("uint16", 2),
    "F16": ("float16", 2),
    "BF16": ("bfloat16", 2),
    "I32": ("int32", 4),
    "U32": ("uint32", 4),
    "F32": ("float32", 4),
    "I64": ("int64", 8),
    "U64": ("uint64", 8),
    "F64": ("float64", 8),
    "C64": ("complex64", 8),
}


@dataclass(frozen=True)
class _Entry:
    """One named tensor: where it lies, what it is, and how to read it."""

    file: Path
    shape: tuple[int, ...]
    dtype: torch.dtype
    read: Callable[[], torch.Tensor]


class LazyTensors(Mapping[str, "torch.Tensor"]):
    """Tensor name -> tensor, in checkpoint order; read on access and not kept.

    Tensors are views of a private memory map: they cost no memory until touched, and writing to one never reaches the
    file (but is seen by the next access of that name: clone first). Int8 rows are dequantised anew on each access.
    """

    def __init__(self, entries: Mapping[str, _Entry]) -> None:
        self._entries = dict(entries)

    def __getitem__(self, name: str) -> torch.Tensor:
        return self._entries[name].read()

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, name: object) -> bool:
        return name in self._entries

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
    """

    path: Path
    format: str
    files: tuple[Path, ...]
    tensors: LazyTensors
    shapes: Mapping[str, tuple[int, ...]]
    dtypes: Mapping[str, torch.dtype]
    metadata: Mapping[str, str]
    notes: tuple[str, ...]

    def digest(self) -> str:
        """SHA-256 in hex: that of the file, or of the lines `<digest>  <name>` over several files sorted by name.

        So it can be checked with `sha256sum FILE`, or `sha256sum INDEX SHARD... | sha256sum`.
        """
        if len(self.files) == 1:
            return _file_digest(self.files[0])
        root = self.files[0].parent
        names = sorted((file.relative_to(root).as_posix(), file) for file in self.files)
        lines = "".join(f"{_file_digest(file)}  {name}\n" for name, file in names)
        return hashlib.sha256(lines.encode()).hexdigest()


@dataclass
class _Contents:
    """What one file holds, before shards are joined and int8 rows paired."""

    entries: dict[str, _Entry]
    metadata: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


def open_checkpoint(path: str | os.PathLike[str]) -> Checkpoint:
    """Open a checkpoint file, index or folder; tensor data is mapped, not read.

    path:   a `.safetensors`, `.pth`, `.pt` or `.bin` file, a `*.index.json`, or a folder that holds just one of these.
    Raises: ToprovarError that names the file, what was found and what was expected; EnvironmentFault without PyTorch.
    """
    _require_torch()
    asked = Path(path).expanduser()
    file = asked
    if stat.S_ISDIR(_stat(asked).st_mode):
        file = _only_candidate(asked)
    if file.name.endswith(".json"):
        return _open_index(asked, file)
    contents = _open_file(file, unwrap=True)
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


def _stat(path: Path) -> os.stat_result:
    """Status of an existing file or folder; distinct errors for every way of not being one."""
    if "\0" in str(path):
        raise ToprovarError(f"checkpoint path {str(path)!r} holds a NUL character", "pass the path of a file or folder")
    try:
        status = path.stat()
    except (FileNotFoundError, NotADirectoryError):
        if path.is_symlink():
            raise ToprovarError(
                f"checkpoint {path} is a symbolic link to {os.readlink(path)}, which doesn't exist",
                "restore the link's target, or pass the file itself",
            ) from None
        hint = "check the spelling; relative paths start at the current folder"
        if os.sep != "\\" and "\\" in str(path):
            hint = "write the path with forward slashes: a backslash is part of a name on this system"
        raise ToprovarError(f"checkpoint {path} doesn't exist", hint) from None
    except OSError as fault:
        raise _unreadable(path, fault) from None
    if not (stat.S_ISREG(status.st_mode) or stat.S_ISDIR(status.st_mode)):
        raise ToprovarError(
            f"checkpoint {path} is neither a file nor a folder: found a pipe, socket or device",
            "write the data to a file first",
        )
    return status


def _unreadable(path: Path, fault: OSError) -> ToprovarError:
    if isinstance(fault, PermissionError):
        return ToprovarError(
            f"checkpoint {path} can't be read: permission denied",
            f"give this user the right to read it:  chmod u+r {path}  (and u+x on its folders)",
        )
    reason = (fault.strerror or str(fault)).lower()
    return ToprovarError(f"checkpoint {path} can't be read: {reason}", "check the path and the disk it lies on")


def _readable_size(path: Path) -> int:
    """Size in bytes of a file that can be opened and isn't empty."""
    if stat.S_ISDIR(_stat(path).st_mode):
        raise ToprovarError(
            f"checkpoint file {path} is a folder; expected a file", "pass a path to one checkpoint file"
        )
    try:
        with path.open("rb") as stream:
            size = stream.seek(0, os.SEEK_END)
    except OSError as fault:
        raise _unreadable(path, fault) from None
    if size == 0:
        raise ToprovarError(f"checkpoint {path} is empty: found 0 bytes", _COPY_AGAIN)
    return size


def _file_digest(path: Path) -> str:
    digest = hashlib.sha256()
    try:
        with path.open("rb") as stream:
            while block := stream.read(1 << 20):
                digest.update(block)
    except OSError as fault:
        raise _unreadable(path, fault) from None
    return digest.hexdigest()


def _only_candidate(folder: Path) -> Path:
    """The one checkpoint file or index in a folder; the shards that an index names don't count beside it."""
    try:
        names = sorted(name for name in os.listdir(folder) if not name.startswith("."))
    except OSError as fault:
        raise _unreadable(folder, fault) from None
    indexes = [name for name in names if name.endswith(INDEX_SUFFIXES)]
    loose = [name for name in names if name.endswith(CHECKPOINT_SUFFIXES) and not (folder / name).is_dir()]
    if len(indexes) + len(loose) > 1:
        shards = {shard for name in indexes for shard in _read_index(folder / name).values()}
        loose = [name for name in loose if name not in shards]
    candidates = indexes + loose
    if not candidates:
        raise ToprovarError(
            f"folder {folder} holds no checkpoint: found {_listed(names)}; "
            f"expected one file ending in {', '.join(CHECKPOINT_SUFFIXES)} or an index ({INDEX_SUFFIXES[0]})",
            "pass the folder that holds the weights, or the file itself",
        )
    parts = [name for name in loose if re.search(r"-\d{5}-of-\d{5}\.", name)]
    if parts and not indexes and len(parts) == len(loose):
        raise ToprovarError(
            f"folder {folder} holds shards without their index: found {_listed(parts)}; "
            f"expected a file ending in {Path(parts[0]).suffix}.index.json",
            "copy the index JSON from where the shards come from",
        )
    if len(candidates) > 1:
        raise ToprovarError(
            f"folder {folder} holds {len(candidates)} checkpoints: found {_listed(candidates)}; expected one",
            f"pass one of them:  {folder / candidates[0]}",
        )
    return folder / candidates[0]


def _listed(names: list[str]) -> str:
    more = f" and {len(names) - MAX_LISTED} more" if len(names) > MAX_LISTED else ""
    return (", ".join(names[:MAX_LISTED]) or "nothing") + more


def _open_file(path: Path, *, unwrap: bool) -> _Contents:
    """One checkpoint file, told by its name and refused if its first bytes say otherwise."""
    size = _readable_size(path)
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
        if head.startswith(b"PK\3\4") or _is_legacy_torch(head):
            raise ToprovarError(
                f"checkpoint {path} holds a torch file: found magic {head[:4]!r}; expected a safetensors header",
                f"rename it to {path.with_suffix('.pth').name}",
            )
        return _open_safetensors(path, size)
    if head.startswith(b"PK\3\4"):
        return _open_torch(path, size, unwrap=unwrap, record_sizes=_check_zip(path))
    if _is_legacy_torch(head):
        return _open_torch(path, size, unwrap=unwrap, record_sizes=None)
    raise _wrong_torch_magic(path, head)


def _open_safetensors(path: Path, size: int) -> _Contents:
    """Check the header against the file and give every tensor a reader; no data is read.

    Layout: 8 bytes little-endian header length, the header as JSON, the data without holes.
    """
    import torch

    header, data_start = _safetensors_header(path, size)
    metadata = header.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise _bad_header(path, "found a __metadata__ that isn't an object of texts")
    spans = {name: _span(path, name, fields) for name, fields in header.items()}
    _check_layout(path, {name: span[2:] for name, span in spans.items()}, size - data_start)
    if not spans:
        raise ToprovarError(
            f"checkpoint {path} holds no tensors: found an empty header", "pass the file with the weights"
        )

    mapped: list[torch.UntypedStorage] = []

    def bytes_of(begin: int, end: int) -> torch.Tensor:
        if not mapped:
            mapped.append(torch.UntypedStorage.from_file(os.fspath(path), False, size))
        part = mapped[0][data_start + begin : data_start + end]
        return torch.empty(0, dtype=torch.uint8).set_(part)  # [bytes], no copy

    def reader(shape: tuple[int, ...], dtype: torch.dtype, begin: int, end: int) -> Callable[[], torch.Tensor]:
        def read() -> torch.Tensor:
            if begin == end:
                return torch.empty(shape, dtype=dtype)
            raw = bytes_of(begin, end)
            if (data_start + begin) % dtype.itemsize:
                raw = raw.clone()  # a foreign writer did not align it
            return raw.view(dtype).view(shape)

        return read

    entries = {}
    for name, (code, shape, begin, end) in spans.items():
        dtype = getattr(torch, _DTYPES[code][0])
        entries[name] = _Entry(path, shape, dtype, reader(shape, dtype, begin, end))
    return _Contents(entries, metadata)


def _bad_header(path: Path, found: str) -> ToprovarError:
    return ToprovarError(f"checkpoint {path} has a bad safetensors header: {found}", _COPY_AGAIN)


def _safetensors_header(path: Path, size: int) -> tuple[dict[str, Any], int]:
    """(the header, where the data starts)."""
    if size < 8:
        raise ToprovarError(
            f"checkpoint {path} is truncated: found {size} bytes; expected at least the 8 of the header's length",
            _COPY_AGAIN,
        )
    with path.open("rb") as stream:
        (length,) = struct.unpack("<Q", stream.read(8))
        if length > MAX_HEADER_BYTES:
            raise _bad_header(path, f"found a length of {length} bytes; expected at most {MAX_HEADER_BYTES}")
        if length > size - 8:
            raise _bad_header(
                path, f"found a length of {length} bytes; expected at most the {size - 8} that follow it in the file"
            )
        raw = stream.read(length)
    try:
        header = json.loads(raw.decode("utf-8"), object_pairs_hook=_no_duplicates, parse_constant=_no_constant)
    except _DuplicateKeyError as fault:
        raise _bad_header(path, f"found key {fault.key!r} twice; expected every name once") from None
    except (ValueError, RecursionError) as fault:
        raise _bad_header(path, f"found {raw[:24]!r}; expected JSON ({_first_line(fault)})") from None
    if not isinstance(header, dict):
        raise _bad_header(path, f"found a JSON {type(header).__name__}; expected an object")
    return header, 8 + length


def _span(path: Path, name: str, fields: Any) -> tuple[str, tuple[int, ...], int, int]:
    """(dtype code, shape, begin, end) of one header entry, offsets relative to the data."""
    if not isinstance(fields, dict) or set(fields) != {"dtype", "shape", "data_offsets"}:
        raise _bad_header(path, f"found tensor {name!r} with {fields!r:.80}; expected dtype, shape and data_offsets")
    code, shape, offsets = fields["dtype"], fields["shape"], fields["data_offsets"]
    if not isinstance(code, str) or code not in _DTYPES:
        raise _bad_header(
            path, f"found tensor {name!r} with unknown dtype {code!r}; expected one of {', '.join(_DTYPES)}"
        )
    if not _is_sizes(shape):
        raise _bad_header(path, f"found tensor {name!r} with shape {shape!r:.80}; expected a list of sizes")
    if not _is_sizes(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise _bad_header(path, f"found tensor {name!r} at offsets {offsets!r:.80}; expected [begin, end]")
    begin, end = offsets
    expected = math.prod(shape) * _DTYPES[code][1]
    if end - begin != expected:
        raise _bad_header(
            path, f"found tensor {name!r} with {end - begin} bytes; expected {expected} for {code} {tuple(shape)}"
        )
    return code, tuple(shape), begin, end


def _is_sizes(value: Any) -> bool:
    return isinstance(value, list) and all(type(n) is int and 0 <= n < 2**63 for n in value)


def _check_layout(path: Path, spans: Mapping[str, tuple[int, ...]], data_bytes: int) -> None:
    """Tensors follow one another without overlap or hole, and end where the file does."""
    reached, before = 0, "the start of the data"
    for name, (begin, end) in sorted(spans.items(), key=lambda item: item[1]):
        if begin < reached:
            raise _bad_header(
                path, f"found tensor {name!r} at byte {begin}, overlapping {before} that ends at {reached}"
            )
        if begin > reached and end > data_bytes:
            raise _bad_header(
                path, f"found tensor {name!r} out of bounds at bytes {begin} to {end}; expected at most {data_bytes}"
            )
        if begin > reached:
            raise _bad_header(path, f"found a hole of {begin - reached} bytes before tensor {name!r}; expected none")
        reached, before = end, f"{name!r}"
    if reached > data_bytes:
        raise ToprovarError(
            f"checkpoint {path} is truncated: found {data_bytes} bytes of tensor data; expected {reached}", _COPY_AGAIN
        )
    if reached < data_bytes:
        raise ToprovarError(
            f"checkpoint {path} has {data_bytes - reached} trailing bytes: "
            f"found {data_bytes} bytes of tensor data; expected {reached}",
            _COPY_AGAIN,
        )


def _is_legacy_torch(head: bytes) -> bool:
    """The pickled magic number 0x1950a86a20f9469cfc6c that torch wrote before it wrote zip files."""
    return head.startswith(b"\x80") and b"\x8a\x0a\x6c\xfc\x9c\x46\xf9\x20\x6a\xa8\x50\x19" in head


def _wrong_torch_magic(path: Path, head: bytes) -> ToprovarError:
    if head.startswith(b"\x80"):
        return ToprovarError(
            f"checkpoint {path} is a plain pickle, which is never loaded: found no torch magic number", _SAVE_TENSORS
        )
    if head[8:9] == b"{":
        return ToprovarError(
            f"checkpoint {path} holds safetensors data: found {head[8:16]!r} behind a length; expected a torch file",
            f"rename it to {path.with_suffix('.safetensors').name}",
        )
    return ToprovarError(
        f"checkpoint {path} isn't a torch file: found magic {head[:8]!r}; expected {b'PK'!r} (zip) or a torch pickle",
        _COPY_AGAIN,
    )


def _check_zip(path: Path) -> frozenset[int]:
    """A zip file as torch writes it: ends with its directory, holds every record whole and uncompressed.

    torch itself accepts trailing bytes, maps compressed records as if they were tensor data, and reads on into the
    next record where the pickled record asks for more than there is.

    Returns: the sizes in bytes of its records, which are the sizes that a tensor's storage can have.
    """
    with path.open("rb") as stream, mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as data:
        directory, end = _zip_directory(path, data)
        if end < len(data):
            raise ToprovarError(
                f"checkpoint {path} has {len(data) - end} trailing bytes: found {len(data)} bytes; "
                f"expected the zip file to end at {end}",
                _COPY_AGAIN,
            )
        try:
            with zipfile.ZipFile(stream) as archive:
                records = archive.infolist()
        except (zipfile.BadZipFile, ValueError, NotImplementedError, struct.error) as fault:
            raise _damaged(path, f"its zip directory can't be read ({_first_line(fault)})") from None
        names = [record.filename for record in records]
        for record in records:
            if record.compress_type != zipfile.ZIP_STORED:
                raise ToprovarError(
                    f"checkpoint {path} was compressed: found record {record.filename} packed; expected it stored",
                    "unpack it and save the tensors again with torch.save",
                )
            at = record.header_offset
            if data[at : at + 4] != b"PK\3\4" or at + 30 + record.file_size > directory:
                raise _damaged(path, f"record {record.filename} isn't where the zip directory says (byte {at})")
            if record.filename.endswith("/data.pkl") and record.file_size > MAX_HEADER_BYTES:
                raise _damaged(
                    path, f"found a pickled record of {record.file_size} bytes; expected at most {MAX_HEADER_BYTES}"
                )
        if len(set(names)) != len(names):
            twice = next(name for name in names if names.count(name) > 1)
            raise _damaged(path, f"found record {twice} twice; expected every record once")
    if any(name.endswith("/constants.pkl") for name in names):
        raise ToprovarError(
            f"checkpoint {path} is a TorchScript archive; expected a state dict of tensors", _SAVE_TENSORS
        )
    if sum(name.endswith("/data.pkl") for name in names) != 1:
        raise ToprovarError(
            f"checkpoint {path} is a zip file but not a torch file: found {_listed(names)}; expected one data.pkl",
            "unpack it if it is an archive around the checkpoint",
        )
    return frozenset(record.file_size for record in records)


def _zip_directory(path: Path, data: mmap.mmap) -> tuple[int, int]:
    """(where the central directory starts, where the zip file ends); an end record is searched from the back."""
    at = data.rfind(b"PK\5\6")
    while at >= 0:
        if at + 22 <= len(data):
            size, start, comment = struct.unpack("<IIH", data[at + 12 : at + 22])
            directory_end = at
            record = at - 76  # the 64-bit end record (56 bytes) and its locator (20) lie before the plain one
            if record >= 0 and data[record : record + 4] == b"PK\6\6" and data[at - 20 : at - 16] == b"PK\6\7":
                size, start = struct.unpack("<QQ", data[record + 40 : record + 56])
                directory_end = record
            found = directory_end - size
            if found >= 0 and data[found : found + 4] == b"PK\1\2":
                if found != start:
                    change = f"{start - found} bytes missing" if found < start else f"{found - start} bytes too many"
                    raise _damaged(path, f"found its directory at byte {found}; expected {start} ({change} before it)")
                return found, at + 22 + comment
        at = data.rfind(b"PK\5\6", 0, at)
    raise ToprovarError(
        f"checkpoint {path} is truncated: found {len(data)} bytes without the zip directory that ends a torch file",
        _COPY_AGAIN,
    )


def _damaged(path: Path, how: str) -> ToprovarError:
    return ToprovarError(f"checkpoint {path} is damaged: {how}", _COPY_AGAIN)


def _open_torch(path: Path, size: int, *, unwrap: bool, record_sizes: frozenset[int] | None) -> _Contents:
    """The tensors of a torch file; pickled objects are refused, not built.

    record_sizes: of a zip file, which is mapped; None for the older form, which is read at once.
    """
    import torch

    notes = []
    try:
        if record_sizes is not None:
            loaded = torch.load(os.fspath(path), weights_only=True, mmap=True, map_location="cpu")
        else:
            notes.append(f"{path.name} is in torch's form before zip files: read at once instead of mapped")
            with path.open("rb") as stream:
                loaded = torch.load(stream, weights_only=True, map_location="cpu")
                if (end := stream.tell()) != size:
                    raise ToprovarError(
                        f"checkpoint {path} has {size - end} trailing bytes: found {size} bytes; expected {end}",
                        _COPY_AGAIN,
                    )
    except pickle.UnpicklingError as fault:
        text = str(fault)
        if refused := re.search(r"GLOBAL (\S+)", text):
            raise ToprovarError(
                f"checkpoint {path} holds a pickled object, which is never loaded: found {refused[1]}; "
                "expected only tensors, numbers, texts and dicts of them",
                _SAVE_TENSORS,
            ) from None
        raise _damaged(path, f"its pickled record can't be read ({_last_line(text)})") from None
    except (EOFError, IndexError, KeyError, struct.error) as fault:
        raise ToprovarError(
            f"checkpoint {path} is truncated: found {size} bytes that end inside a record ({type(fault).__name__})",
            _COPY_AGAIN,
        ) from None
    except (RuntimeError, ValueError, TypeError, AttributeError, AssertionError, MemoryError, OverflowError) as fault:
        if "unexpected EOF" in str(fault):
            raise ToprovarError(
                f"checkpoint {path} is truncated: found {size} bytes; {_first_line(fault)}", _COPY_AGAIN
            ) from None
        raise _damaged(path, f"torch can't read it ({_first_line(fault)})") from None
    where, tensors = _state_dict(path, loaded, notes, unwrap=unwrap)
    entries = {name: _torch_entry(path, where + name, tensor, record_sizes) for name, tensor in tensors.items()}
    return _Contents(entries, notes=notes)


# Where training checkpoints keep the weights, in the order in which they are looked for.
_NESTED = (("trainer", "gpt_fsdp"), ("vae",), ("state_dict",), ("model",))


def _state_dict(path: Path, loaded: Any, notes: list[str], *, unwrap: bool) -> tuple[str, dict[str, torch.Tensor]]:
    """(where in the file, as text; the flat state dict there)."""
    if not isinstance(loaded, dict):
        raise ToprovarError(
            f"checkpoint {path} holds no tensors by name: found a {type(loaded).__name__}; expected a dict of tensors",
            _SAVE_TENSORS,
        )
    for keys in _NESTED if unwrap else ():
        inner: Any = loaded
        for key in keys:
            inner = inner.get(key) if isinstance(inner, dict) else None
        if isinstance(inner, dict) and inner and all(_is_named_tensor(*item) for item in inner.items()):
            where = "".join(f"[{key!r}]" for key in keys)
            beside = [str(key) for key in loaded if key != keys[0]]
            notes.append(f"took the weights from {where} in {path.name}; left out beside it: {_listed(beside)}")
            return where, inner
    flat = {name: value for name, value in loaded.items() if _is_named_tensor(name, value)}
    if not flat:
        paths = ", ".join("".join(f"[{key!r}]" for key in keys) for keys in _NESTED)
        raise ToprovarError(
            f"checkpoint {path} holds no tensors by name: found {_listed([str(key) for key in loaded])}; "
            f"expected tensors at the top, or a flat dict of them at {paths}",
            _SAVE_TENSORS,
        )
    if others := [str(name) for name in loaded if name not in flat]:
        notes.append(f"left out of {path.name}, not tensors: {_listed(others)}")
    return "", flat


def _is_named_tensor(name: Any, value: Any) -> bool:
    import torch

    return isinstance(name, str) and isinstance(value, torch.Tensor)


def _torch_entry(path: Path, name: str, tensor: torch.Tensor, record_sizes: frozenset[int] | None) -> _Entry:
    import torch

    if tensor.layout != torch.strided or tensor.is_quantized or tensor.device.type != "cpu":
        raise ToprovarError(
            f"checkpoint {path}: tensor {name} isn't a plain dense tensor: found layout {tensor.layout}, "
            f"dtype {tensor.dtype}, device {tensor.device}",
            "save it as a dense tensor (tensor.to_dense(), tensor.dequantize()) on a real device",
        )
    size = tensor.untyped_storage().nbytes()
    if record_sizes is not None and size not in record_sizes:
        raise _damaged(path, f"tensor {name} asks for {size} bytes of data; expected the size of a record in the file")
    plain = tensor.detach()
    return _Entry(path, tuple(plain.shape), plain.dtype, lambda: plain)


def _read_index(path: Path) -> dict[str, str]:
    """Tensor name -> shard name, a relative path inside the index's folder with forward slashes."""
    size = _readable_size(path)
    if size > MAX_HEADER_BYTES:
        raise ToprovarError(
            f"index {path} is too large: found {size} bytes; expected at most {MAX_HEADER_BYTES}", _COPY_AGAIN
        )
    raw = path.read_bytes()
    try:
        index = json.loads(raw.decode("utf-8"), object_pairs_hook=_no_duplicates, parse_constant=_no_constant)
    except _DuplicateKeyError as fault:
        raise ToprovarError(f"index {path} names {fault.key!r} twice; expected every key once", _COPY_AGAIN) from None
    except (ValueError, RecursionError) as fault:
        raise ToprovarError(
            f"index {path} isn't JSON: found {raw[:24]!r} ({_first_line(fault)})", _COPY_AGAIN
        ) from None
    shards = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(shards, dict) or not shards or not all(isinstance(shard, str) for shard in shards.values()):
        raise ToprovarError(
            f"index {path} names no shards: found {_listed(list(index)) if isinstance(index, dict) else 'no object'}; "
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
            f"index {index} mixes formats: found {_listed(shards)}; expected safetensors or torch shards only",
            "convert the shards to one format",
        )
    for shard in shards:
        if not (index.parent / shard).is_file() and not (index.parent / shard).is_symlink():
            count = sum(other == shard for other in wanted.values())
            raise ToprovarError(
                f"shard {index.parent / shard} is missing: index {index} expects {len(shards)} shards, "
                f"{count} tensors in this one",
                "download the missing shard into the folder of the index",
            )
    opened = {shard: _open_file(index.parent / shard, unwrap=False) for shard in shards}

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
                f"found {_listed(list(opened[shard].entries))}",
                "download index and shards again; they come from different checkpoints",
            )

    joined = _Contents({name: opened[shard].entries[name] for name, shard in wanted.items()})
    for contents in opened.values():
        joined.notes += contents.notes
        for key, value in contents.metadata.items():
            joined.metadata.setdefault(key, value)
    if unnamed := [name for name in home if name not in wanted]:
        joined.notes.append(f"left out {len(unnamed)} tensors that {index.name} doesn't name: {_listed(unnamed)}")
    files = (index, *(index.parent / shard for shard in shards))
    return _checkpoint(asked, f"sharded-{kinds.pop()}", files, joined)


def _checkpoint(asked: Path, kind: str, files: tuple[Path, ...], contents: _Contents) -> Checkpoint:
    entries = _paired_rows(contents.entries)
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


def _paired_rows(entries: Mapping[str, _Entry]) -> dict[str, _Entry]:
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
            entry = _Entry(entry.file, entry.shape, torch.float32, _dequantiser(name, entry, scale))
        joined[name] = entry
    return joined


def _check_pair(name: str, entry: _Entry, scale: _Entry | None) -> None:
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


def _dequantiser(name: str, entry: _Entry, scale: _Entry | None) -> Callable[[], torch.Tensor]:
    def read() -> torch.Tensor:
        assert scale is not None  # checked by _check_pair
        row_scale = scale.read()
        check_finite({name + ROW_SCALE_SUFFIX: row_scale}, str(scale.file))
        return dequantise_rows(entry.read(), row_scale)

    return read


class _DuplicateKeyError(ValueError):
    def __init__(self, key: str) -> None:
        super().__init__(f"duplicate key {key!r}")
        self.key = key


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    read: dict[str, Any] = {}
    for key, value in pairs:
        if key in read:
            raise _DuplicateKeyError(key)
        read[key] = value
    return read


def _no_constant(text: str) -> Any:
    raise ValueError(f"{text} is not JSON")


def _first_line(fault: BaseException) -> str:
    return (str(fault).strip().splitlines() or [type(fault).__name__])[0][:200]


def _last_line(text: str) -> str:
    lines = [line for line in text.strip().splitlines() if line.strip() and not line.startswith("Check the doc")]
    return (lines or ["no reason given"])[-1][:200]


def _require_torch() -> None:
    if importlib.util.find_spec("torch") is None:
        raise EnvironmentFault(
            "reading a checkpoint needs PyTorch, which isn't installed", "install it:  pip install 'toprovar[torch]'"
        )
