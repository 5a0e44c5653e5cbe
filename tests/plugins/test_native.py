"""The library's C functions: every operator, what graphs cannot ask for, and what is refused."""

import ctypes

import numpy as np
import pytest
from operator_cases import TOLERANCE, all_cases, gate_case, made, norm_case

from toprovar.plugins.attention.reference import attention
from toprovar.plugins.library import load
from toprovar.plugins.native import Call, OperatorError, RawTensor, raw_from_array, run_on_cpu


@pytest.mark.parametrize("case", all_cases()[::3], ids=str)
def test_operators_agree_with_their_references(case, plugin_library):
    outputs = case.empty_outputs()
    run_on_cpu(case.kind, list(case.inputs.values()), outputs, plugin_library.path, **case.numbers)
    case.check(outputs)


def run_attention(plugins, q, k_new, v_new, k_past, v_past, per_head=True, scale=0.3):
    o = np.full(q.shape, np.nan, q.dtype)
    entropy = np.full(q.shape[:3] if per_head else q.shape[:2], np.nan, np.float32)
    run_on_cpu("EntropyAttention", [q, k_new, v_new, k_past, v_past], [o, entropy], plugins.path, scale=scale)
    return o, entropy


@pytest.mark.parametrize(("L", "N", "S"), [(1, 1, 0), (17, 5, 81), (81, 0, 17), (3, 987, 1)])
@pytest.mark.parametrize(("H", "G"), [(6, 2), (4, 1), (3, 3)])
def test_attention_of_fewer_key_heads_gives_every_heads_entropy(L, N, S, H, G, plugin_library):
    R, D = 2, 24
    q = made("f4", L, R, H, D)
    k_new, v_new, k_past, v_past = (
        made("f4", length, R, G, D, seed=seed) for seed, length in ((1, N), (2, N), (3, S), (4, S))
    )
    k, v = np.concatenate([k_past, k_new]), np.concatenate([v_past, v_new])
    expected, expected_entropy = attention(q, k, v, 0.3)
    o, per_head = run_attention(plugin_library, q, k_new, v_new, k_past, v_past)
    np.testing.assert_allclose(o, expected, rtol=TOLERANCE["float32"], atol=TOLERANCE["float32"])
    np.testing.assert_allclose(per_head, expected_entropy, rtol=TOLERANCE["entropy"], atol=TOLERANCE["entropy"])
    _, mean = run_attention(plugin_library, q, k_new, v_new, k_past, v_past, per_head=False)
    np.testing.assert_allclose(mean, per_head.mean(-1), rtol=1e-6, atol=1e-6)


def test_one_key_has_no_entropy_and_its_own_value(plugin_library):
    q, k, v = made("f4", 5, 1, 2, 8), made("f4", 1, 1, 2, 8, seed=1), made("f4", 1, 1, 2, 8, seed=2)
    o, entropy = run_attention(plugin_library, q, k, v, k[:0], v[:0])
    assert (entropy == 0).all()
    np.testing.assert_allclose(o, np.broadcast_to(v, o.shape), rtol=1e-6)


@pytest.mark.parametrize("scale", [0.0, -0.7, 60.0])
def test_scales_of_any_sign_and_size(scale, plugin_library):
    q, k, v = made("f4", 17, 1, 2, 16), made("f4", 81, 1, 2, 16, seed=1), made("f4", 81, 1, 2, 16, seed=2)
    expected, expected_entropy = attention(q, k, v, scale)
    o, entropy = run_attention(plugin_library, q, k, v, k[:0], v[:0], scale=scale)
    # scores up to 60 * 16 carry float32's rounding of 6e-8 of themselves into the exponent
    allowed = 1e-5 + 6e-8 * 16 * 16 * abs(scale)
    np.testing.assert_allclose(o, expected, rtol=allowed, atol=allowed)
    np.testing.assert_allclose(entropy, expected_entropy, rtol=allowed, atol=allowed)


@pytest.mark.parametrize("where", ["q", "k", "v"])
def test_a_nan_reaches_the_output(where, plugin_library):
    operands = {"q": made("f4", 3, 1, 1, 8), "k": made("f4", 17, 1, 1, 8, seed=1), "v": made("f4", 17, 1, 1, 8, seed=2)}
    operands[where][1, 0, 0, 2] = np.nan
    q, k, v = operands.values()
    o, entropy = run_attention(plugin_library, q, k, v, k[:0], v[:0])
    assert np.isnan(o).any()
    assert np.isnan(entropy).any() == (where != "v")
    x = made("f4", 3, 1, 81)
    x[1, 0, 7] = np.nan
    y = np.zeros((3, 1, 81), np.float32)
    ones = np.ones((1, 1, 81), np.float32)
    run_on_cpu("ModulatedNorm", [x, ones, ones], [y], plugin_library.path, epsilon=1e-6, to=1)
    assert np.isnan(y[1]).all()
    assert np.isfinite(y[[0, 2]]).all()
    run_on_cpu("BiasGelu", [x, ones[0, 0]], [y], plugin_library.path)
    assert np.isnan(y).sum() == 1


# float32 keeps a score beside a mask of -1e4 to 1e-3, and forgets it beside -1e9: then all keys count alike.
ROUNDING_BESIDE_MASK = {-1e4: 4e-3, -1e38: 0.0, -np.inf: 0.0}


