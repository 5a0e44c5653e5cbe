"""The self-attention that VAR and HART share: cosine attention over a time-major cache, in fp32."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

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
        self, x: Tensor, k_past: Tensor, v_past: Tensor, turn: Callable[[Tensor], Tensor] = lambda x: x
    ) -> tuple[Tensor, Tensor, Tensor]:
        """x: [R, L, C]; k_past, v_past: [S, R, H, D]; turn: rotation of queries and keys [R, H, L, D].

        Returns: output, all keys, all values.
        """
        bias = torch.cat([self.q_bias, torch.zeros_like(self.q_bias), self.v_bias])
        qkv = F.linear(x, self.get_submodule(self.projection).weight, bias).unflatten(-1, (3, self.heads, -1))
        q, k, v = qkv.permute(2, 0, 3, 1, 4)  # each [R, H, L, D]
        if self.cosine:
            factor = self.scale_mul_1H11.float().clamp(max=MAX_LOG_SCALE).exp()
            q, k = F.normalize(q, dim=-1, eps=1e-12) * factor, F.normalize(k, dim=-1, eps=1e-12)
        q, k = turn(q), turn(k)
        keys = torch.cat([k_past, k.permute(2, 0, 1, 3)])  # [S + L, R, H, D]
        values = torch.cat([v_past, v.permute(2, 0, 1, 3)])
        o = F.scaled_dot_product_attention(
            q, keys.permute(1, 2, 0, 3), values.permute(1, 2, 0, 3), scale=1.0 if self.cosine else self.plain_scale
        )
        return self.proj(o.transpose(1, 2).flatten(-2)), keys, values
