"""Attention that also gives the entropy of its weights, in one pass over the keys: the Triton kernels.

With s_j = scale * q . k_j and p = softmax(s), for each query row

    o = sum_j p_j v_j        entropy = -sum_j p_j ln p_j   (nats)

State per row, in base 2 (y = s * log2 e), relative to a reference m that is at least near the largest y so far:

    x_j = y_j - m     l = sum 2^x     t = sum x 2^x     o = sum 2^x v
    when m moves to m':  d = m - m',  a = 2^d:   t <- a (t + d l),  l <- a l,  o <- a o
    at the end:  output o / l,  entropy ln 2 * (log2 l - t / l)

The term d l is easy to lose: Algorithm 2 of the ToProVAR paper prints t <- a t, which is off by 0.3 nats and more
whenever a later block raises the maximum. t / l <= 0 <= log2 l while m is the maximum, so nothing cancels.

Variants (constexpr): without entropy; with a key mask (a masked key is selected away, never multiplied by zero; a row
that sees no key ends with o = 0, entropy = 0); a range of keys per program, whose states (m, l, t, o) `_merge` joins
exactly; loads through TMA descriptors or pointers. Neither kind of load leaves the tensor: hardware or a mask gives
zeros outside.

Run and check: `toprovar.plugins.entropy_attention` is the way in. tests/plugins/test_entropy_kernel.py runs this file
under Triton's interpreter on the CPU, `python -m toprovar.tools.kernel_bench` checks and times it on a GPU.
Source: ToProVAR eq. 2 and Algorithm 2 (corrected as above); the split merge is flash decoding's with t added.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

LN2 = math.log(2.0)
LOG2E = 1.0 / LN2
# Reference of a row that has seen no key: finite, so that d * l is 0 and not infinity times zero.
_LOWEST = tl.constexpr(-1.0e38)


@dataclass(frozen=True)
class Tile:
    """How one launch cuts the work; every choice gives the same numbers up to rounding.

    block_m, block_n: queries and keys per step
    warps, stages:    of one program; stages = 1 loads without running ahead
    tma:              loads through tensor descriptors where the GPU has them and alignment allows
    """

    block_m: int = 128
    block_n: int = 64
    warps: int = 4
    stages: int = 2
    tma: bool = True

    def __str__(self) -> str:
        return f"{self.block_m}x{self.block_n} w{self.warps} s{self.stages}{' tma' if self.tma else ''}"


@triton.jit
def _rows(source, b, h, first, end, stride_b, stride_h, stride_l,
          N: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, TMA: tl.constexpr):  # fmt: skip
    """Rows first..first+N of one head, [N, BD]; zeros from row `end` and column D on."""
    if TMA:
        tile = source.load([b, h, first, 0]).reshape(N, BD)
    else:
        row = first + tl.arange(0, N)
        column = tl.arange(0, BD)
        at = source + b.to(tl.int64) * stride_b + h.to(tl.int64) * stride_h
        at = at + row[:, None].to(tl.int64) * stride_l + column[None, :]
        tile = tl.load(at, mask=(row[:, None] < end) & (column[None, :] < D), other=0.0)
    return tile


@triton.jit
def _step(scores, v, valid, m, l, t, o, factor, ENTROPY: tl.constexpr, MASKED: tl.constexpr):
    """One block of keys into the state. scores: q . k, [BM, BN]; valid: [1, BN], read if MASKED."""
    if MASKED:  # noqa: SIM108
        top = tl.max(tl.where(valid, scores * factor, _LOWEST), 1)
    else:
        top = tl.max(scores, 1) * factor  # factor >= 0
    m_new = tl.maximum(m, top)
    d = m - m_new
    a = tl.exp2(d)
    if ENTROPY:
        t = a * (t + d * l)
    l = l * a
    o = o * a[:, None]
    x = scores * factor - m_new[:, None]
    p = tl.exp2(x)
    if MASKED:
        p = tl.where(valid, p, 0.0)
        x = tl.where(valid, x, 0.0)
    l += tl.sum(p, 1)
    if ENTROPY:
        t += tl.sum(x * p, 1)
    # "ieee": float32 inputs are multiplied as such, not as TF32; 16-bit products are exact anyway
    o = tl.dot(p.to(v.dtype), v, o, input_precision="ieee")
    return m_new, l, t, o


@triton.jit
def _nats(l, t):
    """ln 2 * (log2 l - t / l), rounding below zero taken away; a select, because a maximum would hide NaN."""
    bits = tl.log2(l) - t / l
    return tl.where(bits < 0.0, 0.0, bits) * 0.6931471805599453


@triton.jit
def _attend(
    q_source, k_source, v_source, mask, out, entropy, part_o, part_m, part_l, part_t,
    factor, H, L, S, keys_per_split,
    q_b, q_h, q_l, k_b, k_h, k_s, v_b, v_h, v_s, mask_b, mask_s, out_b, out_h, out_l,
    D: tl.constexpr, GROUP: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BD: tl.constexpr,
    ENTROPY: tl.constexpr, MASK: tl.constexpr, SPLIT: tl.constexpr, TMA: tl.constexpr,
):  # fmt: skip
    """Grid: (blocks of queries, B * H, splits). Neighbouring programs share one head's keys in L2."""
    head = tl.program_id(1)
    split = tl.program_id(2)
    b = head // H
    h = head % H
    first = tl.program_id(0) * BM
    h_kv = h // GROUP

    q = _rows(q_source, b, h, first, L, q_b, q_h, q_l, BM, D, BD, TMA)
    m = tl.full((BM,), _LOWEST, tl.float32)
    l = tl.zeros((BM,), tl.float32)
    t = l
    o = tl.zeros((BM, BD), tl.float32)
    column = tl.arange(0, BN)

    low = split * keys_per_split
    high = tl.minimum(low + keys_per_split, S)
    whole = low + (high - low) // BN * BN  # the last, partial block has its own code: no comparisons in the loop
    for start in tl.range(low, whole, BN):
        k = _rows(k_source, b, h_kv, start, S, k_b, k_h, k_s, BN, D, BD, TMA)
        scores = tl.dot(q, k.T, input_precision="ieee")
        v = _rows(v_source, b, h_kv, start, S, v_b, v_h, v_s, BN, D, BD, TMA)
        valid = column[None, :] >= 0
        if MASK:
            at = mask + b.to(tl.int64) * mask_b + (start + column).to(tl.int64) * mask_s
            valid = (tl.load(at) != 0)[None, :]
        m, l, t, o = _step(scores, v, valid, m, l, t, o, factor, ENTROPY, MASK)
    if whole < high:
        k = _rows(k_source, b, h_kv, whole, S, k_b, k_h, k_s, BN, D, BD, TMA)
        scores = tl.dot(q, k.T, input_precision="ieee")
        v = _rows(v_source, b, h_kv, whole, S, v_b, v_h, v_s, BN, D, BD, TMA)
        inside = whole + column < S
        valid = inside[None, :]
        if MASK:
            at = mask + b.to(tl.int64) * mask_b + (whole + column).to(tl.int64) * mask_s
            valid = (tl.load(at, mask=inside, other=0) != 0)[None, :]
        m, l, t, o = _step(scores, v, valid, m, l, t, o, factor, ENTROPY, True)

    row = first + tl.arange(0, BM)
    wide = tl.arange(0, BD)
    inside_l = row < L
    inside_o = inside_l[:, None] & (wide[None, :] < D)
    if SPLIT:
        at = (split.to(tl.int64) * tl.num_programs(1) + head) * L + row
        tl.store(part_m + at, m, mask=inside_l)
        tl.store(part_l + at, l, mask=inside_l)
        if ENTROPY:
            tl.store(part_t + at, t, mask=inside_l)
        tl.store(part_o + at[:, None] * D + wide[None, :], o, mask=inside_o)
    else:
        at = out + b.to(tl.int64) * out_b + h.to(tl.int64) * out_h + row[:, None].to(tl.int64) * out_l + wide[None, :]
        total = tl.where(l == 0, 1.0, l)  # no key: o = t = 0, and the entropy comes out as 0
        tl.store(at, (o / total[:, None]).to(out.dtype.element_ty), mask=inside_o)
        if ENTROPY:
            tl.store(entropy + head.to(tl.int64) * L + row, _nats(total, t), mask=inside_l)


