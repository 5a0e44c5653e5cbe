"""Bundles: deterministic, complete or absent, small, in every number format the CPU runs."""

import json
import resource
import shutil
import subprocess
import sys

import numpy as np
import onnx
import pytest
from conftest import GUIDANCE, SCHEDULE, pruning_plan, tiny_model
from helpers import open_pipeline
from made_statistics import statistics_of
from plans import full_size_plan

from toprovar.calibrate.fitting import fit_plan
from toprovar.calibrate.methods.settings import MethodSettings
from toprovar.exporter.bundle_writer import BundleGraphs, bill, export_bundle, export_graphs
from toprovar.exporter.graph_builder import AS_PLUGINS
from toprovar.exporter.model import published_without_weights
from toprovar.exporter.planned.step import StepOptions
from toprovar.exporter.schedules import schedule_for
from toprovar.runtime.backends.onnxruntime import OnnxRuntimeBackend
from toprovar.runtime.bundle import open_bundle
from toprovar.runtime.errors import EXIT_ENVIRONMENT, ToprovarError
from toprovar.runtime.plan import Backbone, Plan, dense_plan, save_plan

OPTIONS = StepOptions(text_tokens=12)


def contents(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_two_exports_give_the_same_bytes(tiny, tiny_bundle, tmp_path):
    export_bundle(tiny, tmp_path / "again", GUIDANCE, OPTIONS, pruning_plan(tiny))
    assert contents(tmp_path / "again") == contents(tiny_bundle)


def test_graphs_are_valid_and_hold_no_weights(tiny_bundle):
    for path in sorted(tiny_bundle.glob("*.onnx")):
        onnx.checker.check_model(str(path), full_check=True)
        model = onnx.load(path, load_external_data=False)
        inline = [t for t in model.graph.initializer if t.data_location != onnx.TensorProto.EXTERNAL]
        assert sum(len(t.raw_data) for t in inline) < 100_000, path.name
        for node in model.graph.node:
            if node.domain == "toprovar":
                found = {a.name: a.s for a in node.attribute if a.name.startswith("plugin")}
                asked = {"plugin_namespace": b"toprovar", "plugin_version": b"1"}
                assert found == (asked if node.op_type in AS_PLUGINS else {})


def test_steps_that_the_plan_leaves_alone_are_shared(tiny_bundle):
    manifest = open_bundle(tiny_bundle).manifest
    dense, planned = ([step.graph.file for step in manifest.variants[name]] for name in ("dense", "planned"))
    assert planned[:4] == dense[:4]
    assert planned[4:] == ["step_04_planned.onnx", "step_05_planned.onnx"]


def test_half_precision_stays_close_to_fp32(tiny, tmp_path):
    seen = {}
    for compute in ("fp32", "fp16"):
        options = StepOptions(text_tokens=12, compute=compute, watched=("logits",))
        export_bundle(tiny, tmp_path / compute, GUIDANCE, options, schedule=SCHEDULE)
        logits = []
        # forced bits (noise below 0 draws a one): both formats see the same inputs at every scale
        open_pipeline(tmp_path / compute).generate(
            "red apple",
            1,
            "dense",
            noise=lambda scale, tokens, bits: np.where(np.indices((tokens, bits)).sum(0) % 2, -1, 2).astype(np.float32),
            on_watch=lambda name, scale, array, into=logits: into.append(array.copy()),
        )
        seen[compute] = logits
    assert len(seen["fp16"]) == len(SCHEDULE)
    for full, half in zip(seen["fp32"], seen["fp16"], strict=True):
        # fp16 keeps 11 bits; 4 layers of products of width 32 add up to about 1 % of the largest logit
        assert np.abs(full - half).max() <= 0.02 * np.abs(full).max()
        assert np.abs(full - half).max() > 0


def test_bf16_bundles_are_written_and_refused_by_the_cpu_backend(tiny, tmp_path):
    options = StepOptions(text_tokens=12, compute="bf16")
    export_bundle(tiny, tmp_path / "b", GUIDANCE, options, pruning_plan(tiny))
    bundle = open_bundle(tmp_path / "b")
    assert bundle.manifest.variants["planned"][5].graph.inputs["k_past_00"].dtype == "BF16"
    with pytest.raises(ToprovarError, match="bf16") as caught:
        OnnxRuntimeBackend(bundle)
    assert caught.value.exit_code == EXIT_ENVIRONMENT
    assert "--dtype fp32" in caught.value.hint


def test_patches_of_two_by_two_export_and_run(tmp_path):
    model = tiny_model(3, bits=8, patchify=True)
    export_bundle(model, tmp_path / "b", GUIDANCE, OPTIONS, pruning_plan(model))
    pipeline = open_pipeline(tmp_path / "b")
    assert pipeline.manifest.code_shape == (2, 40, 40)
    assert pipeline.generate("red apple", 1, "planned").image.shape == (80, 80, 3)


def test_a_plan_for_another_model_writes_nothing(tiny, tmp_path):
    other = Backbone(**{**tiny.backbone.model_dump(), "layers": 5})
    plan = Plan(backbone=other, schedule=SCHEDULE, method="toprovar")
    with pytest.raises(ToprovarError, match="layers 5 in the plan, 4 in the checkpoint"):
        export_bundle(tiny, tmp_path / "b", GUIDANCE, OPTIONS, plan)
    assert not list(tmp_path.iterdir())


def test_a_failure_in_the_middle_leaves_the_old_bundle(tiny, tiny_bundle, tmp_path):
    shutil.copytree(tiny_bundle, tmp_path / "b")

    def stop(what, done, total):
        if done == 5:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        export_bundle(tiny, tmp_path / "b", GUIDANCE, OPTIONS, schedule=SCHEDULE, on_progress=stop)
    assert [path.name for path in tmp_path.iterdir()] == ["b"]
    assert contents(tmp_path / "b") == contents(tiny_bundle)


def test_a_folder_that_is_no_bundle_is_left_alone(tiny, tmp_path):
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "thesis.tex").write_text("years of work")
    with pytest.raises(ToprovarError, match="not empty and no bundle"):
        export_bundle(tiny, tmp_path / "b", GUIDANCE, OPTIONS, schedule=SCHEDULE)
    assert (tmp_path / "b" / "thesis.tex").read_text() == "years of work"


