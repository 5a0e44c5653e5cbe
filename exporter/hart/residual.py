"""HART's residual head: a small diffusion model that adds what the codebook cannot say to the last map.

Everything is fp32: at the first step sqrt(1/alpha) is 2e4, so that half precision would flip the clamped estimate.
Source: HART (arXiv 2410.10812), mit-han-lab/hart, hart/modules/diffusion.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from toprovar.exporter.hart.config import STEPS, HartConfig

TRAINING_STEPS = 1000
RESIDUAL_FACTOR = 0.6  # of the result that enters the map


@dataclass(frozen=True)
class DiffusionTables:
    """Constants of the kept steps, float64, in ascending order of noise.

    times: [STEPS] int64 original step numbers; the others [STEPS]. x0 = x*x0_x - noise*x0_noise;
    mean = x0*mean_x0 + x*mean_x; the log variance lies between log_low and log_high.
    """

    times: np.ndarray
    betas: np.ndarray
    x0_x: np.ndarray
    x0_noise: np.ndarray
    mean_x0: np.ndarray
    mean_x: np.ndarray
    log_low: np.ndarray
    log_high: np.ndarray


def diffusion_tables(steps: int = STEPS) -> DiffusionTables:
    """Cosine betas on 1000 steps, `steps` evenly spaced ones kept with both ends, betas anew from their products."""

    def remaining(u: float) -> float:
        return math.cos((u + 0.008) / 1.008 * math.pi / 2) ** 2

    betas = np.array(
        [
            min(1 - remaining((i + 1) / TRAINING_STEPS) / remaining(i / TRAINING_STEPS), 0.999)
            for i in range(TRAINING_STEPS)
        ]
    )
    products = np.cumprod(1 - betas)
    stride = (TRAINING_STEPS - 1) / max(steps - 1, 1)
    times = np.array([round(i * stride) for i in range(steps)])
    kept = products[times]
    before = np.concatenate([[1.0], kept[:-1]])
    betas = 1 - kept / before
    # products of the recomputed betas, as the reference takes them: equal to `kept` up to rounding
    products = np.cumprod(1 - betas)
    before = np.concatenate([[1.0], products[:-1]])
    posterior = betas * (1 - before) / (1 - products)
    clipped = np.concatenate([posterior[1:2], posterior[1:]]) if steps > 1 else posterior  # the first one is zero
    return DiffusionTables(
        times=times,
        betas=betas,
        x0_x=np.sqrt(1 / products),
        x0_noise=np.sqrt(1 / products - 1),
        mean_x0=betas * np.sqrt(before) / (1 - products),
        mean_x=(1 - before) * np.sqrt(1 - betas) / (1 - products),
        log_low=np.log(clipped),
        log_high=np.log(betas),
    )


def sinusoid(numbers: Tensor, width: int) -> Tensor:
    """Cosines, then sines. numbers: [n] -> [n, width] float32."""
    half = width // 2
    frequencies = torch.exp(-math.log(10000.0) * torch.arange(half, device=numbers.device).float() / half)
    angles = numbers.float()[:, None] * frequencies
    return torch.cat([angles.cos(), angles.sin()], dim=-1)


class SinusoidEmbedding(nn.Module):
    """A number as a vector: sinusoid, linear, SiLU, linear."""

    def __init__(self, sinusoid_width: int, width: int) -> None:
        super().__init__()
        self.sinusoid_width = sinusoid_width
        self.mlp = nn.Sequential(nn.Linear(sinusoid_width, width), nn.SiLU(), nn.Linear(width, width))

    def forward(self, numbers: Tensor) -> Tensor:
        """[n] -> [n, width]."""
        return self.mlp(sinusoid(numbers, self.sinusoid_width))


class ResidualBlock(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.in_ln = nn.LayerNorm(width, eps=1e-6)
        self.mlp = nn.Sequential(nn.Linear(width, width), nn.SiLU(), nn.Linear(width, width))
        self.adaLN_modulation = nn.Sequential(nn.SiLU(), nn.Linear(width, 3 * width))

    def forward(self, h: Tensor, y: Tensor) -> Tensor:
        shift, scale, gate = self.adaLN_modulation(y).chunk(3, dim=-1)
        return h + gate * self.mlp(self.in_ln(h) * (1 + scale) + shift)


class FinalLayer(nn.Module):
    def __init__(self, width: int, channels: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, channels)
        self.adaLN_modulation = nn.Sequential(nn.SiLU(), nn.Linear(width, 2 * width))

    def forward(self, h: Tensor, y: Tensor) -> Tensor:
        shift, scale = self.adaLN_modulation(y).chunk(2, dim=-1)
        return self.linear(F.layer_norm(h, h.shape[-1:], eps=1e-6) * (1 + scale) + shift)


class ResidualNetwork(nn.Module):
    """Predicts noise and variance of every token on its own."""

    def __init__(self, config: HartConfig) -> None:
        super().__init__()
        W, d = config.residual_width, config.code_channels
        self.time_embed = SinusoidEmbedding(config.time_width, W)
        self.cond_embed = nn.Linear(config.width, W)
        self.input_proj = nn.Linear(d, W)
        self.res_blocks = nn.ModuleList(ResidualBlock(W) for _ in range(config.residual_depth))
        self.final_layer = FinalLayer(W, 2 * d)

    def forward(self, x: Tensor, time: int, condition: Tensor) -> tuple[Tensor, Tensor]:
        """x: [n, d]; condition: [n, W] from `cond_embed`. Returns: noise and variance share in [-1, 1], each [n, d]."""
        y = self.time_embed(torch.tensor([time], device=x.device)) + condition
        h = self.input_proj(x)
        for block in self.res_blocks:
            h = block(h, y)
        noise, variance = self.final_layer(h, y).chunk(2, dim=-1)
        return noise, variance


class ResidualHead(nn.Module):
    def __init__(self, config: HartConfig) -> None:
        super().__init__()
        self.net = ResidualNetwork(config)

    def forward(self, z: Tensor, guidance: float | None, start: Tensor, step_noise: Tensor) -> Tensor:
        """All reverse steps, as many as `step_noise` has maps.

        z:          [n, C] float32; with guidance [2n, C], conditional rows, then unconditional ones
        guidance:   t; the predicted noise is (1+t)*conditional - t*unconditional. None: z has no unconditional rows.
        start:      [n, d] standard normal, for both halves
        step_noise: [steps, rows of z, d] standard normal, in the order of use; the last step adds none
        Returns:    [rows of z, d]; the conditional rows are what the last map takes.
        """
        tables = diffusion_tables(len(step_noise))
        condition = self.net.cond_embed(z)
        n = len(start)
        x = start if guidance is None else start.repeat(2, 1)
        for used, step in enumerate(reversed(range(len(step_noise)))):
            first = x if guidance is None else x[:n].repeat(2, 1)
            noise, variance = self.net(first, int(tables.times[step]), condition)
            if guidance is not None:
                noise = ((1 + guidance) * noise[:n] - guidance * noise[n:]).repeat(2, 1)
            x0 = (x * float(tables.x0_x[step]) - noise * float(tables.x0_noise[step])).clamp(-1, 1)
            x = x0 * float(tables.mean_x0[step]) + x * float(tables.mean_x[step])
            if step:
                share = (variance + 1) / 2
                log_variance = share * float(tables.log_high[step]) + (1 - share) * float(tables.log_low[step])
                x = x + (0.5 * log_variance).exp() * step_noise[used]
        return RESIDUAL_FACTOR * x
