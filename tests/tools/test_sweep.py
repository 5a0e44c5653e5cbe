from __future__ import annotations

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from conftest import GUIDANCE, SCHEDULE, pruning_plan
from typer.testing import CliRunner

pytest.importorskip("torch", reason="needs PyTorch: pip install 'toprovar[torch]'")

import torch
from helpers import generate_in_torch

from toprovar.calibrate.statistics import collect_statistics, read_prompts
from toprovar.exporter.planned.scores import lowest_scores
from toprovar.runtime.errors import ToprovarError
from toprovar.runtime.json_files import read_json
from toprovar.tools import sweep
from toprovar.tools.calibration import shipped_prompts
from toprovar.tools.sweep import (
    GRID,
    Variant,
    bootstrap_interval,
    demo_variants,
    exit_plan,
    markdown_table,
    measure,
    measure_all,
    plan_at,
    ranking,
    sweep_prompts,
    variant_facts,
    with_source,
)

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "docs" / "data" / "toprovar_demo_sweep.json"
TABLE = RESULTS.with_suffix(".md")
PAGE = ROOT / "docs" / "calibration.md"
SHOWN_GROUPS = ("exit", "fitted", "combined", "ranking")  # on the page; the rest is in TABLE
PROMPT = "red apple on white"


def at(model, depth, layers, target, **options):
    return plan_at(model.backbone, SCHEDULE, depth, layers, target, **options)


@pytest.fixture(scope="module")
def variants(tiny):
    return [
        Variant("exit", "exit", exit_plan(tiny.backbone, SCHEDULE, 4)),
        Variant("pruned", "grid", pruning_plan(tiny), versus="exit"),
        Variant("random", "ranking", pruning_plan(tiny), "random_layer", "pruned"),
    ]


# -- plans -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("target", [1.2, 1.4, 1.7])
@pytest.mark.parametrize("layers", [(0,), (0, 2), (0, 3)])
def test_plan_meets_its_target_within_one_block(tiny, target, layers):
    plan = at(tiny, 3, layers, target)
    block = 64 / tiny.backbone.layers / sum(h * w for h, w in SCHEDULE)
    # 400 tokens are 6.25 blocks: a layer whole but for that quarter can leave its share unused
    assert target <= plan.tle_speedup <= target * (1 + 8 * block)
    assert all(plan.counts(k)[layer] == plan.tokens(k) for k in (4, 5) for layer in layers)
    assert all(plan.counts(k) == (plan.tokens(k),) * 4 for k in range(4))


def test_plan_without_target_keeps_nothing_in_gated_layers(tiny):
    plan = at(tiny, 4, (0, 1), None)
    assert plan.counts(5) == (400, 400, 0, 0)
    assert plan.score.source_layer == {5: {}}


def test_target_out_of_reach_is_refused(tiny):
    with pytest.raises(ToprovarError, match=r"target speed-up 3 is out of reach at D = 4"):
        at(tiny, 4, (0, 1), 3.0)


def test_first_layer_must_be_dense(tiny):
    with pytest.raises(ToprovarError, match="layer 0"):
        at(tiny, 4, (1,), 1.3)


def test_source_is_the_dense_layer_before_unless_replaced(tiny):
    plan = at(tiny, 4, (0, 2), 1.2)
    assert plan.score.source_layer == {5: {1: 0, 3: 2}}
    assert with_source(plan, 0).score.source_layer == {5: {1: 0, 3: 0}}


# -- ranking -----------------------------------------------------------------------------------------------------------


def test_highest_is_lowest_of_the_negated_score():
    score = torch.rand(300)
    rank, _ = ranking("highest", 1)
    assert torch.equal(rank(score, 64), lowest_scores(-score, 64))


def test_random_draws_differ_per_layer_or_only_per_scale():
    score = torch.zeros(400)
    per_layer, see_layer = ranking("random_layer", 3)
    per_scale, see_scale = ranking("random_scale", 3)
    see_layer("in", 5, score)
    see_scale("in", 5, score)
    first = per_scale(score, 128)
    assert torch.equal(first, per_scale(score, 128))
    assert set(per_scale(score, 64).tolist()) < set(first.tolist())
    assert not torch.equal(per_layer(score, 128), per_layer(score, 128))
    see_scale("in", 6, score)
    assert not torch.equal(first, per_scale(score, 128))
    assert torch.equal(first, torch.sort(first).values)


def test_variance_ranks_by_the_input_of_the_gated_layer(tiny):
    seen = {}
    rank, observe = ranking("variance", 0)

    def watch(name, scale, tensor):
        observe(name, scale, tensor)
        seen[name, scale] = tensor

    run = generate_in_torch(tiny, SCHEDULE, GUIDANCE, PROMPT, 1, plan=pruning_plan(tiny), rank=rank, observe=watch)
    x = seen["block1", 5][0].double()
    spread = (x - x.mean(0)).square().sum(-1)
    expected = np.sort(np.argsort(-spread.numpy(), kind="stable")[:192])
    assert run.kept[5, 2].tolist() == expected.tolist()


