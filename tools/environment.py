"""`toprovar env`: what is installed, and what follows from it."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
from importlib import metadata
from typing import Any

from toprovar.plugins import library
from toprovar.runtime.errors import ToprovarError
from toprovar.runtime.version import VERSION

PACKAGES = (
    "numpy",
    "onnxruntime",
    "onnxruntime-gpu",
    "cuda-bindings",
    "torch",
    "triton",
    "onnx",
    "onnx-ir",
    "tensorrt",
    "tensorrt-rtx-cu13-bindings",
    "safetensors",
    "pydantic",
)


def _installed(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _first_line(command: list[str]) -> str | None:
    """First line that a program prints, or None if it is not there or fails."""
    if shutil.which(command[0]) is None:
        return None
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    lines = done.stdout.strip().splitlines()
    return lines[0] if done.returncode == 0 and lines else None


def _plugins() -> str:
    """The operator library in one line."""
    from toprovar.tools.plugin_building import described

    try:
        found = library.find_library()
    except ToprovarError as error:
        return f"no: {error.message}"
    return "no: toprovar plugins build" if found is None else f"{found.path} ({described(found)})"


def _on_gpu(packages: dict[str, str | None], gpu: str | None) -> str:
    """Whether ONNX Runtime's CUDA provider can be there; what it loads is only seen when it is used."""
    if gpu is None:
        return "no: nvidia-smi shows no GPU"
    try:
        import onnxruntime
    except ImportError:
        return "no: pip install 'toprovar[gpu]'"
    if "CUDAExecutionProvider" not in onnxruntime.get_available_providers():
        from toprovar.runtime.backends.onnxruntime_cuda import INSTALL_HINT

        return f"no: {INSTALL_HINT}"
    return "yes" if packages["cuda-bindings"] else "no: pip install cuda-bindings"


def environment() -> dict[str, Any]:
    """Versions, cores, GPU and which commands work here."""
    packages = {name: _installed(name) for name in PACKAGES}
    gpu = _first_line(["nvidia-smi", "--query-gpu=name,driver_version,memory.total", "--format=csv,noheader"])
    can_run = bool(packages["onnxruntime"] or packages["onnxruntime-gpu"])
    can_calibrate = all(packages[name] for name in ("torch", "onnx", "onnx-ir"))
    return {
        "toprovar": VERSION,
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "packages": packages,
        "gpu": gpu,
        "plugins": _plugins(),
        "commands": {
            "run, bench": "yes" if can_run else "no: pip install toprovar",
            "run, bench --device cuda": _on_gpu(packages, gpu),
            "calibrate, export, demo": "yes" if can_calibrate else "no: pip install 'toprovar[torch]'",
        },
    }
