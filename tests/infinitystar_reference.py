"""InfinityStar in NumPy, float64, without a cache: every pass runs the text, the last maps of earlier clips and its own
tokens as one sequence, under a mask that says who sees whom.

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
Entry = tuple[int, int, int]


@dataclass(frozen=True)
class Case:
    """maps: of a clip; clips: frames of each; tau: of the image clip and of the others."""

    maps: tuple[tuple[int, int], ...] = ((1, 1), (2, 3), (3, 4))
    clips: tuple[int, ...] = (1, 2)
    image_repetitions: tuple[int, ...] = (2, 1, 2)
    video_repetitions: tuple[int, ...] = (1, 2, 1)
    semantic_scales: int = 2
    text_tokens: int = 5
    negative_tokens: int = 0  # 0: the learned rows
    width: int = 24
    heads: int = 4
    kv_heads: int = 2
    head_width: int = 8
    depth: int = 2
    chunks: int = 2
    ffn: int = 36
    text_width: int = 10
    text_length: int = 7
    detail_bits: int = 20
    semantic_bits: int = 6
    kind: str = "apg"
    scale: float = 34.0
    tau: tuple[float, float] = (1.0, 0.4)
    norm_threshold: float = 0.05
    eta: float = 0.0
    seed: int = 0

    @property
    def schedule(self) -> list[Entry]:
        return [(frames, *pair) for frames in self.clips for pair in self.maps]

    @property
    def taus(self) -> list[float]:
        return [self.tau[0 if i < len(self.maps) else 1] for i in range(len(self.schedule))]

    def prefix(self, layer: int) -> str:
        per = self.depth // self.chunks
        return f"blocks.{layer}" if self.chunks == 1 else f"block_chunks.{layer // per}.module.{layer % per}"


def random_weights(case: Case) -> dict[str, Array]:
    """fp16-exact float64 weights under their checkpoint names."""
    rng = np.random.default_rng(case.seed)
    C, D = case.width, case.head_width
    weights: dict[str, Array] = {}

    def put(name: str, *shape: int, scale: float = 1.0, mean: float = 0.0) -> None:
        weights[name] = (mean + scale * rng.standard_normal(shape)).astype(np.float16).astype(np.float64)

    def linear(name: str, rows: int, columns: int, bias: bool = True) -> None:
        put(f"{name}.weight", rows, columns, scale=columns**-0.5)
        if bias:
            put(f"{name}.bias", rows, scale=0.3)

    put("cfg_uncond", case.text_length, case.text_width)
    put("sos_token", 1, 1, C)
    linear("text_proj", C, case.text_width)
    linear("word_embed", C, case.detail_bits)
    for i in range(case.depth):
        p = case.prefix(i)
        put(f"{p}.input_layernorm.weight", C, scale=0.2, mean=1)
        put(f"{p}.post_attention_layernorm.weight", C, scale=0.2, mean=1)
        linear(f"{p}.attn.q_proj", case.heads * D, C, bias=False)
        linear(f"{p}.attn.k_proj", case.kv_heads * D, C, bias=False)
        linear(f"{p}.attn.v_proj", case.kv_heads * D, C, bias=False)
        linear(f"{p}.attn.o_proj", C, case.heads * D, bias=False)
        put(f"{p}.attn.q_norm.weight", D, scale=0.3, mean=1.5)
        put(f"{p}.attn.k_norm.weight", D, scale=0.3, mean=1.5)
        linear(f"{p}.mlp.gate_proj", case.ffn, C, bias=False)
        linear(f"{p}.mlp.up_proj", case.ffn, C, bias=False)
        linear(f"{p}.mlp.down_proj", C, case.ffn, bias=False)
    put("norm_hidden_sates.weight", C, scale=0.2, mean=1)
    linear("head", 2 * case.detail_bits, C)
    linear("semantic_head2", 2 * case.semantic_bits, C)
    return weights


def rms(x: Array, weight: Array) -> Array:
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-6) * weight


def linear_rows(old: int, new: int) -> Array:
    """[new, old]: half-pixel centres, clamped at the borders."""
    rows = np.zeros((new, old))
    for i in range(new):
        place = max((i + 0.5) * old / new - 0.5, 0)
        low = min(math.floor(place), old - 1)
        share = place - low
        rows[i, low] += 1 - share
        rows[i, min(low + 1, old - 1)] += share
    return rows


def area_rows(old: int, new: int) -> Array:
    rows = np.zeros((new, old))
    for i in range(new):
        bins = range(i * old // new, -(-(i + 1) * old // new))
        rows[i, list(bins)] = 1 / len(bins)
    return rows


def spread(place: int, own: int, full: int) -> float:
    return float(np.rint(np.float32(place) * np.float32(full / own)))


@dataclass
class Group:
    """Tokens that entered together: inputs [R, L, C], positions [L, 4], and which earlier groups they see."""

    x: Array
    places: Array
    sees: list[int]


class Reference:
    def __init__(self, case: Case) -> None:
        self.case, self.w = case, random_weights(case)

    def linear(self, name: str, x: Array) -> Array:
        return x @ self.w[f"{name}.weight"].T + self.w.get(f"{name}.bias", 0.0)

    def rotate(self, x: Array, places: Array) -> Array:
        """x: [R, L, heads, D]; neighbouring pairs, D/8 of them for each of four axes."""
        count = x.shape[-1] // 8
        out = np.empty_like(x)
        for axis in range(4):
            for i in range(count):
                j = 2 * (axis * count + i)
                angle = (places[:, axis] * 10000.0 ** (-i / count))[:, None]
                a, b = x[..., j], x[..., j + 1]
                out[..., j] = a * np.cos(angle) - b * np.sin(angle)
                out[..., j + 1] = a * np.sin(angle) + b * np.cos(angle)
        return out

    def run(self, groups: list[Group]) -> list[Array]:
        """Outputs of every layer for the last group, [R, L, C] each."""
        case, D = self.case, self.case.head_width
        x = np.concatenate([group.x for group in groups], 1)
        places = np.concatenate([group.places for group in groups])
        owner = np.repeat(np.arange(len(groups)), [group.x.shape[1] for group in groups])
        sees = np.array([[j == i or j in group.sees for j in range(len(groups))] for i, group in enumerate(groups)])
        forbidden = ~sees[owner][:, owner]
        outputs, repeat = [], case.heads // case.kv_heads
        for i in range(case.depth):
            p = case.prefix(i)
            y = rms(x, self.w[f"{p}.input_layernorm.weight"])
            q, k, v = (self.linear(f"{p}.attn.{n}_proj", y).reshape(*y.shape[:2], -1, D) for n in "qkv")
            q = self.rotate(rms(q, self.w[f"{p}.attn.q_norm.weight"]), places)
            k = self.rotate(rms(k, self.w[f"{p}.attn.k_norm.weight"]), places)
            k, v = k.repeat(repeat, axis=2), v.repeat(repeat, axis=2)
            scores = np.einsum("rlhd,rshd->rhls", q, k) / math.sqrt(D)
            scores = np.where(forbidden, -np.inf, scores)
            chance = np.exp(scores - scores.max(-1, keepdims=True))
            o = np.einsum("rhls,rshd->rlhd", chance / chance.sum(-1, keepdims=True), v)
            x = x + self.linear(f"{p}.attn.o_proj", o.reshape(*o.shape[:2], -1))
            y = rms(x, self.w[f"{p}.post_attention_layernorm.weight"])
            gate = self.linear(f"{p}.mlp.gate_proj", y)
            x = x + self.linear(f"{p}.mlp.down_proj", gate / (1 + np.exp(-gate)) * self.linear(f"{p}.mlp.up_proj", y))
            outputs.append(x[:, -groups[-1].x.shape[1] :])
        return outputs

    def guided(self, logits: Array) -> Array:
        """logits: [R, L, n] behind the temperature -> [L, n]."""
        case = self.case
        if case.scale == 1:
            return logits[0]
        c, u = logits
        if case.kind == "cfg":
            return case.scale * c + (1 - case.scale) * u
        d = c - u
        if case.norm_threshold:
            d = d * min(1, case.norm_threshold / math.sqrt((d**2).mean()))
        along = c / math.sqrt((c**2).sum())
        parallel = (d * along).sum() * along
        return c + (case.scale - 1) * (d - parallel + case.eta * parallel)

    def text_group(self, text: Array, negative: Array | None) -> Group:
        """Both rows padded with zeros to the longer one."""
        rows = [text] if self.case.scale == 1 else [text, self.w["cfg_uncond"][: len(text)]]
        if negative is not None and self.case.scale != 1:
            rows[1] = negative
        T = max(map(len, rows))
        x = np.zeros((len(rows), T, self.case.width))
        for r, own in enumerate(rows):
            x[r, : len(own)] = self.linear("text_proj", own)
        return Group(x, np.array([(t, 0, 0, 0) for t in range(T)], float), [])


@dataclass
class Run:
    case: Case
    weights: dict[str, Array]
    arrays: dict[str, Array] = field(default_factory=dict)


def run_case(case: Case) -> Run:
    """Draws a run; every array under its name in a parity file, without the run's prefix."""
    model, rng = Reference(case), np.random.default_rng(case.seed + 1)
    run = Run(case, model.w)
    seen, (H, W) = run.arrays, case.maps[-1]
    text = rng.standard_normal((case.text_tokens, case.text_width)).astype(np.float32)
    seen["text"] = text
    negative = None
    if case.negative_tokens:
        negative = rng.standard_normal((case.negative_tokens, case.text_width)).astype(np.float32)
        seen["neg_text"] = negative
    groups = [model.text_group(text, negative)]
    seen["in/text"] = groups[0].x[:1]
    for i, output in enumerate(model.run(groups)):
        seen[f"block{i}/text"] = output
    count, start, latents = 0, 0, []
    for clip, frames in enumerate(case.clips):
        latent = np.zeros((case.detail_bits, frames, H, W))
        repetitions = case.video_repetitions if clip else case.image_repetitions
        for scale, (h, w) in enumerate(case.maps):
            for _ in range(repetitions[scale]):
                small = np.einsum("ij,ctjk,lk->ctil", area_rows(H, h), latent, area_rows(W, w))
                x = model.linear("word_embed", small.reshape(case.detail_bits, -1).T)[None]
                seen[f"in/{count}"] = x
                places = [
                    (512 + count, start + t, spread(y, h, H), spread(z, w, W))
                    for t in range(frames)
                    for y in range(h)
                    for z in range(w)
                ]  # fmt: skip
                sees = [0] + ([clip] if clip else [])  # groups: text, then the last map of every clip
                own = Group(np.repeat(x, len(groups[0].x), 0), np.array(places, float), sees)
                outputs = model.run([*groups, own])
                for i, output in enumerate(outputs):
                    seen[f"block{i}/{count}"] = output
                is_semantic = scale < case.semantic_scales
                y = rms(outputs[-1], model.w["norm_hidden_sates.weight"])
                raw = model.linear("semantic_head2" if is_semantic else "head", y)
                seen[f"raw/{count}"] = raw
                logits = model.guided(raw / case.tau[min(clip, 1)])
                seen[f"logits/{count}"] = logits[None]
                pairs = logits.reshape(-1, 2)
                chance = np.exp(pairs - pairs.max(-1, keepdims=True))
                chance = chance / chance.sum(-1, keepdims=True)
                seen[f"prob/{count}"] = chance
                n = case.semantic_bits if is_semantic else case.detail_bits
                bits = (rng.random(len(chance)) < chance[:, 1]).reshape(-1, n)
                seen[f"bits/{count}"] = bits.astype(np.uint8)
                values = ((bits * 2.0 - 1) / math.sqrt(n)).reshape(frames, h, w, n)
                stretch = linear_rows(n, case.detail_bits) if n != case.detail_bits else np.eye(n)
                latent = latent + np.einsum(
                    "tyxn,cn,iy,jx->ctij", values, stretch, linear_rows(h, H), linear_rows(w, W)
                )
                count += 1
        groups.append(own)
        latents.append(latent)
        start += frames
    seen["codes"] = np.concatenate(latents, 1)[None]
    return run


def write_fixture(run: Run, path: Path, name: str = "apg", leave_out: tuple[str, ...] = ()) -> Path:
    """A parity file of the run: settings, weights as fp16, arrays as fp32."""
    case = run.case
    settings: dict[str, Any] = {"scale": case.scale, "tau": case.taus}
    if case.kind == "apg":
        settings |= {"eta": case.eta, "norm_threshold": case.norm_threshold}
    meta = {
        "sched": case.schedule,
        "image_rep": case.image_repetitions,
        "video_rep": case.video_repetitions,
        "semantic_scales": case.semantic_scales,
        name: settings,
    }
    arrays = {
        f"{name}/{key}": np.asarray(array, np.float32) if np.asarray(array).dtype == np.float64 else array
        for key, array in run.arrays.items()
        if key not in leave_out
    }
    weights = {f"w/{key}": array.astype(np.float16) for key, array in run.weights.items()}
    np.savez(path, meta=np.array(json.dumps(meta)), **arrays, **weights)
    return path
