"""The Python modules of TensorRT and TensorRT-RTX, imported late, and the two classes that must derive from theirs."""

from __future__ import annotations

import importlib
import logging
import os
from pathlib import Path
from typing import Any

from toprovar.runtime.errors import EnvironmentFault
from toprovar.runtime.manifest import EngineTarget

log = logging.getLogger("toprovar")

TITLES: dict[EngineTarget, str] = {"tensorrt": "TensorRT", "tensorrt-rtx": "TensorRT-RTX"}
MODULES: dict[EngineTarget, tuple[str, ...]] = {
    "tensorrt": ("tensorrt",),
    "tensorrt-rtx": ("tensorrt_rtx_bindings", "tensorrt_rtx"),
}


def load_module(target: EngineTarget) -> Any:
    """Raises: EnvironmentFault if it is not installed, or does not load."""
    reason = ""
    for name in MODULES[target]:
        try:
            return importlib.import_module(name)
        except ModuleNotFoundError as error:
            if error.name != name:
                reason = f": {error}"
        except (ImportError, OSError) as error:
            reason = f": {error}"
    problem = f"{TITLES[target]} cannot be loaded{reason}" if reason else f"{TITLES[target]} is not installed"
    raise EnvironmentFault(problem, f"pip install 'toprovar[{target}]'")


def kernel_cache_path(trt: Any, capability: str) -> Path:
    """Where kernels that TensorRT-RTX compiled are kept: by version and GPU."""
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache) / "toprovar" / "tensorrt-rtx" / f"{trt.__version__}-sm{capability.replace('.', '')}.cache"


def new_log(trt: Any) -> Any:
    """A logger for TensorRT that writes to ours. `last_error`: its last error's text, or ""."""

    class Log(trt.ILogger):
        def __init__(self) -> None:
            trt.ILogger.__init__(self)
            self.last_error = ""

        def log(self, severity: Any, message: str) -> None:
            if severity in (trt.ILogger.Severity.ERROR, trt.ILogger.Severity.INTERNAL_ERROR):
                self.last_error = message.strip()
                log.debug("TensorRT: %s", message)
            elif severity == trt.ILogger.Severity.WARNING:
                log.debug("TensorRT warns: %s", message)

    return Log()


def new_profiler(trt: Any) -> Any:
    """Notes the time of every layer. `times_ms`: {layer: ms of each run}."""

    class Profiler(trt.IProfiler):
        def __init__(self) -> None:
            trt.IProfiler.__init__(self)
            self.times_ms: dict[str, list[float]] = {}

        def report_layer_time(self, layer_name: str, ms: float) -> None:
            self.times_ms.setdefault(layer_name, []).append(ms)

    return Profiler()
