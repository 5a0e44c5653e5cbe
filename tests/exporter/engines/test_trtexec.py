"""The page for trtexec follows the signatures, and its files hold the bundle's own bytes. trtexec itself is not run."""

import re
import subprocess
import sys

import numpy as np
import onnx
import pytest
from conftest import GUIDANCE
from plans import DECIDED, plan_of
from safetensors.numpy import load_file

from toprovar.exporter.bundle_writer import export_bundle
from toprovar.exporter.engines.trtexec import LOAD_FILE, trtexec_page
from toprovar.exporter.engines.trtexec_files import raw_weight, write_trtexec_files
from toprovar.exporter.planned.step import StepOptions
from toprovar.runtime.bundle import open_bundle
from toprovar.runtime.errors import ToprovarError
from toprovar.runtime.manifest import Engine, EngineSet


def with_engine(manifest):
    engine = Engine(file="engines/tensorrt/prompt.plan", graph="prompt.onnx", weights=("head",), key="0" * 64)
    engines = EngineSet(target="tensorrt", builder_version="11.1.0", compute_capabilities=("9.0",), engines=(engine,))
    return manifest.model_copy(update={"engines": {"tensorrt": engines}})


def test_every_graph_has_its_commands_and_a_built_engine_is_loaded(tiny_bundle):
    manifest = open_bundle(tiny_bundle).manifest
    page = trtexec_page(with_engine(manifest))
    assert re.findall(r"^## (\S+)$", page, re.MULTILINE) == list(manifest.graphs)
    assert "they were not executed" in page
    assert page.count("--loadEngine=engines/tensorrt/prompt.plan") == 2
    assert '--loadEngine="$FILES/step_05/step_05.plan"' in page
    assert page.count("--onnx=") == page.count("--saveEngine=") == len(manifest.graphs)
    assert page.count("--noTF32") == len(manifest.graphs)  # an fp32 bundle rounds nowhere
    assert "planned, scale 5: 400 tokens" in page
    assert "--minShapes" not in page


def test_open_axes_have_a_profile(tiny, tmp_path):
    plan = plan_of(tiny, **DECIDED["energy mass .3, guidance goes on"])
    export_bundle(tiny, tmp_path / "b", GUIDANCE, StepOptions(text_tokens=12, compute="bf16"), plan)
    manifest = open_bundle(tmp_path / "b").manifest
    name, graph = next(
        (file, graph) for file, graph in manifest.graphs.items() if any(f.is_open for f in graph.inputs.values())
    )
    section = trtexec_page(manifest).split(f"## {name}\n")[1].split("\n## ")[0]
    shape = graph.inputs["k_past_00"].shape
    assert f"--maxShapes=k_past_00:{'x'.join(map(str, shape))}," in section
    assert f"--minShapes=k_past_00:0x{'x'.join(map(str, shape[1:]))}," in section
    assert "--noTF32" not in trtexec_page(manifest).split("## decoder.onnx")[1]


@pytest.mark.parametrize("name", ["step_03.onnx", "step_05_planned.onnx"])
def test_files_hold_the_weights_and_an_empty_cache(tiny_bundle, tmp_path, name):
    bundle = open_bundle(tiny_bundle)
    written = write_trtexec_files(bundle, name, tmp_path / "files")
    assert sorted(path.name for path in written) == sorted(path.name for path in (tmp_path / "files").iterdir())
    pairs = dict(pair.rsplit(":", 1) for pair in (tmp_path / "files" / LOAD_FILE).read_text().split(","))
    model = onnx.load(tmp_path / "files" / name)
    inputs = {value.name for value in model.graph.input}
    assert set(pairs) == {
        item for item in inputs if item not in bundle.manifest.graphs[name].inputs or "_past_" in item
    }
    weights = load_file(tiny_bundle / "weights.safetensors")
    for item, path in pairs.items():
        raw = np.fromfile(path, np.uint8)
        assert raw.any() == ("_past_" not in item)
        if item in weights:
            np.testing.assert_array_equal(raw, weights[item].reshape(-1).view(np.uint8))


def test_rows_of_a_weight_are_those_rows(tiny_bundle):
    weights = load_file(tiny_bundle / "weights.safetensors")
    bundle = open_bundle(tiny_bundle)
    assert raw_weight(bundle, "rope_cos[5:14]") == weights["rope_cos"][5:14].tobytes()
    assert raw_weight(bundle, "head") == weights["head"].tobytes()


def test_wrong_graphs_and_places_are_named(tiny_bundle, tmp_path):
    bundle = open_bundle(tiny_bundle)
    with pytest.raises(ToprovarError, match=r"has no graph step_77\.onnx"):
        write_trtexec_files(bundle, "step_77.onnx", tmp_path)
    with pytest.raises(ToprovarError, match="comma or colon"):
        write_trtexec_files(bundle, "step_00.onnx", tmp_path / "a,b")


def test_the_command_of_the_page_runs(tiny_bundle, tmp_path):
    command = [sys.executable, "-m", "toprovar.exporter.engines.trtexec_files", str(tiny_bundle)]
    done = subprocess.run([*command, "step_01.onnx", str(tmp_path / "f")], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("wrote ")
    failed = subprocess.run([*command, "step_x.onnx", str(tmp_path / "g")], capture_output=True, text=True, check=False)
    assert failed.returncode == 2
    assert failed.stderr.startswith("error: ")
    assert subprocess.run(command, capture_output=True, check=False).returncode == 2
