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


@pytest.mark.parametrize("count", [1, 3840, 3841, 262144])
def test_the_gate_has_no_limit(count):
    score = torch.randn(262144, device="cuda").round(decimals=2)  # many ties
    expected = torch.sort(score, stable=True).indices[:count].sort().values
    assert torch.equal(torch.ops.toprovar.token_gate(score, count), expected)
