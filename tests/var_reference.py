"""VAR in NumPy, float64, without a cache: every scale runs the whole sequence so far under a block-causal mask.

Written from the published formulas, apart from the implementation; writes parity files of any size.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from hart_reference import area_rows, bicubic_rows, convolve, layer_norm, resize, silu, smoothing_index

Array = Any


@dataclass(frozen=True)
class Case:
    sides: tuple[int, ...] = (1, 2, 3)
    labels: tuple[int, ...] = (2,)
    classes: int = 5
    width: int = 24
    heads: int = 3
    depth: int = 2
    ffn: int = 40
    vocabulary: int = 37
    channels: int = 6
    shared: bool = False
    cosine: bool = True
    cfg: float = 2.5
    seed: int = 0


def random_weights(case: Case) -> dict[str, Array]:
    """fp16-exact float64 weights under their checkpoint names."""
    rng = np.random.default_rng(case.seed)
    C, d, V = case.width, case.channels, case.vocabulary
    weights: dict[str, Array] = {}

    def put(name: str, *shape: int, scale: float = 1.0, mean: float = 0.0) -> None:
        weights[name] = (mean + scale * rng.standard_normal(shape)).astype(np.float16).astype(np.float64)

    def linear(name: str, rows: int, columns: int, bias: bool = True) -> None:
        put(f"{name}.weight", rows, columns, scale=columns**-0.5)
        if bias:
            put(f"{name}.bias", rows, scale=0.3)

    linear("word_embed", C, d)
    put("pos_start", 1, 1, C)
    put("pos_1LC", 1, sum(n * n for n in case.sides), C)
    put("lvl_embed.weight", len(case.sides), C)
    put("class_emb.weight", case.classes + 1, C)
    if case.shared:
        linear("shared_ada_lin.1", 6 * C, C)
    for i in range(case.depth):
        p = f"blocks.{i}"
        if case.shared:
            put(f"{p}.ada_gss", 1, 1, 6, C, scale=0.3)
        else:
            linear(f"{p}.ada_lin.1", 6 * C, C)
        if case.cosine:
            put(f"{p}.attn.scale_mul_1H11", 1, case.heads, 1, 1, scale=0.5, mean=1.2)
            weights[f"{p}.attn.scale_mul_1H11"][0, 0] = 5.0  # beyond ln 100: clamped
        linear(f"{p}.attn.mat_qkv", 3 * C, C, bias=False)
        put(f"{p}.attn.q_bias", C, scale=0.3)
        put(f"{p}.attn.v_bias", C, scale=0.3)
        weights[f"{p}.attn.zero_k_bias"] = np.zeros(C)
        linear(f"{p}.attn.proj", C, C)
        linear(f"{p}.ffn.fc1", case.ffn, C)
        linear(f"{p}.ffn.fc2", C, case.ffn)
    linear("head_nm.ada_lin.1", 2 * C, C)
    linear("head", V, C)
    for k in range(4):
        put(f"vae.quantize.quant_resi.qresi_ls.{k}.weight", d, d, 3, 3, scale=(9 * d) ** -0.5)
        put(f"vae.quantize.quant_resi.qresi_ls.{k}.bias", d, scale=0.1)
    put("vae.quantize.embedding.weight", V, d)
    return weights


def gelu(x: Array) -> Array:
    return 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


class Reference:
    def __init__(self, case: Case) -> None:
        self.case, self.w = case, random_weights(case)

    def linear(self, name: str, x: Array) -> Array:
        return x @ self.w[f"{name}.weight"].T + self.w.get(f"{name}.bias", 0.0)

    def pack(self, layer: int, condition: Array) -> Array:
        """[R, 6, C]: gammas, scales, shifts of both halves of a block."""
        name = "shared_ada_lin.1" if self.case.shared else f"blocks.{layer}.ada_lin.1"
        pack = self.linear(name, silu(condition)).reshape(len(condition), 6, -1)
        return pack + self.w[f"blocks.{layer}.ada_gss"][0] if self.case.shared else pack

    def blocks(self, x: Array, counts: list[int], condition: Array) -> list[Array]:
        """Outputs of every block over the whole sequence. x: [R, sum of counts, C]."""
        H, outputs = self.case.heads, []
        group = np.repeat(np.arange(len(counts)), counts)
        forbidden = group[:, None] < group[None, :]
        for i in range(self.case.depth):
            p = f"blocks.{i}"
            g1, g2, s1, s2, b1, b2 = (self.pack(i, condition)[:, j : j + 1] for j in range(6))
            q, k, v = np.split(self.linear(f"{p}.attn.mat_qkv", layer_norm(x) * (1 + s1) + b1), 3, axis=-1)
            q, v = q + self.w[f"{p}.attn.q_bias"], v + self.w[f"{p}.attn.v_bias"]
            q, k, v = (t.reshape(*t.shape[:2], H, -1).transpose(0, 2, 1, 3) for t in (q, k, v))
            if self.case.cosine:
                q, k = (t / np.sqrt((t**2).sum(-1, keepdims=True)) for t in (q, k))
                q = q * np.exp(np.minimum(self.w[f"{p}.attn.scale_mul_1H11"], math.log(100)))
            else:
                q = q * 0.25 / math.sqrt(q.shape[-1])
            scores = np.where(forbidden, -np.inf, q @ k.swapaxes(-1, -2))
            chance = np.exp(scores - scores.max(-1, keepdims=True))
            o = (chance / chance.sum(-1, keepdims=True)) @ v
            x = x + self.linear(f"{p}.attn.proj", o.transpose(0, 2, 1, 3).reshape(x.shape)) * g1
            hidden = gelu(self.linear(f"{p}.ffn.fc1", layer_norm(x) * (1 + s2) + b2))
            x = x + self.linear(f"{p}.ffn.fc2", hidden) * g2
            outputs.append(x)
        return outputs


def run_case(case: Case) -> dict[str, Array]:
    """Draws a run; every array under its name in a parity file."""
    model, rng = Reference(case), np.random.default_rng(case.seed + 1)
    w, seen, B, N = model.w, {}, len(case.labels), len(case.sides)
    condition = w["class_emb.weight"][[*case.labels, *[case.classes] * B]]
    sigma, beta = np.split(model.linear("head_nm.ada_lin.1", silu(condition))[:, None], 2, axis=-1)
    latent = np.zeros((B, case.channels, case.sides[-1], case.sides[-1]))
    inputs: list[Array] = []
    counts: list[int] = []
    for s, side in enumerate(case.sides):
        first = sum(counts)
        place = w["lvl_embed.weight"][s] + w["pos_1LC"][0, first : first + side * side]
        if s == 0:
            inputs.append(condition[:, None] + w["pos_start"] + place)
        else:
            small = resize(latent, area_rows(case.sides[-1], side))
            seen[f"next/{s}"] = small
            tokens = small.reshape(B, case.channels, -1).swapaxes(1, 2)
            inputs.append(np.tile(model.linear("word_embed", tokens) + place, (2, 1, 1)))
        counts.append(side * side)
        outputs = model.blocks(np.concatenate(inputs, 1), counts, condition)
        for i, output in enumerate(outputs):
            seen[f"block{i}/{s}"] = output[:, -counts[-1] :]
        raw = model.linear("head", layer_norm(outputs[-1][:, -counts[-1] :]) * (1 + sigma) + beta)
        t = case.cfg * s / (N - 1)
        logits = (1 + t) * raw[:B] - t * raw[B:]
        chance = np.exp(logits - logits.max(-1, keepdims=True))
        indices = (chance / rng.exponential(size=chance.shape)).argmax(-1)
        seen |= {f"raw/{s}": raw, f"logits/{s}": logits, f"idx/{s}": indices.astype(np.int16)}
        grid = w["vae.quantize.embedding.weight"][indices].swapaxes(1, 2).reshape(B, case.channels, side, side)
        if s < N - 1:
            grid = resize(grid, bicubic_rows(side, case.sides[-1]))
        phi = f"vae.quantize.quant_resi.qresi_ls.{smoothing_index(s, N)}"
        latent = latent + 0.5 * grid + 0.5 * convolve(grid, w[f"{phi}.weight"], w[f"{phi}.bias"])
    seen["f_hat"] = latent
    return seen


def write_fixture(case: Case, path: Path, run: str = "", **settings: Any) -> Path:
    """A parity file of the case: settings, weights as fp16, arrays as fp32, under the run's name if it has one."""
    meta = {"patch_nums": case.sides, "labels": case.labels, "cfg": case.cfg, "heads": case.heads, **settings}
    arrays = {
        f"{run}/{name}" if run else name: array if name[:4] == "idx/" else np.asarray(array, np.float32)
        for name, array in run_case(case).items()
    }
    weights = {f"w/{name}": array.astype(np.float16) for name, array in random_weights(case).items()}
    np.savez(path, meta=np.array(json.dumps(meta)), **arrays, **weights)
    return path
