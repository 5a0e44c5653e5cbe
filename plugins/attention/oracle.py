"""Attention with per-token entropy from stock PyTorch kernels: the oracle that needs no kernel of ours.

Any fused attention that returns its log-sum-exp gives the entropy exactly when it is run a second time with V := K:
the second output is the mean key O_K under the attention weights, and H = LSE - scale * q . O_K.
Source: ToProVAR (attention entropy, eq. 2); the identity is derived in docs/calibration.md.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def attention(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    """Unmasked attention. q: [R, H, L, D], k, v: [R, H, S, D] -> [R, H, L, D] in v's dtype."""
    return F.scaled_dot_product_attention(q.to(v.dtype), k.to(v.dtype), v, scale=scale)


def attention_with_entropy(
    q: Tensor, k: Tensor, v: Tensor, scale: float, key_mask: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Attention and the entropy of its weights.

    q: [R, H, L, D]; k, v: [R, Hkv, S, D], H a multiple of Hkv; key_mask: [R, S] bool, True for keys that count.
    Returns: output [R, H, L, D] in v's dtype, entropy [R, H, L] float32 in nats, in [0, ln S]; both 0 in a row of
    which every key is masked.
    """
    q, k = q.to(v.dtype), k.to(v.dtype)
    group = q.shape[1] // k.shape[1]
    if group > 1:
        k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    seen = None
    if key_mask is not None:
        seen = key_mask.any(-1)[:, None, None]  # [R, 1, 1]
        key_mask = key_mask | ~seen[:, :, 0]  # a row without keys is computed with all of them and zeroed below
    # float16 has no fused kernel on the CPU that returns what is needed, GPUs without Triton are rare
    if q.device.type == "cpu" and q.dtype in (torch.float32, torch.bfloat16):
        o, entropy = _by_mean_key(q, k, v, scale, key_mask)
    else:
        o, entropy = _explicit(q, k, v, scale, key_mask)
    if seen is not None:
        o, entropy = o.where(seen[..., None], 0), entropy.where(seen, 0)
    return o, entropy.where(~(entropy < 0), 0)  # rounding may fall below zero; NaN stays


def _by_mean_key(q: Tensor, k: Tensor, v: Tensor, scale: float, key_mask: Tensor | None) -> tuple[Tensor, Tensor]:
    fused = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu

    def bias(dtype: torch.dtype) -> Tensor | None:
        if key_mask is None:
            return None
        zeros = torch.zeros(key_mask.shape, dtype=dtype)
        return zeros.masked_fill(~key_mask, float("-inf"))[:, None, None].expand(-1, q.shape[1], q.shape[2], -1)

    # called by its own name, the kernel takes rows for packed and apart without looking
    q, k, v = (x if x.stride(-1) == 1 and x.stride(-2) >= x.shape[-1] else x.contiguous() for x in (q, k, v))
    o, _ = fused(q, k, v, attn_mask=bias(q.dtype), scale=scale)
    # in float32 whatever the inputs: a mean key rounded to bfloat16 would cost 1e-2 nats
    wide_q, wide_k = q.float(), k.float()
    mean_key, lse = fused(wide_q, wide_k, wide_k, attn_mask=bias(torch.float32), scale=scale)
    return o, lse - scale * (wide_q * mean_key).sum(-1)


def _explicit(q: Tensor, k: Tensor, v: Tensor, scale: float, key_mask: Tensor | None) -> tuple[Tensor, Tensor]:
    """The probabilities in full, one head at a time to bound memory."""
    outputs, entropies = [], []
    for head in range(q.shape[1]):
        scores = (q[:, head].float() @ k[:, head].float().transpose(-1, -2)) * scale  # [R, L, S]
        if key_mask is not None:
            scores = scores.masked_fill(~key_mask[:, None], -1e30)
        lse = scores.logsumexp(-1)
        p = (scores - lse[..., None]).exp()
        outputs.append((p @ v[:, head].float()).to(v.dtype))
        entropies.append(lse - (p * scores).sum(-1))
    return torch.stack(outputs, 1), torch.stack(entropies, 1)
