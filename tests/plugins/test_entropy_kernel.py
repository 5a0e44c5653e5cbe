"""The entropy kernel, compiled where there is a GPU and interpreted elsewhere, against dense float64."""

import importlib
import json
import math
import os
import platform
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

# Without Triton only the oracle is left, on the systems Triton doesn't support. On Linux it is a dev dependency, and
# its absence fails the import here instead of skipping what this file is for.
if platform.system() == "Linux" and platform.machine() == "x86_64":
    from triton_interpreter import DEVICE, touching_only

    from toprovar.plugins.attention import triton_kernel
    from toprovar.plugins.attention.triton_kernel import Tile
else:
    pytest.skip("needs Triton, which has wheels for Linux on x86-64 only", allow_module_level=True)

from toprovar.plugins import entropy_attention
from toprovar.plugins.attention.entropy import interpreted

# float32 scores up to 30 carry 2e-6 each, and sums over 1000 keys as much again. Outputs: one rounding of the weights
# and one of the result, of values up to 4.
TOLERANCE = {"entropy": 1e-5, torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}
SMALL = dict(block_m=16, block_n=32, warps=4)
VARIANTS = [Tile(**SMALL), Tile(**SMALL, tma=False), Tile(**{**SMALL, "block_n": 16}, stages=1)]


def made(B, H, L, S, D, dtype=torch.float32, key_heads=None, temperature=2.0, seed=0):
    generator = torch.Generator().manual_seed(seed)
    shapes = [(B, H, L, D), *[(B, key_heads or H, S, D)] * 2]
    q, k, v = (torch.randn(shape, generator=generator) for shape in shapes)
    return (q * temperature).to(DEVICE, dtype), k.to(DEVICE, dtype), v.to(DEVICE, dtype)


def dense(q, k, v, scale, key_mask=None):
    """float64, NumPy. Output [B, H, L, D] and entropy [B, H, L]; zeros where no key is left."""
    group = q.shape[1] // k.shape[1]
    q, k, v = (x.double().cpu().numpy() for x in (q, k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)))
    scores = np.einsum("bhld,bhsd->bhls", q, k) * scale
    valid = np.ones((q.shape[0], k.shape[2]), bool) if key_mask is None else key_mask.cpu().numpy()
    valid = np.broadcast_to(valid[:, None, None], scores.shape)
    with np.errstate(invalid="ignore", divide="ignore"):
        below = scores - np.where(valid, scores, -np.inf).max(-1, keepdims=True)
        p = np.where(valid, np.exp(below), 0.0)
        p = p / p.sum(-1, keepdims=True)
        p = np.where(valid.any(-1, keepdims=True), p, 0.0)
        entropy = -np.where(p > 0, p * np.log(p), 0.0).sum(-1)
    return np.einsum("bhls,bhsd->bhld", p, v), entropy


def agree(found, expected, dtype, entropy_atol=TOLERANCE["entropy"]):
    o, entropy = (x.double().cpu().numpy() for x in found)
    np.testing.assert_allclose(o, expected[0], rtol=0, atol=TOLERANCE[dtype], equal_nan=False)
    np.testing.assert_allclose(entropy, expected[1], rtol=0, atol=entropy_atol, equal_nan=False)


def test_the_kernel_itself_runs_here():
    """Everything below is void if the calls went to the oracle."""
    assert DEVICE == "cuda" or interpreted()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize(
    ("B", "H", "L", "S", "D"), [(1, 1, 1, 1, 64), (2, 1, 5, 17, 80), (1, 2, 17, 81, 64), (1, 1, 33, 131, 128)]
)
def test_odd_sizes_equal_the_dense_reference(B, H, L, S, D, dtype):
    q, k, v = made(B, H, L, S, D, dtype)
    found = entropy_attention(q, k, v, D**-0.5, backend="triton")
    assert found[0].dtype == dtype
    assert found[1].dtype == torch.float32
    agree(found, dense(q, k, v, D**-0.5), dtype)


