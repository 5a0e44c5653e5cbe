"""What TensorRT and TensorRT-RTX, and their versions, do differently. All else of a build is one code path.

                         TensorRT (10.13 and later)            TensorRT-RTX (1.7)
    Python module        tensorrt                              tensorrt_rtx_bindings, or tensorrt_rtx around it
    builds for           the GPU at hand                       named compute capabilities, without a GPU
    strongly typed       by a flag; always from 11 on          always; the flag is a no-op
    timing cache         kept, so that a second build is fast  none: kernels are compiled on the user's machine
    parser and plugins   links as installed                    opens libtensorrt_rtx.so, which its wheel does not have

`link_libraries` cures the last line: without that name on the library path the parser ends the whole process at the
first plugin, without a word.
"""

from __future__ import annotations

import ctypes
import importlib
import importlib.util
import re
from collections.abc import Iterable
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from types import ModuleType
from typing import Any

from toprovar.runtime.backends.tensorrt_module import MODULES, TITLES
from toprovar.runtime.errors import EnvironmentFault, ToprovarError
from toprovar.runtime.manifest import EngineTarget

CAPABILITIES = ("8.0", "8.6", "8.9", "12.0", "12.1")  # that TensorRT-RTX builds our graphs for
DEFAULT_CAPABILITIES = ("8.0", "8.6", "8.9", "12.0")
RTX_LIBRARY = "libtensorrt_rtx.so"
_REFUSED = {
    "7.5": "its builder has no fp32 or bf16 matrix product there, and every step holds fp32 ones",
    "9.0": "TensorRT-RTX has no Hopper target; use --target tensorrt on that machine",
    "10.0": "TensorRT-RTX has no target for data-centre Blackwell; use --target tensorrt on that machine",
    "10.3": "TensorRT-RTX has no target for data-centre Blackwell; use --target tensorrt on that machine",
}


def capabilities_from(text: str) -> tuple[str, ...]:
    """Compute capabilities of a list such as "80,8.9,sm120", as "8.0", "8.9", "12.0", in rising order.

    Raises: ToprovarError naming the first that TensorRT-RTX cannot build for, and why.
    """
    known = ",".join(name.replace(".", "") for name in CAPABILITIES)
    found = set()
    for part in text.split(","):
        match = re.fullmatch(r"(?:sm_?)?(\d{1,2})\.?(\d)", part.strip().lower())
        name = f"{match[1]}.{match[2]}" if match else ""
        if name in _REFUSED:
            raise ToprovarError(f"--compute-capability {part.strip()}: {_REFUSED[name]}", f"choose from {known}")
        if name not in CAPABILITIES:
            plain = [item.replace(".", "") for item in CAPABILITIES]
            nearest = get_close_matches(part.strip().lower().removeprefix("sm").strip("_"), plain, 1, cutoff=0)
            hint = f"did you mean {nearest[0]}?" if nearest else f"choose from {known}"
            raise ToprovarError(f"--compute-capability {part.strip()!r} is unknown; expected some of {known}", hint)
        found.add(name)
    return tuple(sorted(found, key=lambda name: tuple(map(int, name.split(".")))))


def installed_module(target: EngineTarget) -> str:
    """Name of the Python module that builds for a target; nothing is imported.

    Raises: EnvironmentFault if none is installed.
    """
    for name in MODULES[target]:
        try:
            if importlib.util.find_spec(name) is not None:
                return name
        except (ImportError, ValueError):
            continue
    raise EnvironmentFault(
        f"--target {target} needs {TITLES[target]}, which is not installed", f"pip install 'toprovar[{target}]'"
    )


def import_module(target: EngineTarget) -> ModuleType:
    """The builder's Python module. Raises: EnvironmentFault if it cannot be loaded, or is too old."""
    name = installed_module(target)
    try:
        trt = importlib.import_module(name)
    except (ImportError, OSError, RuntimeError) as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise EnvironmentFault(
            f"{TITLES[target]} cannot be loaded: {reason}", f"install it again:  pip install 'toprovar[{target}]'"
        ) from None
    least = (10, 13) if target == "tensorrt" else (1, 7)
    found = tuple(int(part) for part in re.findall(r"\d+", trt.__version__)[:2])
    if found < least:
        raise EnvironmentFault(
            f"{TITLES[target]} {trt.__version__} is too old; expected {least[0]}.{least[1]} or later",
            f"pip install --upgrade 'toprovar[{target}]'",
        )
    return trt


