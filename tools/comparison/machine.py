"""The machine that times were taken on, as results note it."""

from __future__ import annotations

import os
import platform
from importlib import metadata
from pathlib import Path
from typing import Any

from toprovar.runtime.version import VERSION

PACKAGES = ("numpy", "onnxruntime", "torch", "scikit-image")
CPU_FACTS = Path("/proc/cpuinfo")


def cpu_model() -> str:
    """What the system calls its processor; the architecture where it does not tell."""
    if CPU_FACTS.is_file():
        for line in CPU_FACTS.read_text(encoding="utf-8", errors="replace").splitlines():
            name, _, value = line.partition(":")
            if name.strip() == "model name":
                return value.strip()
    return platform.processor() or platform.machine()


def _version(package: str) -> str:
    """onnxruntime is also what onnxruntime-gpu installs."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return metadata.version(f"{package}-gpu")


def machine_facts(threads: int, device: str) -> dict[str, Any]:
    """threads, device: that the graphs run with. load_average: of the last minute, where the system tells."""
    return {
        "cpu": cpu_model(),
        "architecture": platform.machine(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "threads": threads,
        "device": device,
        "load_average": round(os.getloadavg()[0], 2) if hasattr(os, "getloadavg") else None,
        "system": platform.system(),
        "versions": {
            "toprovar": VERSION,
            "python": platform.python_version(),
            **{name: _version(name) for name in PACKAGES},
        },
    }
