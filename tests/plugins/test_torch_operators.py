"""The operators in PyTorch against the float64 references, on CPU tensors, meta tensors, and in a compiled function."""

import numpy as np
import pytest
import torch
from operator_cases import all_cases
from torch_operator_calls import NAMES, called

from toprovar.plugins.native import OperatorError, found_library
from toprovar.plugins.torch_operators import (
    cached_attention,
    entropy_attention,
    masked_attention,
    modulated_norm,
    rotary_heads,
    token_gate,
)


@pytest.fixture(autouse=True)
def _library(with_plugins):
    found_library.cache_clear()
    yield
    found_library.cache_clear()


@pytest.mark.parametrize("case", all_cases()[1::3], ids=str)
def test_operators_agree_with_their_references(case):
    case.check([x.numpy() for x in called(case)])


def test_every_operator_is_bound(plugin_library):
    assert set(NAMES) == set(plugin_library.operators)
    assert {case.kind for case in all_cases()[1::3]} == set(NAMES)


@pytest.mark.parametrize("case", all_cases()[::7], ids=str)
def test_meta_tensors_have_the_outputs_shapes_and_types(case):
    for real, meta in zip(called(case), called(case, "meta"), strict=True):
        assert meta.is_meta
        assert (real.shape, real.dtype) == (meta.shape, meta.dtype)


def test_a_compiled_function_calls_the_kernel():
    compiled = torch.compile(lambda score: torch.ops.toprovar.token_gate(score, 2) + 1, backend="eager", fullgraph=True)
    assert compiled(torch.tensor([3.0, 1.0, 2.0])).tolist() == [2, 3]


def test_strided_tensors_are_read_as_they_are():
    x = torch.from_numpy(np.random.default_rng(0).standard_normal((2, 17, 81)).astype(np.float32)).transpose(0, 1)
    ones = torch.ones(1, 1, 81)
    found = modulated_norm(x, ones, ones, 1e-6, torch.float32)
    assert torch.equal(found, modulated_norm(x.contiguous(), ones, ones, 1e-6, torch.float32))


def test_entropy_of_every_head():
    q, k = torch.randn(5, 2, 4, 16), torch.randn(7, 2, 2, 16)
    _, per_head = entropy_attention(q, k, k, k[:0], k[:0], 0.25, True)
    _, mean = entropy_attention(q, k, k, k[:0], k[:0], 0.25)
    assert per_head.shape == (5, 2, 4)
    torch.testing.assert_close(mean, per_head.mean(-1))


def test_tensors_that_do_not_fit_are_told():
    x, ones = torch.ones(2, 2, 8), torch.ones(1, 1, 8)
    with pytest.raises(OperatorError, match="ModulatedNorm: shift"):
        modulated_norm(x, ones, torch.ones(1, 1, 7), 1e-6, torch.float32)
    with pytest.raises(ValueError, match=r"x is torch.float64; expected one of torch.float32"):
        modulated_norm(x.double(), ones, ones, 1e-6, torch.float32)
    with pytest.raises(OperatorError, match="bfloat16; expected float32 or float16 on the CPU"):
        modulated_norm(x, ones, ones, 1e-6, torch.bfloat16)


def test_arguments_that_no_output_can_be_made_from_are_told():
    x, ones, score = torch.ones(2, 2, 8), torch.ones(1, 1, 8), torch.ones(9)
    cos = torch.ones(2, 1, 1, 4)
    with pytest.raises(ValueError, match=r"ModulatedNorm: to is torch.float64; expected one of torch.float32"):
        modulated_norm(x, ones, ones, 1e-6, torch.float64)
    with pytest.raises(ValueError, match=r"ModulatedNorm: shift is on meta; expected cpu"):
        modulated_norm(x, ones, ones.to("meta"), 1e-6, torch.float32)
    for count in (-1, 10, 2**40):
        with pytest.raises(ValueError, match=rf"TokenGate: count is {count}; expected 0 to the last extent of \[9\]"):
            token_gate(score, count)
    for qkv, heads in ((x, 0), (x, -1), (x[0], 2), (x, 5)):
        with pytest.raises(ValueError, match="RotaryHeads: qkv is "):
            rotary_heads(qkv, ones[0, 0], torch.ones(2, 1), cos, cos, heads)


@pytest.mark.parametrize("shape", [(0, 2, 4), (5, 0, 4)])
def test_attention_of_nothing_is_nothing(shape):
    q, k = torch.ones(*shape, 16), torch.ones(7, shape[1], 4, 16)
    o, entropy = entropy_attention(q, k, k, k, k, 0.3)
    assert o.shape == q.shape
    assert entropy.shape == shape[:2]
    assert cached_attention(q, k, k, k, k, 0.3).shape == q.shape
    assert masked_attention(q, k, k, torch.zeros(shape[1], 7), 0.3).shape == q.shape


def test_attention_without_heads_is_told():
    q, k = torch.ones(5, 2, 0, 16), torch.ones(7, 2, 4, 16)
    with pytest.raises(OperatorError, match="heads: found 0 over 4; expected a multiple"):
        cached_attention(q, k, k, k, k, 0.3)
