"""Checkpoint files, whole and damaged, and how they are refused."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from toprovar.exporter.checkpoints import open_checkpoint
from toprovar.runtime.errors import EXIT_WRONG_INPUT, ToprovarError

Tensors = dict[str, Any]


def snapshot(path: Path) -> dict[str, bytes]:
    folder = path if path.is_dir() else path.parent
    return {str(file): file.read_bytes() for file in sorted(folder.rglob("*")) if file.is_file()}


def refusal(path: Path, action: Callable[[Path], object] = open_checkpoint, names: str | None = None) -> str:
    """The message with which a path is refused; checks the form that every user error has, and that no file changed."""
    before = snapshot(path) if path.exists() else {}
    with pytest.raises(ToprovarError) as caught:
        action(path)
    fault = caught.value
    assert fault.exit_code == EXIT_WRONG_INPUT
    assert fault.hint
    assert (names or path.name) in fault.message
    assert "!" not in str(fault)
    assert "\n" not in fault.hint
    assert (snapshot(path) if path.exists() else {}) == before
    return fault.message


def assert_same(found: Any, expected: Tensors) -> None:
    assert set(found) == set(expected)
    assert expected
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype, name
        assert found[name].shape == tensor.shape, name
        assert torch.equal(found[name], tensor), name


def raw_safetensors(path: Path, header: Any, data: bytes = b"", length: int | None = None) -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text) if length is None else length) + text + data)
    return path


def f32(begin: int, end: int, *shape: int) -> dict[str, Any]:
    return {"dtype": "F32", "shape": list(shape), "data_offsets": [begin, end]}
