"""The program that measures a GPU path: its stages on the CPU with a small model, and what a failing stage leaves."""

import json
import subprocess
import sys

import numpy as np
import pytest

from toprovar.runtime.plan import COUNT_GRID
from toprovar.tools.gpu_check import __main__ as program
from toprovar.tools.gpu_check import stages
from toprovar.tools.gpu_check.models import CONFIGS, pruning_plan, random_model
from toprovar.tools.gpu_check.stages import STAGES, Context
from toprovar.tools.gpu_check.timing import summary


@pytest.fixture(scope="module")
def context(tmp_path_factory):
    return Context(tmp_path_factory.mktemp("check"), "cpu", "tiny", runs=1, seeds=1)


@pytest.fixture(scope="module", autouse=True)
def tiny_config():
    """A model of seconds."""
    from dataclasses import replace

    from toprovar.tools.gpu_check import models

    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(
            CONFIGS, "tiny", replace(CONFIGS["small"], width=64, ffn_width=128, heads=2, bits=8, pool_heads=2)
        )
        patch.setitem(models.BUDGETS, "tiny", "0.06M")
        yield


def test_the_plan_is_one_that_holds_for_the_real_model():
    from toprovar.exporter.model import published_without_weights

    model = published_without_weights("infinity-2b")
    plan = pruning_plan(model.backbone, model.schedule)
    plan.check()
    assert sorted(plan.keep) == [9, 10, 11, 12]
    for counts in plan.keep.values():
        assert all(count % COUNT_GRID == 0 for count in counts)
        assert len(set(counts)) == 2


def test_random_models_repeat_and_have_no_uninitialised_weight():
    first, again, other = (random_model("tiny", "cpu", seed).transformer.state_dict() for seed in (0, 0, 1))
    assert all(bool(tensor.isfinite().all()) for tensor in first.values())
    assert all(bool((first[name] == again[name]).all()) for name in first)
    assert any(bool((first[name] != other[name]).any()) for name in first)


def test_the_small_model_is_exported_compared_and_timed(context):
    exported = STAGES["export"](context)
    assert exported["bytes"] > 0
    assert exported["export_s"] > 0
    assert STAGES["export"](context)["export_s"] == 0  # it is there
    logits = STAGES["logits-body"](context)
    assert logits["finite"]
    assert logits["forced_bits_not_taken"] == 0
    assert len(logits["scales"]) == 7
    assert all(0 < row["rms"] < 1e-4 < row["torch_rms"] for row in logits["scales"])  # float32 against bfloat16
    times = STAGES["times-body"](context)
    assert set(times["dense"]["steps"]) == {"median_ms", "p90_ms", "count", "samples_ms"}
    assert times["speedup"] > 0
    eager = STAGES["torch"](context)
    assert eager["planned"]["steps"]["count"] == 1


def test_a_comparison_that_differs_says_where_and_how_nearly(context):
    from toprovar.tools.gpu_check.parity import compare_bits, random_text

    STAGES["export"](context)
    model = random_model("tiny", "cpu")
    pipeline = stages._pipeline(context, context.work / "tiny-fp32", "body", cuda_graph=False)
    rows = random_text(model, 5, 1)
    assert compare_bits(model, pipeline, rows, 3, "dense")["equal"]
    real = pipeline.backend.run

    def run(graph, inputs, outputs):
        real(graph, inputs, outputs)
        if graph.file == "step_02.onnx":
            outputs["bits"][0] = 1 - outputs["bits"][0]

    pipeline.backend.run = run
    found = compare_bits(model, pipeline, rows, 3, "dense")
    assert not found["equal"]
    assert found["first_scale"] == 2
    assert found["bits_different"][2] == 8
    assert 0 < found["first_scale_largest_distance_from_a_tie"] <= 1


def test_a_failing_stage_is_recorded_and_the_next_one_runs(tmp_path):
    out = tmp_path / "found" / "check.json"
    words = ["--device", "cpu", "--size", "small", "--work", str(tmp_path / "work"), "--out", str(out)]
    code = program.main([*words, "--stages", "times-body,environment"])  # no bundle was exported
    results = json.loads(out.read_text())["stages"]
    assert code == 1
    assert results["times-body"]["status"].startswith("failed: ToprovarError")
    assert results["times-body"]["exit_code"] == 1
    assert "Traceback" in results["times-body"]["traceback"]
    assert results["environment"]["status"] == "done"
    assert results["environment"]["packages"]["numpy"] == np.__version__


def test_a_stage_that_takes_too_long_is_stopped_and_without_time_none_starts(tmp_path):
    words = ["--device", "cpu", "--work", str(tmp_path), "--out", str(tmp_path / "x.json"), "--stages", "environment"]
    program.main([*words, "--stage-s", "0.01"])
    assert "stopped after" in json.loads((tmp_path / "x.json").read_text())["stages"]["environment"]["status"]
    program.main([*words, "--budget-s", "1"])
    assert "no time" in json.loads((tmp_path / "x.json").read_text())["stages"]["environment"]["status"]


def test_an_unknown_stage_is_refused(capsys):
    with pytest.raises(SystemExit):
        program.main(["--stages", "everything"])
    assert "unknown stage everything" in capsys.readouterr().err


def test_a_summary_takes_the_nearest_rank():
    assert summary([3.0, 1.0, 2.0])["median_ms"] == 2
    assert summary([float(i) for i in range(1, 21)])["p90_ms"] == 18
    assert summary([5.0])["p90_ms"] == 5


BARE_MACHINE = """
import runpy, sys
for name in ("torch", "onnx", "onnx_ir", "onnxruntime"):
    sys.modules[name] = None
runpy.run_module("toprovar.tools." + sys.argv[1], run_name="__main__", alter_sys=True)
"""


@pytest.mark.parametrize("module", ["gpu_check", "operator_bench"])
def test_help_works_and_a_run_says_what_is_missing_on_a_bare_machine(module, tmp_path):
    command = [sys.executable, "-c", BARE_MACHINE.replace("sys.argv[1]", repr(module))]
    told = subprocess.run([*command, "--help"], capture_output=True, text=True, check=True, cwd=tmp_path)
    assert "usage:" in told.stdout
    told = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path)
    assert told.returncode == 3
    assert told.stderr.startswith("error: ")
    assert "torch" in told.stderr
    assert "Traceback" not in told.stderr
    assert list(tmp_path.iterdir()) == []


def test_a_machine_without_a_gpu_and_places_that_cannot_be_written_are_told(tmp_path, monkeypatch, capsys):
    import onnxruntime

    monkeypatch.setattr(onnxruntime, "get_available_providers", lambda: ["CPUExecutionProvider"])
    places = ["--out", str(tmp_path / "g.json"), "--work", str(tmp_path / "work")]
    assert program.main(places) == 3
    assert "has no CUDA provider" in capsys.readouterr().err
    assert program.main([*places, "--device", "cpu", "--out", str(tmp_path)]) == 2
    assert "is a folder; a file is expected" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []
