"""The CUDA side of the ONNX Runtime backend: one stream, one upload of the weights, steps as captured graphs."""

from __future__ import annotations

import contextlib
import ctypes
import importlib.util
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from toprovar.runtime.backends import ort_values
from toprovar.runtime.bundle import Bundle
from toprovar.runtime.cuda_memory import ALIGNMENT, CudaMemory, compute_capability, load_cuda
from toprovar.runtime.errors import EnvironmentFault
from toprovar.runtime.weights import WeightsFile

log = logging.getLogger("toprovar")

CUDA = "CUDAExecutionProvider"
MAX_GRAPHS = 4  # captured per session: one for each set of addresses
NOT_CAPTURED = -1
LIBRARIES = ("cudart", "cublasLt", "cublas", "curand", "cufft", "nvrtc", "cupti")  # each before what needs it
CUDNN = "libcudnn.so.9"
# both packages fill the same folder: the one that is uninstalled takes the other's files along
INSTALL_HINT = (
    "pip install 'toprovar[gpu]', then pip uninstall -y onnxruntime, "
    "then pip install --force-reinstall --no-deps onnxruntime-gpu"
)
CANNOT_CAPTURE = "cannot use the graph capture feature"  # ONNX Runtime's words where a node has no CUDA kernel


def check_cuda(ort: Any) -> Any:
    """The CUDA runtime, once everything that a GPU needs is there.

    Raises: EnvironmentFault if this onnxruntime has no CUDA provider or cannot load it, or driver or GPU are missing.
    """
    if CUDA not in ort.get_available_providers():
        raise EnvironmentFault(
            f"onnxruntime {ort.__version__} has no CUDA provider",
            INSTALL_HINT,
        )
    if not hasattr(ort.OrtValue, "from_dlpack"):
        raise EnvironmentFault(
            f"onnxruntime {ort.__version__} cannot share weights on a GPU; 1.31 can", "pip install 'toprovar[gpu]'"
        )
    api = load_cuda()
    load_libraries()
    try:
        ort.OrtValue.ortvalue_from_shape_and_type([1], np.float32, "cuda", 0)
    except Exception as error:  # the library's own classes are not exported
        raise EnvironmentFault(
            f"onnxruntime {ort.__version__} cannot load its CUDA provider: {_last_words(error)}",
            "its message above names the library that is missing; "
            "pip install 'onnxruntime-gpu[cuda,cudnn]' nvidia-cublas",
        ) from None
    return api


def load_libraries() -> None:
    """Loads the CUDA libraries that ONNX Runtime opens by plain names, from wherever pip or the system has put them.

    What is not found is left to ONNX Runtime, whose own message names it.
    """
    with contextlib.suppress(ImportError):
        from cuda.pathfinder import load_nvidia_dynamic_lib

        for name in LIBRARIES:
            with contextlib.suppress(RuntimeError):  # its own errors are of this class
                load_nvidia_dynamic_lib(name)
    with contextlib.suppress(ImportError):
        spec = importlib.util.find_spec("nvidia.cudnn")
        for place in (spec.submodule_search_locations or ()) if spec else ():
            with contextlib.suppress(OSError):
                ctypes.CDLL(str(Path(place) / "lib" / CUDNN), ctypes.RTLD_GLOBAL)