def network_flags(trt: Any) -> int:
    """Strongly typed: types are those of the graph, never chosen by the builder."""
    flag = getattr(trt.NetworkDefinitionCreationFlag, "STRONGLY_TYPED", None)
    return 0 if flag is None else 1 << int(flag)


def configure(trt: Any, config: Any, target: EngineTarget, capabilities: Iterable[str], allow_tf32: bool) -> None:
    """Settings of a build. Raises: EnvironmentFault if this version lacks one of the capabilities."""
    if not allow_tf32:
        config.clear_flag(trt.BuilderFlag.TF32)
    if target != "tensorrt-rtx":
        return
    # capture in a CUDA graph stays possible
    config.set_flag(trt.BuilderFlag.REQUIRE_USER_ALLOCATION)
    names = list(capabilities)
    config.num_compute_capabilities = len(names)
    for index, name in enumerate(names):
        value = getattr(trt.ComputeCapability, f"SM{name.replace('.', '')}", None)
        if value is None:
            raise EnvironmentFault(
                f"TensorRT-RTX {trt.__version__} cannot build for compute capability {name}",
                "leave it out of --compute-capability, or upgrade:  pip install --upgrade 'toprovar[tensorrt-rtx]'",
            )
        config.set_compute_capability(value, index)


def has_timing_cache(target: EngineTarget) -> bool:
    return target == "tensorrt"


@dataclass(frozen=True)
class Gpu:
    name: str
    capability: str


def gpu_at_hand() -> Gpu:
    """The first GPU of this machine, which is what TensorRT builds for.

    Raises: EnvironmentFault if there is no driver, or no GPU.
    """
    hint = "build on the machine that runs the engines, or take --target tensorrt-rtx, which needs no GPU"
    try:
        cuda = ctypes.CDLL("libcuda.so.1")
    except OSError:
        raise EnvironmentFault(
            "--target tensorrt builds for the GPU at hand; this machine has no NVIDIA driver (libcuda.so.1)", hint
        ) from None
    device, count = ctypes.c_int(), ctypes.c_int()
    status = cuda.cuInit(0) or cuda.cuDeviceGetCount(ctypes.byref(count)) or cuda.cuDeviceGet(ctypes.byref(device), 0)
    if status or not count.value:
        raise EnvironmentFault(
            f"--target tensorrt builds for the GPU at hand; the driver found none (CUDA error {status})", hint
        )
    name = ctypes.create_string_buffer(256)
    parts = [ctypes.c_int(), ctypes.c_int()]
    cuda.cuDeviceGetName(name, len(name), device)
    for part, attribute in zip(parts, (75, 76), strict=True):  # compute capability, major and minor
        cuda.cuDeviceGetAttribute(ctypes.byref(part), attribute, device)
    return Gpu(name.value.decode(errors="replace"), f"{parts[0].value}.{parts[1].value}")


def link_libraries(target: EngineTarget, folder: Path) -> None:
    """Links the builder's library into a folder under the name by which its parser opens it.

    Raises: EnvironmentFault if the library is not where its package should have it.
    """
    if target != "tensorrt-rtx":
        return
    for package in ("tensorrt_rtx_libs", "tensorrt_rtx"):
        spec = importlib.util.find_spec(package)
        for place in (spec.submodule_search_locations or ()) if spec else ():
            found = sorted(Path(place).glob(f"{RTX_LIBRARY}*"))
            if found:
                (folder / RTX_LIBRARY).symlink_to(found[0])
                return
    raise EnvironmentFault(
        f"TensorRT-RTX is installed without {RTX_LIBRARY}.*", "pip install --force-reinstall 'toprovar[tensorrt-rtx]'"
    )
