"""Every operator at awkward sizes: inputs, attributes and the float64 outputs that all hosts are held against."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from onnx import helper

from toprovar.plugins.attention.reference import attention
from toprovar.plugins.bias_gelu.reference import bias_gelu
from toprovar.plugins.bit_sampler.reference import bit_sampler
from toprovar.plugins.functions import DOMAIN, OPSET, PLUGIN, functions
from toprovar.plugins.gated_residual.reference import gated_residual
from toprovar.plugins.modulated_norm.reference import modulated_norm
from toprovar.plugins.rotary_heads.reference import rotary_heads
from toprovar.plugins.token_gate.reference import lowest_scores
from toprovar.plugins.token_restore.reference import token_restore

# Allowed distance, absolute plus as much relative.
TOLERANCE = {
    "float32": 5e-6,  # some ten roundings of 6e-8 each, more where sums are long
    "float16": 1e-3,  # two roundings of 5e-4
    "float32 of float16": 1e-3,  # a sum that is rounded to float16 before float32 takes over
    "entropy": 1e-5,  # a logarithm on top; arithmetic is float32 whatever the operands
    "entropy of float16": 1e-5,
}
# The function's body rounds scores (up to 8, so by 4e-3) and weights to float16 between its nodes.
BODY_TOLERANCE = {**TOLERANCE, "float16": 6e-3, "entropy of float16": 6e-3}


@dataclass(frozen=True)
class Case:
    """inputs: arrays by name, in the operator's order; expected: outputs by name, of the type they have on a graph."""

    kind: str
    inputs: dict[str, np.ndarray]
    attributes: dict[str, object]
    expected: dict[str, np.ndarray]
    types: dict[str, str]

    def __str__(self) -> str:
        shapes = "_".join("x".join(map(str, x.shape)) for x in list(self.inputs.values())[:2])
        is_half = any(x.dtype == np.float16 for x in self.inputs.values()) or "float16" in self.types.values()
        return f"{self.kind}_{shapes}{'_half' if is_half else ''}"

    @property
    def numbers(self) -> dict[str, float]:
        """Attributes as the C functions take them."""
        return {name: value[0] if isinstance(value, list) else value for name, value in self.attributes.items()}

    def empty_outputs(self) -> list[np.ndarray]:
        """Arrays for the outputs, filled with what no operator writes."""
        fill = {"i": -7, "f": np.nan}
        return [
            np.full(value.shape, fill[np.dtype(self.types[name]).kind], self.types[name])
            for name, value in self.expected.items()
        ]

    def check(self, outputs, tolerances=TOLERANCE) -> None:
        assert len(outputs) == len(self.expected) > 0
        is_half = any(x.dtype == np.float16 for x in self.inputs.values())
        for (name, expected), found in zip(self.expected.items(), outputs, strict=True):
            assert found.dtype == self.types[name], name
            assert found.shape == expected.shape, name
            if expected.dtype.kind == "i":
                assert np.array_equal(found, expected), name
                continue
            assert np.isfinite(found).all(), name
            key = "entropy" if name == "entropy" else self.types[name]
            allowed = tolerances[f"{key} of float16" if is_half and key != "float16" else key]
            np.testing.assert_allclose(found.astype(np.float64), expected, rtol=allowed, atol=allowed, err_msg=name)


def made(dtype, *shape, seed=0):
    return np.random.default_rng([seed, *shape]).standard_normal(shape).astype(dtype)


def attention_case(kind, L, S, R, H, D, dtype, tied=False):
    q, k_new, v_new = (made(dtype, L, R, H, D, seed=seed) for seed in (1, 2, 3))
    k_past, v_past = (made(dtype, S, R, H, D, seed=seed) for seed in (4, 5))
    if tied:
        k_new[:], k_past[:] = k_new[:1], k_new[:1]
    o, entropy = attention(q, np.concatenate([k_past, k_new]), np.concatenate([v_past, v_new]), D**-0.5)
    expected = {"o": o, "entropy": entropy.mean(-1)} if kind == "EntropyAttention" else {"o": o}
    if tied:
        np.testing.assert_allclose(entropy, np.log(S + L), atol=1e-12)
    return Case(
        kind,
        {"q": q, "k_new": k_new, "v_new": v_new, "k_past": k_past, "v_past": v_past},
        {"scale": D**-0.5},
        expected,
        {"o": np.dtype(dtype).name, "entropy": "float32"},
    )