@triton.jit
def _merge(
    part_o, part_m, part_l, part_t, out, entropy, H, L, splits, out_b, out_h, out_l,
    D: tl.constexpr, BM: tl.constexpr, BD: tl.constexpr, ENTROPY: tl.constexpr,
):  # fmt: skip
    """Joins the states of disjoint ranges of keys, in order. Grid: (blocks of BM queries, B * H)."""
    head = tl.program_id(1)
    row = tl.program_id(0) * BM + tl.arange(0, BM)
    wide = tl.arange(0, BD)
    inside = row < L
    inside_o = inside[:, None] & (wide[None, :] < D)
    m = tl.full((BM,), _LOWEST, tl.float32)
    l = tl.zeros((BM,), tl.float32)
    t = tl.zeros((BM,), tl.float32)
    o = tl.zeros((BM, BD), tl.float32)
    for split in range(splits):
        at = (tl.cast(split, tl.int64) * tl.num_programs(1) + head) * L + row
        m_part = tl.load(part_m + at, mask=inside, other=_LOWEST)
        l_part = tl.load(part_l + at, mask=inside, other=0.0)
        o_part = tl.load(part_o + at[:, None] * D + wide[None, :], mask=inside_o, other=0.0)
        m_new = tl.maximum(m, m_part)
        d, d_part = m - m_new, m_part - m_new
        a, a_part = tl.exp2(d), tl.exp2(d_part)
        if ENTROPY:
            t_part = tl.load(part_t + at, mask=inside, other=0.0)
            t = a * (t + d * l) + a_part * (t_part + d_part * l_part)
        l = a * l + a_part * l_part
        o = a[:, None] * o + a_part[:, None] * o_part
        m = m_new
    b = head // H
    h = head % H
    at = out + b.to(tl.int64) * out_b + h.to(tl.int64) * out_h + row[:, None].to(tl.int64) * out_l + wide[None, :]
    total = tl.where(l == 0, 1.0, l)
    tl.store(at, (o / total[:, None]).to(out.dtype.element_ty), mask=inside_o)
    if ENTROPY:
        tl.store(entropy + head.to(tl.int64) * L + row, _nats(total, t), mask=inside)


