"""Everything a plan can say runs in PyTorch and in exported graphs and draws the same bits."""

import numpy as np
import pytest
import torch
from conftest import GUIDANCE, SCHEDULE
from helpers import differing_bits, generate_in_torch, open_pipeline
from plans import EVERY, RUNGS, plan_of

from toprovar.exporter.bundle_writer import export_bundle
from toprovar.exporter.infinity.generate import draw_bits
from toprovar.exporter.planned.step import StepOptions
from toprovar.runtime.guidance import Guidance
from toprovar.runtime.noise import uniform_noise
from toprovar.runtime.plan import CfgStop, Restore, Score

OPTIONS = StepOptions(text_tokens=12)


def both(tiny, plan, folder, prompt="red apple", seed=1):
    export_bundle(tiny, folder, GUIDANCE, OPTIONS, plan)
    result = open_pipeline(folder).generate(prompt, seed, "planned")
    run = generate_in_torch(tiny, SCHEDULE, GUIDANCE, prompt, seed, plan=plan, tokenizer=tiny.tokenizer)
    return run, result


@pytest.mark.parametrize("name", list(EVERY))
def test_pytorch_and_onnx_runtime_draw_the_same_bits(tiny, tmp_path, name):
    plan = plan_of(tiny, **EVERY[name])
    run, result = both(tiny, plan, tmp_path / "b")
    assert sum(differing_bits(run, result.bits)) == 0
    np.testing.assert_allclose(run.codes[0].numpy(), result.codes, atol=1e-5)
    assert run.counts[0] == [step.counts for step in result.steps]
    assert [decision[1:] for decision in run.decisions] == result.decisions
    for step in result.steps:
        for layer, kept in step.kept.items():
            mine = run.kept[step.scale, layer].numpy()
            assert np.array_equal(mine, kept), (step.scale, layer)
            assert len(kept) == step.counts[layer]
            assert (np.diff(kept) > 0).all()


KEEPING = [
    (kind, granularity, restore)
    for kind, granularity, restores in (
        ("entropy", "block", ("identity", "cached_residual", "prev_residual")),
        ("variance", "block", ("identity", "cached_residual", "prev_residual")),
        ("variance", "sublayer", ("identity", "cached_residual", "prev_residual")),
        ("variance", "scale", ("identity", "nn_kept", "prev_code", "zero_code")),
        ("structure", "scale", ("identity", "nn_kept", "prev_code", "zero_code")),
        ("change", "block", ("identity", "cached_residual", "prev_residual")),
        ("change", "scale", ("nn_kept", "prev_code")),
        ("code_energy", "block", ("identity", "prev_residual")),
        ("code_energy", "scale", ("identity", "nn_kept", "prev_code", "zero_code")),
    )
    for restore in restores
]


def all_keep(tiny, kind, granularity, restore):
    """A plan that sends every token of scales 4 and 5 through its own gates."""
    return plan_of(
        tiny,
        score=Score(
            kind=kind,
            granularity=granularity,
            source_layer={k: {1: 0, 2: 0, 3: 0} for k in (4, 5)} if kind == "entropy" else {},
        ),
        keep={4: (256,) * 4, 5: (400,) * 4},
        restore=Restore(kind=restore, ref_scale=3 if restore == "cached_residual" else None),
    )


@pytest.mark.parametrize(("kind", "granularity", "restore"), KEEPING)
def test_a_plan_that_keeps_all_is_the_dense_model_bit_for_bit(tiny, tmp_path, kind, granularity, restore):
    plan = all_keep(tiny, kind, granularity, restore)
    dense = generate_in_torch(tiny, SCHEDULE, GUIDANCE, "red apple", 11)
    kept = generate_in_torch(tiny, SCHEDULE, GUIDANCE, "red apple", 11, plan=plan, gate_whole_layers=True)
    assert sum(int((a != b).sum()) for a, b in zip(dense.bits, kept.bits, strict=True)) == 0
    assert torch.equal(dense.codes, kept.codes)
    assert {scale for scale, _ in kept.kept} == {4, 5}
    export_bundle(tiny, tmp_path / "b", GUIDANCE, StepOptions(text_tokens=12, gate_whole_layers=True), plan)
    pipeline = open_pipeline(tmp_path / "b")
    result = pipeline.generate("red apple", 11, "planned")
    assert len(result.steps[5].kept) >= 3
    np.testing.assert_array_equal(result.codes, pipeline.generate("red apple", 11, "dense").codes)
    assert sum(differing_bits(dense, result.bits)) == 0


