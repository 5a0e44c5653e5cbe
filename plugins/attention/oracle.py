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


def attention_with_entropy(q: Tensor, k: Tensor, v: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Attention and the entropy of its weights.

    q: [R, H, L, D]; k, v: [R, H, S, D].
    Returns: output [R, H, L, D] in v's dtype, entropy [R, H, L] float32 in nats, in [0, ln S].
    """
    q, k = q.to(v.dtype), k.to(v.dtype)
    if q.device.type == "cpu" and q.dtype in (torch.float32, torch.bfloat16):
        fused = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        o, lse = fused(q, k, v, scale=scale)
        mean_key, _ = fused(q, k, k, scale=scale)
        entropy = lse.float() - scale * (q.float() * mean_key.float()).sum(-1)
        return o, entropy.clamp(min=0.0)
    # Elsewhere the probabilities are formed explicitly, one head at a time to bound memory.
    outputs, entropies = [], []
    for head in range(q.shape[1]):
        scores = (q[:, head].float() @ k[:, head].float().transpose(-1, -2)) * scale  # [R, L, S]
        lse = scores.logsumexp(-1)
        p = (scores - lse[..., None]).exp()
        outputs.append((p @ v[:, head].float()).to(v.dtype))
        entropies.append((lse - (p * scores).sum(-1)).clamp(min=0.0))
    return torch.stack(outputs, 1), torch.stack(entropies, 1)
