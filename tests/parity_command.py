"""Parity files changed for a test, and what the command says of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from typer.testing import CliRunner

from toprovar.tools.parity import app


def changed(file: Path, settings: dict[str, Any] | None = None, **arrays: Any) -> Path:
    """A copy with some arrays or settings replaced; None leaves one out. `__` stands for `/`."""
    with np.load(file) as archive:
        content = dict(archive)
    if settings:
        content["meta"] = np.array(json.dumps({**json.loads(str(content["meta"])), **settings}))
    for name, array in arrays.items():
        content.pop(name.replace("__", "/"), None)
        if array is not None:
            content[name.replace("__", "/")] = array
    path = file.with_name("changed.npz")
    np.savez(path, **content)
    return path


def refusal(path: Path, *options: str) -> str:
    result = CliRunner().invoke(app, [str(path), *options])
    assert result.exit_code == 2, result.output
    assert "hint:" in result.stderr
    return " ".join(result.stderr.split())