@pytest.mark.parametrize("tile", VARIANTS, ids=str)
@pytest.mark.parametrize("masked", [False, True])
def test_every_variant_gives_the_same_numbers(tile, masked):
    q, k, v = made(2, 1, 20, 81, 64, torch.float16)
    mask = torch.rand(2, 81, generator=torch.Generator().manual_seed(1)).to(DEVICE) > 0.6 if masked else None
    found = triton_kernel.attend(q, k, v, 0.125, mask, tile=tile)
    agree(found, dense(q, k, v, 0.125, mask), torch.float16)


@pytest.mark.parametrize("tile", VARIANTS, ids=str)
def test_without_entropy_the_output_is_the_same(tile):
    q, k, v = made(1, 2, 20, 81, 64, torch.float16)
    o, entropy = triton_kernel.attend(q, k, v, 0.125, with_entropy=False, tile=tile)
    assert entropy is None
    assert torch.equal(o, triton_kernel.attend(q, k, v, 0.125, tile=tile)[0])


@pytest.mark.parametrize("splits", [1, 2, 7])
@pytest.mark.parametrize("masked", [False, True])
def test_ranges_of_keys_merge_exactly(splits, masked):
    q, k, v = made(2, 1, 3, 250, 80)
    mask = None
    if masked:
        mask = torch.ones(2, 250, dtype=torch.bool, device=DEVICE)
        mask[0, :100] = False  # whole ranges without a key
        mask[1, 31:] = False
    found = triton_kernel.attend(q, k, v, 0.1, mask, tile=Tile(**SMALL), splits=splits)
    agree(found, dense(q, k, v, 0.1, mask), torch.float32)


def test_tiles_fit_the_shape_and_the_gpu():
    chosen = triton_kernel.chosen_tile
    assert chosen(torch.bfloat16, 4096, 128) == Tile(128, 64, 4, 2)
    assert chosen(torch.bfloat16, 4096, 128, hopper=False).warps == 8
    assert chosen(torch.float16, 1, 80).block_m == 16
    assert chosen(torch.float16, 4096, 256).block_m == 64
    assert not chosen(torch.float32, 4096, 128).tma


def test_few_queries_and_many_keys_are_split():
    assert triton_kernel.chosen_splits(tiles=32, S=10521, block_n=64, processors=132) > 1
    assert triton_kernel.chosen_splits(tiles=1024, S=10521, block_n=64, processors=132) == 1
    assert triton_kernel.chosen_splits(tiles=1, S=17, block_n=64, processors=132) == 1


@pytest.mark.parametrize("tile", VARIANTS, ids=str)
def test_a_maximum_in_the_last_block_is_exact(tile):
    q, k, v = made(1, 1, 9, 131, 64)
    k = k * torch.linspace(0.05, 3.0, 131, device=DEVICE)[:, None]  # the maximum moves in almost every block
    k[..., -1, :] = 2 * q[..., 0, :]
    expected = dense(q, k, v, 0.125)
    agree(triton_kernel.attend(q, k, v, 0.125, tile=tile), expected, torch.float32)


def recurrence(scores, block, with_shift, base=math.e):
    """State (m, l, t) over blocks in float64; with_shift=False is the paper's printed update. Entropy [rows], nats."""
    log_base = math.log(base)
    m = np.full(len(scores), -np.inf)
    l, t = np.zeros(len(scores)), np.zeros(len(scores))
    for start in range(0, scores.shape[1], block):
        y = scores[:, start : start + block] / log_base
        m_new = np.maximum(m, y.max(1))
        d = np.where(np.isinf(m), 0.0, m - m_new)
        a = np.where(np.isinf(m), 0.0, base**d)
        x = y - m_new[:, None]
        p = base**x
        t = a * (t + d * l if with_shift else t) + (x * p).sum(1)
        l = a * l + p.sum(1)
        m = m_new
    return np.log(l) - log_base * t / l


def late_scores():
    rng = np.random.default_rng(3)
    return rng.standard_normal((64, 320)) * np.linspace(0.5, 3.0, 320)


