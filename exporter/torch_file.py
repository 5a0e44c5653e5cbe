"""One torch file, zip or the older form before it: read with weights only, and down to its flat state dict.

Nothing pickled is ever executed. torch itself lets much damage pass, so a zip file is checked before torch reads it.
"""

from __future__ import annotations

import mmap
import os
import pickle
import re
import struct
import zipfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from toprovar.exporter.checkpoint_file import COPY_AGAIN, MAX_HEADER_BYTES, Contents, Entry, first_line, listed
from toprovar.runtime.errors import ToprovarError

if TYPE_CHECKING:
    import torch

ZIP_MAGIC = b"PK\3\4"

_SAVE_TENSORS = "save the tensors alone, where the file is trusted:  torch.save(model.state_dict(), 'weights.pth')"

# Where training checkpoints keep the weights, in the order in which they are looked for. Those of Infinity and VAR hold
# transformer and tokenizer side by side.
_PLAIN = (("state_dict",), ("model",))
_TRANSFORMER = (("trainer", "gpt_fsdp"), ("trainer", "gpt_wo_ddp"), ("trainer", "var_wo_ddp"))
_TOKENIZER = (("vae",), ("trainer", "vae_local"))
NESTED = {"transformer": (*_TRANSFORMER, *_TOKENIZER, *_PLAIN), "tokenizer": (*_TOKENIZER, *_PLAIN, *_TRANSFORMER)}


def has_torch_magic(head: bytes) -> bool:
    """Whether a file starts as torch writes it: as a zip file, or as the pickle before that."""
    return head.startswith(ZIP_MAGIC) or _is_legacy(head)


def open_torch(path: Path, size: int, head: bytes, *, part: str | None) -> Contents:
    """The tensors of a torch file; pickled objects are refused, not built.

    head: its first bytes, 64 where there are as many.
    part: "transformer" or "tokenizer", whose weights are looked for where training checkpoints keep them; None takes
          the file as it is.
    """
    import torch

    if head.startswith(ZIP_MAGIC):
        record_sizes: frozenset[int] | None = _check_zip(path)  # a zip file is mapped
    elif _is_legacy(head):
        record_sizes = None  # the older form is read at once
    else:
        raise _wrong_magic(path, head)
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
                        COPY_AGAIN,
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
            COPY_AGAIN,
        ) from None
    except (RuntimeError, ValueError, TypeError, AttributeError, AssertionError, MemoryError, OverflowError) as fault:
        if "unexpected EOF" in str(fault):
            raise ToprovarError(
                f"checkpoint {path} is truncated: found {size} bytes; {first_line(fault)}", COPY_AGAIN
            ) from None
        raise _damaged(path, f"torch can't read it ({first_line(fault)})") from None
    where, tensors = _state_dict(path, loaded, notes, part)
    entries = {name: _torch_entry(path, where + name, tensor, record_sizes) for name, tensor in tensors.items()}
    return Contents(entries, notes=notes)


def _is_legacy(head: bytes) -> bool:
    """The pickled magic number 0x1950a86a20f9469cfc6c that torch wrote before it wrote zip files."""
    return head.startswith(b"\x80") and b"\x8a\x0a\x6c\xfc\x9c\x46\xf9\x20\x6a\xa8\x50\x19" in head


def _wrong_magic(path: Path, head: bytes) -> ToprovarError:
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
        COPY_AGAIN,
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
                COPY_AGAIN,
            )
        try:
            with zipfile.ZipFile(stream) as archive:
                records = archive.infolist()
        except (zipfile.BadZipFile, ValueError, NotImplementedError, struct.error) as fault:
            raise _damaged(path, f"its zip directory can't be read ({first_line(fault)})") from None
        names = [record.filename for record in records]
        for record in records:
            if record.compress_type != zipfile.ZIP_STORED:
                raise ToprovarError(
                    f"checkpoint {path} was compressed: found record {record.filename} packed; expected it stored",
                    "unpack it and save the tensors again with torch.save",
                )
            at = record.header_offset
            if data[at : at + 4] != ZIP_MAGIC or at + 30 + record.file_size > directory:
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
            f"checkpoint {path} is a zip file but not a torch file: found {listed(names)}; expected one data.pkl",
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
        COPY_AGAIN,
    )


def _damaged(path: Path, how: str) -> ToprovarError:
    return ToprovarError(f"checkpoint {path} is damaged: {how}", COPY_AGAIN)


def _state_dict(path: Path, loaded: Any, notes: list[str], part: str | None) -> tuple[str, dict[str, torch.Tensor]]:
    """(where in the file, as text; the flat state dict there)."""
    if not isinstance(loaded, dict):
        raise ToprovarError(
            f"checkpoint {path} holds no tensors by name: found a {type(loaded).__name__}; expected a dict of tensors",
            _SAVE_TENSORS,
        )
    for keys in NESTED[part] if part else ():
        inner: Any = loaded
        for key in keys:
            inner = inner.get(key) if isinstance(inner, dict) else None
        if isinstance(inner, dict) and inner and all(_is_named_tensor(*item) for item in inner.items()):
            where = "".join(f"[{key!r}]" for key in keys)
            outer = loaded[keys[0]] if len(keys) > 1 else {}
            beside = [str(key) for key in (*loaded, *outer) if key not in keys]
            notes.append(f"took the weights from {where} in {path.name}; left out beside it: {listed(beside)}")
            return where, inner
    flat = {name: value for name, value in loaded.items() if _is_named_tensor(name, value)}
    if not flat:
        paths = ", ".join("".join(f"[{key!r}]" for key in keys) for keys in NESTED["transformer"])
        raise ToprovarError(
            f"checkpoint {path} holds no tensors by name: found {listed([str(key) for key in loaded])}; "
            f"expected tensors at the top, or a flat dict of them at {paths}",
            _SAVE_TENSORS,
        )
    if others := [str(name) for name in loaded if name not in flat]:
        notes.append(f"left out of {path.name}, not tensors: {listed(others)}")
    return "", flat


def _is_named_tensor(name: Any, value: Any) -> bool:
    import torch

    return isinstance(name, str) and isinstance(value, torch.Tensor)


def _torch_entry(path: Path, name: str, tensor: torch.Tensor, record_sizes: frozenset[int] | None) -> Entry:
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
    is_mapped = record_sizes is not None and plain.is_contiguous()
    return Entry(path, tuple(plain.shape), plain.dtype, lambda: plain, is_mapped)


def _last_line(text: str) -> str:
    lines = [line for line in text.strip().splitlines() if line.strip() and not line.startswith("Check the doc")]
    return (lines or ["no reason given"])[-1][:200]
