"""One safetensors file: its header checked against its bytes, and a lazy reader for every tensor."""

from __future__ import annotations

import math
import os
import struct
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from toprovar.exporter.checkpoint_file import (
    COPY_AGAIN,
    MAX_HEADER_BYTES,
    Contents,
    Entry,
    first_line,
    strict_json,
)
from toprovar.runtime.errors import ToprovarError
from toprovar.runtime.json_files import DuplicateKeyError

if TYPE_CHECKING:
    import torch

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


def open_safetensors(path: Path, size: int) -> Contents:
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
        is_mapped = begin < end and (data_start + begin) % dtype.itemsize == 0
        entries[name] = Entry(path, shape, dtype, reader(shape, dtype, begin, end), is_mapped)
    return Contents(entries, metadata)


def _bad_header(path: Path, found: str) -> ToprovarError:
    return ToprovarError(f"checkpoint {path} has a bad safetensors header: {found}", COPY_AGAIN)


def _safetensors_header(path: Path, size: int) -> tuple[dict[str, Any], int]:
    """(the header, where the data starts)."""
    if size < 8:
        raise ToprovarError(
            f"checkpoint {path} is truncated: found {size} bytes; expected at least the 8 of the header's length",
            COPY_AGAIN,
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
        header = strict_json(raw)
    except DuplicateKeyError as fault:
        raise _bad_header(path, f"found key {fault.key!r} twice; expected every name once") from None
    except (ValueError, RecursionError) as fault:
        raise _bad_header(path, f"found {raw[:24]!r}; expected JSON ({first_line(fault)})") from None
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
            f"checkpoint {path} is truncated: found {data_bytes} bytes of tensor data; expected {reached}", COPY_AGAIN
        )
    if reached < data_bytes:
        raise ToprovarError(
            f"checkpoint {path} has {data_bytes - reached} trailing bytes: "
            f"found {data_bytes} bytes of tensor data; expected {reached}",
            COPY_AGAIN,
        )
