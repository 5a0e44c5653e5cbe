"""Bundles of InfinityStar: what they draw equals the PyTorch loop, whatever a plan says, and the commands run them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from command_line import done, refusal
from tiny_star import write_tiny_star

torch = pytest.importorskip("torch", reason="needs PyTorch: pip install 'toprovar[torch]'")
pytest.importorskip("onnxruntime", reason="needs ONNX Runtime: pip install 'toprovar[onnxruntime]'")

from helpers import differing_bits, open_pipeline  # noqa: E402
from plans import logistic  # noqa: E402

from toprovar.exporter.bundle_writer import export_bundle  # noqa: E402
from toprovar.exporter.infinitystar.generate import BitNoise, generate  # noqa: E402
from toprovar.exporter.model import load_model  # noqa: E402
from toprovar.exporter.planned.loop import Generation, LoopOptions  # noqa: E402
from toprovar.exporter.planned.step import StepOptions  # noqa: E402
from toprovar.runtime.backends.onnxruntime import OnnxRuntimeBackend  # noqa: E402
from toprovar.runtime.bundle import open_bundle  # noqa: E402
from toprovar.runtime.decisions import EnergyMassDecision, RhoDecision, SatsDecision, SkipvarDecision  # noqa: E402
from toprovar.runtime.errors import ToprovarError  # noqa: E402
from toprovar.runtime.guidance import Guidance  # noqa: E402
from toprovar.runtime.noise import noise_that_draws  # noqa: E402
from toprovar.runtime.pipeline import Pipeline, Result, picture_from_image  # noqa: E402
from toprovar.runtime.plan import CfgStop, Plan, PlanPath, Restore, Score  # noqa: E402

PROMPT, SEED = "red apple on house", 7
# passes of the tiny model: 3 x 1x1, 3 x 3x3, 3 x 12x12, then 3 x 2x1x1, 3 x 2x3x3, 3 x 2x12x12; 288 tokens at the end
CLOSING, LAST = 8, 17


@pytest.fixture(scope="module")
def star(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return load_model(str(write_tiny_star(tmp_path_factory.mktemp("star"))))


def exported(model: Any, folder: Path, plan: Plan | None = None, guidance: Guidance | None = None) -> Guidance:
    guidance = guidance or model.guidance()
    options = StepOptions.for_guidance(guidance, model.config.depth, model.text_tokens)
    export_bundle(model, folder, guidance, options, plan, model.schedule)
    return guidance


def in_torch(model: Any, guidance: Guidance, plan: Plan | None = None) -> Generation:
    prompt = model.family.prompt(model, [PROMPT], guidance)
    options = LoopOptions(plan=plan, small_picture=lambda codes, size: model.family.small_picture(model, codes, size))
    run: Generation = model.family.generate(model, prompt, model.schedule, guidance, [SEED], options)
    return run


def same(run: Generation, result: Result) -> None:
    """Bits that a pass does not have are 255 in PyTorch."""
    widths = [bits.shape[1] for bits in result.bits]
    run.drawn = [bits[..., :width] for bits, width in zip(run.drawn, widths, strict=True)]
    assert sum(differing_bits(run, result.bits)) == 0
    np.testing.assert_allclose(run.codes[0].numpy(), result.codes, atol=1e-5)
    assert run.counts[0] == [step.counts for step in result.steps]
    assert [decision[1:] for decision in run.decisions] == result.decisions


GATED = {CLOSING: (144, 60, 0), 16: (288, 128, 64), LAST: (288, 192, 0)}
WHOLE = {CLOSING: (100,) * 3, LAST: (192,) * 3}
AFTER_FEWER_BITS = {5: (4,) * 3, 6: (70,) * 3, 9: (1,) * 3, LAST: (192,) * 3}
SOURCES = {scale: {1: 0, 2: 0} for scale in GATED}
PLANS: dict[str, dict[str, Any]] = {
    "entropy, cached residual": {
        "score": Score(kind="entropy", source_layer=SOURCES),
        "keep": GATED,
        "restore": Restore(kind="cached_residual", ref_scale=7),
    },
    "variance by sub-layer and row": {
        "score": Score(kind="variance", granularity="sublayer", row="each"),
        "keep": GATED,
        "restore": Restore(kind="prev_residual", resample="area"),
    },
    "structure, nearest kept": {
        "score": Score(kind="structure", granularity="scale"),
        "keep": WHOLE,
        "restore": Restore(kind="nn_kept"),
    },
    "variance by scale, codes of the pass before": {
        "score": Score(kind="variance", granularity="scale"),
        "keep": AFTER_FEWER_BITS,
        "restore": Restore(kind="prev_code"),
    },
    "change, guidance stops, the last passes skipped": {
        "score": Score(kind="change"),
        "keep": {CLOSING: GATED[CLOSING]},
        "restore": Restore(kind="cached_residual", ref_scale=7),
        "cfg_stop": CfgStop(mode="static", scale=12),
        "skip_scales": (16, 17),
    },
    "ladder across clips, guidance decided": {
        "score": Score(kind="code_energy", granularity="scale"),
        "restore": Restore(kind="zero_code"),
        "keep": WHOLE,
        "ladder": {CLOSING: (40, 100, 144), LAST: (64, 192, 288)},
        "cfg_stop": CfgStop(mode="decided"),
        "decisions": (EnergyMassDecision(mass=0.6), SatsDecision(scales=(13, 14), delta=0.5)),
    },
    "small pictures say that the last passes go": {
        "cfg_stop": CfgStop(),
        "paths": {"exit": PlanPath(skip_scales=(15, 16, 17)), "conditional": PlanPath(cfg_stop=14)},
        "decisions": (
            SkipvarDecision(
                scale=12,
                feature_scale=4,
                skip=logistic((0.0, 1.0), (0, 1)),
                uncond=logistic((1.0, 0.0), (0, 1)),
                skip_paths={1: "exit"},
                uncond_paths={1: "conditional"},
            ),
        ),
    },
    "path entered behind the closing pass": {
        "score": Score(kind="entropy", source_layer={LAST: {1: 0, 2: 0}}),
        "restore": Restore(kind="cached_residual", ref_scale=7),
        "keep": {LAST: GATED[LAST]},
        "paths": {"D10": PlanPath(keep={LAST: (288, 64, 64)}, ref_scale=10)},
        "decisions": (RhoDecision(tau=0.0, direction="ge", layers=(0, 1), paths={10: "D10"}),),
    },
    "path entered before the closing pass": {
        "score": Score(kind="entropy", source_layer=SOURCES),
        "restore": Restore(kind="cached_residual", ref_scale=7),
        "paths": {"D7": PlanPath(keep=GATED, ref_scale=7)},
        "decisions": (RhoDecision(tau=0.0, direction="ge", layers=(0, 1), paths={7: "D7"}),),
    },
}


# whose parts other plans of the table have too
SLOW = ("structure, nearest kept", "small pictures say that the last passes go")


def plan_of(model: Any, **parts: Any) -> Plan:
    plan = Plan(backbone=model.backbone, schedule=model.schedule, method="made", grid=1, **parts)
    plan.check()
    return plan


@pytest.mark.parametrize("name", [pytest.param(n, marks=pytest.mark.slow) if n in SLOW else n for n in PLANS])
def test_pytorch_and_onnx_runtime_draw_the_same_video(star: Any, tmp_path: Path, name: str) -> None:
    plan = plan_of(star, **PLANS[name])
    guidance = exported(star, tmp_path / "b", plan)
    run = in_torch(star, guidance, plan)
    result = open_pipeline(tmp_path / "b").generate(PROMPT, SEED, "planned")
    same(run, result)
    decoded = picture_from_image(star.family.decode(star, run.codes)[0].numpy())
    assert result.frames is not None
    assert np.abs(decoded.reshape(result.frames.shape).astype(int) - result.frames).max() <= 1
    for step in result.steps:
        for layer, kept in step.kept.items():
            assert np.array_equal(run.kept[step.scale, layer].numpy(), kept), (step.scale, layer)


def test_kernels_and_bodies_draw_the_same_bits(star: Any, tmp_path: Path, with_plugins: Any) -> None:
    """Query heads are folded into tokens: more queries than new keys."""
    exported(star, tmp_path / "b", plan_of(star, **PLANS["entropy, cached residual"]))
    bundle = open_bundle(tmp_path / "b")
    by = {name: Pipeline(bundle, OnnxRuntimeBackend(bundle, 1, operators=name)) for name in ("body", "library")}
    assert by["library"].backend.operators == "library"  # type: ignore[attr-defined]
    body, library = (by[name].generate(PROMPT, SEED, "planned") for name in ("body", "library"))
    assert all(np.array_equal(a, b) for a, b in zip(body.bits, library.bits, strict=True))


def test_small_pictures_are_those_of_the_loop(star: Any, tmp_path: Path) -> None:
    exported(star, tmp_path / "b", plan_of(star, **PLANS["small pictures say that the last passes go"]))
    backend = open_pipeline(tmp_path / "b").backend
    assert isinstance(backend, OnnxRuntimeBackend)
    graph = open_bundle(tmp_path / "b").manifest.small_decoder
    assert graph is not None
    codes = np.random.default_rng(4).standard_normal(graph.inputs["codes"].shape).astype(np.float32)
    found = {"image": np.empty(graph.outputs["image"].shape, np.float32)}
    backend.run(graph, {"codes": codes}, found)
    expected = star.family.small_picture(star, torch.from_numpy(codes), (3, 3))
    assert found["image"][0].shape == expected.shape == (3, 9 * 24, 24)
    np.testing.assert_allclose(found["image"][0], expected, atol=3e-5)  # fp32 convolutions; as the video decoder's test


def test_decisions_of_the_table_are_taken(star: Any) -> None:
    guidance = star.guidance()
    run = in_torch(star, guidance, plan_of(star, **PLANS["ladder across clips, guidance decided"]))
    taken = {(scale, what) for _, scale, what, _ in run.decisions}
    assert {(CLOSING, "tokens"), (LAST, "tokens"), (13, "guidance")} <= taken
    run = in_torch(star, guidance, plan_of(star, **PLANS["path entered before the closing pass"]))
    assert [decision[1:] for decision in run.decisions] == [(7, "path", "D7")]
    assert run.counts[0][CLOSING] == GATED[CLOSING]


def test_repeated_maps_share_a_graph_and_nothing_is_cached(star: Any, tmp_path: Path) -> None:
    exported(star, tmp_path / "b")
    steps = open_pipeline(tmp_path / "b").steps("dense")
    files = [step.graph.file for step in steps]
    assert files[1] == files[2] != files[0]  # the first pass has no codes to read
    assert files[3] == files[4] == files[5]
    assert files[6] == files[7] != files[8]  # the last one leaves its keys to the next clip
    assert files[9] == files[10] == files[11]
    assert not any(name.startswith(("k_past", "k_new")) for step in steps for name in step.graph.inputs)
    assert all(step.past == (0, 0, 0) == step.cached for step in steps)
    assert {name for name in steps[9].graph.inputs if name.startswith("context_k")} == {
        f"context_k_02_{layer:02d}" for layer in range(3)
    }


def test_without_guidance_one_row_runs(star: Any, tmp_path: Path) -> None:
    off = star.guidance().model_copy(update={"cfg": (1.0,) * len(star.schedule)})
    exported(star, tmp_path / "b", guidance=off)
    pipeline = open_pipeline(tmp_path / "b")
    assert pipeline.manifest.rows == 1
    assert {step.graph.inputs["text_k_00"].shape[1] for step in pipeline.steps("dense")} == {1}
    same(in_torch(star, off), pipeline.generate(PROMPT, SEED))


def test_a_video_goes_on_from_given_bits(star: Any, tmp_path: Path) -> None:
    """As image to video does: the image clip is given, the rest is drawn."""
    guidance = exported(star, tmp_path / "b")
    pipeline = open_pipeline(tmp_path / "b")
    first = pipeline.generate(PROMPT, SEED)
    given = [1 - bits for bits in first.bits[: CLOSING + 1]]
    result = pipeline.generate(PROMPT, SEED, noise=noise_that_draws(given, SEED))
    assert all(np.array_equal(a, b) for a, b in zip(given, result.bits, strict=False))
    video = star.family.video_of(star, star.schedule)
    prompt, noise = star.family.prompt(star, [PROMPT], guidance), BitNoise([SEED], 8)
    tensors = [torch.from_numpy(bits)[None] for bits in given]
    run = generate(star.transformer, prompt, video, guidance, noise, given_bits=tensors)
    run.counts = [[step.counts for step in result.steps]]  # given passes do not run in the loop
    same(run, result)
    assert any((a != b).any() for a, b in zip(first.bits[-3:], result.bits[-3:], strict=True))


def test_negative_prompt_of_another_length_is_padded_as_in_the_loop(star: Any, tmp_path: Path) -> None:
    guidance = exported(star, tmp_path / "b")
    rng = np.random.default_rng(2)
    text, negative = (rng.standard_normal((count, 16)).astype(np.float32) for count in (2, 5))
    with torch.inference_mode():
        prompt = star.transformer.prompt([torch.from_numpy(text)], [torch.from_numpy(negative)])
    run = star.family.generate(star, prompt, star.schedule, guidance, [SEED], LoopOptions())
    result = open_pipeline(tmp_path / "b").generate(None, SEED, text_rows=text, negative_rows=negative)
    same(run, result)


def test_one_frame_is_a_picture(tmp_path: Path) -> None:
    model = load_model(str(write_tiny_star(tmp_path / "model", frames=1)))
    exported(model, tmp_path / "b")
    result = open_pipeline(tmp_path / "b").generate(PROMPT, SEED)
    decoded = picture_from_image(model.family.decode(model, torch.from_numpy(result.codes)[None])[0].numpy())
    assert result.frames is None
    assert result.image is not None
    assert result.image.shape == (96, 96, 3)
    assert np.abs(decoded.astype(int) - result.image).max() <= 1


def test_what_a_bundle_cannot_do_is_refused(star: Any, tmp_path: Path) -> None:
    from dataclasses import replace

    guidance = star.guidance()
    several = replace(StepOptions.for_guidance(guidance, 3, star.text_tokens), images=2)
    with pytest.raises(ToprovarError, match="2 videos at a time"):
        export_bundle(star, tmp_path / "b", guidance, several, None, star.schedule)
    with pytest.raises(ToprovarError, match="13 text tokens asked for; the model takes 12"):
        star.family.prompt_graph(star, None, StepOptions(text_tokens=13))
    with pytest.raises(ToprovarError, match="a schedule of 2 passes, last 5x5, is none of InfinityStar's"):
        star.family.video_of(star, ((1, 1), (5, 5)))


@pytest.mark.slow
def test_length_of_the_video_is_an_option(tmp_path: Path) -> None:
    model = write_tiny_star(tmp_path / "model")
    done("export", model, "--frames", 13, "-o", tmp_path / "b")
    manifest = open_bundle(tmp_path / "b").manifest
    assert manifest.video is not None
    assert (manifest.video.maps, manifest.code_shape) == (4, (8, 4 * 12, 12))
    assert "a video of 6 frames cannot be made" in refusal("export", model, "--frames", 6, "-o", tmp_path / "c")
    assert "model demo draws pictures" in refusal("export", "demo", "--frames", 5, "-o", tmp_path / "c")


@pytest.mark.slow
def test_published_size_is_billed_without_weights() -> None:
    result = done("export", "infinitystar-8b", "--frames", 1, "--budget", "0.06M", "--dry-run", "-o", "x", "--json")
    facts = json.loads(result.stdout)
    assert (
        facts["graphs"] == 15
    )  # prompt, decoder, the first pass, eleven maps, and the last pass over the last of them
    assert len(facts["scales"]) == 33
    assert abs(facts["weights_bytes"] / 1e9 - 35.6) < 0.1
    assert facts["cache_bytes"] == 128 * 2 * 36 * 8 * 128 * 4 * 2  # text, two rows, fp32


def test_tokenizer_must_fit(tmp_path: Path) -> None:
    from safetensors.torch import save_file
    from video_reference import random_video_tokenizer

    folder = write_tiny_star(tmp_path / "m")
    weights = {n: torch.from_numpy(w).float() for n, w in random_video_tokenizer(1, (8, 8, 4), (2, 2), 1).items()}
    save_file(weights, folder / "tokenizer.safetensors")
    with pytest.raises(ToprovarError, match="predicts 8 bits per token, the tokenizer has 4 channels"):
        load_model(str(folder))


def test_calibrate_export_and_run(tmp_path: Path) -> None:
    """The three commands, from files to a video; the plan is one of the command's own."""
    pytest.importorskip("av", reason="needs PyAV: pip install 'toprovar[video]'")
    model = write_tiny_star(tmp_path / "model")
    (tmp_path / "prompts.txt").write_text("red apple\n")
    done("calibrate", model, "--prompts", tmp_path / "prompts.txt", "--method", "fastvar", "-o", tmp_path / "c")
    plan = json.loads((tmp_path / "c" / "plan.json").read_text())
    assert plan["backbone"]["family"] == "infinitystar"
    done("export", model, "--plan", tmp_path / "c" / "plan.json", "-o", tmp_path / "b")
    done("run", tmp_path / "b", "-p", PROMPT, "--seed", SEED, "-o", tmp_path / "x.mp4")
    done("run", tmp_path / "b", "-p", PROMPT, "--seed", SEED, "-o", tmp_path / "frames")
    assert len(list((tmp_path / "frames").iterdir())) == 9
    assert (tmp_path / "x.mp4").stat().st_size > 1000
    assert "is a folder" in refusal("run", tmp_path / "b", "-p", PROMPT, "-o", tmp_path / "frames")
    assert "the bundle makes videos" in refusal("run", tmp_path / "b", "-p", PROMPT, "-o", tmp_path / "x.png")
    assert "--preview-dir writes a picture" in refusal(
        "run", tmp_path / "b", "-p", PROMPT, "-o", tmp_path / "y.mp4", "--preview-dir", tmp_path / "p"
    )
