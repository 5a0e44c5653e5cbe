"""The backend that a command's options ask for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from toprovar.runtime.bundle import Bundle
from toprovar.runtime.errors import ToprovarError

if TYPE_CHECKING:
    from pathlib import Path

    from toprovar.runtime.backends.onnxruntime import OnnxRuntimeBackend
    from toprovar.runtime.backends.tensorrt import TensorRtBackend

    RunningBackend = OnnxRuntimeBackend | TensorRtBackend

BackendName = Literal["onnxruntime", "tensorrt", "tensorrt-rtx"]
DeviceName = Literal["cpu", "cuda"]
OperatorChoice = Literal["auto", "library", "body"]


def check_device(device: str) -> None:
    """Whether ONNX Runtime can run on a device, before long work. Raises: EnvironmentFault if it cannot."""
    if device == "cuda":
        import onnxruntime

        from toprovar.runtime.backends.onnxruntime_cuda import check_cuda

        check_cuda(onnxruntime)


@dataclass(frozen=True)
class BackendChoice:
    """Options as the commands have them. device: None is the backend's own; threads: on the CPU."""

    backend: BackendName = "onnxruntime"
    device: DeviceName | None = None
    operators: OperatorChoice = "auto"
    cuda_graph: bool = True
    threads: int = 0

    def open(self, bundle: Bundle, profile_to: Path | None = None) -> RunningBackend:
        """Raises: EnvironmentFault or ToprovarError if this machine or the bundle cannot do it."""
        if self.backend == "onnxruntime":
            from toprovar.runtime.backends.onnxruntime import OnnxRuntimeBackend

            return OnnxRuntimeBackend(
                bundle,
                self.threads,
                device=self.device or "cpu",
                operators=self.operators,
                cuda_graph=self.cuda_graph,
                profile_to=profile_to,
            )
        if self.device == "cpu":
            raise ToprovarError(f"backend {self.backend} runs on a GPU only; --device is cpu", "pass --device cuda")
        if self.operators == "body":
            raise ToprovarError(
                f"backend {self.backend} runs what its engines were built from; --operators is body",
                "leave --operators out, and build the engines anew to change it",
            )
        from toprovar.runtime.backends.tensorrt import TensorRtBackend

        return TensorRtBackend(bundle, self.backend, cuda_graph=self.cuda_graph, profile=profile_to is not None)
