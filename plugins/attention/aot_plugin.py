"""CachedAttention and EntropyAttention as ahead-of-time Python plugins of TensorRT: engines that need no library.

TensorRT 10.9 and later take such a plugin as one compiled kernel, which goes into the plan: a server loads it with
neither Python nor the operator library. TensorRT-RTX does not take them. In the process that builds, before parsing:

    import tensorrt as trt
    from toprovar.plugins.attention.aot_plugin import register_attention
    register_attention(architecture="sm_90")
    network = builder.create_network(1 << int(trt.NetworkDefinitionCreationFlag.PREFER_AOT_PYTHON_PLUGINS))

Only fp16 and head widths that are multiples of 8 up to 128. The scale of the scores is compiled in, because arguments
are 32-bit integers; attention_single.cuh says what the kernel does. Written from TensorRT 11.4's Python sources, whose
checks accept it; no engine was built or run with it.
"""

from __future__ import annotations

import shutil
import subprocess
import tempfile
from functools import lru_cache
from importlib import import_module
from pathlib import Path
from typing import Any

from toprovar.plugins.errors import EnvironmentFault, ToprovarError

SOURCE = Path(__file__).with_name("attention_single.cuh")
KERNEL = "attentionSingle"
QUERIES, THREADS = 32, 128  # of a block, as in the source
MAX_HEAD_WIDTH = 128
TENSORS = ("q", "k_new", "v_new", "k_past", "v_past")


@lru_cache(maxsize=32)
def attention_ptx(head_width: int, scale: float, with_entropy: bool, architecture: str = "sm_80") -> bytes:
    """The kernel as PTX, compiled by nvcc. PTX of an older architecture runs on newer GPUs.

    Raises: ToprovarError for a head width that it does not have, EnvironmentFault if nvcc is missing or fails.
    """
    if head_width % 8 or not 0 < head_width <= MAX_HEAD_WIDTH:
        raise ToprovarError(
            f"the single attention kernel has no head width {head_width}; expected a multiple of 8 up to "
            f"{MAX_HEAD_WIDTH}",
            "build with the operator library:  toprovar plugins build",
        )
    nvcc = shutil.which("nvcc")
    if nvcc is None:
        raise EnvironmentFault("nvcc is not on the path", "install a CUDA toolkit, of the driver's version or older")
    with tempfile.TemporaryDirectory() as folder:
        target = Path(folder) / "attention.ptx"
        virtual = architecture.replace("sm_", "compute_")
        command = [nvcc, "-x", "cu", f"-arch={virtual}", "-ptx", "-O3", "-o", str(target), str(SOURCE)]
        command += [f"-DHEAD_WIDTH={head_width}", f"-DSCALE={float(scale)!r}f"]
        command += ["-DWITH_ENTROPY"] if with_entropy else []
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            reason = (done.stderr.strip().splitlines() or ["no reason given"])[-1]
            raise EnvironmentFault(f"nvcc cannot compile {SOURCE}: {reason}", "choose another architecture, as sm_80")
        return target.read_bytes()


def register_attention(architecture: str = "sm_80", trt: Any = None, plugin: Any = None) -> None:
    """Registers both operators with TensorRT in this process. A process registers them once, or loads the library.

    trt, plugin: the modules tensorrt and tensorrt.plugin, which are imported if left out
    """
    if trt is None or plugin is None:
        try:
            trt, plugin = import_module("tensorrt"), import_module("tensorrt.plugin")
        except ImportError:
            raise EnvironmentFault(
                "ahead-of-time plugins need TensorRT 10.9 or later, which is not installed",
                "pip install 'toprovar[tensorrt]'",
            ) from None
    desc = plugin.TensorDesc
    attributes = {**dict.fromkeys(TENSORS, desc), "scale": float}
    compiled = tuple[bytes, bytes, plugin.KernelLaunchParams, plugin.SymIntExprs]

    def launch(q: Any, k_past: Any, scale: float, with_entropy: bool) -> Any:
        L, R, H = (q.shape_expr[i] for i in range(3))
        ptx = attention_ptx(q.shape_expr[3].constant_value(), scale, with_entropy, architecture)
        params = plugin.KernelLaunchParams(
            grid_x=plugin.cdiv(L, QUERIES), grid_y=R, grid_z=1 if with_entropy else H, block_x=THREADS
        )
        sizes = tuple(plugin.SymInt32(size) for size in (L, k_past.shape_expr[0], R, H))
        return KERNEL.encode(), ptx, params, plugin.SymIntExprs.from_tuple(sizes)

    def describe_cached(q, k_new, v_new, k_past, v_past, scale):  # type: ignore[no-untyped-def]
        return q.like()

    def describe_entropy(q, k_new, v_new, k_past, v_past, scale):  # type: ignore[no-untyped-def]
        return q.like(), plugin.from_shape_expr((q.shape_expr[0], q.shape_expr[1]), trt.float32)

    def compile_cached(q, k_new, v_new, k_past, v_past, scale, outputs, tactic):  # type: ignore[no-untyped-def]
        return launch(q, k_past, scale, with_entropy=False)

    def compile_entropy(q, k_new, v_new, k_past, v_past, scale, outputs, tactic):  # type: ignore[no-untyped-def]
        return launch(q, k_past, scale, with_entropy=True)

    for name, describe, outputs, kernel in (
        ("CachedAttention", describe_cached, desc, compile_cached),
        ("EntropyAttention", describe_entropy, tuple[desc, desc], compile_entropy),  # type: ignore[valid-type]
    ):
        # TensorRT reads tensors, attributes and results from annotations: its own classes, not text
        describe.__annotations__ = {**attributes, "return": outputs}
        kernel.__annotations__ = {**attributes, "tactic": int, "return": compiled}
        plugin.register(f"toprovar::{name}")(describe)
        plugin.aot_impl(f"toprovar::{name}")(kernel)
