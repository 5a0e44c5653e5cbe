"""The operators in PyTorch, as `torch.ops.toprovar.*`: the library's kernels through ctypes, on CPU and CUDA tensors.

Each function below says which outputs an operator has; PyTorch runs it alone for meta tensors and while it compiles,
and the library fills what it made otherwise. Inputs that are not contiguous are copied. No gradient is defined.
Shapes are those of the ONNX functions (plugins/<op>/function.py). Importing this file needs PyTorch, not the library:
the first call looks for it and raises EnvironmentFault if it is missing.
"""

# no postponed annotations: PyTorch reads the types of the signatures below

import inspect
from collections.abc import Callable
from contextlib import nullcontext
from functools import wraps
from typing import Any

import torch
from torch import Tensor

from toprovar.plugins.native import BFLOAT16, FLOAT16, FLOAT32, INT32, INT64, Call, RawTensor, found_library

ONNX_TYPES = {
    torch.float32: FLOAT32,
    torch.float16: FLOAT16,
    torch.bfloat16: BFLOAT16,
    torch.int32: INT32,
    torch.int64: INT64,
}


def _operator(kind: str) -> Callable[[Callable[..., Any]], Any]:
    """Makes an operator of a function that allocates its outputs, dense whatever the inputs' strides.

    Arguments that are no tensors are attributes.
    """

    def bind(outputs: Callable[..., Any]) -> Any:
        signature = inspect.signature(outputs)

        @wraps(outputs)
        def checked(*args: Any, **kwargs: Any) -> Any:
            _check(kind, signature.bind(*args, **kwargs).arguments)
            return outputs(*args, **kwargs)

        @wraps(outputs)
        def run(*args: Any, **kwargs: Any) -> Any:
            bound = signature.bind(*args, **kwargs)
            bound.apply_defaults()
            tensors = {name: value for name, value in bound.arguments.items() if isinstance(value, Tensor)}
            attributes = {name: value for name, value in bound.arguments.items() if name not in tensors}
            made = checked(**bound.arguments)
            _run(kind, tensors, made if isinstance(made, tuple) else (made,), attributes)
            return made

        operator = torch.library.custom_op(f"toprovar::{outputs.__name__}", run, mutates_args=())
        operator.register_fake(checked)
        return operator

    return bind


def _check(kind: str, arguments: dict[str, Any]) -> None:
    """What outputs are made from, and what the library is never shown. Raises: ValueError."""
    tensors = {name: value for name, value in arguments.items() if isinstance(value, Tensor)}
    device = next(iter(tensors.values())).device
    for name, tensor in tensors.items():
        if tensor.device != device:
            raise ValueError(f"{kind}: {name} is on {tensor.device}; expected {device}")
        if tensor.layout is not torch.strided:
            raise ValueError(f"{kind}: {name} is {tensor.layout}; expected torch.strided")
    for name, value in arguments.items():
        dtype = value.dtype if name in tensors else value
        if isinstance(dtype, torch.dtype) and dtype not in ONNX_TYPES:
            raise ValueError(f"{kind}: {name} is {dtype}; expected one of {', '.join(map(str, ONNX_TYPES))}")


def _run(kind: str, tensors: dict[str, Tensor], outputs: tuple[Tensor, ...], attributes: dict[str, Any]) -> None:
    device = next(iter(tensors.values())).device
    if device.type not in ("cpu", "cuda"):
        raise ValueError(f"{kind}: tensors are on {device}; expected cpu or cuda")
    dense = [tensor.contiguous() for tensor in tensors.values()]  # kept alive until the launch
    numbers = {name: ONNX_TYPES[value] if name == "to" else value for name, value in attributes.items()}
    call = Call(found_library(), kind, [_raw(x) for x in dense], [_raw(x) for x in outputs], numbers)
    with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
        if device.type == "cpu":
            call.run_on_cpu()
            return
        scratch = torch.empty(call.scratch_bytes(), dtype=torch.uint8, device=device)
        call.run_on_cuda(scratch.data_ptr(), torch.cuda.current_stream(device).cuda_stream)


def _raw(tensor: Tensor) -> RawTensor:
    return RawTensor(tensor.data_ptr(), tuple(tensor.shape), ONNX_TYPES[tensor.dtype])


@_operator("EntropyAttention")
def entropy_attention(
    q: Tensor, k_new: Tensor, v_new: Tensor, k_past: Tensor, v_past: Tensor, scale: float, per_head: bool = False
) -> tuple[Tensor, Tensor]:
    """Attention and the entropy of its weights in nats: [L, R], mean over heads, or [L, R, H] with per_head."""
    return q.new_empty(q.shape), q.new_empty(q.shape[:3] if per_head else q.shape[:2], dtype=torch.float32)


@_operator("CachedAttention")
def cached_attention(q: Tensor, k_new: Tensor, v_new: Tensor, k_past: Tensor, v_past: Tensor, scale: float) -> Tensor:
    """Attention over cached and new keys."""
    return q.new_empty(q.shape)


@_operator("MaskedAttention")
def masked_attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scale: float) -> Tensor:
    """Attention over the prompt. mask: [R, T] float32, added to the scores."""
    return q.new_empty(q.shape)


@_operator("TokenGate")
def token_gate(score: Tensor, count: int) -> Tensor:
    """Positions of the `count` lowest scores of every row, ascending."""
    if not 0 <= count <= (score.shape[-1] if score.dim() else 0):
        raise ValueError(f"TokenGate: count is {count}; expected 0 to the last extent of {list(score.shape)}")
    return score.new_empty((*score.shape[:-1], count), dtype=torch.int64)


@_operator("ModulatedNorm")
def modulated_norm(x: Tensor, scale: Tensor, shift: Tensor, epsilon: float, to: torch.dtype) -> Tensor:
    """Layer norm, scale and shift, in the type `to`."""
    return x.new_empty(x.shape, dtype=to)


@_operator("RotaryHeads")
def rotary_heads(
    qkv: Tensor, bias: Tensor, gain: Tensor, cos: Tensor, sin: Tensor, heads: int
) -> tuple[Tensor, Tensor, Tensor]:
    """q, k and v from the packed projection."""
    if qkv.dim() != 3 or heads < 1 or qkv.shape[2] % (3 * heads):
        raise ValueError(
            f"RotaryHeads: qkv is {list(qkv.shape)}; expected [n, R, 3 times {heads} heads of an even width]"
        )
    n, R, width = qkv.shape
    q, k, v = (qkv.new_empty((n, R, heads, width // 3 // heads)) for _ in range(3))
    return q, k, v


@_operator("GatedResidual")
def gated_residual(x: Tensor, y: Tensor, bias: Tensor, gate: Tensor) -> Tensor:
    """x + (y + bias) * gate."""
    return x.new_empty(x.shape)


@_operator("BiasGelu")
def bias_gelu(x: Tensor, bias: Tensor) -> Tensor:
    """gelu(x + bias), tanh form."""
    return x.new_empty(x.shape)


@_operator("BitSampler")
def bit_sampler(logits: Tensor, noise: Tensor, limit: Tensor) -> Tensor:
    """Bits from pairs of logits and noise."""
    return logits.new_empty(logits.shape[:-1], dtype=torch.int32)


@_operator("TokenRestore")
def token_restore(x: Tensor, residual: Tensor, rows: Tensor, columns: Tensor, kept: Tensor, y: Tensor) -> Tensor:
    """Computed tokens among those that take a resampled residual."""
    return x.new_empty(x.shape)