def _last_words(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[-1][-200:]


class CudaProvider:
    """captures: steps become CUDA graphs; tf32: float32 products may round their factors to 10 bits."""

    device = "cuda"

    def __init__(self, ort: Any, api: Any, captures: bool, tf32: bool) -> None:
        self._ort, self._captures, self._tf32 = ort, captures, tf32
        self.memory = CudaMemory(api)
        self.description = f"CUDA, compute capability {compute_capability(api)}"
        self._shares_arena = self._register_arena()
        # by session, then by addresses: bindings, which take 5 µs a tensor to make, and numbers of captured graphs
        self._met: dict[int, dict[tuple[int, ...], tuple[Any, int]]] = {}
        self._capturing: set[int] = set()

    def _register_arena(self) -> bool:
        """One arena for the intermediate values of all sessions: they run in turn, so the largest need is all."""
        ort = self._ort
        info = ort.OrtMemoryInfo("Cuda", ort.OrtAllocatorType.ORT_ARENA_ALLOCATOR, 0, ort.OrtMemType.DEFAULT)
        same_as_requested = 1
        try:
            ort.create_and_register_allocator_v2(CUDA, info, {}, ort.OrtArenaCfg(0, same_as_requested, -1, -1))
        except Exception as error:  # one is registered already, by an earlier backend of this process
            if "already" in str(error):
                return True
            log.warning("each step keeps an arena of its own on the GPU: %s", _last_words(error))
            return False
        return True

    def load_weights(self, bundle: Bundle) -> dict[str, Any]:
        file = WeightsFile(bundle.path(bundle.manifest.weights_file))
        places, size = {}, 0
        for name, tensor in file.tensors.items():
            places[name] = size
            size += -(-tensor.size_bytes // ALIGNMENT) * ALIGNMENT
        start = self.memory.reserve(max(size, ALIGNMENT))
        for name, tensor in file.tensors.items():
            self.memory.upload(file.data(tensor), start + places[name])
        self.memory.wait()
        return {
            name: ort_values.value_over(self._ort, start + places[name], tensor.shape, tensor.dtype, ort_values.CUDA)
            for name, tensor in file.tensors.items()
        }

    def configure(self, options: Any) -> None:
        options.intra_op_num_threads = 1
        if self._shares_arena:
            options.add_session_config_entry("session.use_env_allocators", "1")

    def open(self, path: Path, options: Any, is_step: bool) -> Any:
        captures = self._captures and is_step
        try:
            session = self._open(path, options, captures)
        except Exception as error:
            if not captures or CANNOT_CAPTURE not in str(error):
                raise
            log.warning("%s runs without a captured graph: a node of it has no CUDA kernel", path.name)
            captures = False
            session = self._open(path, options, captures)
        if CUDA not in session.get_providers():
            raise EnvironmentFault(
                f"onnxruntime {self._ort.__version__} took the CPU for {path.name}; CUDA was asked for",
                "its message above says why; check the installation of onnxruntime-gpu",
            )
        if captures:
            self._capturing.add(id(session))
        return session

    def _open(self, path: Path, options: Any, captures: bool) -> Any:
        settings = {
            "device_id": "0",
            "use_tf32": str(int(self._tf32)),
            "enable_cuda_graph": str(int(captures)),
            "user_compute_stream": str(self.memory.stream),
            "arena_extend_strategy": "kSameAsRequested",
            "cudnn_conv_algo_search": "HEURISTIC",  # trying all algorithms takes seconds and picks another each time
        }
        return self._ort.InferenceSession(
            path, options, providers=[(CUDA, settings), "CPUExecutionProvider"], enable_fallback=0
        )

    def run(self, session: Any, addresses: tuple[int, ...], is_fixed: bool, bind: Callable[[], Any]) -> None:
        known = self._met.setdefault(id(session), {}) if is_fixed else {}
        if addresses not in known:
            binding = bind()
            if len(known) >= MAX_GRAPHS:
                self._run(session, binding, NOT_CAPTURED)
                return
            known[addresses] = binding, len(known) + 1 if is_fixed else NOT_CAPTURED
            if len(known) == MAX_GRAPHS:
                log.debug("a graph met %d sets of buffers: further ones are bound anew and not captured", MAX_GRAPHS)
        self._run(session, *known[addresses])

    def _run(self, session: Any, binding: Any, number: int) -> None:
        """number: of the captured graph. One replays its own addresses, whatever is bound: others need another."""
        options = None
        if id(session) in self._capturing:
            options = self._ort.RunOptions()
            options.add_run_config_entry("gpu_graph_id", str(number))
        session.run_with_iobinding(binding, options)
