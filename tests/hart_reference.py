"""HART in NumPy, float64, without a cache: every scale runs the whole sequence so far under a block-causal mask.

Written from the published formulas, apart from the implementation; writes parity files of any size.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

Array = Any


@dataclass(frozen=True)
class Case:
    sides: tuple[int, ...] = (1, 2, 3)
    prompts: tuple[int, ...] = (4,)  # tokens of each prompt's own
    text_tokens: int = 5
    width: int = 24
    heads: int = 3
    depth: int = 2
    ffn: int = 40
    text_width: int = 10
    vocabulary: int = 37
    channels: int = 6
    residual_width: int = 14
    residual_depth: int = 3
    level_width: int = 20
    time_width: int = 16
    cfg: float = 2.5
    steps: int = 8
    seed: int = 0

    @property
    def images(self) -> int:
        return len(self.prompts)


def random_weights(case: Case) -> dict[str, Array]:
    """fp16-exact float64 weights under their checkpoint names."""
    rng = np.random.default_rng(case.seed)
    C, W, d, V = case.width, case.residual_width, case.channels, case.vocabulary
    weights: dict[str, Array] = {}

    def put(name: str, *shape: int, scale: float = 1.0, mean: float = 0.0) -> None:
        weights[name] = (mean + scale * rng.standard_normal(shape)).astype(np.float16).astype(np.float64)

    def linear(name: str, rows: int, columns: int, bias: bool = True) -> None:
        put(f"{name}.weight", rows, columns, scale=columns**-0.5)
        if bias:
            put(f"{name}.bias", rows, scale=0.3)

    linear("word_embed", C, d)
    put("context_norm.weight", case.text_width, scale=0.2, mean=1)
    linear("context_embed", C, case.text_width)
    linear("lvl_embed.mlp.0", C, case.level_width)
    linear("lvl_embed.mlp.2", C, C)
    for i in range(case.depth):
        p = f"blocks.{i}"
        put(f"{p}.scale_shift_table", 6, C, scale=0.3)
        put(f"{p}.ln_wo_grad.weight", C, scale=0.2, mean=1)
        put(f"{p}.attn.scale_mul_1H11", 1, case.heads, 1, 1, scale=0.5, mean=1.2)
        weights[f"{p}.attn.scale_mul_1H11"][0, 0] = 5.0  # beyond ln 100: clamped
        linear(f"{p}.attn.qkv_proj", 3 * C, C, bias=False)
        put(f"{p}.attn.q_bias", C, scale=0.3)
        put(f"{p}.attn.v_bias", C, scale=0.3)
        weights[f"{p}.attn.zero_k_bias"] = np.zeros(C)
        linear(f"{p}.attn.proj", C, C)
        linear(f"{p}.ffn.gate_proj", case.ffn, C, bias=False)
        linear(f"{p}.ffn.up_proj", case.ffn, C, bias=False)
        linear(f"{p}.ffn.down_proj", C, case.ffn, bias=False)
    put("head_nm.ln_wo_grad.weight", C, scale=0.2, mean=1)
    linear("head_nm.ada_lin.1", 2 * C, C)
    linear("head", V, C)
    put("decoder_norm.weight", C, scale=0.2, mean=1)
    linear("diffloss.net.time_embed.mlp.0", W, case.time_width)
    linear("diffloss.net.time_embed.mlp.2", W, W)
    linear("diffloss.net.cond_embed", W, C)
    linear("diffloss.net.input_proj", W, d)
    for j in range(case.residual_depth):
        p = f"diffloss.net.res_blocks.{j}"
        put(f"{p}.in_ln.weight", W, scale=0.2, mean=1)
        put(f"{p}.in_ln.bias", W, scale=0.2)
        linear(f"{p}.mlp.0", W, W)
        linear(f"{p}.mlp.2", W, W)
        linear(f"{p}.adaLN_modulation.1", 3 * W, W)
    linear("diffloss.net.final_layer.linear", 2 * d, W)
    linear("diffloss.net.final_layer.adaLN_modulation.1", 2 * W, W)
    for k in range(4):
        put(f"vae.quantize.quant_resi.qresi_ls.{k}.weight", d, d, 3, 3, scale=(9 * d) ** -0.5)
        put(f"vae.quantize.quant_resi.qresi_ls.{k}.bias", d, scale=0.1)
    put("vae.quantize.embedding.weight", V, d)
    return weights


def silu(x: Array) -> Array:
    return x / (1 + np.exp(-x))


def rms(x: Array, weight: Array) -> Array:
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-6) * weight


def layer_norm(x: Array) -> Array:
    return (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + 1e-6)


def sinusoid(number: float, width: int) -> Array:
    angles = number * 10000.0 ** (-np.arange(width // 2) / (width // 2))
    return np.concatenate([np.cos(angles), np.sin(angles)])


def cubic(x: float) -> float:
    a, x = -0.75, abs(x)
    if x <= 1:
        return (a + 2) * x**3 - (a + 3) * x**2 + 1
    return a * x**3 - 5 * a * x**2 + 8 * a * x - 4 * a if x < 2 else 0.0


def bicubic_rows(old: int, new: int) -> Array:
    rows = np.zeros((new, old))
    for i in range(new):
        centre = (i + 0.5) * old / new - 0.5
        for j in range(math.floor(centre) - 1, math.floor(centre) + 3):
            rows[i, min(max(j, 0), old - 1)] += cubic(centre - j)
    return rows


def area_rows(old: int, new: int) -> Array:
    rows = np.zeros((new, old))
    for i in range(new):
        bins = range(i * old // new, -(-(i + 1) * old // new))
        rows[i, list(bins)] = 1 / len(bins)
    return rows


def resize(x: Array, rows: Array) -> Array:
    return np.einsum("ij,bcjk,lk->bcil", rows, x, rows)


def convolve(x: Array, weight: Array, bias: Array) -> Array:
    """3x3 with zero borders. x: [B, d, n, n]."""
    n = x.shape[-1]
    padded = np.pad(x, ((0, 0), (0, 0), (1, 1), (1, 1)))
    out = sum(
        np.einsum("oc,bcij->boij", weight[:, :, dy, dx], padded[:, :, dy : dy + n, dx : dx + n])
        for dy in range(3)
        for dx in range(3)
    )
    return out + bias[:, None, None]


class Reference:
    def __init__(self, case: Case) -> None:
        self.case, self.w = case, random_weights(case)

    def linear(self, name: str, x: Array) -> Array:
        bias = self.w.get(f"{name}.bias", 0.0)
        return x @ self.w[f"{name}.weight"].T + bias

    def mlp(self, name: str, x: Array) -> Array:
        return self.linear(f"{name}.2", silu(self.linear(f"{name}.0", x)))

    def level(self, scale: int) -> Array:
        return self.mlp("lvl_embed.mlp", sinusoid(scale, self.case.level_width))

    def rotate(self, x: Array, places: Array) -> Array:
        """x: [R, H, L, D]; places: [R, L, 2] row and column; text has the same number twice and other frequencies."""
        half = x.shape[-1] // 2
        out = np.empty_like(x)
        for i in range(half):
            first, second = x[..., i], x[..., i + half]
            row, column = places[:, None, :, 0, i], places[:, None, :, 1, i]
            out[..., i] = first * np.cos(row) - second * np.sin(row)
            out[..., i + half] = second * np.cos(column) + first * np.sin(column)
        return out

    def text_angles(self, positions: Array) -> Array:
        D = self.case.width // self.case.heads
        angles = positions[..., None] * 10000.0 ** (-2 * np.arange(D // 2) / D)  # [R, T, D/2]
        return np.stack([angles, angles], axis=2)

    def image_angles(self, side: int, last: Array) -> Array:
        D = self.case.width // self.case.heads
        e = 10000.0 ** (-4 * np.arange(D // 4) / D)
        extent = self.case.sides[-1]
        out = np.empty((len(last), side * side, 2, D // 2))
        for r, start in enumerate(last):
            for y in range(side):
                for x in range(side):
                    for axis, place in enumerate((y, x)):
                        out[r, y * side + x, axis] = np.tile((place / side * extent + start) * e, 2)
        return out

    def blocks(self, x: Array, angles: Array, counts: list[int], mean: Array) -> list[Array]:
        """Outputs of every block over the whole sequence. x: [R, sum of counts, C]."""
        H, outputs = self.case.heads, []
        group = np.repeat(np.arange(len(counts)), counts)
        forbidden = group[:, None] < group[None, :]
        for i in range(self.case.depth):
            p = f"blocks.{i}"
            pack = self.w[f"{p}.scale_shift_table"] + mean[:, None]  # [R, 6, C]
            g1, g2, s1, s2, b1, b2 = (pack[:, j : j + 1] for j in range(6))
            norm = self.w[f"{p}.ln_wo_grad.weight"]
            qkv = self.linear(f"{p}.attn.qkv_proj", rms(x, norm) * (1 + s1) + b1)
            q, k, v = np.split(qkv, 3, axis=-1)
            q, v = q + self.w[f"{p}.attn.q_bias"], v + self.w[f"{p}.attn.v_bias"]
            q, k, v = (t.reshape(*t.shape[:2], H, -1).transpose(0, 2, 1, 3) for t in (q, k, v))
            q, k = (t / np.sqrt((t**2).sum(-1, keepdims=True)) for t in (q, k))
            factor = np.exp(np.minimum(self.w[f"{p}.attn.scale_mul_1H11"], math.log(100)))
            scores = self.rotate(q * factor, angles) @ self.rotate(k, angles).swapaxes(-1, -2)
            scores = np.where(forbidden, -np.inf, scores)
            chance = np.exp(scores - scores.max(-1, keepdims=True))
            o = (chance / chance.sum(-1, keepdims=True)) @ v
            x = x + self.linear(f"{p}.attn.proj", o.transpose(0, 2, 1, 3).reshape(x.shape)) * g1
            y = rms(x, norm) * (1 + s2) + b2
            hidden = silu(self.linear(f"{p}.ffn.gate_proj", y)) * self.linear(f"{p}.ffn.up_proj", y)
            x = x + self.linear(f"{p}.ffn.down_proj", hidden) * g2
            outputs.append(x)
        return outputs

    def residual(self, z: Array, t: float, noise: list[Array]) -> Array:
        """z: [2n, C]; noise: the start [n, d], then [2n, d] per step."""
        steps, d, n = len(noise) - 1, self.case.channels, len(noise[0])

        def alpha_bar(u: float) -> float:
            return math.cos((u + 0.008) / 1.008 * math.pi / 2) ** 2

        all_betas = [min(1 - alpha_bar((i + 1) / 1000) / alpha_bar(i / 1000), 0.999) for i in range(1000)]
        product = np.cumprod(1 - np.array(all_betas))
        times = [round(i * 999 / (steps - 1)) for i in range(steps)]
        x = np.concatenate([noise[0], noise[0]])
        condition = self.linear("diffloss.net.cond_embed", z)
        first_variance = None
        for k in reversed(range(steps)):
            now, before = product[times[k]], product[times[k - 1]] if k else 1.0
            beta = 1 - now / before
            variance = beta * (1 - before) / (1 - now)
            if k == 0:  # takes the variance of the step after it
                later = product[times[1]]
                variance = first_variance = (1 - later / now) * (1 - now) / (1 - later)
            y = self.mlp("diffloss.net.time_embed.mlp", sinusoid(times[k], self.case.time_width)) + condition
            h = self.linear("diffloss.net.input_proj", np.concatenate([x[:n], x[:n]]))
            for j in range(self.case.residual_depth):
                p = f"diffloss.net.res_blocks.{j}"
                a, b, g = np.split(self.linear(f"{p}.adaLN_modulation.1", silu(y)), 3, axis=-1)
                normal = layer_norm(h) * self.w[f"{p}.in_ln.weight"] + self.w[f"{p}.in_ln.bias"]
                h = h + g * self.mlp(f"{p}.mlp", normal * (1 + b) + a)
            p = "diffloss.net.final_layer"
            a, b = np.split(self.linear(f"{p}.adaLN_modulation.1", silu(y)), 2, axis=-1)
            out = self.linear(f"{p}.linear", layer_norm(h) * (1 + b) + a)
            eps, share = out[:, :d], (out[:, d:] + 1) / 2
            eps = np.tile((1 + t) * eps[:n] - t * eps[n:], (2, 1))
            x0 = np.clip(x / math.sqrt(now) - eps * math.sqrt(1 / now - 1), -1, 1)
            x = x0 * beta * math.sqrt(before) / (1 - now) + x * (1 - before) * math.sqrt(1 - beta) / (1 - now)
            if k:
                log_variance = share * math.log(beta) + (1 - share) * math.log(variance)
                x = x + np.exp(log_variance / 2) * noise[steps - k]
        assert first_variance is not None
        return 0.6 * x


@dataclass
class Run:
    case: Case
    weights: dict[str, Array]
    arrays: dict[str, Array] = field(default_factory=dict)


def smoothing_index(scale: int, scales: int) -> int:
    ticks = np.linspace(1 / 12, 11 / 12, 4)
    return int(np.argmin(np.abs(ticks - scale / (scales - 1))))


def run_case(case: Case) -> Run:
    """Draws a run; every array under its name in a parity file, without the run's prefix."""
    model, rng = Reference(case), np.random.default_rng(case.seed + 1)
    run, w = Run(case, model.w), model.w
    seen, B, N, T = run.arrays, case.images, len(case.sides), case.text_tokens
    text = rng.standard_normal((B, T, case.text_width)).astype(np.float32)
    mask = np.arange(T) < np.array(case.prompts)[:, None]
    positions = mask.cumsum(1) - 1
    seen |= {"text": text, "mask": mask, "position_ids": positions}
    rows = np.concatenate([text, np.zeros_like(text)]).astype(np.float64)
    X = model.linear("context_embed", rms(rows, w["context_norm.weight"]))
    mean = np.stack([X[r, : case.prompts[r]].mean(0) if r < B else X[r, 0] for r in range(2 * B)])
    head = model.linear("head_nm.ada_lin.1", silu(X.max(axis=1)))[:, None]
    sigma, beta = np.split(head, 2, axis=-1)
    last_place = np.concatenate([positions[:, -1], np.zeros(B, int)])
    latent = np.zeros((B, case.channels, case.sides[-1], case.sides[-1]))
    inputs, angles, counts = [], [], []
    for s, side in enumerate(case.sides):
        t = case.cfg * min(s, N - 2) / (N - 1)
        if s == 0:
            inputs.append(X + model.level(0))
            angles.append(model.text_angles(np.concatenate([positions, np.zeros_like(positions)])))
        else:
            small = resize(latent, area_rows(case.sides[-1], side))
            seen[f"next/{s}"] = small
            tokens = small.reshape(B, case.channels, -1).swapaxes(1, 2)
            inputs.append(np.tile(model.linear("word_embed", tokens) + model.level(s), (2, 1, 1)))
            angles.append(model.image_angles(side, last_place))
        counts.append(inputs[-1].shape[1])
        outputs = model.blocks(np.concatenate(inputs, 1), np.concatenate(angles, 1), counts, mean)
        for i, output in enumerate(outputs):
            seen[f"block{i}/{s}"] = output[:, -counts[-1] :]
        x = outputs[-1][:, -counts[-1] :]
        raw = model.linear("head", rms(x, w["head_nm.ln_wo_grad.weight"]) * (1 + sigma) + beta)
        logits = raw[:, -1:] if s == 0 else raw
        logits = (1 + t) * logits[:B] - t * logits[B:]
        chance = np.exp(logits - logits.max(-1, keepdims=True))
        indices = (chance / rng.exponential(size=chance.shape)).argmax(-1)
        seen |= {f"raw/{s}": raw, f"logits/{s}": logits, f"idx/{s}": indices.astype(np.int16)}
        E = w["vae.quantize.embedding.weight"][indices]  # [B, n*n, d]
        if s == N - 1:
            n = B * side * side
            noise = [rng.standard_normal((n, case.channels)).astype(np.float32) for _ in range(1)]
            noise += [rng.standard_normal((2 * n, case.channels)).astype(np.float32) for _ in range(case.steps)]
            z = rms(x + model.linear("word_embed", np.tile(E, (2, 1, 1))), w["decoder_norm.weight"])
            z = z.reshape(-1, case.width)
            out = model.residual(z, t, [plane.astype(np.float64) for plane in noise])
            seen |= {f"diff/noise/{i}": plane for i, plane in enumerate(noise)}
            seen |= {"diff/z": z, "diff/cfg": np.float64(t), "diff/out": out}
            E = E + out[:n].reshape(E.shape)
        grid = E.swapaxes(1, 2).reshape(B, case.channels, side, side)
        if s < N - 1:
            grid = resize(grid, bicubic_rows(side, case.sides[-1]))
            phi = f"vae.quantize.quant_resi.qresi_ls.{smoothing_index(s, N)}"
            grid = 0.5 * grid + 0.5 * convolve(grid, w[f"{phi}.weight"], w[f"{phi}.bias"])
        latent = latent + grid
    seen["f_hat"] = latent
    return run


def write_fixture(run: Run, path: Path, name: str = "hard") -> Path:
    """A parity file of the run: settings, weights as fp16, arrays as fp32."""
    case = run.case
    meta = {"patch_nums": list(case.sides), "cfg": case.cfg, "top_p": 0.0, "heads": case.heads}
    arrays = {
        f"{name}/{key}": np.asarray(array, np.float32) if np.asarray(array).dtype == np.float64 else array
        for key, array in run.arrays.items()
    }
    weights = {f"w/{key}": array.astype(np.float16) for key, array in run.weights.items()}
    np.savez(path, meta=np.array(json.dumps(meta)), **arrays, **weights)
    return path