@triton.jit
def _head_mean(per_head, mean, H, L, BL: tl.constexpr):
    """[B, H, L] -> [B, L], heads added in order: the same bits every time. Grid: (blocks of BL rows, B)."""
    b = tl.program_id(1).to(tl.int64)
    row = tl.program_id(0) * BL + tl.arange(0, BL)
    total = tl.zeros((BL,), tl.float32)
    for h in range(H):
        total += tl.load(per_head + (b * H + h) * L + row, mask=row < L, other=0.0)
    tl.store(mean + b * L + row, total / H, mask=row < L)


def padded_width(D: int) -> int:
    """The power of two that a head of width D is computed in; at least the 16 that matrix units want."""
    return max(16, triton.next_power_of_2(D))


def on_hopper(x: Tensor) -> bool:
    """Whether x's GPU multiplies from shared memory and loads through descriptors; the interpreter emulates one."""
    return not x.is_cuda or torch.cuda.get_device_capability(x.device) >= (9, 0)


def chosen_tile(dtype: torch.dtype, L: int, D: int, hopper: bool = True) -> Tile:
    """The tile for a shape. tools/kernel_bench.py measures it beside others.

    4 warps with 128 rows leave room for two programs per processor, which hide each other's softmax: 534 TFLOP/s,
    372 with 8 warps (H200, 4096 x 10521). Before Hopper 8 warps are needed to hold 128 rows without spills.
    """
    if dtype == torch.float32:  # true float32 products run on the ordinary units, where larger tiles spill
        return Tile(32 if L > 16 else 16, 32 if D <= 128 else 16, warps=8, stages=1, tma=False)
    if L <= 16:
        return Tile(16, 64 if D <= 128 else 32)
    if D > 128:
        return Tile(64, 32)
    if L <= 64:
        return Tile(64, 64)
    if D <= 64 and hopper:
        return Tile(128, 64, warps=4, stages=3)  # a third stage fits: 384 TFLOP/s at width 64, 330 with two
    return Tile(128, 64, warps=4 if hopper else 8)