@pytest.mark.parametrize("hidden", list(ROUNDING_BESIDE_MASK))
@pytest.mark.parametrize("T", [1, 17, 987])
def test_a_row_whose_keys_are_all_hidden_sees_all_of_them(hidden, T, plugin_library):
    q, k, v = made("f4", 5, 3, 2, 8), made("f4", T, 3, 2, 8, seed=1), made("f4", T, 3, 2, 8, seed=2)
    mask = np.zeros((3, T), np.float32)
    mask[1:] = hidden
    mask[2, -1] = -100.0  # low, and yet the only one that its row sees
    o = np.full_like(q, np.nan)
    run_on_cpu("MaskedAttention", [q, k, v, mask], [o], plugin_library.path, scale=0.3)
    usual, _ = attention(q, k, v, 0.3)
    hidden_row = usual[:, 1] if hidden == -1e4 else np.broadcast_to(v.astype(float).mean(0)[1], usual[:, 1].shape)
    allowed = TOLERANCE["float32"] + ROUNDING_BESIDE_MASK[hidden]
    np.testing.assert_allclose(o[:, 1], hidden_row, rtol=allowed, atol=allowed)
    np.testing.assert_allclose(o[:, 0], usual[:, 0], rtol=TOLERANCE["float32"], atol=TOLERANCE["float32"])
    np.testing.assert_allclose(o[:, 2], np.broadcast_to(v[-1, 2], o[:, 2].shape), rtol=1e-6)


def test_gate_takes_ties_zeros_and_extremes_in_order_of_position(plugin_library):
    score = np.float32([0.0, -0.0, np.inf, -np.inf, 0.0, -1e-45])
    for count, expected in ((1, [3]), (2, [3, 5]), (3, [0, 3, 5]), (4, [0, 1, 3, 5]), (6, [0, 1, 2, 3, 4, 5])):
        indices = np.full(count, -1, np.int64)
        run_on_cpu("TokenGate", [score], [indices], plugin_library.path, count=count)
        assert indices.tolist() == expected


def test_a_gate_over_nan_still_gives_positions(plugin_library):
    indices = np.full(17, -1, np.int64)
    run_on_cpu("TokenGate", [np.full(987, np.nan, np.float32)], [indices], plugin_library.path, count=17)
    assert (np.diff(indices) > 0).all()
    assert 0 <= indices[0] < indices[-1] < 987


@pytest.mark.parametrize(
    ("kind", "change", "message"),
    [
        ("TokenGate", {"count": 82}, r"TokenGate: count: found 82; expected 0 to 81"),
        ("TokenGate", {}, r"TokenGate: attribute count is missing"),
        ("NoSuch", {"count": 1}, r"NoSuch: no such operator in this library"),
    ],
)
def test_calls_that_are_refused(kind, change, message, plugin_library):
    score, indices = made("f4", 81), np.zeros(17, np.int64)
    with pytest.raises(OperatorError, match=message):
        run_on_cpu(kind, [score], [indices], plugin_library.path, **change)


def test_types_and_counts_that_are_refused(plugin_library):
    case = norm_case(17, 2, 2, 81, "f4")
    operands, (y,) = list(case.inputs.values()), case.empty_outputs()
    with pytest.raises(OperatorError, match="y: found float32; expected float16"):
        run_on_cpu("ModulatedNorm", operands, [y], plugin_library.path, epsilon=1e-6, to=10)
    with pytest.raises(OperatorError, match="attribute to: found int64; expected float32, float16 or bfloat16"):
        run_on_cpu("ModulatedNorm", operands, [y], plugin_library.path, epsilon=1e-6, to=7)
    with pytest.raises(OperatorError, match="inputs: found 2; expected 3"):
        run_on_cpu("ModulatedNorm", operands[:2], [y], plugin_library.path, epsilon=1e-6, to=1)
    with pytest.raises(ValueError, match="not contiguous"):
        run_on_cpu("ModulatedNorm", [operands[0][:, ::-1], *operands[1:]], [y], plugin_library.path)
    native = load(plugin_library.path)
    wide = [RawTensor(0, (2, 4), 16), RawTensor(0, (4,), 16)]
    with pytest.raises(OperatorError, match="bfloat16; expected float32 or float16 on the CPU"):
        Call(native, "BiasGelu", wide, [RawTensor(0, (2, 4), 16)], {}).run_on_cpu()


def test_a_library_without_cuda_says_so(plugin_library):
    if plugin_library.has_cuda:
        pytest.skip("needs a library that was built without CUDA")
    case = gate_case(1, 81, 17, 4)
    outputs = case.empty_outputs()
    call = Call(
        load(plugin_library.path), case.kind, [raw_from_array(case.inputs["score"])], [raw_from_array(outputs[0])],
        case.numbers,
    )  # fmt: skip
    assert call.scratch_bytes() == 0
    with pytest.raises(OperatorError, match="built without CUDA"):
        call.run_on_cuda(0, 0)


def test_threads_can_be_set(plugin_library):
    native = load(plugin_library.path)
    usual = native.toprovarThreads()
    try:
        native.toprovarSetThreads(3)
        assert native.toprovarThreads() == 3
        case = norm_case(81, 2, 1, 192, "f4")
        outputs = case.empty_outputs()
        run_on_cpu(case.kind, list(case.inputs.values()), outputs, plugin_library.path, **case.numbers)
        case.check(outputs)
    finally:
        native.toprovarSetThreads(0)
    assert native.toprovarThreads() == usual >= 1
    assert native.toprovarOperatorName(ctypes.c_int32(len(plugin_library.operators))) is None