@pytest.mark.parametrize("stop", [1, 3, 5])
def test_without_unconditional_rows_the_run_is_that_of_one_row(tiny, tmp_path, stop):
    """From the stop on, bits are those of an unguided model that saw the same codes, hence the same keys and values."""
    plan = plan_of(tiny, cfg_stop=CfgStop(mode="static", scale=stop))
    run, result = both(tiny, plan, tmp_path / "b", seed=3)
    off = Guidance(cfg=(1.0,) * len(SCHEDULE), tau=GUIDANCE.tau)
    seen = {}
    alone = generate_in_torch(
        tiny, SCHEDULE, off, "red apple", 3, forced_bits=run.bits,
        observe=lambda name, scale, tensor: seen.update({(name, scale): tensor}),
    )  # fmt: skip
    assert torch.equal(alone.codes, run.codes)
    for scale in range(stop, len(SCHEDULE)):
        height, width = SCHEDULE[scale]
        noise = torch.from_numpy(uniform_noise(3, scale, height * width, 8))[None]
        drawn = draw_bits(seen["logits", scale], noise, off.bit_limit)
        assert torch.equal(drawn, run.bits[scale])
        assert np.array_equal(drawn[0].numpy(), result.bits[scale])
        assert not result.steps[scale].guided
    assert all(step.guided for step in result.steps[:stop])
    assert sum(differing_bits(run, result.bits)) == 0
    guided = generate_in_torch(tiny, SCHEDULE, GUIDANCE, "red apple", 3)
    assert [int((a != b).sum()) for a, b in zip(guided.bits, run.bits, strict=True)][:stop] == [0] * stop
    assert any((a != b).any() for a, b in zip(guided.bits[stop:], run.bits[stop:], strict=True))


def test_decisions_of_the_table_are_taken(tiny, tmp_path):
    """The plans of `DECIDED` reach what their names say, so that the comparison above compares it."""
    run, _ = both(tiny, plan_of(tiny, **EVERY["rho crosses early"]), tmp_path / "1")
    assert run.decisions == [(0, 3, "path", "D3")]
    run, _ = both(tiny, plan_of(tiny, **EVERY["rho crosses never"]), tmp_path / "2")
    assert [decision[3] for decision in run.decisions] == ["main", "main"]
    run, _ = both(tiny, plan_of(tiny, **EVERY["skipvar 2, 0"]), tmp_path / "3")
    assert (len(run.bits), run.decisions) == (4, [(0, 3, "path", "exit after 3")])
    run, result = both(tiny, plan_of(tiny, **EVERY["skipvar 0, 1"]), tmp_path / "4")
    assert [step.guided for step in result.steps] == [True] * 5 + [False]
    run, result = both(tiny, plan_of(tiny, **EVERY["energy mass .6, guidance ends at once"]), tmp_path / "5")
    assert [step.guided for step in result.steps] == [True] * 4 + [False] * 2
    tokens = {scale: value for _, scale, what, value in run.decisions if what == "tokens"}
    assert tokens.keys() == {4, 5}
    assert all(tokens[k] in RUNGS[k] and tokens[k] < RUNGS[k][-1] for k in tokens)


def test_cache_lengths_that_decisions_leave_open_are_open_in_few_graphs(tiny, tmp_path):
    """Four rungs at two scales, two kinds of rows: 8 graphs at scale 5, not 32; all else is static."""
    export_bundle(
        tiny, tmp_path / "b", GUIDANCE, OPTIONS, plan_of(tiny, **EVERY["energy mass .9, guidance decided, l2"])
    )
    steps = open_pipeline(tmp_path / "b").steps("planned")
    at = {scale: [step for step in steps if step.scale == scale] for scale in range(6)}
    assert [len(at[scale]) for scale in range(6)] == [1, 1, 1, 1, 8, 8]
    for step in steps:
        is_open = {facts.is_open for name, facts in step.graph.inputs.items() if name.startswith("k_past_")}
        assert is_open == {step.scale == 5}
