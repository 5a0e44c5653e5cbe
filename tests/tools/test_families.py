"""Every family from checkpoint to picture through the command line, and the bundle draws what PyTorch draws."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from command_line import done, refusal
from family_models import SIDES, write_hart, write_var
from PIL import Image

from toprovar.exporter.model import load_model
from toprovar.exporter.planned.loop import LoopOptions
from toprovar.runtime.backends.onnxruntime import OnnxRuntimeBackend
from toprovar.runtime.bundle import open_bundle
from toprovar.runtime.errors import ToprovarError
from toprovar.runtime.pipeline import Pipeline, Request
from toprovar.runtime.plan import dense_plan, load_plan

WRITERS = {"var": write_var, "hart": write_hart}
PROMPTS = {"var": ["3", "7", "0"], "hart": ["red apple", "green dog on white", "house"]}
# codes of about 5 behind six scales of fp32; HART's first reverse step multiplies rounding by 2e4 before it clamps, so
# that single codes are off by 1e-3 (measured), while the typical one is not
CODES_TOLERANCE = {"var": 1e-4, "hart": 1e-2}
TYPICAL_TOLERANCE = 1e-5


@pytest.fixture(scope="module", params=sorted(WRITERS))
def made(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    """A model, its calibration and its bundle with the plan, all by the commands."""
    family: str = request.param
    folder = tmp_path_factory.mktemp(family)
    WRITERS[family](folder / "model")
    (folder / "prompts.txt").write_text("\n".join(PROMPTS[family]) + "\n")
    done(
        "calibrate", folder / "model", "--prompts", folder / "prompts.txt", "-o", folder / "calibration",
        "--scale-depth", 4, "--target-speedup", 1.15,
    )  # fmt: skip
    done("export", folder / "model", "--plan", folder / "calibration" / "plan.json", "-o", folder / "bundle")
    return family, folder


def opened(folder: Path) -> Pipeline:
    bundle = open_bundle(folder)
    return Pipeline(bundle, OnnxRuntimeBackend(bundle))


def test_the_plan_prunes_and_a_picture_is_written(made: tuple[str, Path]) -> None:
    family, folder = made
    plan = load_plan(folder / "calibration" / "plan.json")
    assert plan.backbone.family == family
    assert plan.method == "toprovar"
    assert plan.tle_speedup >= 1.15
    for variant in ("dense", "planned"):
        out = folder / f"{variant}.png"
        done("run", folder / "bundle", "--prompt", PROMPTS[family][0], "--plan", variant, "-o", out)
        assert Image.open(out).size == (2 * SIDES[-1], 2 * SIDES[-1])
    assert Image.open(folder / "dense.png").tobytes() != Image.open(folder / "planned.png").tobytes()


@pytest.mark.parametrize("variant", ["dense", "planned"])
def test_the_bundle_draws_what_pytorch_draws(made: tuple[str, Path], variant: str) -> None:
    family, folder = made
    model = load_model(str(folder / "model"))
    plan = load_plan(folder / "calibration" / "plan.json") if variant == "planned" else None
    prompts, seeds = PROMPTS[family][:2], [4, 5]
    asked = model.family.prompt(model, prompts, model.guidance())
    run = model.family.generate(model, asked, model.schedule, model.guidance(), seeds, LoopOptions(plan=plan))
    pipeline = opened(folder / "bundle")
    for image, (prompt, seed) in enumerate(zip(prompts, seeds, strict=True)):
        result = pipeline.generate(prompt, seed, variant)
        assert not result.bits
        for mine, theirs in zip(run.indices, result.indices, strict=True):
            assert np.array_equal(mine[image].numpy(), theirs)
        away = np.abs(run.codes[image].numpy() - result.codes)
        assert away.max() <= CODES_TOLERANCE[family]
        assert np.median(away) <= TYPICAL_TOLERANCE
        assert [step.counts for step in result.steps] == run.counts[image]


def test_pictures_of_a_batch_are_those_drawn_alone(made: tuple[str, Path], tmp_path: Path) -> None:
    family, folder = made
    plan = folder / "calibration" / "plan.json"
    done("export", folder / "model", "--plan", plan, "--images", 2, "-o", tmp_path / "two")
    pipeline = opened(tmp_path / "two")
    requests = [Request(prompt, seed) for seed, prompt in enumerate(PROMPTS[family])]
    for request, together in zip(requests, pipeline.generate_batch(requests, "planned"), strict=True):
        alone = pipeline.generate(request.prompt, request.seed, "planned")
        assert all(np.array_equal(a, b) for a, b in zip(alone.indices, together.indices, strict=True))


def test_one_row_runs_without_guidance(made: tuple[str, Path], tmp_path: Path) -> None:
    family, folder = made
    done("export", folder / "model", "--cfg", 0, "-o", tmp_path / "one")
    pipeline = opened(tmp_path / "one")
    assert pipeline.manifest.rows == 1
    model = load_model(str(folder / "model"))
    guidance = pipeline.manifest.guidance
    asked = model.family.prompt(model, PROMPTS[family][:1], guidance)
    run = model.family.generate(model, asked, model.schedule, guidance, [9], LoopOptions())
    result = pipeline.generate(PROMPTS[family][0], 9)
    assert all(np.array_equal(a[0].numpy(), b) for a, b in zip(run.indices, result.indices, strict=True))
    assert "exported without guidance" in refusal(
        "run", tmp_path / "one", "--prompt", PROMPTS[family][0], "--cfg", 3, "-o", tmp_path / "x.png"
    )


@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
def test_half_precision_bundles_are_written(made: tuple[str, Path], tmp_path: Path, dtype: str) -> None:
    family, folder = made
    done("export", folder / "model", "--dtype", dtype, "-o", tmp_path / dtype)
    full, half = (open_bundle(place) for place in (folder / "bundle", tmp_path / dtype))
    assert half.manifest.compute == dtype
    size = half.manifest.files[half.manifest.weights_file].size_bytes
    assert size < full.manifest.files[full.manifest.weights_file].size_bytes
    if dtype == "fp16":
        result = opened(tmp_path / dtype).generate(PROMPTS[family][0], 3)
        assert np.isfinite(result.codes).all()


def test_growth_of_guidance_follows_the_family(made: tuple[str, Path]) -> None:
    family, folder = made
    cfg = open_bundle(folder / "bundle").manifest.guidance.cfg
    t = {"var": 4.0, "hart": 4.5}[family]
    places = [0, 1, 2, 3, 4, 5 if family == "var" else 4]
    assert cfg == pytest.approx([1 + t * place / 5 for place in places])


def test_the_smooth_variant_is_a_setting(made: tuple[str, Path], tmp_path: Path) -> None:
    family, folder = made
    facts = json.loads((folder / "model" / "model.json").read_text())
    facts["smooth"] = True
    if family == "hart":
        del facts["smooth"]  # as published
    other = shutil.copytree(folder / "model", tmp_path / "model")
    (other / "model.json").write_text(json.dumps(facts))
    done("export", other, "-o", tmp_path / "bundle")
    pipelines = [opened(place) for place in (folder / "bundle", tmp_path / "bundle")]
    assert [pipeline.manifest.guidance.smooth for pipeline in pipelines] == [False, True]
    codes = [pipeline.generate(PROMPTS[family][0], 1, "dense").codes for pipeline in pipelines]
    assert np.abs(codes[0] - codes[1]).max() > 0.1
    model = load_model(str(other))
    asked = model.family.prompt(model, PROMPTS[family][:1], model.guidance())
    run = model.family.generate(model, asked, model.schedule, model.guidance(), [1], LoopOptions())
    # the soft mean divides logits by 0.27 down to 0.0135, so that rounding grows from scale to scale: measured 4e-5
    assert np.median(np.abs(run.codes[0].numpy() - codes[1])) <= 1e-3


@pytest.mark.parametrize("method", ["fastvar", "stepvar", "depthvar", "ld_pruning"])
def test_every_method_prunes_both_ways_alike(made: tuple[str, Path], method: str, tmp_path: Path) -> None:
    family, folder = made
    if family == "hart" and method in ("fastvar", "depthvar"):
        pytest.skip("their parts are those of VAR's test; the time goes to what HART's last scale does differently")
    calibration = shutil.copytree(folder / "calibration", tmp_path / "calibration")
    prompts = folder / "prompts.txt"
    done("calibrate", folder / "model", "--prompts", prompts, "-o", calibration, "--method", method)
    done("export", folder / "model", "--plan", calibration / "plan.json", "-o", tmp_path / "bundle")
    plan, model = load_plan(calibration / "plan.json"), load_model(str(folder / "model"))
    assert plan.expected_speedup > 1.5
    asked = model.family.prompt(model, PROMPTS[family][:1], model.guidance())
    run = model.family.generate(model, asked, model.schedule, model.guidance(), [2], LoopOptions(plan=plan))
    result = opened(tmp_path / "bundle").generate(PROMPTS[family][0], 2, "planned")
    assert all(np.array_equal(a[0].numpy(), b) for a, b in zip(run.indices, result.indices, strict=True))


def test_harts_last_scale_always_runs(made: tuple[str, Path], tmp_path: Path) -> None:
    family, folder = made
    if family != "hart":
        pytest.skip("only HART has a residual head")
    plan = load_plan(folder / "calibration" / "plan.json")
    shorter = dense_plan(plan.backbone, plan.schedule).model_copy(update={"method": "fixed_exit", "skip_scales": (5,)})
    with pytest.raises(ToprovarError, match="the last scale of hart always runs"):
        shorter.check()
    calibration = shutil.copytree(folder / "calibration", tmp_path / "calibration")
    again = ("calibrate", folder / "model", "--prompts", folder / "prompts.txt", "-o", calibration)
    assert "cannot exit early" in refusal(*again, "--method", "fixed_exit")
    done(*again, "--method", "stepvar", "--preset", "paper")
    assert not load_plan(calibration / "plan.json").skip_scales


def test_what_a_class_is(tmp_path: Path, made: tuple[str, Path]) -> None:
    family, folder = made
    if family != "var":
        pytest.skip("only VAR draws classes")
    for prompt in ("red apple", "10", "-1", "3.0", "", "9" * 30):
        told = refusal("run", folder / "bundle", "--prompt", prompt, "-o", tmp_path / "x.png")
        assert "is no class; expected a whole number from 0 to 9" in told
    told = refusal("run", folder / "bundle", "--prompt", "3", "--negative", "dog", "-o", tmp_path / "x.png")
    assert "draws classes" in told


def refused_model(folder: Path) -> str:
    return refusal("export", folder, "-o", folder / "out")


def test_square_families_refuse_what_they_cannot_draw(made: tuple[str, Path], tmp_path: Path) -> None:
    _, folder = made
    for option, value in (("--aspect", 1.5), ("--budget", "1M")):
        told = refusal("export", folder / "model", option, value, "-o", tmp_path / "out")
        assert "square" in told or "no pixel budgets" in told
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("family", sorted(WRITERS))
def test_models_that_do_not_fit_are_refused(family: str, tmp_path: Path) -> None:
    model = WRITERS[family](tmp_path / "model", sides=[2, 3])
    assert "sides [2, 3]" in refused_model(model)
    without = WRITERS[family](tmp_path / "without", tokenizer=None)
    assert "names no tokenizer" in refused_model(without)
