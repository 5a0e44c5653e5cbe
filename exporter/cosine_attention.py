"""The self-attention that VAR and HART share: cosine attention over a time-major cache, in fp32."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from toprovar.exporter.planned.loop import BlockOutput
from toprovar.exporter.weights_file import Thunks
from toprovar.plugins import entropy_attention

MAX_LOG_SCALE = math.log(100.0)


class CosineAttention(nn.Module):
    """Unit queries and keys with a learned factor per head; without `cosine` plain products, scaled by 0.25/sqrt(D).

    projection: the name that checkpoints give the packed projection
    """

    def __init__(self, width: int, heads: int, cosine: bool, projection: str) -> None:
        super().__init__()
        self.heads, self.cosine, self.projection = heads, cosine, projection
        self.add_module(projection, nn.Linear(width, 3 * width, bias=False))
        self.q_bias = nn.Parameter(torch.zeros(width))
        self.v_bias = nn.Parameter(torch.zeros(width))
        self.register_buffer("zero_k_bias", torch.zeros(width))
        self.plain_scale = 0.25 / math.sqrt(width // heads)
        if cosine:
            self.scale_mul_1H11 = nn.Parameter(torch.full((1, heads, 1, 1), math.log(4.0)))
        self.proj = nn.Linear(width, width)

    def forward(
        self,
        x: Tensor,
        k_past: Tensor,
        v_past: Tensor,
        turn: Callable[[Tensor], Tensor] = lambda x: x,
        want_entropy: bool = False,
    ) -> BlockOutput:
        """What attention adds, before the gate, with new keys and values [L, R, H, D] and entropy [R, L] in nats.

        x: [R, L, C]; k_past, v_past: [S, R, H, D]; turn: rotation of queries and keys [R, H, L, D].
        """
        bias = torch.cat([self.q_bias, torch.zeros_like(self.q_bias), self.v_bias])
        qkv = F.linear(x, self.get_submodule(self.projection).weight, bias).unflatten(-1, (3, self.heads, -1))
        q, k, v = qkv.permute(2, 0, 3, 1, 4)  # each [R, H, L, D]
        if self.cosine:
            factor = self.scale_mul_1H11.float().clamp(max=MAX_LOG_SCALE).exp()
            q, k = F.normalize(q, dim=-1, eps=1e-12) * factor, F.normalize(k, dim=-1, eps=1e-12)
        q, k = turn(q), turn(k)
        k_new, v_new = k.permute(2, 0, 1, 3), v.permute(2, 0, 1, 3)  # [L, R, H, D]
        keys = torch.cat([k_past, k_new]).permute(1, 2, 0, 3)
        values = torch.cat([v_past, v_new]).permute(1, 2, 0, 3)
        scale, entropy = 1.0 if self.cosine else self.plain_scale, None
        if want_entropy:
            o, entropy = entropy_attention(q, keys, values, scale=scale, head_mean=True)
        else:
            o = F.scaled_dot_product_attention(q, keys, values, scale=scale)
        return BlockOutput(self.proj(o.transpose(1, 2).flatten(-2)), k_new, v_new, entropy)


def attention_weights(attention: CosineAttention, prefix: str) -> Thunks:
    """What step graphs read of it: matrices [in, out], the packed bias in one piece, the factor exponentiated."""
    packed = attention.get_submodule(attention.projection)

    def bias() -> Tensor:
        return torch.cat([attention.q_bias, torch.zeros_like(attention.q_bias), attention.v_bias])

    weights: Thunks = {
        f"{prefix}.qkv": lambda: packed.weight.T,
        f"{prefix}.qkv_bias": bias,
        f"{prefix}.proj": lambda: attention.proj.weight.T,
        f"{prefix}.proj_bias": lambda: attention.proj.bias,
    }
    if attention.cosine:
        factor = attention.scale_mul_1H11
        weights[f"{prefix}.scale_mul"] = lambda: factor.float().clamp(max=MAX_LOG_SCALE).exp().view(-1, 1)
    return weights
