"""Every operator of the library on a GPU, against float64 references; TOPROVAR_PLUGINS or the cache must hold it."""

import numpy as np
import pytest
import torch
from operator_cases import all_cases
from torch_operator_calls import called

from toprovar.tools.operator_bench import CHECKED, check_attention

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
]
# bfloat16 keeps 8 bits; sums of a few such numbers, relative to 1 + |expected|
BFLOAT16 = 1.6e-2


@pytest.mark.parametrize("case", all_cases(), ids=str)
def test_operators_agree_with_their_references_on_a_gpu(case):
    case.check([x.cpu().numpy() for x in called(case, "cuda")])


@pytest.mark.parametrize("case", [case for case in all_cases() if "half" in str(case)], ids=str)
def test_operators_in_bfloat16(case):
    for found, expected in zip(called(case, "cuda", torch.bfloat16), case.expected.values(), strict=True):
        error = np.abs(found.double().cpu().numpy() - expected) / (1 + np.abs(expected))
        assert error.max() <= BFLOAT16  # NaN is not


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("case", CHECKED)
def test_attention_at_the_sizes_that_choose_each_kernel(case, dtype):
    found = check_attention(case, dtype, 3.0)
    assert found["ok"], found


@pytest.mark.parametrize("case", CHECKED)
def test_attention_gives_the_same_bits_on_every_run(case):
    L, S, R, H, G, D = case
    q, k, v = (torch.randn(n, R, h, D, device="cuda").bfloat16() for n, h in ((L, H), (S + L, G), (S + L, G)))
    runs = [torch.ops.toprovar.entropy_attention(q, k[S:], v[S:], k[:S], v[:S], D**-0.5) for _ in range(2)]
    for first, second in zip(*runs, strict=True):
        assert torch.equal(first, second)


def test_no_tokens_are_no_fault():
    operators, x, pairs = torch.ops.toprovar, torch.empty(0, 2, 64, device="cuda"), torch.empty(0, 2, device="cuda")
    ones, qkv = torch.ones(1, 1, 64, device="cuda"), torch.empty(0, 2, 192, device="cuda")
    angles, heads = torch.empty(0, 1, 1, 32, device="cuda"), torch.empty(0, 2, 1, 64, device="cuda")
    some = torch.ones(3, 2, 1, 64, device="cuda")
    assert operators.modulated_norm(x, ones, ones, 1e-6, torch.float32).shape == x.shape
    assert operators.gated_residual(x, x, ones[0, 0], ones).shape == x.shape
    assert operators.bias_gelu(x, ones[0, 0]).shape == x.shape
    assert operators.bit_sampler(pairs, pairs[:, 0], torch.ones(1, device="cuda")).shape == (0,)
    assert (
        operators.rotary_heads(qkv, torch.ones(192, device="cuda"), ones[0, :, :1], angles, angles, 1)[0].shape
        == heads.shape
    )
    assert operators.cached_attention(heads, some, some, some, some, 1.0).shape == heads.shape
    torch.cuda.synchronize()


@pytest.mark.parametrize("count", [1, 3840, 3841, 262144])
def test_the_gate_has_no_limit(count):
    score = torch.randn(262144, device="cuda").round(decimals=2)  # many ties
    expected = torch.sort(score, stable=True).indices[:count].sort().values
    assert torch.equal(torch.ops.toprovar.token_gate(score, count), expected)