def test_default_rank_of_generate_is_lowest_entropy(tiny):
    rank, observe = ranking("lowest", 0)
    plain = generate_in_torch(tiny, SCHEDULE, GUIDANCE, PROMPT, 1, plan=pruning_plan(tiny))
    ranked = generate_in_torch(tiny, SCHEDULE, GUIDANCE, PROMPT, 1, plan=pruning_plan(tiny), rank=rank, observe=observe)
    assert plain.kept[5, 2].tolist() == ranked.kept[5, 2].tolist()
    assert torch.equal(plain.codes, ranked.codes)


# -- measuring ---------------------------------------------------------------------------------------------------------


def test_exit_taken_from_the_dense_run_equals_running_it(tiny, variants):
    skipped = generate_in_torch(tiny, SCHEDULE, GUIDANCE, PROMPT, 5, plan=variants[0].plan)
    dense = generate_in_torch(tiny, SCHEDULE, GUIDANCE, PROMPT, 5)
    assert len(skipped.bits) == 5
    assert all(torch.equal(a, b) for a, b in zip(skipped.bits, dense.bits, strict=False))
    found = measure(tiny, SCHEDULE, GUIDANCE, PROMPT, 5, variants[:1])["exit"]
    assert found["equal_bits"] == [1.0] * 5 + [None]
    assert found["ssim"] < 1


def test_plan_that_keeps_all_measures_as_dense(tiny):
    whole = pruning_plan(tiny, keep={5: (400,) * 4})
    found = measure(tiny, SCHEDULE, GUIDANCE, PROMPT, 5, [Variant("all", "grid", whole)])["all"]
    assert found == {"ssim": 1.0, "psnr_db": 100.0, "equal_bits": [1.0] * 6}


def test_interrupted_sweep_goes_on_with_the_prompts_it_has(tiny, variants, tmp_path, monkeypatch):
    partial = tmp_path / ".sweep.partial"
    prompts = [PROMPT, "green dog"]
    first = measure_all(tiny, SCHEDULE, GUIDANCE, prompts[:1], 3, variants, partial)
    again = measure_all(tiny, SCHEDULE, GUIDANCE, prompts, 3, variants, partial)
    assert again[0] == first[0]
    monkeypatch.setattr(sweep, "measure", None)  # nothing is left to run
    assert measure_all(tiny, SCHEDULE, GUIDANCE, prompts, 3, variants, partial) == again


def test_interruption_stops_between_variants_and_keeps_what_is_done(tiny, variants, tmp_path, monkeypatch):
    def stops(model, schedule, guidance, prompt, seed, variants, on_variant):
        raise KeyboardInterrupt

    partial = tmp_path / ".sweep.partial"
    measure_all(tiny, SCHEDULE, GUIDANCE, [PROMPT], 3, variants, partial)
    monkeypatch.setattr(sweep, "measure", stops)
    with pytest.raises(KeyboardInterrupt):
        measure_all(tiny, SCHEDULE, GUIDANCE, [PROMPT, "green dog"], 3, variants, partial)
    assert len(read_json(partial)) == 1


def test_facts_pair_differences_by_prompt(tiny, variants, tmp_path):
    measured = measure_all(tiny, SCHEDULE, GUIDANCE, [PROMPT, "green dog"], 3, variants, tmp_path / "p")
    exit_facts, pruned, random = variant_facts(variants, measured)
    assert exit_facts["versus"] is None
    assert pruned["versus"]["name"] == "exit"
    assert pruned["versus"]["ssim_difference"] == pytest.approx(pruned["ssim_mean"] - exit_facts["ssim_mean"], abs=1e-5)
    assert random["plan"]["rank"] == "random_layer"
    assert pruned["ssim_interval"][0] <= pruned["ssim_mean"] <= pruned["ssim_interval"][1]
    assert pruned["equal_bits"][:5] == [1.0] * 5


def test_bootstrap_interval_covers_the_mean_and_shrinks_to_it():
    values = np.random.default_rng(1).normal(0.8, 0.1, 16)
    low, high = bootstrap_interval(values)
    standard_error = values.std() / 4
    assert low < values.mean() < high
    assert high - low == pytest.approx(2 * 1.96 * standard_error, rel=0.15)
    assert bootstrap_interval(np.full(5, 0.5)) == [0.5, 0.5]
    assert bootstrap_interval(values) == [low, high]


