"""The scores that rank tokens, and how ranked tokens are chosen, in PyTorch. Lower runs first, always.

score_graphs.py writes the same arithmetic as ONNX. Formulas and sources: docs/calibration.md.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

Rank = Callable[[Tensor, int], Tensor]

STRATA = 4  # regions along an axis, where a score is stratified
STRATUM_SHARE = 0.25  # of an even share of the kept tokens, that each region keeps at least
CERTAIN = -1e30  # score of a token that its region keeps


def lowest_scores(score: Tensor, count: int) -> Tensor:
    """Token gate in PyTorch: ties to the smaller index, result ascending. score: [N] -> [count] int64."""
    return torch.argsort(score, stable=True)[:count].sort().values


def variance_score(x: Tensor) -> Tensor:
    """FastVAR: squared distance from the mean over tokens, negated. x: [B, N, C] -> [B, N]."""
    return -(x - x.mean(1, keepdim=True)).square().sum(-1)


def structure_score(x: Tensor, size: tuple[int, int], weight: float, iterations: int) -> Tensor:
    """StepVAR: projection on the main direction plus local high-pass, each over its mean, negated.

    x: [B, N, C] on a map of `size`. The power iteration starts from the token farthest from the mean.
    """
    centred = x - x.mean(1, keepdim=True)
    farthest = centred.square().sum(-1).argmax(1)  # [B]
    direction = centred[torch.arange(len(x), device=x.device), farthest]  # [B, C]
    for _ in range(iterations):
        direction = ((centred @ direction[:, :, None]).transpose(1, 2) @ centred)[:, 0]
        direction = direction / direction.square().sum(-1, keepdim=True).sqrt().clamp(min=1e-12)
    structure = (centred @ direction[:, :, None])[:, :, 0].abs()
    low = F.avg_pool2d(x.transpose(1, 2).unflatten(-1, size), 3, 1, 1, count_include_pad=False)
    texture = (x - low.flatten(2).transpose(1, 2)).square().sum(-1)
    return -(weight * over_mean(structure) + over_mean(texture))


def over_mean(score: Tensor) -> Tensor:
    """A score over its mean over tokens; a score of zeros stays one."""
    return score / score.mean(-1, keepdim=True).clamp(min=1e-12)


def code_energy(code: Tensor, patch: int, size: tuple[int, int]) -> Tensor:
    """LD-Pruning: energy of the Haar details of one scale's codes, smoothed 3x3, on the map of the next scale.

    code: [B, d, h*patch, w*patch]; odd edges are repeated. size: of the next map. Returns: [B, N] >= 0.
    """
    height, width = code.shape[-2:]
    code = F.pad(code, (0, width % 2, 0, height % 2), mode="replicate")
    a, b = code[..., 0::2, 0::2], code[..., 0::2, 1::2]
    c, d = code[..., 1::2, 0::2], code[..., 1::2, 1::2]
    details = ((b + d) - (a + c), (c + d) - (a + b), (b + c) - (a + d))
    energy = sum((0.5 * detail).square().sum(1, keepdim=True) for detail in details)
    energy = F.avg_pool2d(energy, 3, 1, 1)
    return F.interpolate(energy, size=size, mode="bilinear", align_corners=False).flatten(1)


def rotated_order(score: Tensor, rotation: float) -> Tensor:
    """DepthVAR: each token's place in the order of its score, rotated by a share of the order.

    score: [B, N], higher comes later. Returns: [B, N] float32 places 0..N-1, all different; the highest run first.
    """
    tokens = score.shape[-1]
    order = torch.argsort(score, dim=-1, stable=True)
    place = torch.empty_like(order).scatter_(-1, order, torch.arange(tokens, device=score.device).expand_as(order))
    return ((place + rotation_steps(rotation, tokens)) % tokens).float()


def rotation_steps(rotation: float, tokens: int) -> int:
    """Places by which an order of `tokens` is rotated."""
    return round(rotation * tokens)


def strata(size: tuple[int, int]) -> list[list[int]]:
    """Token indices of each of 4 x 4 regions of a map; regions without a token are left out."""
    height, width = size
    regions: dict[tuple[int, int], list[int]] = {}
    for index in range(height * width):
        y, x = divmod(index, width)
        regions.setdefault((y * STRATA // height, x * STRATA // width), []).append(index)
    return list(regions.values())


def stratum_count(count: int) -> int:
    """Tokens that a region keeps at least, of `count` kept on the whole map."""
    return math.ceil(count * STRATUM_SHARE / STRATA**2)


def stratified(score: Tensor, size: tuple[int, int], count: int) -> Tensor:
    """The score with each region's lowest tokens made certain to run. score: [N] -> [N]."""
    score = score.clone()
    for region in strata(size):
        places = torch.tensor(region, device=score.device)
        least = min(stratum_count(count), len(region))
        score[places[torch.argsort(score[places], stable=True)[:least]]] = CERTAIN
    return score


def depth_weight(place: Tensor, ramp: tuple[float, float]) -> Tensor:
    """Weight of each token's code: from ramp[0] for the last in order to ramp[1] for the first. place: [B, N]."""
    low, high = ramp
    return (place + 0.5) / place.shape[-1] * (high - low) + low
