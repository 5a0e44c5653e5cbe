from __future__ import annotations

from typing import Any

import infinity_reference as reference
import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="needs PyTorch: pip install 'toprovar[torch]'")

from toprovar.exporter.infinity.config import PUBLISHED, InfinityConfig, config_from_shapes  # noqa: E402
from toprovar.exporter.infinity.generate import generate  # noqa: E402
from toprovar.exporter.infinity.load import load_infinity  # noqa: E402
from toprovar.exporter.infinity.transformer import Infinity  # noqa: E402
from toprovar.runtime.errors import ToprovarError  # noqa: E402
from toprovar.runtime.guidance import Guidance, per_scale  # noqa: E402

# fp32 against float64, times the largest value of the array; measured 2.5e-6
TOLERANCE = 1e-5


def assert_close(found: Any, expected: np.ndarray, what: str) -> None:
    found = np.asarray(found)
    assert found.shape == expected.shape, what
    assert found.size
    assert np.isfinite(found).all(), what
    assert np.abs(found - expected).max() <= TOLERANCE * np.abs(expected).max(), what


def model_and_prompt(run: Any) -> tuple[Infinity, Any]:
    """The run's model and prompt; rows padded with nonsense, which the mask must hide."""
    case = run.case
    weights = {name: torch.from_numpy(array) for name, array in run.weights.items()}
    model = load_infinity(weights, case.__class__.__name__, patchify=case.patchify)
    rows = reference.split_rows(run.text, case.lens)
    if any(value != 1 for value in case.cfg):
        if run.negative is not None:
            rows += reference.split_rows(run.negative, case.negative_lens)
        else:
            rows += [model.cfg_uncond.numpy()[:n] for n in case.lens]
    length = max(len(row) for row in rows) + 2
    padded = torch.full((len(rows), length, case.text_width), 3.0)
    valid = torch.zeros(len(rows), length, dtype=torch.bool)
    for r, row in enumerate(rows):
        padded[r, : len(row)] = torch.from_numpy(row)
        valid[r, : len(row)] = True
    return model, model.prompt(padded, valid)


@pytest.mark.parametrize("name", list(reference.CASES))
def test_loop_equals_the_plain_reference(name: str) -> None:
    case = reference.CASES[name]
    run = reference.run_case(case)
    model, prompt = model_and_prompt(run)
    guidance = Guidance(
        cfg=per_scale(case.cfg, len(case.schedule), "cfg"),
        tau=per_scale(case.tau, len(case.schedule), "tau"),
        top_p=case.top_p,
        insertion=case.insertion,
    )
    bits = [torch.from_numpy(run.arrays[f"bits/{s}"]) for s in range(case.scales)]
    seen: dict[str, np.ndarray] = {}
    done = generate(
        model,
        prompt,
        case.schedule,
        guidance,
        forced_bits=bits,
        observe=lambda what, scale, tensor: seen.__setitem__(f"{what}/{scale}", tensor.numpy()),
    )
    B = len(case.lens)
    for s in range(case.scales):
        for layer in range(case.depth):
            assert_close(seen[f"block{layer}/{s}"], run.arrays[f"block{layer}/{s}"], f"block{layer}/{s}")
        raw = run.arrays[f"raw/{s}"]
        assert_close(seen[f"raw/{s}"][: len(raw)], raw, f"raw/{s}")
        assert_close(seen[f"logits/{s}"], run.arrays[f"logits/{s}"], f"logits/{s}")
        if s:
            assert_close(seen[f"next/{s}"], run.arrays[f"next/{s}"], f"next/{s}")
            assert_close(seen[f"codes_in/{s}"], run.arrays[f"codes_in/{s}"], f"codes_in/{s}")
            level = model.lvl_embed.weight.numpy()[s]
            assert_close(seen[f"in/{s}"][:B] - level, run.arrays[f"in/{s}"], f"in/{s}")
    assert_close(done.codes, run.arrays["summed_codes"], "summed_codes")
    assert_close(prompt.pooled, run.arrays["cond_BD"], "cond_BD")
    assert_close(prompt.modulation, run.arrays["gss"], "gss")