# -- what is swept on the demo -----------------------------------------------------------------------------------------


def test_sweep_prompts_are_sixteen_and_not_the_first_of_the_calibration_list():
    prompts = sweep_prompts()
    assert len(set(prompts)) == 16
    assert not set(prompts) & set(read_prompts(shipped_prompts())[:12])


@pytest.fixture(scope="module")
def demo():
    from toprovar.exporter.model import load_model

    return load_model("demo")


@pytest.fixture(scope="module")
def calibration(demo, tmp_path_factory):
    """One prompt measured on the demo model."""
    folder = tmp_path_factory.mktemp("calibration")
    prompts = read_prompts(shipped_prompts())[:1]
    collect_statistics(demo, demo.schedule, demo.guidance(), prompts, 0, folder / "stats")
    return folder


def test_demo_variants_are_sound_and_comparable(demo, calibration):
    stats = sweep.read_calibration(calibration, demo)
    found, unreachable = demo_variants(stats, demo.backbone)
    names = {variant.name: variant for variant in found}
    assert len(names) == len(found)
    for variant in found:
        variant.plan.check()
        assert not variant.versus or variant.versus in names
    for target, depths in GRID.items():
        grid = [names[f"D{d} G{count} @{target}"].plan.tle_speedup for d, counts in depths.items() for count in counts]
        assert max(grid) / min(grid) < 1.02
    assert all("out of reach" in entry["message"] for entry in unreachable)


def test_command_writes_the_file_and_leaves_the_calibration_alone(calibration, tmp_path):
    before = {path: path.read_bytes() for path in calibration.rglob("*") if path.is_file()}
    out = tmp_path / "sweep.json"
    options = ["--calibration", str(calibration), "--out", str(out), "--limit", "1", "--group", "exit", "--json"]
    done = CliRunner().invoke(sweep.app, options)
    assert done.exit_code == 0, done.output
    document = read_json(out)
    assert json.loads(done.stdout) == document
    assert [entry["name"] for entry in document["variants"]] == [f"exit after {k}" for k in (5, 6, 7, 8)]
    assert document["prompts"]["count"] == 1
    assert "date" not in document
    assert sorted(path.name for path in tmp_path.iterdir()) == ["sweep.json"]
    assert before == {path: path.read_bytes() for path in calibration.rglob("*") if path.is_file()}


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ([], "--calibration and --out are needed"),
        (["--calibration", "nowhere", "--out", "x.json"], "nowhere holds no statistics"),
        (["--table", "nowhere.json"], "nowhere.json does not exist"),
    ],
)
def test_wrong_usage_says_what_to_do(options, expected):
    done = CliRunner().invoke(sweep.app, options)
    assert done.exit_code == 2
    assert expected in done.stderr


def test_unknown_group_is_refused(calibration, tmp_path):
    options = ["--calibration", str(calibration), "--out", str(tmp_path / "x.json"), "--group", "grids"]
    done = CliRunner().invoke(sweep.app, options)
    assert done.exit_code == 2
    assert "unknown group grids" in done.stderr
    assert "exit, grid" in done.stderr


def test_calibration_of_other_weights_is_refused(demo, calibration, tmp_path):
    shutil.copytree(calibration, tmp_path / "c")
    with pytest.raises(ToprovarError, match="measured with another weights_sha256"):
        sweep.read_calibration(tmp_path / "c", replace(demo, weights_sha256="0" * 64))


# -- the page ----------------------------------------------------------------------------------------------------------


def test_tables_of_the_docs_are_the_file_s():
    page = [part for name in SHOWN_GROUPS for part in ("--group", name)]
    for options, place in (([], TABLE), (page, PAGE)):
        done = CliRunner().invoke(sweep.app, ["--table", str(RESULTS), *options])
        assert done.exit_code == 0, done.output
        assert len(done.stdout.splitlines()) > 10
        assert done.stdout in place.read_text(encoding="utf-8")


def test_the_page_names_the_weights_that_were_measured():
    """The sweep is older than the packaged weights; the page must say whose numbers these are."""
    digest = read_json(RESULTS)["model"]["weights_sha256"]
    assert f"weights {digest[:12]}" in PAGE.read_text(encoding="utf-8")


def numbers_in(value):
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list):
        return [number for part in value for number in numbers_in(part)]
    return [abs(value)] if isinstance(value, float) else []


def test_numbers_in_the_page_s_text_are_in_the_file():
    document = read_json(RESULTS)
    text = PAGE.read_text(encoding="utf-8").replace(markdown_table(document, SHOWN_GROUPS), "")
    quoted = set(re.findall(r"\b0\.\d{3}\b", text))
    assert len(quoted) > 20
    assert quoted <= {f"{number:.3f}" for number in numbers_in(document)}
