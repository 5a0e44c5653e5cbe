"""The loop: what it needs to be imported, what it refuses, and what stays the same from run to run."""

import json
import shutil
import subprocess
import sys

import numpy as np
import pytest
from conftest import GUIDANCE, SCHEDULE, tiny_model
from helpers import open_pipeline

from toprovar.exporter.bundle_writer import export_bundle
from toprovar.exporter.planned.step import StepOptions
from toprovar.runtime.backends.onnxruntime import OnnxRuntimeBackend
from toprovar.runtime.bundle import open_bundle
from toprovar.runtime.errors import ToprovarError
from toprovar.runtime.guidance import Guidance
from toprovar.runtime.pipeline import Pipeline

ABOVE = ("torch", "onnx", "onnx_ir", "triton", "skimage", "scipy", "matplotlib", "jinja2")
FLOORS_ABOVE = ("toprovar.exporter", "toprovar.calibrate")


@pytest.fixture(scope="module")
def pipeline(tiny_bundle):
    return open_pipeline(tiny_bundle)


def modules_after(statement):
    code = f"import json, sys\n{statement}\nprint(json.dumps(sorted(sys.modules)))"
    return json.loads(subprocess.check_output([sys.executable, "-c", code], text=True).splitlines()[-1])


def above(modules):
    return [name for name in modules if name.split(".")[0] in ABOVE or name.startswith(FLOORS_ABOVE)]


def test_importing_the_pipeline_loads_nothing_above_the_runtime():
    modules = modules_after("import toprovar.runtime.pipeline")
    assert not above(modules)
    assert not [name for name in modules if name.startswith("toprovar.tools")]
    assert "toprovar.runtime.pipeline" in modules


def test_a_whole_run_loads_nothing_above_the_runtime(tiny_bundle, tmp_path):
    arguments = ["run", str(tiny_bundle), "--prompt", "red apple", "-o", str(tmp_path / "x.png")]
    modules = modules_after(
        f"from toprovar.tools import cli\nassert not cli.app({arguments!r}, standalone_mode=False), 'the run failed'"
    )
    assert (tmp_path / "x.png").exists()
    assert not above(modules)


def test_the_same_seed_gives_the_same_picture_and_another_seed_another(pipeline):
    first, again, other = (pipeline.generate("red apple", seed, "planned") for seed in (7, 7, 8))
    assert np.array_equal(first.image, again.image)
    assert all(np.array_equal(a, b) for a, b in zip(first.bits, again.bits, strict=True))
    assert not np.array_equal(first.image, other.image)


def test_variants_may_run_in_any_order(pipeline):
    dense = pipeline.generate("red apple", 1, "dense").image
    pipeline.generate("red apple", 1, "planned")
    assert np.array_equal(pipeline.generate("red apple", 1, "dense").image, dense)


def test_a_planned_run_keeps_what_its_counts_say(pipeline):
    result = pipeline.generate("red apple", 3, "planned")
    last = result.steps[-1]
    assert last.counts == (400, 400, 192, 128)
    assert {layer: len(kept) for layer, kept in last.kept.items()} == {2: 192, 3: 128}
    for kept in last.kept.values():
        assert np.array_equal(np.unique(kept), np.sort(kept))
        assert 0 <= kept.min() <= kept.max() < 400


def test_latencies_cover_loading_text_steps_and_decoding(tiny_bundle):
    latency = open_pipeline(tiny_bundle).generate("red", 0).latency_ms
    assert latency.keys() == {"load", "text", "prompt", "steps", "decode"}
    assert latency["load"] > 0


@pytest.mark.parametrize("seed", [0, 2**32, 2**63])
def test_seeds_up_to_two_to_the_63_are_taken(pipeline, seed):
    assert pipeline.generate("red", seed).image is not None


@pytest.mark.parametrize("seed", [-1, 2**63 + 1])
def test_seeds_out_of_range_are_refused(pipeline, seed):
    with pytest.raises(ToprovarError, match=f"seed {seed} is out of range"):
        pipeline.generate("red", seed)


@pytest.mark.parametrize("prompt", ["", "\0", "\ud800", "🍎" * 50, "שלום", "red " * 3000, "\x1b[31m", "<script>"])
def test_any_text_is_a_prompt(pipeline, prompt):
    assert pipeline.generate(prompt, 0).image.dtype == np.uint8


def test_a_missing_prompt_and_an_unknown_variant_are_refused(pipeline):
    with pytest.raises(ToprovarError, match="no prompt given"):
        pipeline.generate(None, 0)
    with pytest.raises(ToprovarError, match="has no variant fast; it has dense, planned"):
        pipeline.generate("red", 0, "fast")


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (np.zeros((3, 15), np.float32), r"shape \[3, 15\]; expected \[1 to 12, 16\]"),
        (np.zeros((0, 16), np.float32), r"shape \[0, 16\]"),
        (np.zeros(16, np.float32), r"shape \[16\]"),
        (np.full((3, 16), np.nan, np.float32), "non-finite"),
    ],
)
def test_text_rows_that_do_not_fit_are_refused(pipeline, rows, message):
    with pytest.raises(ToprovarError, match=f"^text rows.*{message}"):
        pipeline.generate(None, 0, text_rows=rows)
    with pytest.raises(ToprovarError, match=f"^negative text rows.*{message}"):
        pipeline.generate("red", 0, negative_rows=rows)


