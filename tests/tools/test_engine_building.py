"""Engines through the command line: the same bytes as from Python, one message per fault, and what inspect tells."""

import json
import shutil

import pytest
from command_line import call, done, listing, refusal, write_model
from engine_helpers import use_fake_builder

from toprovar.exporter.engines.engine_set import EngineRequest, build_engines
from toprovar.runtime.bundle import open_bundle
from toprovar.tools import cli

RTX = ("--target", "tensorrt-rtx")
BODIES = "--allow-function-body"


@pytest.fixture
def bundle(tiny_bundle, tmp_path, monkeypatch):
    use_fake_builder(monkeypatch)
    return shutil.copytree(tiny_bundle, tmp_path / "bundle")


@pytest.fixture
def model(tiny, tmp_path, monkeypatch):
    use_fake_builder(monkeypatch)
    return write_model(tiny, tmp_path / "model")


def test_rebuild_gives_the_bytes_of_the_api(bundle, tiny_bundle, tmp_path):
    other = shutil.copytree(tiny_bundle, tmp_path / "other")
    result = done("rebuild", bundle, *RTX, "--compute-capability", "sm89,120", BODIES, "--json")
    build_engines(other, EngineRequest(("tensorrt-rtx",), ("8.9", "12.0"), allow_function_body=True))
    for name in listing(other):
        if (other / name).is_file():
            assert (bundle / name).read_bytes() == (other / name).read_bytes(), name
    facts = json.loads(result.stdout)
    assert facts["engines"] == [{"target": "tensorrt-rtx", "built": 11, "reused": 0, "plan_bytes": 11 * 64}]
    again = done("rebuild", bundle, BODIES)  # what it has, for the GPUs it had
    assert "11 tensorrt-rtx engines of 0.0 MB, 11 of them built before" in again.stderr
    assert "next: toprovar inspect" in again.stderr


def test_relative_paths_are_those_of_the_caller(bundle, monkeypatch):
    monkeypatch.chdir(bundle.parent)
    done("rebuild", bundle.name, *RTX, BODIES, "--scale", "5")
    assert len(open_bundle(bundle).manifest.engines["tensorrt-rtx"].engines) == 2


def test_export_builds_engines_in_bf16_unless_told_otherwise(model, tmp_path):
    result = done("export", model, *RTX, BODIES, "-o", tmp_path / "b", "--json")
    manifest = open_bundle(tmp_path / "b").manifest
    assert manifest.compute == "bf16"
    assert list(manifest.engines) == ["tensorrt-rtx"]
    facts = json.loads(result.stdout)
    assert facts["engines"][0]["built"] == len(manifest.graphs) == facts["graphs"]
    done("export", model, "--target", "onnxruntime", "-o", tmp_path / "c")
    manifest = open_bundle(tmp_path / "c").manifest
    assert (manifest.compute, manifest.engines) == ("fp32", {})


def test_an_export_that_is_repeated_builds_nothing_anew(model, tmp_path):
    arguments = ("export", model, *RTX, BODIES, "--dtype", "fp16", "-o", tmp_path / "b", "--json")
    first = json.loads(done(*arguments).stdout)
    before = (tmp_path / "b" / "manifest.json").read_bytes()
    second = json.loads(done(*arguments).stdout)
    assert open_bundle(tmp_path / "b").manifest.compute == "fp16"
    assert second["engines"][0]["reused"] == first["engines"][0]["built"] > 0
    assert (tmp_path / "b" / "manifest.json").read_bytes() == before


def test_a_dry_run_bills_the_engines_and_builds_none(model, tmp_path):
    facts = json.loads(done("export", model, *RTX, "-o", tmp_path / "b", "--dry-run", "--json").stdout)
    engines = facts["engines"][0]
    assert engines["target"] == "tensorrt-rtx"
    assert engines["engines"] == facts["graphs"]
    assert engines["graph_bytes"] == facts["graph_bytes"]
    assert 2e8 < engines["peak_build_bytes"] < 2e9
    table = done("export", model, *RTX, "-o", tmp_path / "b", "--dry-run").stdout
    assert "tensorrt-rtx engines" in table
    assert not (tmp_path / "b").exists()


