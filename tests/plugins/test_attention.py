"""Entropy attention, oracle and ONNX body, against a dense float64 reference."""

import math

import numpy as np
import onnxruntime
import pytest
import torch
from onnx import TensorProto, helper

from toprovar.plugins.attention.function import cached_attention_function, entropy_attention_function
from toprovar.plugins.attention.oracle import attention_with_entropy

# fp32 scores of up to 100: 24 bits leave 6e-6 nats of absolute error in a difference of two such numbers
TOLERANCE = {"oracle": 2e-5, "body": 1e-5, "output": 1e-5}


def reference(q, k, v, scale):
    """Dense float64. q: [R, H, L, D] -> output, entropy [R, H, L]."""
    scores = np.einsum("rhld,rhsd->rhls", q.astype(np.float64), k.astype(np.float64)) * scale
    scores -= scores.max(-1, keepdims=True)
    p = np.exp(scores)
    p /= p.sum(-1, keepdims=True)
    logs = np.log(np.where(p > 0, p, 1))
    return np.einsum("rhls,rhsd->rhld", p, v.astype(np.float64)), -(p * logs).sum(-1)


def made(R, H, L, S, D, seed=0, temperature=1.0):
    rng = np.random.default_rng(seed)
    q, k, v = (rng.standard_normal((R, H, n, D)).astype(np.float32) for n in (L, S, S))
    return q * np.float32(temperature), k, v


CASES = [(2, 2, 17, 81, 64, 0.3), (1, 3, 1, 1, 16, 1.0), (2, 1, 5, 987, 32, 4.0), (2, 2, 64, 1497, 64, 1.0)]


@pytest.mark.parametrize(("R", "H", "L", "S", "D", "temperature"), CASES)
def test_oracle_equals_the_dense_reference(R, H, L, S, D, temperature):
    q, k, v = made(R, H, L, S, D, temperature=temperature)
    o, entropy = attention_with_entropy(*map(torch.from_numpy, (q, k, v)), scale=D**-0.5)
    expected_o, expected = reference(q, k, v, D**-0.5)
    np.testing.assert_allclose(o.numpy(), expected_o, atol=TOLERANCE["output"])
    np.testing.assert_allclose(entropy.numpy(), expected, atol=TOLERANCE["oracle"])


def session_of(kind, R, H, L, S, past, D, scale):
    """One node of our domain with its function body, as ONNX Runtime runs it without any plugin."""
    function = {"EntropyAttention": entropy_attention_function, "CachedAttention": cached_attention_function}[kind]()
    names = ["q", "k_new", "v_new", "k_past", "v_past"]
    sizes = [L, S - past, S - past, past, past]
    inputs = [
        helper.make_tensor_value_info(n, TensorProto.FLOAT, [s, R, H, D]) for n, s in zip(names, sizes, strict=True)
    ]
    outputs = [helper.make_tensor_value_info("o", TensorProto.FLOAT, [L, R, H, D])]
    if kind == "EntropyAttention":
        outputs.append(helper.make_tensor_value_info("entropy", TensorProto.FLOAT, [L, R]))
    node = helper.make_node(
        kind, names, [o.name for o in outputs], domain="toprovar", scale=scale, plugin_namespace="toprovar",
        plugin_version="1",
    )  # fmt: skip
    model = helper.make_model(
        helper.make_graph([node], "test", inputs, outputs),
        opset_imports=[helper.make_opsetid("", 20), helper.make_opsetid("toprovar", 1)],
        functions=[function],
        ir_version=10,
    )
    return onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])


@pytest.mark.parametrize("kind", ["EntropyAttention", "CachedAttention"])
@pytest.mark.parametrize(("R", "H", "L", "S", "D", "temperature"), CASES)
def test_function_body_equals_the_dense_reference(kind, R, H, L, S, D, temperature):
    past = S - L if S > L else 0
    q, k, v = made(R, H, L, S, D, temperature=temperature)
    time_major = [np.ascontiguousarray(x.transpose(2, 0, 1, 3)) for x in (q, k, v)]  # [., R, H, D]
    feeds = dict(
        q=time_major[0], k_new=time_major[1][past:], v_new=time_major[2][past:], k_past=time_major[1][:past],
        v_past=time_major[2][:past],
    )  # fmt: skip
    found = session_of(kind, R, H, L, S, past, D, D**-0.5).run(None, feeds)
    expected_o, expected = reference(q, k, v, D**-0.5)
    np.testing.assert_allclose(found[0].transpose(1, 2, 0, 3), expected_o, atol=TOLERANCE["output"])
    if kind == "EntropyAttention":
        np.testing.assert_allclose(found[1].T, expected.mean(1), atol=TOLERANCE["body"])


def test_equal_scores_give_the_log_of_the_number_of_keys():
    q, k, v = torch.zeros(1, 1, 1, 8), torch.zeros(1, 1, 987, 8), torch.randn(1, 1, 987, 8)
    assert attention_with_entropy(q, k, v, 1.0)[1].item() == pytest.approx(math.log(987), abs=1e-5)


def test_one_dominant_key_gives_no_entropy_and_nothing_overflows():
    q = torch.full((1, 1, 1, 64), 1.0)
    k = torch.zeros(1, 1, 33, 64)
    k[..., 5, :] = 100.0
    entropy = attention_with_entropy(q, k, torch.randn(1, 1, 33, 64), 1.0)[1]
    assert entropy.item() == pytest.approx(0, abs=1e-4)
    assert torch.isfinite(entropy).all()


def test_the_explicit_path_for_other_formats_agrees():
    q, k, v = map(torch.from_numpy, made(2, 2, 9, 40, 16))
    half = attention_with_entropy(q.half(), k.half(), v.half(), 0.25)
    full = attention_with_entropy(q.half().float(), k.half().float(), v.half().float(), 0.25)
    torch.testing.assert_close(half[1], full[1], atol=1e-5, rtol=0)
