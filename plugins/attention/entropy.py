"""`entropy_attention`: attention and the entropy of its weights, for anyone who wants nothing else of this project.

Checks the arguments, chooses between the Triton kernel and the oracle made of stock PyTorch operators, and passes
strided views through without copies. docs/entropy_attention.md shows its use.
"""

from __future__ import annotations

import importlib.util
import math
from typing import Literal

import torch
from torch import Tensor

Backend = Literal["auto", "triton", "oracle"]
DTYPES = (torch.float16, torch.bfloat16, torch.float32)
MAX_WIDTH = 256
MAX_PROGRAMS = 65535  # of a CUDA grid in its second dimension


def have_triton() -> bool:
    try:
        return importlib.util.find_spec("triton") is not None
    except ValueError:  # a module without a spec, which is how an absent package is feigned
        return False


def interpreted() -> bool:
    """Whether Triton runs its kernels on the CPU in this process: TRITON_INTERPRET=1 when it was first imported."""
    if not have_triton():
        return False
    from triton.runtime.interpreter import InterpretedFunction

    from toprovar.plugins.attention import triton_kernel

    return isinstance(triton_kernel._attend, InterpretedFunction)


def _is_finite(scale: float) -> bool:
    """Whether it is one number that float32, the type of scores, can hold."""
    try:
        return math.isfinite(scale) and abs(scale) <= torch.finfo(torch.float32).max
    except (TypeError, ValueError, OverflowError, RuntimeError):
        return False


def _check(q: Tensor, k: Tensor, v: Tensor, scale: float, key_mask: Tensor | None) -> None:
    for name, x in (("q", q), ("k", k), ("v", v), ("key_mask", key_mask)):
        if x is None and name == "key_mask":
            continue
        if not isinstance(x, Tensor) or x.layout != torch.strided or x.is_nested:
            found = f"a tensor of layout {x.layout}" if isinstance(x, Tensor) else type(x).__name__
            raise ValueError(f"entropy_attention: {name} is {found}; expected a dense torch.Tensor")
    if any(x.dim() != 4 for x in (q, k, v)):
        shapes = ", ".join(f"{name} {list(x.shape)}" for name, x in (("q", q), ("k", k), ("v", v)))
        raise ValueError(f"entropy_attention: found {shapes}; expected q [B, H, L, D] and k, v [B, Hkv, S, D]")
    B, H, _, D = q.shape
    if k.shape != v.shape or k.shape[0] != B or k.shape[3] != D:
        raise ValueError(
            f"entropy_attention: q is {list(q.shape)}, k {list(k.shape)}, v {list(v.shape)}; expected k and v "
            f"[{B}, Hkv, S, {D}]"
        )
    Hkv, S = k.shape[1:3]
    if H == 0 or Hkv == 0 or H % Hkv:
        raise ValueError(f"entropy_attention: {H} query heads over {Hkv} key heads; expected a multiple, at least one")
    if S == 0:
        raise ValueError("entropy_attention: k has no keys; expected S >= 1 (leave rows out with key_mask)")
    if not 1 <= D <= MAX_WIDTH:
        raise ValueError(f"entropy_attention: the head width is {D}; expected 1 to {MAX_WIDTH}")
    if B * H > MAX_PROGRAMS:
        raise ValueError(
            f"entropy_attention: {B} rows times {H} heads are {B * H}; expected at most {MAX_PROGRAMS} (cut the batch)"
        )
    if q.dtype not in DTYPES or not q.dtype == k.dtype == v.dtype:
        raise ValueError(
            f"entropy_attention: q is {q.dtype}, k {k.dtype}, v {v.dtype}; expected all three float16, bfloat16 or "
            "float32, and the same (convert with .to)"
        )
    if len({x.device for x in (q, k, v)}) != 1:
        raise ValueError(f"entropy_attention: q is on {q.device}, k {k.device}, v {v.device}; expected one device")
    if not _is_finite(scale):
        raise ValueError(f"entropy_attention: scale is {scale!r}; expected a finite number of float32")
    if key_mask is not None:
        if key_mask.dtype != torch.bool or tuple(key_mask.shape) != (B, S):
            found = f"{key_mask.dtype} {list(key_mask.shape)}"
            raise ValueError(f"entropy_attention: key_mask is {found}; expected torch.bool [{B}, {S}]")
        if key_mask.device != q.device:
            raise ValueError(f"entropy_attention: key_mask is on {key_mask.device}; expected {q.device}")


def entropy_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float,
    key_mask: Tensor | None = None,
    *,
    head_mean: bool = False,
    backend: Backend = "auto",
) -> tuple[Tensor, Tensor]:
    """softmax(scale * q k^T) v, and the entropy of every row of that softmax.

    q:        [B, H, L, D], any strides (a transposed view of a time-major [L, B, H, D] tensor is read in place)
    k, v:     [B, Hkv, S, D]; H is a multiple of Hkv, and head h reads key head h // (H / Hkv); D from 1 to 256
    scale:    what scores are multiplied by, usually D ** -0.5
    key_mask: [B, S] bool, True for keys that count; None counts all
    head_mean: entropy as the mean over heads; heads are added in order, so results repeat bit by bit
    backend:  "triton"; "oracle", stock PyTorch operators; "auto" takes Triton for CUDA tensors where it is installed
    Returns:  output [B, H, L, D] in v's dtype; entropy float32 in nats, [B, H, L], or [B, L] with head_mean.
              A batch row whose keys are all masked has output 0 and entropy 0, and means nothing: leave it out of
              statistics with key_mask.any(-1). NaN or infinite scores give NaN.
    Precision: scores and sums are float32; float32 inputs are multiplied in true float32 (no TF32).
    No gradient is defined: what is returned does not require one.
    Raises:   ValueError for shapes, dtypes, devices or a scale that don't fit; RuntimeError if backend="triton" and
              Triton is missing, or the tensors aren't on a GPU and Triton's interpreter isn't on.
    Source:   ToProVAR eq. 2; recurrence in triton_kernel.py.
    """
    _check(q, k, v, scale, key_mask)
    if backend not in ("auto", "triton", "oracle"):
        raise ValueError(f'entropy_attention: backend is {backend!r}; expected "auto", "triton" or "oracle"')
    scale = float(scale)
    if backend == "auto":
        backend = "triton" if q.is_cuda and have_triton() else "oracle"
    if backend == "triton" and not have_triton():
        raise RuntimeError('entropy_attention: Triton is not installed; install it, or pass backend="oracle"')
    if backend == "triton" and not q.is_cuda and not interpreted():
        raise RuntimeError(
            f'entropy_attention: the tensors are on {q.device}, and Triton needs a CUDA GPU; pass backend="oracle", '
            "or set TRITON_INTERPRET=1 before Python starts"
        )
    if q.numel() == 0:  # stock attention divides by the number of queries, and takes the process with it
        return torch.empty_like(q), q.new_zeros((q.shape[0], q.shape[2]) if head_mean else q.shape[:3]).float()
    if backend == "oracle":
        from toprovar.plugins.attention.oracle import attention_with_entropy

        with torch.no_grad():
            o, entropy = attention_with_entropy(q, k, v, scale, key_mask)
            return o, entropy.mean(1) if head_mean else entropy
    from toprovar.plugins.attention import triton_kernel

    with torch.no_grad(), torch.cuda.device(q.device if q.is_cuda else -1):
        if scale < 0:  # the kernel takes the maximum before it multiplies
            q, scale = -q, -scale
        o, per_head = triton_kernel.attend(q, k, v, scale, key_mask)
        assert per_head is not None
        return o, triton_kernel.head_mean(per_head) if head_mean else per_head