def test_a_negative_prompt_changes_the_picture(pipeline):
    plain = pipeline.generate("red apple", 0)
    assert not np.array_equal(plain.image, pipeline.generate("red apple", 0, negative="green dog house").image)


def test_non_finite_codes_name_their_scale(pipeline):
    broken = open_pipeline(pipeline.bundle.folder)
    real = broken.backend.run

    def run(graph, inputs, outputs):
        real(graph, inputs, outputs)
        if "codes_next" in outputs and graph.file == "step_02.onnx":
            outputs["codes_next"][...] = np.nan

    broken.backend.run = run
    with pytest.raises(ToprovarError, match="codes of scale 2 are not finite"):
        broken.generate("red", 0)


def test_guidance_cannot_be_turned_on_in_a_bundle_without_it(tmp_path):
    model = tiny_model()
    off = Guidance(cfg=(1.0,) * len(SCHEDULE), tau=GUIDANCE.tau)
    export_bundle(model, tmp_path / "b", off, StepOptions(rows=1, text_tokens=12), schedule=SCHEDULE)
    pipeline = open_pipeline(tmp_path / "b")
    assert pipeline.generate("red", 0).image is not None
    with pytest.raises(ToprovarError, match="was exported without guidance"):
        pipeline.generate("red", 0, guidance=GUIDANCE)


@pytest.mark.parametrize("threads", [1, 1000, 10**20])
def test_no_more_threads_than_cores_are_started(tiny_bundle, threads, caplog):
    backend = OnnxRuntimeBackend(open_bundle(tiny_bundle), threads)
    assert 1 <= backend.threads <= max(threads, 1)
    if threads > 1:
        assert f"{threads} threads asked for; {backend.threads} are used" in caplog.text


# -- backends that share -----------------------------------------------------------------------------------------------


def test_two_bundles_of_one_model_load_weights_and_equal_graphs_once(tiny, tiny_bundle, tmp_path):
    export_bundle(tiny, tmp_path / "dense", GUIDANCE, StepOptions(text_tokens=12), None, SCHEDULE)
    first = OnnxRuntimeBackend(open_bundle(tiny_bundle), 1)
    second = OnnxRuntimeBackend(open_bundle(tmp_path / "dense"), 1, first)
    assert second._values is first._values
    mine, alone = Pipeline(open_bundle(tiny_bundle), first), open_pipeline(tmp_path / "dense")
    shared = Pipeline(open_bundle(tmp_path / "dense"), second)
    planned = mine.generate("red apple", 3, "planned").image
    loaded = len(first._sessions)
    assert np.array_equal(shared.generate("red apple", 3).image, alone.generate("red apple", 3).image)
    assert len(first._sessions) == loaded + 2  # planned, the last scale is pruned and the one before leaves residuals
    assert np.array_equal(mine.generate("red apple", 3, "planned").image, planned)


def test_bundles_of_other_weights_share_nothing(tiny_bundle, tmp_path):
    export_bundle(tiny_model(seed=1), tmp_path / "other", GUIDANCE, StepOptions(text_tokens=12), None, SCHEDULE)
    first = OnnxRuntimeBackend(open_bundle(tiny_bundle), 1)
    other = OnnxRuntimeBackend(open_bundle(tmp_path / "other"), 1, first)
    assert other._values is not first._values
    drawn = Pipeline(open_bundle(tmp_path / "other"), other).generate("red apple", 3).image
    assert np.array_equal(drawn, open_pipeline(tmp_path / "other").generate("red apple", 3).image)
    assert not first._sessions


def test_a_shared_graph_is_still_held_against_the_second_manifest(tiny_bundle, tmp_path):
    shutil.copytree(tiny_bundle, tmp_path / "b")
    manifest = json.loads((tmp_path / "b" / "manifest.json").read_text())
    manifest["decoder"]["outputs"]["image"]["shape"] = [1, 3, 2, 2]
    (tmp_path / "b" / "manifest.json").write_text(json.dumps(manifest))
    first = OnnxRuntimeBackend(open_bundle(tiny_bundle), 1)
    first.prepare(open_bundle(tiny_bundle).manifest.decoder)
    bundle = open_bundle(tmp_path / "b")
    with pytest.raises(ToprovarError, match="the manifest says"):
        OnnxRuntimeBackend(bundle, 1, first).prepare(bundle.manifest.decoder)