def test_the_recurrence_is_exact_in_any_base_and_any_cut():
    scores = late_scores()
    p = np.exp(scores - scores.max(1, keepdims=True))
    p /= p.sum(1, keepdims=True)
    expected = -(p * np.log(p)).sum(1)
    for block in (1, 7, 64, 320):
        for base in (2.0, math.e):
            np.testing.assert_allclose(recurrence(scores, block, True, base), expected, rtol=0, atol=1e-12)


def test_the_update_as_printed_in_the_paper_is_wrong():
    """Algorithm 2 of ToProVAR leaves out d * l. The kernel must be right on scores where that shows."""
    scores = late_scores()
    exact, printed = recurrence(scores, 64, True), recurrence(scores, 64, False)
    assert np.abs(printed - exact).max() > 0.1
    # the same scores through the kernel: unit queries pick one column of k each
    q = torch.eye(64)[None, None].to(DEVICE)
    k = torch.from_numpy(scores.T.copy()).float()[None, None].to(DEVICE)
    _, entropy = entropy_attention(q, k, torch.zeros_like(k), 1.0, backend="triton")
    found = entropy[0, 0].double().cpu().numpy()
    np.testing.assert_allclose(found, exact, rtol=0, atol=TOLERANCE["entropy"])
    assert np.abs(found - printed).max() > 0.1


@pytest.mark.parametrize("backend", ["triton", "oracle"])
def test_a_row_without_keys_is_zero_and_the_others_are_not_touched(backend):
    q, k, v = made(3, 1, 4, 81, 64)
    mask = torch.ones(3, 81, dtype=torch.bool, device=DEVICE)
    mask[0] = False
    mask[1, :64] = False
    o, entropy = entropy_attention(q, k, v, 0.125, mask, backend=backend)
    agree((o, entropy), dense(q, k, v, 0.125, mask), torch.float32, 2e-5)
    assert entropy[0].abs().max() == 0
    assert o[0].abs().max() == 0
    assert (entropy[1:] > 0).all()


@pytest.mark.parametrize("backend", ["triton", "oracle"])
def test_equal_scores_give_the_log_of_the_number_of_keys_that_count(backend):
    q, k, v = torch.zeros(1, 1, 1, 64), torch.zeros(1, 1, 131, 64), torch.randn(1, 1, 131, 64)
    mask = torch.arange(131)[None] % 3 == 0
    arguments = [x.to(DEVICE) for x in (q, k, v)]
    _, entropy = entropy_attention(*arguments, 1.0, mask.to(DEVICE), backend=backend)
    assert entropy.item() == pytest.approx(math.log(44), abs=1e-5)


@pytest.mark.parametrize("backend", ["triton", "oracle"])
@pytest.mark.parametrize("scale", [0.0, -0.2, 0.2])
def test_any_finite_scale_and_grouped_heads(backend, scale):
    q, k, v = made(1, 4, 5, 40, 64, key_heads=2)
    found = entropy_attention(q, k, v, scale, backend=backend)
    agree(found, dense(q, k, v, scale), torch.float32, 2e-5)


@pytest.mark.parametrize("backend", ["triton", "oracle"])
def test_head_mean_is_the_mean_and_repeats_bit_by_bit(backend):
    q, k, v = made(2, 3, 20, 40, 64)
    _, per_head = entropy_attention(q, k, v, 0.125, backend=backend)
    _, mean = entropy_attention(q, k, v, 0.125, backend=backend, head_mean=True)
    torch.testing.assert_close(mean, per_head.mean(1), rtol=0, atol=1e-6)
    assert torch.equal(mean, entropy_attention(q, k, v, 0.125, backend=backend, head_mean=True)[1])


def test_time_major_views_are_read_in_place_and_sliced_ones_too():
    time_major = [torch.randn(n, 2, 3, 64, generator=torch.Generator().manual_seed(n)).to(DEVICE) for n in (18, 90, 91)]
    q, k, v = time_major[0][1:], time_major[1][:81], time_major[2][10:]
    q, k, v = (x.permute(1, 2, 0, 3) for x in (q, k, v))
    found = entropy_attention(q, k, v, 0.125, backend="triton")
    assert found[0].stride() == q.stride()
    agree(found, dense(q, k, v, 0.125), torch.float32)
    spread = torch.zeros(2, 3, 17, 128, device=DEVICE)
    spread[..., ::2] = q
    agree(entropy_attention(spread[..., ::2], k, v, 0.125, backend="triton"), dense(q, k, v, 0.125), torch.float32)


