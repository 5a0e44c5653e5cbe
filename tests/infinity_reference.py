"""Infinity once more, in plain float64 NumPy: slow, short and separate, to hold the other implementations against.

Nothing here is shared with the project's own code. Every step is written the way the reference states it: one row,
one head, one cell at a time. Only the rotation angles are float32, because positions are defined there by float32
rounding. `write_fixture` stores a run in the format of the parity files.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

Array = np.ndarray


@dataclass(frozen=True)
class Case:
    """A model and one run of it. last_map: last map of the 1M schedule of the aspect ratio; negative_lens: own text."""

    schedule: tuple[tuple[int, int], ...]
    last_map: tuple[int, int]
    width: int = 32
    heads: int = 4
    depth: int = 3
    chunks: int = 1
    text_width: int = 24
    pool_heads: int = 2
    code_channels: int = 6
    patchify: bool = False
    swapped_scale_axes: bool = False
    lens: tuple[int, ...] = (5,)
    negative_lens: tuple[int, ...] = ()
    cfg: tuple[float, ...] = (3.0,)
    tau: tuple[float, ...] = (0.5,)
    insertion: tuple[int, ...] = (0,)
    top_p: float = 0.97
    scales_run: int = 0
    seed: int = 1

    @property
    def bits(self) -> int:
        return self.code_channels * (4 if self.patchify else 1)

    @property
    def scales(self) -> int:
        return self.scales_run or len(self.schedule)

    def at(self, values: tuple[float, ...], scale: int) -> float:
        return values[0] if len(values) == 1 else values[scale]


@dataclass
class Run:
    """weights by published name, text rows, and every recorded array by its name in the parity files."""

    case: Case
    weights: dict[str, Array]
    text: Array
    negative: Array | None
    arrays: dict[str, Array] = field(default_factory=dict)


def block_prefix(case: Case, layer: int) -> str:
    if case.chunks == 1:
        return f"blocks.{layer}"
    per_chunk = case.depth // case.chunks
    return f"block_chunks.{layer // per_chunk}.module.{layer % per_chunk}"


def random_weights(case: Case) -> dict[str, Array]:
    """Weights that keep activations near 1, exact in fp16."""
    rng = np.random.default_rng(case.seed)
    C, text_width, bits = case.width, case.text_width, case.bits

    def matrix(rows: int, columns: int, gain: float = 1.0) -> Array:
        return rng.standard_normal((rows, columns)) * gain / math.sqrt(columns)

    def vector(*shape: int) -> Array:
        return rng.standard_normal(shape) * 0.2

    w = {
        "cfg_uncond": rng.standard_normal((12, text_width)),
        "text_norm.weight": 1 + vector(text_width),
        "text_proj_for_sos.ca.mat_q": rng.standard_normal((1, case.pool_heads, C // case.pool_heads)),
        "text_proj_for_sos.ca.mat_kv.weight": matrix(2 * C, text_width),
        "text_proj_for_sos.ca.v_bias": vector(C),
        "text_proj_for_sos.ca.zero_k_bias": np.zeros(C),
        "text_proj_for_sos.ca.proj.weight": matrix(C, C),
        "text_proj_for_sos.ca.proj.bias": vector(C),
        "text_proj_for_ca.0.weight": matrix(C, text_width),
        "text_proj_for_ca.0.bias": vector(C),
        "text_proj_for_ca.2.weight": matrix(C, C),
        "text_proj_for_ca.2.bias": vector(C),
        "pos_start": vector(1, 1, C),
        "lvl_embed.weight": rng.standard_normal((15, C)) * 0.5,
        "word_embed.weight": matrix(C, bits, 2.0),
        "word_embed.bias": vector(C),
        "shared_ada_lin.1.weight": matrix(6 * C, C, 0.3),
        "shared_ada_lin.1.bias": vector(6 * C),
        "head_nm.ada_lin.1.weight": matrix(2 * C, C, 0.3),
        "head_nm.ada_lin.1.bias": vector(2 * C),
        "head.weight": matrix(2 * bits, C, 2.0),
        "head.bias": vector(2 * bits),
    }
    for layer in range(case.depth):
        p = block_prefix(case, layer)
        factor = rng.uniform(0.5, 2.0, case.heads)
        factor[0] = 5.0  # above ln 100: the cap is in use
        axes = (1, 1, case.heads, 1) if case.swapped_scale_axes else (1, case.heads, 1, 1)
        w |= {
            f"{p}.ada_gss": vector(1, 1, 6, C) + np.array([0.6, 0.6, 0, 0, 0, 0])[:, None],
            f"{p}.sa.mat_qkv.weight": matrix(3 * C, C),
            f"{p}.sa.q_bias": vector(C),
            f"{p}.sa.v_bias": vector(C),
            f"{p}.sa.zero_k_bias": np.zeros(C),
            f"{p}.sa.scale_mul_1H11": factor.reshape(axes),
            f"{p}.sa.proj.weight": matrix(C, C),
            f"{p}.sa.proj.bias": vector(C),
            f"{p}.ca_norm.weight": 1 + vector(C),
            f"{p}.ca_norm.bias": vector(C),
            f"{p}.ca.mat_q.weight": matrix(C, C, 2.0),
            f"{p}.ca.mat_q.bias": vector(C),
            f"{p}.ca.mat_kv.weight": matrix(2 * C, C),
            f"{p}.ca.v_bias": vector(C),
            f"{p}.ca.zero_k_bias": np.zeros(C),
            f"{p}.ca.proj.weight": matrix(C, C),
            f"{p}.ca.proj.bias": vector(C),
            f"{p}.ffn.fc1.weight": matrix(3 * C, C),
            f"{p}.ffn.fc1.bias": vector(3 * C),
            f"{p}.ffn.fc2.weight": matrix(C, 3 * C),
            f"{p}.ffn.fc2.bias": vector(C),
        }
    return {name: array.astype(np.float16) for name, array in w.items()}


# -- elementary steps --------------------------------------------------------------------------------------------------


def layer_norm(x: Array) -> Array:
    centred = x - x.mean(-1, keepdims=True)
    return centred / np.sqrt((centred**2).mean(-1, keepdims=True) + 1e-6)


def silu(x: Array) -> Array:
    return x / (1 + np.exp(-x))


def gelu_tanh(x: Array) -> Array:
    return 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


def unit(x: Array) -> Array:
    return x / np.maximum(np.sqrt((x**2).sum(-1, keepdims=True)), 1e-12)


def softmax(x: Array) -> Array:
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def attend(q: Array, k: Array, v: Array, scale: float) -> Array:
    """One head of one row. q: [L, c]; k, v: [S, c] -> [L, c]."""
    return softmax(q @ k.T * scale) @ v


def resize_bilinear(x: Array, size: tuple[int, int]) -> Array:
    """[..., h, w]: half-pixel centres, no antialias, clamped at the borders."""
    height, width = x.shape[-2:]
    out = np.zeros((*x.shape[:-2], *size))
    for i in range(size[0]):
        y = max((i + 0.5) * height / size[0] - 0.5, 0.0)
        y0 = min(math.floor(y), height - 1)
        y1 = min(y0 + 1, height - 1)
        for j in range(size[1]):
            z = max((j + 0.5) * width / size[1] - 0.5, 0.0)
            x0 = min(math.floor(z), width - 1)
            x1 = min(x0 + 1, width - 1)
            top = x[..., y0, x0] * (1 - (z - x0)) + x[..., y0, x1] * (z - x0)
            bottom = x[..., y1, x0] * (1 - (z - x0)) + x[..., y1, x1] * (z - x0)
            out[..., i, j] = top * (1 - (y - y0)) + bottom * (y - y0)
    return out


def rope_table(case: Case) -> Array:
    """[2, all tokens, c/2] float32: cosines, sines."""
    n = case.width // case.heads // 4
    frequencies = np.array([10000.0 ** (-2 * i / (2 * n)) for i in range(n)], np.float32)
    angles = []
    for height, width in case.schedule:
        for y in range(height):
            for x in range(width):
                row = np.rint(np.float32(y) * np.float32(case.last_map[0] / height))
                column = np.rint(np.float32(x) * np.float32(case.last_map[1] / width))
                angles.append(np.concatenate([row * frequencies, column * frequencies]))
    table = np.array(angles, np.float32)
    return np.stack([np.cos(table), np.sin(table)])


def rotate(x: Array, table: Array) -> Array:
    """Neighbouring pairs. x: [L, c]; table: [2, L, c/2]."""
    out = np.empty_like(x)
    for i in range(x.shape[1] // 2):
        cos, sin = table[0, :, i].astype(np.float64), table[1, :, i].astype(np.float64)
        out[:, 2 * i] = x[:, 2 * i] * cos - x[:, 2 * i + 1] * sin
        out[:, 2 * i + 1] = x[:, 2 * i] * sin + x[:, 2 * i + 1] * cos
    return out


def latent(bits: Array, case: Case, size: tuple[int, int]) -> Array:
    """bits [B, L, bits] of an (h, w) map -> [B, d, h*p, w*p], +-1/sqrt(d)."""
    height, width = size
    d = case.code_channels
    p = 2 if case.patchify else 1
    out = np.zeros((bits.shape[0], d, height * p, width * p))
    for y in range(height):
        for x in range(width):
            for k in range(d):
                for i in range(p):
                    for j in range(p):
                        bit = bits[:, y * width + x, k * p * p + i * p + j].astype(np.float64)
                        out[:, k, y * p + i, x * p + j] = (2 * bit - 1) / math.sqrt(d)
    return out


def tokens(grid: Array, case: Case) -> Array:
    """[B, d, h*p, w*p] -> [B, h*w, bits]."""
    p = 2 if case.patchify else 1
    B, d, H, W = grid.shape
    out = np.zeros((B, (H // p) * (W // p), d * p * p))
    for y in range(H):
        for x in range(W):
            for k in range(d):
                token = (y // p) * (W // p) + x // p
                out[:, token, k * p * p + (y % p) * p + x % p] = grid[:, k, y, x]
    return out


# -- the model ---------------------------------------------------------------------------------------------------------


class Reference:
    def __init__(self, case: Case, weights: dict[str, Array]) -> None:
        self.case = case
        self.w = {name: array.astype(np.float64) for name, array in weights.items()}
        self.table = rope_table(case)

    def lin(self, name: str, x: Array) -> Array:
        return x @ self.w[f"{name}.weight"].T + self.w[f"{name}.bias"]

    def text_side(self, rows: list[Array]) -> None:
        """rows: the text of every row of the batch, conditional first."""
        w, C, heads = self.w, self.case.width, self.case.pool_heads
        width = C // heads
        pooled, self.cross_text = [], []
        for text in rows:
            e = text / np.sqrt((text**2).mean(-1, keepdims=True) + 1e-6) * w["text_norm.weight"]
            kv = e @ w["text_proj_for_sos.ca.mat_kv.weight"].T
            k, v = kv[:, :C], kv[:, C:] + w["text_proj_for_sos.ca.v_bias"]
            parts = []
            for h in range(heads):
                q = w["text_proj_for_sos.ca.mat_q"][0, h][None]
                part = slice(h * width, (h + 1) * width)
                parts.append(attend(q, k[:, part], v[:, part], width**-0.5)[0])
            pooled.append(self.lin("text_proj_for_sos.ca.proj", np.concatenate(parts)))
            self.cross_text.append(self.lin("text_proj_for_ca.2", gelu_tanh(self.lin("text_proj_for_ca.0", e))))
        self.pooled = np.stack(pooled)  # [R, C]
        self.modulation = self.lin("shared_ada_lin.1", silu(self.pooled)).reshape(-1, 1, 6, C)
        self.head_modulation = self.lin("head_nm.ada_lin.1", silu(self.pooled)).reshape(-1, 1, 2, C)

    def block(self, layer: int, x: Array, cache: dict[str, list[Array]], table: Array) -> Array:
        """x: [R, L, C]. cache: per kind a list over layers of [R, H, S, c], grown in place."""
        w, case, p = self.w, self.case, block_prefix(self.case, layer)
        R, L, C = x.shape
        H, c = case.heads, case.width // case.heads
        gamma1, gamma2, scale1, scale2, shift1, shift2 = np.moveaxis(w[f"{p}.ada_gss"] + self.modulation, 2, 0)
        y = layer_norm(x) * (1 + scale1) + shift1
        bias = np.concatenate([w[f"{p}.sa.q_bias"], np.zeros(C), w[f"{p}.sa.v_bias"]])
        qkv = (y @ w[f"{p}.sa.mat_qkv.weight"].T + bias).reshape(R, L, 3, H, c)
        factors = np.exp(np.minimum(w[f"{p}.sa.scale_mul_1H11"].reshape(-1), math.log(100)))
        new_k, new_v, new_q = np.empty((R, H, L, c)), np.empty((R, H, L, c)), np.empty((R, H, L, c))
        for r in range(R):
            for h in range(H):
                new_q[r, h] = rotate(unit(qkv[r, :, 0, h]) * factors[h], table)
                new_k[r, h] = rotate(unit(qkv[r, :, 1, h]), table)
                new_v[r, h] = qkv[r, :, 2, h]
        cache["k"][layer] = np.concatenate([cache["k"][layer], new_k], axis=2)
        cache["v"][layer] = np.concatenate([cache["v"][layer], new_v], axis=2)
        o = np.empty((R, L, C))
        for r in range(R):
            for h in range(H):
                o[r, :, h * c : (h + 1) * c] = attend(
                    new_q[r, h], cache["k"][layer][r, h], cache["v"][layer][r, h], 1.0
                )
        x = x + self.lin(f"{p}.sa.proj", o) * gamma1
        q = self.lin(f"{p}.ca.mat_q", layer_norm(x) * w[f"{p}.ca_norm.weight"] + w[f"{p}.ca_norm.bias"])
        o = np.empty((R, L, C))
        for r in range(R):
            kv = self.cross_text[r] @ w[f"{p}.ca.mat_kv.weight"].T
            k, v = kv[:, :C], kv[:, C:] + w[f"{p}.ca.v_bias"]
            for h in range(H):
                part = slice(h * c, (h + 1) * c)
                o[r, :, part] = attend(q[r, :, part], k[:, part], v[:, part], c**-0.5)
        x = x + self.lin(f"{p}.ca.proj", o)
        y = layer_norm(x) * (1 + scale2) + shift2
        return x + self.lin(f"{p}.ffn.fc2", gelu_tanh(self.lin(f"{p}.ffn.fc1", y))) * gamma2

    def head(self, x: Array) -> Array:
        rows = x.shape[0]
        scale, shift = self.head_modulation[:rows, :, 0], self.head_modulation[:rows, :, 1]
        return self.lin("head", layer_norm(x) * (1 + scale) + shift)


def draw(logits: Array, top_p: float, rng: np.random.Generator) -> Array:
    """[B, L, 2*bits] -> [B, L, bits]: softmax per pair; the smaller outcome is dropped where it is <= 1 - top_p."""
    p = softmax(logits.reshape(*logits.shape[:2], -1, 2))
    if top_p:
        p = np.where(p <= 1 - top_p, 0.0, p)
    chance = p[..., 1] / p.sum(-1)
    return (rng.random(chance.shape) < chance).astype(np.uint8)


def split_rows(rows: Array, lens: tuple[int, ...]) -> list[Array]:
    ends = np.cumsum(lens)
    return [rows[end - n : end] for n, end in zip(lens, ends, strict=True)]


def run_case(case: Case) -> Run:
    """Draws weights, texts and bits from the case's seed and records everything the parity files know."""
    rng = np.random.default_rng(case.seed + 1000)
    weights = random_weights(case)
    text = rng.standard_normal((sum(case.lens), case.text_width)).astype(np.float16).astype(np.float32)
    negative = None
    if case.negative_lens:
        negative = rng.standard_normal((sum(case.negative_lens), case.text_width)).astype(np.float32)
    run = Run(case, weights, text, negative)
    model, a = Reference(case, weights), run.arrays
    B = len(case.lens)
    rows = [row.astype(np.float64) for row in split_rows(text, case.lens)]
    guided = any(value != 1 for value in case.cfg)
    if guided:
        if negative is not None:
            rows += [row.astype(np.float64) for row in split_rows(negative, case.negative_lens)]
        else:
            rows += [model.w["cfg_uncond"][:n] for n in case.lens]
    model.text_side(rows)
    R = len(rows)
    a["cond_BD"], a["gss"], a["ca_kv"] = model.pooled, model.modulation, np.concatenate(model.cross_text)
    p = 2 if case.patchify else 1
    full = (case.schedule[-1][0] * p, case.schedule[-1][1] * p)
    acc = np.zeros((B, case.code_channels, *full))
    empty = np.zeros((R, case.heads, 0, case.width // case.heads))
    cache = {"k": [empty] * case.depth, "v": [empty] * case.depth}
    mixed_layers = {case.depth + j for j in case.insertion if j < 0}
    x = model.pooled[:, None] + model.w["pos_start"]
    a["in/0"] = x
    for s in range(case.scales):
        cfg, tau = (case.at(case.cfg, s) if guided else 1.0), case.at(case.tau, s)
        start = sum(h * w for h, w in case.schedule[:s])
        table = model.table[:, start : start + case.schedule[s][0] * case.schedule[s][1]]
        x = x + model.w["lvl_embed.weight"][s]
        for layer in range(case.depth):
            x = model.block(layer, x, cache, table)
            a[f"block{layer}/{s}"] = x
            if cfg != 1 and layer in mixed_layers:
                m = cfg * x[:B] + (1 - cfg) * x[B:]
                x = np.concatenate([m, m])
        if cfg != 1 and 0 in case.insertion:
            a[f"raw/{s}"] = model.head(x)
            logits = a[f"raw/{s}"] / tau
            logits = cfg * logits[:B] + (1 - cfg) * logits[B:]
        else:
            a[f"raw/{s}"] = model.head(x[:B])
            logits = a[f"raw/{s}"] / tau
        a[f"logits/{s}"] = logits
        a[f"bits/{s}"] = draw(logits, case.top_p, rng)
        acc = acc + resize_bilinear(latent(a[f"bits/{s}"], case, case.schedule[s]), full)
        if s + 1 < case.scales:
            h, w = case.schedule[s + 1]
            a[f"next/{s + 1}"] = resize_bilinear(acc, (h * p, w * p))
            a[f"codes_in/{s + 1}"] = tokens(a[f"next/{s + 1}"], case)
            x = model.lin("word_embed", a[f"codes_in/{s + 1}"])
            a[f"in/{s + 1}"] = x
            x = np.concatenate([x, x]) if guided else x
    a["summed_codes"] = acc
    a["cache_k0"], a["cache_v0"] = cache["k"][0][:, :, :21], cache["v"][0][:, :, :21]
    return run


def write_fixture(run: Run, path: Path, letter: str = "b") -> Path:
    """Stores a run in the format of the parity files: weights fp16, arrays fp32, settings in `meta`."""
    case = run.case
    meta = {
        "C": case.width,
        "heads": case.heads,
        "depth": case.depth,
        "block_chunks": case.chunks,
        "Ct5": case.text_width,
        "d_vae": case.code_channels,
        "patchify": int(case.patchify),
        "sched": [[1, h, w] for h, w in case.schedule],
        letter: {
            "lens": list(case.lens),
            "cfg": [case.at(case.cfg, s) for s in range(len(case.schedule))],
            "tau": [case.at(case.tau, s) for s in range(len(case.schedule))],
            "seed": case.seed,
            "insertion": list(case.insertion),
            "top_k": 900,
            "top_p": case.top_p,
        },
    }
    if case.scales_run:
        meta[letter]["scales_run"] = case.scales_run
    arrays: dict[str, Array] = {f"w/{name}": array for name, array in run.weights.items()}
    arrays[f"{letter}/text"] = run.text
    if run.negative is not None:
        meta[letter]["neg_lens"] = list(case.negative_lens)
        arrays[f"{letter}/neg_text"] = run.negative
    for name, array in run.arrays.items():
        arrays[f"{letter}/{name}"] = array if array.dtype == np.uint8 else array.astype(np.float32)
    arrays["rope"] = rope_table(case)
    np.savez(path, meta=np.array(json.dumps(meta)), **arrays)
    return path


CASES = {
    "chunks": Case(((1, 1), (2, 2), (4, 4), (6, 6)), (64, 64), depth=4, chunks=2),
    "patchify-tall": Case(
        ((1, 1), (2, 2), (3, 2), (6, 4)),
        (78, 52),
        code_channels=14,
        patchify=True,
        swapped_scale_axes=True,
        tau=(1.0,),
        seed=2,
    ),
    "guided-layers-some-scales": Case(
        ((1, 1), (2, 2), (4, 4), (6, 6)),
        (64, 64),
        lens=(3, 7),
        cfg=(1.0, 1.5, 1.0, 3.0),
        tau=(1.0, 0.9, 0.8, 0.5),
        insertion=(-2,),
        seed=3,
    ),
    "guided-twice": Case(((1, 1), (2, 2), (4, 4)), (64, 64), insertion=(0, -1), cfg=(2.0, 1.0, 2.5), seed=4),
    "negative": Case(((1, 1), (2, 2), (4, 4)), (64, 64), lens=(4, 6), negative_lens=(9, 1), seed=5),
    "unguided": Case(((1, 1), (2, 2), (4, 4)), (64, 64), lens=(4, 2), cfg=(1.0,), top_p=0.0, seed=6),
    "stops-early-wide": Case(
        ((1, 1), (2, 2), (3, 5), (4, 7)), (4, 7), width=48, heads=3, scales_run=3, top_p=0.6, cfg=(4.0,), seed=7
    ),
}


# -- the bit tokenizer -------------------------------------------------------------------------------------------------


def convolve(x: Array, weight: Array, bias: Array, stride: int = 1) -> Array:
    """[B, i, h, w] -> [B, o, h', w']; stride 1 pads all sides, stride 2 pads one row below and one column right."""
    size = weight.shape[-1]
    pad = size // 2
    x = np.pad(x, ((0, 0), (0, 0), (pad, pad), (pad, pad)) if stride == 1 else ((0, 0), (0, 0), (0, 1), (0, 1)))
    height, width = (x.shape[2] - size) // stride + 1, (x.shape[3] - size) // stride + 1
    out = np.zeros((x.shape[0], len(weight), height, width))
    for y in range(height):
        for z in range(width):
            patch = x[:, :, y * stride : y * stride + size, z * stride : z * stride + size]
            out[:, :, y, z] = np.tensordot(patch, weight, axes=([1, 2, 3], [1, 2, 3])) + bias
    return out


class ReferenceTokenizer:
    """Decoder and encoder. weights by published name; widths per level; res_blocks of the encoder."""

    def __init__(self, weights: dict[str, Array], widths: tuple[int, ...], res_blocks: int = 2) -> None:
        self.w = {name: array.astype(np.float64) for name, array in weights.items()}
        self.widths, self.res_blocks = widths, res_blocks

    def conv(self, x: Array, name: str, stride: int = 1) -> Array:
        return convolve(x, self.w[f"{name}.conv.weight"], self.w[f"{name}.conv.bias"], stride)

    def norm_swish(self, x: Array, name: str) -> Array:
        groups = x.reshape(x.shape[0], 32, -1)
        centred = groups - groups.mean(-1, keepdims=True)
        y = (centred / np.sqrt((centred**2).mean(-1, keepdims=True) + 1e-6)).reshape(x.shape)
        return silu(y * self.w[f"{name}.norm.weight"][:, None, None] + self.w[f"{name}.norm.bias"][:, None, None])

    def res(self, x: Array, name: str) -> Array:
        y = self.conv(self.norm_swish(x, f"{name}.norm1"), f"{name}.conv1")
        y = self.conv(self.norm_swish(y, f"{name}.norm2"), f"{name}.conv2")
        shortcut = f"{name}.nin_shortcut"
        return y + (self.conv(x, shortcut) if f"{shortcut}.conv.weight" in self.w else x)

    def decode(self, z: Array) -> Array:
        """Not clamped."""
        x = self.conv(z, "decoder.conv_in")
        x = self.res(self.res(x, "decoder.mid.block_1"), "decoder.mid.block_2")
        for level in reversed(range(len(self.widths))):
            for j in range(self.res_blocks + 1):
                x = self.res(x, f"decoder.up.{level}.block.{j}")
            if level:
                x = self.conv(x.repeat(2, axis=2).repeat(2, axis=3), f"decoder.up.{level}.upsample.conv")
        return self.conv(self.norm_swish(x, "decoder.norm_out"), "decoder.conv_out")

    def encode(self, image: Array) -> Array:
        x = self.conv(image, "encoder.conv_in")
        for level in range(len(self.widths)):
            for j in range(self.res_blocks):
                x = self.res(x, f"encoder.down.{level}.block.{j}")
            if level < len(self.widths) - 1:
                x = self.conv(x, f"encoder.down.{level}.downsample.conv", stride=2)
        x = self.res(self.res(x, "encoder.mid.block_1"), "encoder.mid.block_2")
        return self.conv(self.norm_swish(x, "encoder.norm_out"), "encoder.conv_out")


def random_tokenizer(channels: int, widths: tuple[int, ...], seed: int = 0) -> dict[str, Array]:
    """Weights of decoder and encoder, exact in fp16, two residual blocks per level (three in the decoder)."""
    rng = np.random.default_rng(seed)
    w: dict[str, Array] = {}

    def conv(name: str, inputs: int, outputs: int, size: int = 3) -> None:
        w[f"{name}.conv.weight"] = rng.standard_normal((outputs, inputs, size, size)) / (size * math.sqrt(inputs))
        w[f"{name}.conv.bias"] = rng.standard_normal(outputs) * 0.1

    def norm(name: str, width: int) -> None:
        w[f"{name}.norm.weight"] = 1 + rng.standard_normal(width) * 0.1
        w[f"{name}.norm.bias"] = rng.standard_normal(width) * 0.1

    def res(name: str, inputs: int, outputs: int) -> None:
        norm(f"{name}.norm1", inputs)
        conv(f"{name}.conv1", inputs, outputs)
        norm(f"{name}.norm2", outputs)
        conv(f"{name}.conv2", outputs, outputs)
        if inputs != outputs:
            conv(f"{name}.nin_shortcut", inputs, outputs, 1)

    top = len(widths) - 1
    conv("decoder.conv_in", channels, widths[-1])
    conv("encoder.conv_in", 3, widths[0])
    for side in ("decoder", "encoder"):
        res(f"{side}.mid.block_1", widths[-1], widths[-1])
        res(f"{side}.mid.block_2", widths[-1], widths[-1])
    for i, width in enumerate(widths):
        for j in range(3):
            res(f"decoder.up.{i}.block.{j}", widths[min(i + 1, top)] if j == 0 else width, width)
        for j in range(2):
            res(f"encoder.down.{i}.block.{j}", widths[max(i - 1, 0)] if j == 0 else width, width)
        if i:
            conv(f"decoder.up.{i}.upsample.conv", width, width)
        if i < top:
            conv(f"encoder.down.{i}.downsample.conv", width, width)
    norm("decoder.norm_out", widths[0])
    conv("decoder.conv_out", widths[0], 3)
    norm("encoder.norm_out", widths[-1])
    conv("encoder.conv_out", widths[-1], channels)
    return {name: array.astype(np.float16) for name, array in w.items()}


def resize_area(x: Array, size: tuple[int, int]) -> Array:
    """[..., h, w]: mean over the bins [floor(i*n/m), ceil((i+1)*n/m))."""
    height, width = x.shape[-2:]
    out = np.zeros((*x.shape[:-2], *size))
    for i in range(size[0]):
        for j in range(size[1]):
            rows = slice(i * height // size[0], math.ceil((i + 1) * height / size[0]))
            columns = slice(j * width // size[1], math.ceil((j + 1) * width / size[1]))
            out[..., i, j] = x[..., rows, columns].mean((-2, -1))
    return out


def residual_bits(z: Array, schedule: tuple[tuple[int, int], ...]) -> tuple[list[Array], Array]:
    """Bits per scale [B, h, w, d] of a latent, and the sum of their up-sampled codes."""
    residual, total, found = z.astype(np.float64), np.zeros(z.shape), []
    for s, size in enumerate(schedule):
        target = residual if s == len(schedule) - 1 else resize_area(residual, size)
        found.append((target > 0).transpose(0, 2, 3, 1).astype(np.uint8))
        code = np.where(target > 0, 1.0, -1.0) / math.sqrt(z.shape[1])
        code = resize_bilinear(code, z.shape[-2:])
        residual, total = residual - code, total + code
    return found, total


def write_tokenizer_fixture(path: Path, seed: int = 0) -> Path:
    """Decoder, encoder and residual bits of a two-level tokenizer, in the format of the parity files."""
    widths, channels, schedule = (32, 64), 5, ((1, 1), (2, 2), (4, 4))
    weights = random_tokenizer(channels, widths, seed)
    model = ReferenceTokenizer(weights, widths)
    rng = np.random.default_rng(seed + 1)
    z = rng.standard_normal((2, channels, 3, 4)).astype(np.float32)
    image = rng.uniform(-1, 1, (1, 3, 8, 8)).astype(np.float32)
    latent_of_image = model.encode(image).astype(np.float32)
    bits, total = residual_bits(latent_of_image, schedule)
    arrays: dict[str, Array] = {f"w/{name}": array for name, array in weights.items()}
    arrays |= {"dec/z": z, "dec/x": model.decode(z), "enc/x": image, "enc/z": latent_of_image}
    arrays |= {f"enc/bits/{s}": b for s, b in enumerate(bits)} | {"enc/summed_codes": total}
    meta = {"decoder": {"ch": 32, "ch_mult": [1, 2]}, "enc_sched": [[1, h, w] for h, w in schedule]}
    floats = {n: a.astype(np.float32) if a.dtype == np.float64 else a for n, a in arrays.items()}
    np.savez(path, meta=np.array(json.dumps(meta)), **floats)
    return path
