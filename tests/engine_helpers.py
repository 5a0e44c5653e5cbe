"""A stand-in for the builder: engines in no time, and children that end as badly as real ones can."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from toprovar.exporter.engines import child, versions

BEHAVIOUR = "FAKE_BUILDER"  # environment variable: what happens at which graph: "abort step_02.onnx"
PROGRAM = Path(__file__).parent / "fake_builder.py"


def use_fake_builder(monkeypatch: pytest.MonkeyPatch, behaviour: str = "") -> None:
    """Children run fake_builder.py from here on, as if TensorRT-RTX were installed."""
    monkeypatch.setattr(child, "COMMAND", (sys.executable, "-I", "-S", str(PROGRAM)))  # starts in half the time
    monkeypatch.setattr(versions, "installed_module", lambda target: "fake")
    monkeypatch.setattr(versions, "link_libraries", lambda target, folder: None)
    monkeypatch.setenv(BEHAVIOUR, behaviour)


def needs_rtx() -> None:
    pytest.importorskip("tensorrt_rtx_bindings", reason="needs TensorRT-RTX: pip install 'toprovar[tensorrt-rtx]'")