def inside_nan(x):
    """The same numbers as a slice of a larger buffer that holds NaN everywhere else; still good for descriptors."""
    B, H, n, D = x.shape
    around = torch.full((B + 1, H + 1, n + 70, D + 16), float("nan"), dtype=x.dtype, device=x.device)
    around[1:, 1:, 35 : 35 + n, 8 : 8 + D] = x
    return around[1:, 1:, 35 : 35 + n, 8 : 8 + D]


SHAPES_WITH_TAILS = [(17, 81, 80, 1), (16, 64, 64, 1), (1, 131, 72, 3), (33, 97, 128, 2)]


@pytest.mark.parametrize(("L", "S", "D", "splits"), SHAPES_WITH_TAILS)
@pytest.mark.parametrize("tile", VARIANTS[:2], ids=str)
def test_what_surrounds_a_slice_is_never_used(L, S, D, splits, tile):
    dtype = torch.bfloat16 if tile.tma else torch.float32
    q, k, v = made(1, 2, L, S, D, dtype)
    found = triton_kernel.attend(*map(inside_nan, (q, k, v)), 0.125, tile=tile, splits=splits)
    agree(found, dense(q, k, v, 0.125), dtype)


@pytest.mark.skipif(DEVICE != "cpu", reason="watches addresses in Triton's interpreter, which GPUs don't use")
@pytest.mark.parametrize(("L", "S", "D", "splits"), SHAPES_WITH_TAILS)
@pytest.mark.parametrize("tile", VARIANTS[:2], ids=str)
def test_every_address_is_an_element_of_a_tensor(L, S, D, splits, tile):
    q, k, v = map(inside_nan, made(1, 2, L, S, D, torch.bfloat16 if tile.tma else torch.float32))
    mask = torch.ones(1, S + 9, dtype=torch.bool)[:, 4 : 4 + S] if L > 16 else None
    with touching_only(q, k, v, *([] if mask is None else [mask])) as counts:
        _, entropy = triton_kernel.attend(q, k, v, 0.125, mask, tile=tile, splits=splits)
        mean = triton_kernel.head_mean(entropy)
    assert torch.isfinite(mean).all()
    assert counts["load"] >= q.numel() + k.numel() + v.numel()
    assert counts["store"] >= q.numel() + entropy.numel() + mean.numel()


@pytest.mark.skipif(DEVICE != "cpu", reason="watches addresses in Triton's interpreter, which GPUs don't use")
def test_the_watch_on_addresses_sees_a_read_past_the_end():
    q, k, v = map(inside_nan, made(1, 1, 4, 40, 64))
    with pytest.raises(Exception, match="outside the tensors"), touching_only(q, k[:, :, :-1], v):
        triton_kernel.attend(q, k, v, 0.125, tile=Tile(**SMALL, tma=False))


def test_one_dominant_key_gives_no_entropy_and_nothing_overflows():
    q = torch.full((1, 1, 1, 64), 1.0, device=DEVICE)
    k = torch.zeros(1, 1, 70, 64, device=DEVICE)
    k[..., 66, :] = 1000.0
    o, entropy = entropy_attention(q, k, torch.ones_like(k), 1.0, backend="triton")
    assert entropy.item() == pytest.approx(0, abs=1e-6)
    assert torch.isfinite(o).all()


def test_nan_in_a_query_shows_in_its_row_alone():
    q, k, v = made(1, 1, 4, 40, 64)
    q[0, 0, 2, 5] = float("nan")
    _, entropy = entropy_attention(q, k, v, 0.125, backend="triton")
    assert torch.isnan(entropy[0, 0]).tolist() == [False, False, True, False]


