"""The scores of scores.py as ONNX: the same arithmetic on time-major tensors [L, B, C].

A score is [L] for one image and [B, L] for several; lower runs first.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from toprovar.exporter.graph_builder import GraphBuilder
from toprovar.exporter.planned.scores import CERTAIN, rotation_steps, strata, stratum_count
from toprovar.exporter.resize_matrices import resize_pair, smoothing_matrix

INT64 = ir.DataType.INT64.value
FLOAT = ir.DataType.FLOAT.value
TINY = np.float32(1e-12)


def variance_score(g: GraphBuilder, x: ir.Value) -> ir.Value:
    """x: [L, B, C] -> [L, B]."""
    centred = g.Sub(x, g.ReduceMean(x, [0], keepdims=1))
    return g.Neg(g.ReduceSumSquare(centred, [2], keepdims=0))


def structure_score(
    g: GraphBuilder, x: ir.Value, size: tuple[int, int], images: int, width: int, weight: float, iterations: int
) -> ir.Value:
    """x: [L, B, C] on a map of `size` -> [L, B]."""
    height, across = size
    tokens = height * across
    centred = g.Sub(x, g.ReduceMean(x, [0], keepdims=1))
    rows = g.Transpose(centred, perm=[1, 0, 2])  # [B, L, C]
    farthest = g.ArgMax(g.ReduceSumSquare(rows, [2], keepdims=0), axis=1, keepdims=1)  # [B, 1]
    direction = g.reshape(g.GatherND(rows, farthest, batch_dims=1), (images, width, 1))
    across_tokens = g.Transpose(rows, perm=[0, 2, 1])  # [B, C, L]
    for _ in range(iterations):
        direction = g.MatMul(across_tokens, g.MatMul(rows, direction))  # [B, C, 1]
        direction = g.Div(direction, g.Max(g.ReduceL2(direction, [1], keepdims=1), TINY))
    structure = g.Abs(g.reshape(g.MatMul(rows, direction), (images, tokens)))
    low = g.MatMul(g.constant(smoothing_matrix(across, True)), g.reshape(x, (height, across, images * width)))
    low = g.MatMul(g.constant(smoothing_matrix(height, True)), g.reshape(low, (height, across * images * width)))
    texture = g.ReduceSumSquare(g.Sub(x, g.reshape(low, (tokens, images, width))), [2], keepdims=0)  # [L, B]
    total = g.Add(g.Mul(_over_mean(g, structure), np.float32(weight)), _over_mean(g, g.Transpose(texture, perm=[1, 0])))
    return g.Transpose(g.Neg(total), perm=[1, 0])


def _over_mean(g: GraphBuilder, score: ir.Value) -> ir.Value:
    """[B, L] over its mean over tokens."""
    return g.Div(score, g.Max(g.ReduceMean(score, [1], keepdims=1), TINY))


def code_energy(g: GraphBuilder, code: ir.Value, images: int, old: tuple[int, int], new: tuple[int, int]) -> ir.Value:
    """code: [B, d, *old] -> [B, N] energy of the Haar details on the map `new`."""
    pads = [0, 0, 0, 0, 0, 0, old[0] % 2, old[1] % 2]
    if any(pads):
        code = g.Pad(code, pads, mode="edge")
    height, width = old[0] + old[0] % 2, old[1] + old[1] % 2

    def corner(y: int, x: int) -> ir.Value:
        return g.Slice(code, [y, x], [height, width], [2, 3], [2, 2])

    a, b, c, d = corner(0, 0), corner(0, 1), corner(1, 0), corner(1, 1)
    pairs = ((g.Add(b, d), g.Add(a, c)), (g.Add(c, d), g.Add(a, b)), (g.Add(b, c), g.Add(a, d)))
    energy: ir.Value | None = None
    for plus, minus in pairs:
        detail = g.ReduceSumSquare(g.Mul(g.Sub(plus, minus), np.float32(0.5)), [1], keepdims=0)  # [B, h/2, w/2]
        energy = detail if energy is None else g.Add(energy, detail)
    small = (height // 2, width // 2)
    rows, columns = resize_pair("bilinear", small, new)
    smooth = [smoothing_matrix(small[i], False) for i in (0, 1)]
    energy = g.resize(
        energy,
        smooth[0] if rows is None else (rows.astype(np.float64) @ smooth[0]).astype(np.float32),
        smooth[1] if columns is None else (columns.astype(np.float64) @ smooth[1]).astype(np.float32),
    )
    return g.reshape(energy, (images, new[0] * new[1]))


def rotated_order(g: GraphBuilder, score: ir.Value, images: int, tokens: int, rotation: float) -> ir.Value:
    """[B, L] score -> [B, L] float32 places in its rotated order."""
    _, order = g.TopK(score, [tokens], axis=-1, largest=0, sorted=1, outputs=2)
    zeros = g.full(np.int64(0), (images, tokens))
    places = g.Expand(g.constant(np.arange(tokens)[None]), [images, tokens])
    place = g.ScatterElements(zeros, order, places, axis=-1)
    steps = rotation_steps(rotation, tokens)
    if steps:
        place = g.Mod(g.Add(place, g.constant([steps])), g.constant([tokens]))
    return g.Cast(place, to=FLOAT)


def stratified(g: GraphBuilder, score: ir.Value, size: tuple[int, int], count: int, images: int) -> ir.Value:
    """The score, [L] or [B, L], with each region's lowest tokens made certain to run."""
    for region in strata(size):
        least = min(stratum_count(count), len(region))
        places = g.constant(region)
        _, best = g.TopK(g.Gather(score, places, axis=-1), [least], axis=-1, largest=0, sorted=1, outputs=2)
        shape = (least,) if images == 1 else (images, least)
        certain = g.constant(np.full(shape, CERTAIN, np.float32))
        score = g.ScatterElements(score, g.Gather(places, best), certain, axis=-1)
    return score


def depth_weight(g: GraphBuilder, place: ir.Value, tokens: int, ramp: tuple[float, float]) -> ir.Value:
    """Weight of each token's code. place: [B, L] -> [B, L]."""
    low, high = ramp
    share = g.Div(g.Add(place, np.float32(0.5)), np.float32(tokens))
    return g.Add(g.Mul(share, np.float32(high - low)), np.float32(low))
