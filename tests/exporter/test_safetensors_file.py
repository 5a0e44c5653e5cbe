from __future__ import annotations

import os
import struct
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="needs PyTorch")

from checkpoint_helpers import Tensors, f32, raw_safetensors, refusal  # noqa: E402
from safetensors.torch import save_file  # noqa: E402

from toprovar.exporter.checkpoints import open_checkpoint  # noqa: E402
from toprovar.runtime.errors import ToprovarError  # noqa: E402


def test_unaligned_safetensors_are_read(tmp_path: Path) -> None:
    header = {"b": {"dtype": "U8", "shape": [1], "data_offsets": [0, 1]}, "a": f32(1, 9, 2)}
    path = raw_safetensors(tmp_path / "u.safetensors", header, b"\7" + struct.pack("<2f", 1.5, -2.0))
    checkpoint = open_checkpoint(path)
    assert checkpoint.tensors["a"].tolist() == [1.5, -2.0]
    assert list(checkpoint.shapes) == ["b", "a"]


def test_truncated_safetensors_is_named(tmp_path: Path, tensors: Tensors) -> None:
    path = tmp_path / "m.safetensors"
    save_file(tensors, path)
    os.truncate(path, path.stat().st_size - 5)
    message = refusal(path)
    assert "is truncated" in message
    assert "bytes of tensor data; expected" in message


def test_safetensors_cut_before_the_header_is_truncated(tmp_path: Path) -> None:
    (tmp_path / "m.safetensors").write_bytes(b"\1\0\0")
    assert "is truncated: found 3 bytes" in refusal(tmp_path / "m.safetensors")


@pytest.mark.parametrize("extra", [1, 1497])
def test_trailing_bytes_are_named(tmp_path: Path, tensors: Tensors, extra: int) -> None:
    path = tmp_path / "m.safetensors"
    save_file(tensors, path)
    with path.open("ab") as stream:
        stream.write(b"\0" * extra)
    assert f"has {extra} trailing bytes" in refusal(path)


def test_header_longer_than_file_is_named(tmp_path: Path) -> None:
    path = raw_safetensors(tmp_path / "m.safetensors", {}, length=1000)
    assert "found a length of 1000 bytes; expected at most the 2 that follow" in refusal(path)


def test_header_length_is_bounded_before_it_is_read(tmp_path: Path) -> None:
    path = raw_safetensors(tmp_path / "m.safetensors", b"{}", length=100_000_001)
    os.truncate(path, 200_000_000)
    with pytest.raises(ToprovarError, match="found a length of 100000001 bytes; expected at most 100000000"):
        open_checkpoint(path)


TWICE = b'{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]},"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}'


@pytest.mark.parametrize(
    ("header", "expected"),
    [
        (b"not json at all", "found b'not json at all'; expected JSON"),
        (b"\xff\xfe\xfd\xfc", "expected JSON"),
        (b"[" * 100_000, "expected JSON"),
        (b'{"a": NaN}', "NaN is not JSON"),
        (b"[1, 2]", "found a JSON list; expected an object"),
        (TWICE, "found key 'a' twice"),
        ({"a": {"dtype": "F13", "shape": [1], "data_offsets": [0, 4]}}, "'a' with unknown dtype 'F13'"),
        ({"a": {"dtype": ["F32"], "shape": [1], "data_offsets": [0, 4]}}, "unknown dtype"),
        ({"a": {"dtype": "F32", "shape": [1]}}, "expected dtype, shape and data_offsets"),
        ({"a": 3}, "expected dtype, shape and data_offsets"),
        ({"a": f32(0, 4, -1)}, "with shape [-1]"),
        ({"a": {"dtype": "F32", "shape": [True], "data_offsets": [0, 4]}}, "with shape [True]"),
        ({"a": f32(4, 0, 1)}, "at offsets [4, 0]; expected [begin, end]"),
        ({"a": f32(-4, 0, 1)}, "at offsets [-4, 0]"),
        ({"a": f32(0, 8, 1)}, "'a' with 8 bytes; expected 4 for F32 (1,)"),
        ({"a": f32(0, 8, 2), "b": f32(4, 12, 2)}, "'b' at byte 4, overlapping 'a' that ends at 8"),
        ({"a": f32(0, 8, 2), "b": f32(4000, 4008, 2)}, "'b' out of bounds at bytes 4000 to 4008; expected at most 16"),
        ({"a": f32(0, 4, 1), "b": f32(8, 16, 2)}, "a hole of 4 bytes before tensor 'b'"),
        ({"__metadata__": {"a": 1}}, "__metadata__"),
    ],
)
def test_bad_header_says_what_is_bad(tmp_path: Path, header: Any, expected: str) -> None:
    message = refusal(raw_safetensors(tmp_path / "m.safetensors", header, bytes(16)))
    assert "has a bad safetensors header" in message
    assert expected in message


def test_safetensors_without_tensors_is_refused(tmp_path: Path) -> None:
    assert "holds no tensors" in refusal(raw_safetensors(tmp_path / "m.safetensors", {}))