def masked_case(L, T, visible, dtype):
    R, H, D = 2, 3, 16
    q, k, v = made(dtype, L, R, H, D), made(dtype, T, R, H, D, seed=1), made(dtype, T, R, H, D, seed=2)
    mask = np.zeros((R, T), np.float32)
    mask[0] = -0.5 * np.arange(T) / T
    mask[1, visible:] = -1e4
    o, _ = attention(q, k, v, D**-0.5, mask)
    operands = {"q": q, "k": k, "v": v, "mask": mask}
    return Case("MaskedAttention", operands, {"scale": D**-0.5}, {"o": o}, {"o": np.dtype(dtype).name})


def gate_case(B, N, count, ties):
    score = np.float32(np.random.default_rng(N).integers(0, ties, (B, N)) - ties // 2) * np.float32(0.5)
    indices = np.stack([lowest_scores(row, count) for row in score]).astype(np.int64)
    shape = {"score": score} if B > 1 else {"score": score[0]}
    expected = {"indices": indices if B > 1 else indices[0]}
    return Case("TokenGate", shape, {"count": [count]}, expected, {"indices": "int64"})


def norm_case(n, R, P, C, dtype):
    x, scale, shift = 10 + 3 * made("f4", n, R, C), made("f4", 1, P, C, seed=1), made("f4", 1, P, C, seed=2)
    to = helper.np_dtype_to_tensor_dtype(np.dtype(dtype))
    expected = {"y": modulated_norm(x, scale, shift, 1e-6)}
    operands = {"x": x, "scale": scale, "shift": shift}
    return Case("ModulatedNorm", operands, {"epsilon": 1e-6, "to": to}, expected, {"y": np.dtype(dtype).name})


def heads_case(n, R, P, H, D, dtype):
    angle = made("f4", n, P, 1, D // 2, seed=3)
    operands = {
        "qkv": made(dtype, n, R, 3 * H * D), "bias": made(dtype, 3 * H * D, seed=1),
        "gain": 1 + made("f4", H, 1, seed=2) ** 2, "cos": np.cos(angle), "sin": np.sin(angle),
    }  # fmt: skip
    expected = dict(zip("qkv", rotary_heads(*operands.values()), strict=True))
    return Case("RotaryHeads", operands, {"heads": [H]}, expected, dict.fromkeys("qkv", np.dtype(dtype).name))


def residual_case(n, R, P, C, dtype):
    operands = {
        "x": made("f4", n, R, C), "y": made(dtype, n, R, C, seed=1), "bias": made(dtype, C, seed=2),
        "gate": made("f4", 1, P, C, seed=3),
    }  # fmt: skip
    expected = {"out": gated_residual(*operands.values())}
    return Case("GatedResidual", operands, {}, expected, {"out": "float32"})


def gelu_case(shape, dtype):
    x, bias = 3 * made(dtype, *shape), made(dtype, shape[-1], seed=1)
    return Case("BiasGelu", {"x": x.astype(dtype), "bias": bias}, {}, {"y": bias_gelu(x, bias)}, {"y": x.dtype.name})


def sampler_case(shape, limit):
    logits = 4 * made("f4", *shape, 2)
    noise = np.random.default_rng(5).random(shape).astype(np.float32)
    odds = logits[..., 1].astype(np.float64) - logits[..., 0]
    noise[np.abs(noise - 1 / (1 + np.exp(-odds))) < 1e-6] = 0  # not at a threshold, where rounding decides
    expected = {"bits": bit_sampler(logits, noise, limit)}
    operands = {"logits": logits, "noise": noise, "limit": np.float32([limit])}
    return Case("BitSampler", operands, {}, expected, {"bits": "int32"})


def restore_case(old, new, n):
    tokens = new[0] * new[1]
    rows, columns = made("f4", new[0], old[0], seed=2), made("f4", new[1], old[1], seed=3)
    rows[:, ::2], columns[::2] = 0, 0  # as resampling matrices are: mostly zeros
    operands = {
        "x": made("f4", tokens, 2, 17), "residual": made("f4", old[0] * old[1], 2, 17, seed=1), "rows": rows,
        "columns": columns, "kept": np.sort(np.random.default_rng(n).choice(tokens, n, replace=False)).astype(np.int64),
        "y": made("f4", n, 2, 17, seed=4),
    }  # fmt: skip
    return Case("TokenRestore", operands, {}, {"out": token_restore(*operands.values())}, {"out": "float32"})


def all_cases() -> list[Case]:
    cases = []
    for dtype in ("f4", "f2"):
        for kind in ("EntropyAttention", "CachedAttention"):
            for sizes in (
                (1, 0, 1, 1, 8),
                (1, 1, 2, 3, 64),
                (17, 81, 2, 3, 128),
                (81, 987, 1, 2, 16),
                (100, 0, 2, 1, 40),
            ):
                cases.append(attention_case(kind, *sizes, dtype))
        cases.append(attention_case("EntropyAttention", 17, 64, 1, 2, 64, dtype, tied=True))
        cases += [masked_case(*sizes, dtype) for sizes in ((1, 1, 1), (17, 12, 5), (81, 64, 64), (3, 987, 981))]
        cases += [
            norm_case(*sizes, dtype) for sizes in ((1, 1, 1, 3), (17, 2, 2, 81), (81, 2, 1, 192), (5, 3, 3, 2048))
        ]
        cases += [heads_case(*sizes, dtype) for sizes in ((1, 1, 1, 1, 4), (17, 2, 1, 3, 64), (81, 2, 2, 2, 128))]
        cases += [residual_case(*sizes, dtype) for sizes in ((1, 1, 1, 1), (17, 2, 2, 81), (81, 3, 1, 64))]
        cases += [gelu_case(shape, dtype) for shape in ((1,), (1, 1), (17, 2, 81), (3, 4096))]
    cases += [
        gate_case(*sizes) for sizes in ((1, 1, 1, 3), (1, 81, 17, 4), (3, 987, 500, 2), (2, 17, 17, 9), (1, 17, 0, 9))
    ]
    cases += [sampler_case(shape, limit) for shape in ((1,), (81, 2, 16), (987,)) for limit in (3.0, np.inf)]
    cases += [
        restore_case(*sizes)
        for sizes in (((2, 3), (5, 4), 7), ((6, 6), (9, 9), 1), ((4, 4), (4, 4), 16), ((3, 3), (9, 9), 0))
    ]
    return cases


def model_of(case: Case, has_body: bool, is_open: bool = False):
    """The operator alone in a graph. is_open: extents have names, and outputs no shape."""
    node = helper.make_node(
        case.kind, list(case.inputs), list(case.expected), name="one", domain=DOMAIN, **case.attributes, **PLUGIN
    )
    inputs = [
        helper.make_tensor_value_info(
            name,
            helper.np_dtype_to_tensor_dtype(x.dtype),
            [f"{name}{axis}" for axis in range(x.ndim)] if is_open else x.shape,
        )
        for name, x in case.inputs.items()
    ]
    outputs = [
        helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(np.dtype(case.types[name])), None)
        for name in case.expected
    ]
    return helper.make_model(
        helper.make_graph([node], case.kind, inputs, outputs),
        opset_imports=[helper.make_opsetid("", OPSET), helper.make_opsetid(DOMAIN, 1)],
        functions=[functions()[case.kind]()] if has_body else [],
        ir_version=10,
    )