def test_drawn_bits_obey_the_closed_form() -> None:
    case = reference.CASES["chunks"]
    run = reference.run_case(case)
    model, prompt = model_and_prompt(run)
    guidance = Guidance(cfg=(3.0,) * 4, tau=(0.5,) * 4)
    logits: dict[int, Any] = {}
    done = generate(
        model,
        prompt,
        case.schedule,
        guidance,
        noise=lambda scale, L: torch.full((1, L, case.bits), 0.5),
        observe=lambda what, scale, tensor: logits.__setitem__(scale, tensor) if what == "logits" else None,
    )
    for s, bits in enumerate(done.bits):  # noise 1/2 draws the likelier bit
        zero, one = logits[s].unflatten(-1, (-1, 2)).unbind(-1)
        assert torch.equal(bits == 1, one > zero)


@pytest.mark.parametrize("name", ["unguided", "patchify-tall"])
def test_one_teacher_forced_pass_equals_the_cached_loop(name: str) -> None:
    case = reference.CASES[name]
    run = reference.run_case(case)
    model, prompt = model_and_prompt(run)
    B, T = len(case.lens), max(case.lens)
    text = torch.zeros(B, T, case.text_width)
    valid = torch.zeros(B, T, dtype=torch.bool)
    for b, row in enumerate(reference.split_rows(run.text, case.lens)):
        text[b, : len(row)] = torch.from_numpy(row)
        valid[b, : len(row)] = True
    prompt = model.prompt(text, valid)
    ones = (1.0,) * len(case.schedule)
    bits = [torch.from_numpy(run.arrays[f"bits/{s}"]) for s in range(case.scales)]
    seen: dict[str, Any] = {}
    generate(
        model,
        prompt,
        case.schedule,
        Guidance(cfg=ones, tau=ones),
        forced_bits=bits,
        observe=lambda what, scale, tensor: seen.__setitem__(f"{what}/{scale}", tensor.clone()),
    )
    inputs = [seen[f"codes_in/{s}"] for s in range(1, case.scales)]
    whole = model.teacher_forced_logits(text, valid, inputs, case.schedule)
    cached = torch.cat([seen[f"logits/{s}"] for s in range(case.scales)], dim=1)
    assert_close(whole.numpy(), cached.numpy(), "teacher-forced logits")


@pytest.mark.parametrize("name", list(reference.CASES))
def test_configuration_is_read_off_the_shapes(name: str) -> None:
    case = reference.CASES[name]
    shapes = {n: a.shape for n, a in reference.random_weights(case).items()}
    config = config_from_shapes(shapes, case.patchify)
    assert config == InfinityConfig(
        depth=case.depth,
        width=case.width,
        heads=case.heads,
        ffn_width=3 * case.width,
        text_width=case.text_width,
        bits=case.bits,
        patchify=case.patchify,
        pool_heads=case.pool_heads,
        chunks=case.chunks,
        text_length=12,
    )
    assert config.code_channels == case.code_channels


@pytest.mark.parametrize(
    ("name", "shape", "message"),
    [
        ("word_embed.weight", (192,), r"word_embed.weight has shape \[192\]; expected 2 axes"),
        ("blocks.0.sa.scale_mul_1H11", (0,), r"scale_mul_1H11 has shape \[0\]; expected 4 axes"),
        ("blocks.0.sa.scale_mul_1H11", (1, 5, 1, 1), "width 32 over 5 heads"),
        ("head.weight", (10, 32), "head.weight has 10 rows; expected 12"),
        ("cfg_uncond", None, "tensor cfg_uncond is missing"),
    ],
)
def test_shapes_that_contradict_each_other_are_refused(name: str, shape: tuple[int, ...] | None, message: str) -> None:
    shapes = {n: tuple(a.shape) for n, a in reference.random_weights(reference.CASES["unguided"]).items()}
    if shape is None:
        del shapes[name]
    else:
        shapes[name] = shape
    with pytest.raises(ToprovarError, match=message):
        config_from_shapes(shapes)


@pytest.mark.parametrize(
    ("name", "keys", "parameters"), [("infinity-2b", 694, 2_204_564_032), ("infinity-8b", 862, 8_375_791_824)]
)
def test_published_models_have_the_published_size(name: str, keys: int, parameters: int) -> None:
    with torch.device("meta"):
        model = Infinity(PUBLISHED[name])
    assert len(model.state_dict()) == keys
    assert sum(parameter.numel() for parameter in model.parameters()) == parameters