@pytest.mark.parametrize("backend", ["triton", "oracle"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(("B", "L"), [(1, 0), (0, 3), (0, 0)])
def test_no_queries_give_empty_results(backend, dtype, B, L):
    q, k, v = (x.to(dtype) for x in made(B, 2, L, 40, 64))
    o, entropy = entropy_attention(q, k, v, 0.125, backend=backend)
    assert o.shape == (B, 2, L, 64)
    assert entropy.shape == (B, 2, L)
    assert entropy.dtype == torch.float32
    assert entropy_attention(q, k, v, 0.125, head_mean=True, backend=backend)[1].shape == (B, L)


LAYOUTS = {
    "last dimension strided": lambda x: x.transpose(2, 3).contiguous().transpose(2, 3),
    "every second element": lambda x: torch.stack([x, torch.full_like(x, math.nan)], -1)[..., 0],
    "one value repeated": lambda x: x[..., :1].expand(x.shape),
    "one token repeated": lambda x: x[:, :, :1].expand(x.shape),
    "time-major": lambda x: x.permute(2, 0, 1, 3).contiguous().permute(1, 2, 0, 3),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("which", [0, 1, 2])
def test_the_oracle_reads_any_strides(layout, dtype, which):
    inputs = [x.to(dtype) for x in made(2, 4, 17, 33, 20)]
    inputs[which] = LAYOUTS[layout](inputs[which])
    packed = [x.clone(memory_format=torch.contiguous_format) for x in inputs]
    found, expected = (entropy_attention(*x, 0.3, backend="oracle") for x in (inputs, packed))
    for a, b in zip(found, expected, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("backend", ["triton", "oracle"])
def test_no_gradient_is_given_by_any_backend(backend):
    q, k, v = (x.requires_grad_() for x in made(1, 2, 3, 40, 64))
    o, entropy = entropy_attention(q, k, v, 0.125, backend=backend)
    assert not o.requires_grad
    assert not entropy.requires_grad


WRONG = {
    "expected q": lambda q, k, v: entropy_attention(q[0], k, v, 1.0),
    "k and v": lambda q, k, v: entropy_attention(q, k, v[:, :, :-1], 1.0),
    "multiple": lambda q, k, v: entropy_attention(q, k[:, :1].repeat(1, 2, 1, 1), v.repeat(1, 2, 1, 1)[:, :2], 1.0),
    "S >= 1": lambda q, k, v: entropy_attention(q, k[:, :, :0], v[:, :, :0], 1.0),
    "the same": lambda q, k, v: entropy_attention(q, k.half(), v, 1.0),
    "one device": lambda q, k, v: entropy_attention(q, k.to("meta"), v, 1.0),
    "finite": lambda q, k, v: entropy_attention(q, k, v, math.nan),
    "scale is None; expected a finite": lambda q, k, v: entropy_attention(q, k, v, None),
    "scale is '1'; expected a finite": lambda q, k, v: entropy_attention(q, k, v, "1"),
    "number of float32": lambda q, k, v: entropy_attention(q, k, v, 1e300),
    "scale is 1000": lambda q, k, v: entropy_attention(q, k, v, 10**400),
    "scale is tensor": lambda q, k, v: entropy_attention(q, k, v, torch.ones(2)),
    "q is ndarray; expected": lambda q, k, v: entropy_attention(q.cpu().numpy(), k, v, 1.0),
    "k is NoneType; expected": lambda q, k, v: entropy_attention(q, None, v, 1.0),
    "v is a tensor of layout torch.sparse": lambda q, k, v: entropy_attention(q, k, v.to_sparse(), 1.0),
    "key_mask is list; expected": lambda q, k, v: entropy_attention(q, k, v, 1.0, [[True] * 9]),
    "0 query heads over 1 key heads": lambda q, k, v: entropy_attention(q[:, :0], k, v, 1.0, head_mean=True),
    "torch.bool": lambda q, k, v: entropy_attention(q, k, v, 1.0, torch.ones(1, 9)),
    "backend is 'cuda'": lambda q, k, v: entropy_attention(q, k, v, 1.0, backend="cuda"),
    "cut the batch": lambda q, k, v: entropy_attention(*(x.expand(1, 70000, 1, 64) for x in 3 * (q[:, :1, :1],)), 1.0),
    "head width": lambda q, k, v: entropy_attention(*(x.repeat(1, 1, 1, 5) for x in (q, k, v)), 1.0),
}


@pytest.mark.parametrize("message", WRONG)
def test_bad_arguments_say_what_was_found_and_expected(message):
    q, k, v = made(1, 3, 2, 9, 64)
    with pytest.raises(ValueError, match=message):
        WRONG[message](q, k[:, :1], v[:, :1])


# -- what needs a process of its own -----------------------------------------------------------------------------------


def python(code):
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)


def test_importing_the_package_loads_neither_torch_nor_triton():
    done = python("import sys, toprovar.plugins as p; assert not {'torch', 'triton'} & set(sys.modules); dir(p)")
    assert done.returncode == 0, done.stderr


def test_without_triton_the_oracle_answers_and_the_kernel_says_what_is_missing():
    done = python(
        "import sys; sys.modules['triton'] = None\n"
        "import torch\nfrom toprovar.plugins import entropy_attention\n"
        "x = torch.ones(1, 1, 3, 64)\n"
        "print(entropy_attention(x, x, x, 1.0)[1].mean().item())\n"
        "entropy_attention(x, x, x, 1.0, backend='triton')"
    )
    assert float(done.stdout) == pytest.approx(math.log(3), abs=1e-5)
    assert "Triton is not installed" in done.stderr


def test_the_package_has_one_public_name():
    package = importlib.import_module("toprovar.plugins")
    assert package.__all__ == ["entropy_attention"]
    with pytest.raises(AttributeError, match="nothing_here"):
        _ = package.nothing_here


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
def test_the_bench_finds_every_case_within_tolerance():
    from toprovar.tools.kernel_bench import check, check_cases

    cases = [check(case) for case in check_cases()]
    assert len(cases) > 40
    assert [case for case in cases if not case["ok"]] == []


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
def test_every_candidate_tile_is_right():
    from toprovar.tools.kernel_bench import candidate_check, candidates, check

    assert [str(tile) for case, tile in candidates() if not check(candidate_check(case), tile)["ok"]] == []


# -- the bench without a GPU -------------------------------------------------------------------------------------------


def fails(what):
    raise RuntimeError(f"CUDA error: {what}")


def test_a_failing_job_leaves_the_next_one_a_fresh_process():
    from toprovar.tools.kernel_bench import Isolated

    alone = Isolated()
    try:
        first, failure = alone(os.getpid)
        assert failure == ""
        assert alone(os.getpid) == (first, "")
        assert alone(fails, "an illegal memory access") == (None, "RuntimeError: CUDA error: an illegal memory access")
        second, failure = alone(os.getpid)
        assert failure == ""
        assert second not in (first, os.getpid())
    finally:
        alone.close()


def test_a_check_that_fails_among_others_is_tried_again_alone(monkeypatch):
    from toprovar.tools import kernel_bench

    cases = [{"name": "first"}, {"name": "second"}]
    monkeypatch.setattr(kernel_bench, "check_cases", lambda: cases)
    monkeypatch.setattr(kernel_bench, "shapes", lambda: [])
    monkeypatch.setattr(kernel_bench, "check", fails)
    asked = []

    def alone(*job):
        asked.append(job)
        return (None, "again") if job[1] is cases[0] else ({"ok": True}, "")

    refused, checks = kernel_bench.compiled_and_checked(False, 1, alone)
    assert refused == []
    assert asked == [(fails, case) for case in cases]
    assert checks == [{"name": "first", "ok": False, "failure": "again"}, {"ok": True}]


def test_a_process_that_dies_is_named(monkeypatch):
    from toprovar.tools import kernel_bench

    monkeypatch.setattr(kernel_bench, "JOB_TIMEOUT_S", 2)
    alone = kernel_bench.Isolated()
    try:
        result, failure = alone(os._exit, 9)
    finally:
        alone.close()
    assert result is None
    assert "hangs or died" in failure


def test_compiling_ahead_launches_nothing_and_puts_the_kernels_back(monkeypatch):
    from toprovar.tools import kernel_bench

    seen = []

    class Kernel:
        def warmup(self, *arguments, grid, **options):
            seen.append((grid, options))

    ours = (Kernel(), Kernel())
    monkeypatch.setattr(triton_kernel, "_attend", ours[0])
    monkeypatch.setattr(triton_kernel, "_merge", ours[1])
    monkeypatch.setattr(kernel_bench, "randoms", lambda case: made(1, 2, 3, 300, 64, torch.bfloat16))
    case = {"dtype": "bfloat16", "L": 3, "S": 300, "D": 64}
    kernel_bench.compile_case(case, Tile(**SMALL))
    assert [options["ENTROPY"] for _, options in seen] == [True, False, True]
    assert all(grid == (1, 2, 1) and options["BN"] == 32 for grid, options in seen)
    assert (triton_kernel._attend, triton_kernel._merge) == ours


def test_the_bench_times_every_candidate_against_a_default_at_the_same_shape():
    from toprovar.tools.kernel_bench import candidates, shapes

    for case, tile in candidates():
        assert case in shapes() or case["dtype"] == "float32"
        assert tile != triton_kernel.chosen_tile(getattr(torch, case["dtype"]), case["L"], case["D"]) or (
            case["dtype"] == "float32"
        )


def test_one_fault_in_the_bench_is_named_and_loses_no_other_row(monkeypatch, tmp_path, capsys):
    from toprovar.tools import kernel_bench

    class InProcess:
        def __call__(self, *job):
            return kernel_bench.answer(job)

        def close(self):
            pass

    def timed(calls, seconds):
        if seconds == 0.25:
            raise RuntimeError("CUDA error: an illegal memory access was encountered\nmore lines")
        return {name: [2.0, 1.0, 4.0] for name in calls}

    checked = {"ok": True, "entropy_error_nats": 1e-6, "output_error": 1e-3}
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    properties = type("Properties", (), {"multi_processor_count": 132})()
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    monkeypatch.setattr(kernel_bench, "conditions", lambda arguments: {"command": arguments})
    monkeypatch.setattr(kernel_bench, "Isolated", InProcess)
    monkeypatch.setattr(kernel_bench, "compiled_and_checked", lambda *_: ([], [checked]))
    monkeypatch.setattr(kernel_bench, "check", lambda case, tile: checked)
    monkeypatch.setattr(kernel_bench, "rivals", lambda q, k, v: {"cudnn": None})
    monkeypatch.setattr(kernel_bench, "time_matmul", lambda seconds: kernel_bench.summary([1.0], 1e12))
    monkeypatch.setattr(kernel_bench, "randoms", lambda case: made(1, 1, 1, 1, 16, torch.bfloat16))
    monkeypatch.setattr(kernel_bench, "timed", timed)
    path = tmp_path / "kernel.json"
    assert kernel_bench.main(["--json", str(path), "--seconds", "0.5"]) == 0
    report = json.loads(path.read_text())
    assert [row["results"]["cudnn"]["median_ms"] for row in report["shapes"]] == [2.0] * len(kernel_bench.SHAPES)
    assert report["shapes"][0]["results"]["entropy"]["samples_ms"] == [2.0, 1.0, 4.0]
    assert len(report["candidates"]) == len(kernel_bench.candidates())
    printed = capsys.readouterr().out
    for row, (_, tile) in zip(report["candidates"], kernel_bench.candidates(), strict=True):
        assert row["failure"] == "RuntimeError: CUDA error: an illegal memory access was encountered"
        assert f"tile {tile}: FAILED" in printed
    assert kernel_bench.main(["--no-sweep", "--seconds", "0.25"]) == 1


def test_the_docs_quote_the_committed_measurement():
    from toprovar.tools.kernel_bench import table_from_report

    docs = Path(__file__).parents[2] / "docs"
    report = json.loads((docs / "data" / "entropy_attention_h200.json").read_text())
    text = (docs / "entropy_attention.md").read_text()
    assert table_from_report(report) in text
    assert f"{len(report['checks'])} awkward cases" in text
