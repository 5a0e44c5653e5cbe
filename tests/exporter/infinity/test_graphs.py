"""Exported step graphs draw the bits that PyTorch draws, dense and planned, and an all-keep plan is the dense model."""

import numpy as np
import pytest
from conftest import GUIDANCE, SCHEDULE, pruning_plan
from helpers import differing_bits, generate_in_torch, open_pipeline

from toprovar.exporter.bundle_writer import export_bundle
from toprovar.exporter.planned.step import StepOptions
from toprovar.runtime.plan import Restore, Score

PROMPTS = ["red apple", "green dog on white", "", "unknown words only"]


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("prompt", PROMPTS)
def test_dense_codes_equal_pytorch(tiny, tiny_bundle, prompt, seed):
    run = generate_in_torch(tiny, SCHEDULE, GUIDANCE, prompt, seed)
    result = open_pipeline(tiny_bundle).generate(prompt, seed, "dense")
    assert sum(differing_bits(run, result.bits)) == 0
    assert 0.02 < np.mean(np.concatenate([bits.ravel() for bits in result.bits])) < 0.98
    np.testing.assert_allclose(run.codes[0].numpy(), result.codes, atol=1e-5)


@pytest.mark.parametrize("seed", range(3))
def test_planned_codes_equal_pytorch(tiny, tiny_bundle, seed):
    plan = pruning_plan(tiny)
    run = generate_in_torch(tiny, SCHEDULE, GUIDANCE, "red apple", seed, plan=plan)
    result = open_pipeline(tiny_bundle).generate("red apple", seed, "planned")
    assert sum(differing_bits(run, result.bits)) == 0
    for layer in (2, 3):
        assert np.array_equal(run.kept[5, layer].numpy(), result.steps[5].kept[layer])
        assert len(result.steps[5].kept[layer]) == plan.counts(5)[layer]


def test_pruning_changes_the_last_scale_only(tiny, tiny_bundle):
    pipeline = open_pipeline(tiny_bundle)
    dense, planned = (pipeline.generate("red apple", 3, variant) for variant in ("dense", "planned"))
    changed = [int((a != b).sum()) for a, b in zip(dense.bits, planned.bits, strict=True)]
    assert changed[:-1] == [0] * (len(SCHEDULE) - 1)
    assert changed[-1] > 0


@pytest.mark.parametrize("restore", [Restore(), Restore(kind="cached_residual", ref_scale=3)])
def test_all_keep_plan_equals_dense(tiny, tmp_path, restore):
    """Every layer behind the source goes through gate, gather and scatter with all tokens kept."""
    source = {k: {1: 0, 2: 0, 3: 0} for k in (4, 5)}
    plan = pruning_plan(
        tiny,
        score=Score(kind="entropy", source_layer=source),
        keep={4: (256,) * 4, 5: (400,) * 4},
        restore=restore,
    )
    dense = generate_in_torch(tiny, SCHEDULE, GUIDANCE, "red apple", 11)
    kept = generate_in_torch(tiny, SCHEDULE, GUIDANCE, "red apple", 11, plan=plan, gate_whole_layers=True)
    assert [int((a != b).sum()) for a, b in zip(dense.bits, kept.bits, strict=True)] == [0] * len(SCHEDULE)
    assert len(kept.kept) == 6
    export_bundle(tiny, tmp_path / "b", GUIDANCE, StepOptions(text_tokens=12, gate_whole_layers=True), plan)
    pipeline = open_pipeline(tmp_path / "b")
    result = pipeline.generate("red apple", 11, "planned")
    assert len(result.steps[5].kept) == 3
    assert sum(differing_bits(dense, result.bits)) == 0


@pytest.mark.parametrize("restore", [Restore(), Restore(kind="cached_residual", ref_scale=4, resample="area")])
def test_layers_can_be_skipped_whole(tiny, tmp_path, restore):
    plan = pruning_plan(
        tiny, keep={5: (400, 0, 192, 0)}, score=Score(kind="entropy", source_layer={5: {2: 0}}), restore=restore
    )
    export_bundle(tiny, tmp_path / "b", GUIDANCE, StepOptions(text_tokens=12), plan)
    run = generate_in_torch(tiny, SCHEDULE, GUIDANCE, "green dog", 5, plan=plan)
    result = open_pipeline(tmp_path / "b").generate("green dog", 5, "planned")
    assert sum(differing_bits(run, result.bits)) == 0


def test_skipped_scales_leave_the_codes_of_the_last_one_that_ran(tiny, tmp_path):
    plan = pruning_plan(tiny, keep={}, score=Score(), restore=Restore(), skip_scales=(4, 5))
    export_bundle(tiny, tmp_path / "b", GUIDANCE, StepOptions(text_tokens=12), plan)
    pipeline = open_pipeline(tmp_path / "b")
    result = pipeline.generate("red apple", 2, "planned")
    run = generate_in_torch(tiny, SCHEDULE, GUIDANCE, "red apple", 2, plan=plan)
    assert len(result.steps) == 4
    assert sum(differing_bits(run, result.bits)) == 0
    snapshots = []
    pipeline.generate("red apple", 2, "dense", on_scale=lambda scale, codes: snapshots.append(codes.copy()))
    np.testing.assert_array_equal(snapshots[3], result.codes)


def test_one_row_runs_without_guidance(tiny, tmp_path):
    guidance = GUIDANCE.model_copy(update={"cfg": (1.0,) * len(SCHEDULE)})
    export_bundle(tiny, tmp_path / "b", guidance, StepOptions(rows=1, text_tokens=12), schedule=SCHEDULE)
    run = generate_in_torch(tiny, SCHEDULE, guidance, "red apple", 4)
    assert sum(differing_bits(run, open_pipeline(tmp_path / "b").generate("red apple", 4, "dense").bits)) == 0