def test_an_existing_bundle_needs_overwrite(tiny, tiny_bundle, tmp_path):
    shutil.copytree(tiny_bundle, tmp_path / "b")
    with pytest.raises(ToprovarError, match="already holds a bundle"):
        export_bundle(tiny, tmp_path / "b", GUIDANCE, OPTIONS, schedule=SCHEDULE, overwrite=False)
    export_bundle(tiny, tmp_path / "b", GUIDANCE, OPTIONS, schedule=SCHEDULE)
    assert list(open_bundle(tmp_path / "b").manifest.variants) == ["dense"]


def test_a_full_size_model_is_billed_without_weights():
    model = published_without_weights("infinity-2b")
    facts = bill(BundleGraphs(model, dense_plan(model.backbone, schedule_for(1.0, "1M")), StepOptions()))
    assert facts.graphs == 15
    # transformer 2.2 G parameters and decoder 65 M, fp32
    assert facts.weights_bytes == pytest.approx(4 * (2_204_564_032 + 65.1e6), rel=0.01)
    assert facts.cache_bytes == 2 * 32 * 2 * 2048 * 4 * (10521 - 4096)


def test_a_full_size_model_exports_its_graphs_in_little_time_and_memory(tmp_path):
    """13 dense and 4 planned steps of 32 layers and width 2048, in a process of its own."""
    save_plan(full_size_plan(published_without_weights("infinity-2b")), tmp_path / "plan.json")
    command = [
        sys.executable, "-m", "toprovar.tools.cli", "export", "infinity-2b", "--graphs-only", "--json",
        "--plan", str(tmp_path / "plan.json"), "-o", str(tmp_path / "graphs"),
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=True)
    facts = json.loads(done.stdout)
    assert facts["graphs"] == 19
    assert facts["graph_bytes"] < 20e6
    assert resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss < 4 * 2**20  # KiB: 4 GiB
    described = json.loads((tmp_path / "graphs" / "graphs.json").read_text())
    assert described["graphs"]["step_12_planned.onnx"]["inputs"]["k_past_05"]["shape"] == [2521 + 384 + 576, 2, 16, 128]


def test_watched_graphs_export_alone_too(tiny, tmp_path):
    facts = export_graphs(BundleGraphs(tiny, pruning_plan(tiny), OPTIONS), tmp_path / "g")
    assert facts["graphs"] == len(list((tmp_path / "g").glob("*.onnx")))


def test_a_full_size_model_with_many_decisions_needs_few_graphs():
    """LD-Pruning on 2B: seven rungs at three scales, with and without unconditional rows, beside 13 dense steps."""
    model = published_without_weights("infinity-2b")
    plan = fit_plan("ld_pruning", statistics_of(), model.backbone, MethodSettings())
    graphs = BundleGraphs(model, plan, StepOptions(compute="bf16"))
    by_scale = {}
    for file, route, _ in graphs.variants()["planned"]:
        by_scale.setdefault(route.scale, set()).add(file)
    assert [len(by_scale[k]) for k in range(13)] == [1] * 10 + [14, 14, 14]
    widest = max(
        (route for _, route, _ in graphs.variants()["planned"] if route.scale == 12), key=lambda r: (r.counts, r.guided)
    )
    assert widest.open_past
    assert set(widest.past) == {6425}
    builder = graphs.step(widest)
    assert builder.signature("inputs")["k_past_31"].is_open
    assert builder.signature("inputs")["k_past_31"].shape == (6425, 2, 16, 128)