def test_inspect_explains_engine_by_engine(bundle):
    assert json.loads(done("inspect", bundle, "--json").stdout)["engines"] == {}
    done("rebuild", bundle, *RTX, "--scale", "5", BODIES)
    facts = json.loads(done("inspect", bundle, "--json").stdout)["engines"]["tensorrt-rtx"]
    assert facts["builder_version"] == "1.7.1.116"
    assert facts["compute_capabilities"] == ["8.0", "8.6", "8.9", "12.0"]
    dense, planned = facts["engines"]
    assert dense["file"] == "engines/tensorrt-rtx/step_05.plan"
    assert (dense["scale"], dense["variants"], dense["tokens"], dense["kept"]) == (5, ["dense"], 400, [400] * 4)
    assert (planned["variants"], planned["kept"]) == (["planned"], [400, 400, 192, 128])
    assert planned["size_bytes"] == 64
    assert "step_04.onnx" in facts["graphs_without_engine"]
    table = done("inspect", bundle).stdout
    assert "engines/tensorrt-rtx, built by 1.7.1.116 for 8.0, 8.6, 8.9, 12.0" in table
    assert "step_05_planned.plan" in table
    assert "without an engine: text_encoder.onnx" in table


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            ("--target", "tensort"),
            "--target 'tensort' is unknown; expected onnxruntime, tensorrt, tensorrt-rtx hint: did",
        ),
        (("--target", "TensorRT-RTX"), "did you mean tensorrt-rtx?"),
        ((*RTX, "--compute-capability", "90"), "TensorRT-RTX has no Hopper target"),
        (("--target", "tensorrt", "--compute-capability", "89"), "TensorRT builds for the GPU at hand"),
        (("--compute-capability", "89"), "has no engines to rebuild hint: name what to build"),
        ((), "has no engines to rebuild"),
        (("--target", "onnxruntime"), "--target onnxruntime has no engines"),
        ((*RTX, BODIES, "--scale", "9"), "the bundle has steps of scales 0 to 5"),
    ],
)
def test_wrong_requests_are_one_message(bundle, options, message):
    assert message in refusal("rebuild", bundle, *options)
    assert not (bundle / "engines").exists()


def test_export_refuses_before_it_loads_a_model(model, tmp_path):
    assert "did you mean tensorrt?" in refusal("export", model, "--target", "tensorr", "-o", tmp_path / "b")
    assert "--graphs-only writes no weights" in refusal("export", model, *RTX, "--graphs-only", "-o", tmp_path / "b")
    assert "for --target tensorrt-rtx" in refusal("export", model, "--compute-capability", "89", "-o", tmp_path / "b")


def test_what_the_machine_lacks_ends_with_three(bundle, monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("TOPROVAR_PLUGINS", raising=False)
    told = refusal("rebuild", bundle, *RTX, code=3)
    assert "the operator library is missing" in told
    assert "--allow-function-body" in told
    monkeypatch.undo()
    monkeypatch.setattr("toprovar.exporter.engines.versions.MODULES", {"tensorrt-rtx": ("no_such_module",)})
    assert "pip install 'toprovar[tensorrt-rtx]'" in refusal("rebuild", bundle, *RTX, BODIES, code=3)


def test_a_crash_ends_with_three_and_the_same_command_goes_on(bundle, monkeypatch):
    use_fake_builder(monkeypatch, "abort step_02.onnx")
    result = call("rebuild", bundle, *RTX, BODIES)
    assert result.exit_code == 3
    assert "SIGABRT at step_02.onnx" in result.stderr
    use_fake_builder(monkeypatch)
    assert "4 of them built before" in done("rebuild", bundle, *RTX, BODIES).stderr


def test_the_build_step_has_its_own_program(bundle, monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["toprovar-export", "rebuild", str(bundle), *RTX, BODIES, "--scale", "5"])
    with pytest.raises(SystemExit) as ended:
        cli.export_main()
    assert ended.value.code == 0
    assert "tensorrt-rtx" in open_bundle(bundle).manifest.engines
    monkeypatch.setattr("sys.argv", ["toprovar-export", "rebuild", "--help"])
    with pytest.raises(SystemExit):
        cli.export_main()
    assert "rebuild" in capsys.readouterr().out
