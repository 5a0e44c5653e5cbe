"""FastVAR's exact form against its public code's steps, written out in float64, over a whole run.

Before each of self-attention, cross-attention and feed-forward, every row keeps the tokens farthest from their mean;
the others take the part's output of the reference scale, resampled by averaging; only kept keys and values are cached.
"""

import math

import infinity_reference as reference
import numpy as np
import torch

from toprovar.exporter.infinity.generate import generate
from toprovar.exporter.infinity.load import load_infinity
from toprovar.runtime.guidance import Guidance, per_scale
from toprovar.runtime.plan import Backbone, Plan, Restore, Score

TOLERANCE = 1e-5  # fp32 against float64, times the largest value of the array, as in test_transformer.py
CASE = reference.Case(tuple((side, side) for side in (1, 2, 4, 8, 16, 20)), (20, 20), depth=4, lens=(5,), cfg=(3.0,))
REFERENCE_SCALE, RATIOS, LAYERS = 3, {4: 0.4, 5: 0.5}, (1, 2)
KEPT = {4: 256 - math.floor(256 * 0.4), 5: 400 - math.floor(400 * 0.5)}


class Published(reference.Reference):
    """A block that prunes by the published rule; `scale` is set by the loop."""

    def __init__(self, case, weights):
        super().__init__(case, weights)
        heads = range(case.heads)
        empty = np.zeros((0, case.width // case.heads))
        self.keys = [[[empty for _ in heads] for _ in range(2)] for _ in range(case.depth)]
        self.values = [[[empty for _ in heads] for _ in range(2)] for _ in range(case.depth)]
        self.stored, self.chosen, self.scale = {}, {}, 0

    def pruned(self, name, layer, x, part):
        """x plus the part's output. part: (row, tokens [n, C], their positions) -> [n, C]."""
        height, width = self.case.schedule[self.scale]
        outputs = []
        for r, row in enumerate(x):
            if layer not in LAYERS or self.scale not in RATIOS:
                outputs.append(part(r, row, np.arange(len(row))))
                continue
            distance = ((row - row.mean(0)) ** 2).sum(1)
            kept = np.sort(np.argsort(-distance, kind="stable")[: KEPT[self.scale]])
            self.chosen[self.scale, layer, name, r] = kept
            h, w = self.case.schedule[REFERENCE_SCALE]
            grid = self.stored[layer, name][r].T.reshape(-1, h, w)
            whole = reference.resize_area(grid, (height, width)).reshape(-1, height * width).T.copy()
            whole[kept] = part(r, row[kept], kept)
            outputs.append(whole)
        if self.scale == REFERENCE_SCALE:
            self.stored[layer, name] = outputs
        return x + np.stack(outputs)

    def step(self, layer, x, table):
        w, case, p = self.w, self.case, reference.block_prefix(self.case, layer)
        C, H, c = case.width, case.heads, case.width // case.heads
        gamma1, gamma2, scale1, scale2, shift1, shift2 = np.moveaxis(w[f"{p}.ada_gss"] + self.modulation, 2, 0)
        bias = np.concatenate([w[f"{p}.sa.q_bias"], np.zeros(C), w[f"{p}.sa.v_bias"]])
        factors = np.exp(np.minimum(w[f"{p}.sa.scale_mul_1H11"].reshape(-1), math.log(100)))

        def attention(r, tokens, kept):
            y = reference.layer_norm(tokens) * (1 + scale1[r]) + shift1[r]
            qkv = (y @ w[f"{p}.sa.mat_qkv.weight"].T + bias).reshape(len(kept), 3, H, c)
            out = []
            for h in range(H):
                turn = table[:, kept]
                q = reference.rotate(reference.unit(qkv[:, 0, h]) * factors[h], turn)
                k = reference.rotate(reference.unit(qkv[:, 1, h]), turn)
                self.keys[layer][r][h] = np.concatenate([self.keys[layer][r][h], k])
                self.values[layer][r][h] = np.concatenate([self.values[layer][r][h], qkv[:, 2, h]])
                out.append(reference.attend(q, self.keys[layer][r][h], self.values[layer][r][h], 1.0))
            return self.lin(f"{p}.sa.proj", np.concatenate(out, 1)) * gamma1[r]

        def cross(r, tokens, kept):
            normed = reference.layer_norm(tokens) * w[f"{p}.ca_norm.weight"] + w[f"{p}.ca_norm.bias"]
            q = self.lin(f"{p}.ca.mat_q", normed)
            kv = self.cross_text[r] @ w[f"{p}.ca.mat_kv.weight"].T
            k, v = kv[:, :C], kv[:, C:] + w[f"{p}.ca.v_bias"]
            parts = [slice(h * c, (h + 1) * c) for h in range(H)]
            out = [reference.attend(q[:, s], k[:, s], v[:, s], c**-0.5) for s in parts]
            return self.lin(f"{p}.ca.proj", np.concatenate(out, 1))

        def feed_forward(r, tokens, kept):
            y = reference.layer_norm(tokens) * (1 + scale2[r]) + shift2[r]
            return self.lin(f"{p}.ffn.fc2", reference.gelu_tanh(self.lin(f"{p}.ffn.fc1", y))) * gamma2[r]

        for name, part in (("attention", attention), ("cross", cross), ("ffn", feed_forward)):
            x = self.pruned(name, layer, x, part)
        return x


def published_run():
    """The float64 run: (weights, text rows, bits per scale, block outputs, chosen tokens)."""
    rng = np.random.default_rng(77)
    weights = reference.random_weights(CASE)
    text = rng.standard_normal((5, CASE.text_width))
    model = Published(CASE, weights)
    model.text_side([text, model.w["cfg_uncond"][:5]])
    full = CASE.schedule[-1]
    codes, bits, blocks = np.zeros((1, CASE.code_channels, *full)), [], {}
    x = (model.pooled[:, None] + model.w["pos_start"]) + model.w["lvl_embed.weight"][0]
    for s, size in enumerate(CASE.schedule):
        model.scale = s
        start = sum(h * w for h, w in CASE.schedule[:s])
        table = model.table[:, start : start + size[0] * size[1]]
        for layer in range(CASE.depth):
            x = model.step(layer, x, table)
            blocks[s, layer] = x
        raw = model.head(x) / CASE.tau[0]
        bits.append(reference.draw(3.0 * raw[:1] - 2.0 * raw[1:], CASE.top_p, rng))
        codes = codes + reference.resize_bilinear(reference.latent(bits[s], CASE, size), full)
        if s + 1 < len(CASE.schedule):
            following = reference.resize_bilinear(codes, CASE.schedule[s + 1])
            x = model.lin("word_embed", reference.tokens(following, CASE)) + model.w["lvl_embed.weight"][s + 1]
            x = np.concatenate([x, x])
    return weights, text, bits, blocks, model.chosen


def test_the_exact_form_is_the_published_run():
    weights, text, bits, blocks, chosen = published_run()
    model = load_infinity({name: torch.from_numpy(array) for name, array in weights.items()}, "case")
    rows = torch.stack([torch.from_numpy(text).float(), model.cfg_uncond[:5]])
    prompt = model.prompt(rows, torch.ones(2, 5, dtype=torch.bool))
    config = model.config
    plan = Plan(
        backbone=Backbone(
            family="infinity", layers=config.depth, width=config.width, heads=config.heads, bits=config.bits
        ),
        schedule=CASE.schedule,
        method="fastvar",
        score=Score(kind="variance", granularity="sublayer", row="each"),
        keep={
            k: tuple(KEPT[k] if layer in LAYERS else h * w for layer in range(4))
            for k, h, w in ((4, 16, 16), (5, 20, 20))
        },
        grid=1,
        restore=Restore(kind="cached_residual", ref_scale=REFERENCE_SCALE, resample="area"),
    )
    plan.check()
    assert [plan.counts(k)[1] for k in (4, 5)] == [154, 200]
    seen = {}
    scales = len(CASE.schedule)
    guidance = Guidance(cfg=per_scale((3.0,), scales, "cfg"), tau=per_scale(CASE.tau, scales, "tau"), top_p=CASE.top_p)
    run = generate(
        model, prompt, CASE.schedule, guidance, forced_bits=[torch.from_numpy(b) for b in bits], plan=plan,
        observe=lambda name, scale, tensor: seen.__setitem__((name, scale), tensor.numpy()),
    )  # fmt: skip
    for (scale, layer), expected in blocks.items():
        found = seen[f"block{layer}", scale]
        assert found.shape == expected.shape
        assert np.isfinite(found).all()
        assert np.abs(found - expected).max() <= TOLERANCE * np.abs(expected).max(), (scale, layer)
    for scale in RATIOS:
        for layer in LAYERS:
            assert np.array_equal(run.kept[scale, layer].numpy(), chosen[scale, layer, "ffn", 0])
    differing = [key for key, kept in chosen.items() if key[3] == 0 and not np.array_equal(kept, chosen[(*key[:3], 1)])]
    assert differing  # rows do choose for themselves
