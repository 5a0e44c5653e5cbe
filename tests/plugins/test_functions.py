"""The ONNX functions of the element-wise operators against their float64 references, on ONNX Runtime's CPU."""

import numpy as np
import onnxruntime
import pytest
from onnx import TensorProto, helper

from toprovar.plugins.attention.reference import attention
from toprovar.plugins.bias_gelu.reference import bias_gelu
from toprovar.plugins.bit_sampler.reference import bit_sampler
from toprovar.plugins.functions import DOMAIN, OPSET, functions
from toprovar.plugins.gated_residual.reference import gated_residual
from toprovar.plugins.modulated_norm.reference import modulated_norm
from toprovar.plugins.rotary_heads.reference import rotary_heads
from toprovar.plugins.token_restore.reference import token_restore

# float32 arithmetic on values near 1: some 10 roundings of 6e-8 each, more where sums are long
TOLERANCE = 5e-6


def run(kind, feeds, outputs, **attributes):
    """One node with its function body. feeds: arrays in the operator's order; outputs: how many."""
    names = [f"i{n}" for n in range(len(feeds))]
    results = [f"o{n}" for n in range(outputs)]
    kinds = {np.dtype(np.float32): TensorProto.FLOAT, np.dtype(np.int64): TensorProto.INT64}
    inputs = [helper.make_tensor_value_info(n, kinds[x.dtype], x.shape) for n, x in zip(names, feeds, strict=True)]
    values = [onnx_output(name, kind) for name in results]
    node = helper.make_node(kind, names, results, domain=DOMAIN, **attributes)
    model = helper.make_model(
        helper.make_graph([node], "one", inputs, values),
        opset_imports=[helper.make_opsetid("", OPSET), helper.make_opsetid(DOMAIN, 1)],
        functions=[functions()[kind]()],
        ir_version=10,
    )
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    return session.run(None, dict(zip(names, feeds, strict=True)))


def onnx_output(name, kind):
    dtype = TensorProto.INT32 if kind == "BitSampler" else TensorProto.FLOAT
    return helper.make_tensor_value_info(name, dtype, None)


def made(*shape, seed=0):
    return np.random.default_rng([seed, *shape]).standard_normal(shape).astype(np.float32)


def close(found, expected):
    assert found.size
    assert np.isfinite(found).all()
    np.testing.assert_allclose(found, expected, rtol=TOLERANCE, atol=TOLERANCE)


@pytest.mark.parametrize(("n", "R", "P", "C"), [(1, 1, 1, 3), (17, 2, 2, 81), (81, 2, 1, 192), (5, 3, 3, 2048)])
def test_modulated_norm(n, R, P, C):
    x, scale, shift = 10 + 3 * made(n, R, C), made(1, P, C, seed=1), made(1, P, C, seed=2)
    close(run("ModulatedNorm", [x, scale, shift], 1, epsilon=1e-6, to=1)[0], modulated_norm(x, scale, shift))


def test_modulated_norm_of_a_constant_token_is_its_shift():
    x, scale, shift = np.full((1, 2, 17), 7, np.float32), made(1, 2, 17), made(1, 2, 17, seed=1)
    close(run("ModulatedNorm", [x, scale, shift], 1, epsilon=1e-6, to=1)[0], shift)


@pytest.mark.parametrize(("n", "R", "P", "H", "D"), [(1, 1, 1, 1, 4), (17, 2, 1, 3, 64), (9, 2, 2, 2, 128)])
def test_rotary_heads(n, R, P, H, D):
    qkv, bias, gain = made(n, R, 3 * H * D), made(3 * H * D, seed=1), 1 + made(H, 1, seed=2) ** 2
    angle = made(n, P, 1, D // 2, seed=3)
    operands = [qkv, bias, gain, np.cos(angle), np.sin(angle)]
    found = run("RotaryHeads", operands, 3, heads=[H])
    for one, expected in zip(found, rotary_heads(*operands), strict=True):
        assert one.shape == (n, R, H, D)
        close(one, expected)


def test_rotary_heads_of_zeros_are_zero():
    angle = made(2, 1, 1, 2)
    feeds = [np.zeros((2, 1, 12), np.float32), np.zeros(12, np.float32), np.ones((1, 1), np.float32)]
    for one in run("RotaryHeads", [*feeds, np.cos(angle), np.sin(angle)], 3, heads=[1]):
        assert (one == 0).all()


@pytest.mark.parametrize(("n", "R", "P", "C"), [(1, 1, 1, 1), (17, 2, 2, 81), (9, 3, 1, 64)])
def test_gated_residual(n, R, P, C):
    operands = [made(n, R, C), made(n, R, C, seed=1), made(C, seed=2), made(1, P, C, seed=3)]
    close(run("GatedResidual", operands, 1)[0], gated_residual(*operands))


@pytest.mark.parametrize("shape", [(1, 1), (17, 2, 81), (3, 4096)])
def test_bias_gelu(shape):
    x, bias = 3 * made(*shape), made(shape[-1], seed=1)
    close(run("BiasGelu", [x, bias], 1)[0], bias_gelu(x, bias))


@pytest.mark.parametrize("limit", [3.0, np.inf])
def test_bit_sampler(limit):
    logits = 4 * made(81, 2, 16, 2)
    noise = np.random.default_rng(5).random((81, 2, 16)).astype(np.float32)
    expected = bit_sampler(logits, noise, limit)
    found = run("BitSampler", [logits, noise, np.float32([limit])], 1)[0]
    odds = logits[..., 1].astype(np.float64) - logits[..., 0]
    is_tie = np.abs(noise - 1 / (1 + np.exp(-odds))) < 1e-6
    assert 0 < expected.mean() < 1
    assert (found == expected)[~is_tie].all()
    assert (found[odds >= limit] == 1).all()
    assert (found[odds <= -limit] == 0).all()


@pytest.mark.parametrize(("old", "new", "n"), [((2, 3), (5, 4), 7), ((6, 6), (9, 9), 1), ((4, 4), (4, 4), 16)])
def test_token_restore(old, new, n):
    tokens = new[0] * new[1]
    kept = np.sort(np.random.default_rng(n).choice(tokens, n, replace=False)).astype(np.int64)
    operands = [
        made(tokens, 2, 17), made(old[0] * old[1], 2, 17, seed=1), made(new[0], old[0], seed=2),
        made(new[1], old[1], seed=3), kept, made(n, 2, 17, seed=4),
    ]  # fmt: skip
    found = run("TokenRestore", operands, 1)[0]
    close(found, token_restore(*operands))
    assert np.array_equal(found[kept], operands[-1])


@pytest.mark.parametrize(("L", "T", "visible"), [(1, 1, 1), (17, 12, 5), (81, 64, 64)])
def test_masked_attention(L, T, visible):
    R, H, D = 2, 3, 16
    q, k, v = made(L, R, H, D), made(T, R, H, D, seed=1), made(T, R, H, D, seed=2)
    mask = np.zeros((R, T), np.float32)
    mask[1, visible:] = -1e4
    found = run("MaskedAttention", [q, k, v, mask], 1, scale=D**-0.5)[0]
    close(found, attention(q, k, v, D**-0.5, mask)[0])
    alone = attention(q[:, 1:], k[:visible, 1:], v[:visible, 1:], D**-0.5)[0]
    close(found[:, 1:], alone)