def chosen_splits(tiles: int, S: int, block_n: int, processors: int) -> int:
    """How many ranges to cut the keys into, so that `tiles` programs become enough to fill the processors.

    1 where the tiles alone fill half of them; a range is never shorter than 4 blocks of keys, or the merge costs more.
    """
    if 2 * tiles > processors:
        return 1
    return max(1, min(2 * processors // tiles, S // (4 * block_n), 64))


def _fits_tma(x: Tensor) -> bool:
    """Tensor descriptors want packed rows, and a start and steps of whole 16 bytes. float32 gains nothing by them."""
    if x.element_size() != 2 or x.stride(-1) != 1 or x.data_ptr() % 16:
        return False
    return all(step > 0 and step * 2 % 16 == 0 for step in x.stride()[:-1])


def _descriptor(x: Tensor, rows: int, width: int) -> TensorDescriptor:
    return TensorDescriptor(x, list(x.shape), list(x.stride()), [1, 1, rows, width])


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float,
    key_mask: Tensor | None = None,
    *,
    with_entropy: bool = True,
    tile: Tile | None = None,
    splits: int | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Launches the kernels; arguments as checked by `entropy_attention`, scale >= 0.

    with_entropy=False is the same kernel without t, for measuring what the entropy costs.
    tile, splits: None chooses by shape.
    Returns: output [B, H, L, D] in v's dtype laid out like q, entropy [B, H, L] float32 nats or None.
    """
    B, H, L, D = q.shape
    S = k.shape[2]
    hopper = on_hopper(q)
    tile = tile or chosen_tile(q.dtype, L, D, hopper)
    BM, BN, BD = tile.block_m, tile.block_n, padded_width(D)
    q, k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, v))
    blocks = triton.cdiv(L, BM)
    if splits is None:
        processors = torch.cuda.get_device_properties(q.device).multi_processor_count if q.is_cuda else 1
        splits = chosen_splits(blocks * B * H, S, BN, processors)
    per_split = triton.cdiv(triton.cdiv(S, splits), BN) * BN
    splits = triton.cdiv(S, per_split)

    out = torch.empty_like(q, dtype=v.dtype)
    if out.stride(-1) != 1:
        out = torch.empty(q.shape, dtype=v.dtype, device=q.device)
    entropy = torch.empty((B, H, L) if with_entropy else (0,), dtype=torch.float32, device=q.device)
    states = [entropy] * 4  # o, m, l, t of every range; never touched without ranges
    if splits > 1:
        shapes = [(splits, B, H, L, D), *[(splits, B, H, L)] * 3]
        states = [torch.empty(shape, dtype=torch.float32, device=q.device) for shape in shapes]
    mask = q if key_mask is None else key_mask.view(torch.uint8)
    tma = tile.tma and hopper and all(map(_fits_tma, (q, k, v)))
    sources = (_descriptor(q, BM, BD), _descriptor(k, BN, BD), _descriptor(v, BN, BD)) if tma else (q, k, v)
    _attend[(blocks, B * H, splits)](
        *sources, mask, out, entropy, *states,
        scale * LOG2E, H, L, S, per_split,
        *q.stride()[:3], *k.stride()[:3], *v.stride()[:3],
        *((0, 0) if key_mask is None else key_mask.stride()), *out.stride()[:3],
        D=D, GROUP=H // k.shape[1], BM=BM, BN=BN, BD=BD,
        ENTROPY=with_entropy, MASK=key_mask is not None, SPLIT=splits > 1, TMA=tma,
        num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
    if splits > 1:
        rows = 16
        _merge[(triton.cdiv(L, rows), B * H)](
            *states, out, entropy, H, L, splits, *out.stride()[:3],
            D=D, BM=rows, BD=BD, ENTROPY=with_entropy, num_warps=4,
        )  # fmt: skip
    return out, entropy if with_entropy else None


def head_mean(per_head: Tensor) -> Tensor:
    """[B, H, L] float32, contiguous -> [B, L], the same bits every time."""
    B, H, L = per_head.shape
    mean = torch.empty((B, L), dtype=torch.float32, device=per_head.device)
    _head_mean[(triton.cdiv(L, 256), B)](per_head, mean, H, L, BL=256)
    return mean
