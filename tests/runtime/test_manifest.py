"""Engines in a manifest: what names them, what they take, and where their files may lie."""

import hashlib
import json
import shutil

import pytest
from command_line import refusal

from toprovar.runtime.bundle import open_bundle
from toprovar.runtime.errors import ToprovarError
from toprovar.runtime.manifest import check_engine_file, tensor_rows

FILE = "engines/tensorrt-rtx/step_00.plan"


@pytest.fixture
def bundle(tiny_bundle, tmp_path):
    """A bundle with one engine, whose plan is a few bytes: whether it is listed is what counts here."""
    folder = shutil.copytree(tiny_bundle, tmp_path / "bundle")
    (folder / FILE).parent.mkdir(parents=True)
    (folder / FILE).write_bytes(b"a plan")
    engine = {"file": FILE, "graph": "step_00.onnx", "weights": ["head", "rope_cos[0:1]"], "key": "0" * 64}
    engine["plugin_layers"] = {"EntropyAttention": 4}
    engines = {"target": "tensorrt-rtx", "builder_version": "1.7.1.116", "compute_capabilities": ["8.9", "12.0"]}
    engines |= {"plugin_sha256": "1" * 64, "engines": [engine]}
    facts = json.loads((folder / "manifest.json").read_text())
    facts["engines"] = {"tensorrt-rtx": engines}
    facts["files"][FILE] = {"size_bytes": 6, "sha256": hashlib.sha256(b"a plan").hexdigest()}
    (folder / "manifest.json").write_text(json.dumps(facts))
    return folder


def refused(folder, path=(), value=None):
    """The message for a manifest with one value replaced, or left out for None."""
    file = folder / "manifest.json"
    before = file.read_text()
    facts = json.loads(before)
    place = facts
    for key in path[:-1]:
        place = place[key]
    if path:
        place.pop(path[-1]) if value is None else place.__setitem__(path[-1], value)
    file.write_text(json.dumps(facts))
    with pytest.raises(ToprovarError) as caught:
        open_bundle(folder)
    file.write_text(before)
    return caught.value.message


def test_engines_are_part_of_a_bundle_and_an_older_one_has_none(bundle, tiny_bundle):
    opened = open_bundle(bundle)
    engines = opened.manifest.engines["tensorrt-rtx"]
    assert engines.engine_of("step_00.onnx").weights == ("head", "rope_cos[0:1]")
    assert engines.engine_of("step_01.onnx") is None
    assert engines.plugin_layers == {"EntropyAttention": 4}
    assert opened.size_bytes == sum(path.stat().st_size for path in bundle.rglob("*") if path.is_file())
    facts = json.loads((tiny_bundle / "manifest.json").read_text())
    facts.pop("engines", None)
    assert open_bundle(tiny_bundle).manifest.engines == {}


def test_graphs_are_all_onnx_files_in_the_order_they_run(tiny_bundle):
    manifest = open_bundle(tiny_bundle).manifest
    assert set(manifest.graphs) == {name for name in manifest.files if name.endswith(".onnx")}
    assert list(manifest.graphs)[:3] == ["text_encoder.onnx", "prompt.onnx", "step_00.onnx"]
    assert list(manifest.graphs)[-1] == "decoder.onnx"


def test_a_missing_short_or_changed_engine_is_caught_when_the_bundle_opens(bundle):
    path = bundle / FILE
    path.write_bytes(b"b plan")
    assert f"{path} was changed" in refused(bundle)
    path.write_bytes(b"a")
    assert f"{path} is cut short: 1 bytes, 6 expected" in refused(bundle)
    path.unlink()
    assert f"lacks {FILE}" in refused(bundle)
    with pytest.raises(ToprovarError) as caught:
        open_bundle(bundle)
    assert caught.value.hint.endswith(f"build it again:  toprovar-export rebuild {bundle} --target tensorrt-rtx")
    assert f"lacks {FILE}" in refusal("inspect", bundle)


SET = ("engines", "tensorrt-rtx")
ENGINE = (*SET, "engines", 0)


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (("files", FILE), None, "has no entry under files"),
        ((*SET, "target"), "tensorrt", "holds engines of target tensorrt"),
        ((*SET, "target"), "tensorflow", "'tensorrt' or 'tensorrt-rtx'"),
        ((*SET, "builder_version"), "new", "builder_version"),
        ((*SET, "compute_capabilities"), ["sm_89"], "compute_capabilities"),
        ((*SET, "compute_capabilities"), [], "compute_capabilities"),
        ((*SET, "plugin_sha256"), None, "names no plugin library"),
        ((*ENGINE, "graph"), "step_77.onnx", "no graph of this bundle"),
        ((*ENGINE, "file"), "step_00.onnx", "no file of engines"),
        ((*ENGINE, "file"), "engines/tensorrt/../../x.plan", "no file of engines"),
        ((*ENGINE, "file"), "engines/tensorrt/step_00.plan", "has no entry under files"),
        ((*ENGINE, "weights"), ["head", "head"], "named twice"),
        ((*ENGINE, "weights"), ["head[3:3]"], "holds no rows"),
        ((*ENGINE, "weights"), ["Head[-3:3]"], "'Head[-3:3]' names no tensor of the weights file; expected NAME"),
        ((*ENGINE, "weights"), ["head", "no.such"], "takes no.such as a weight; "),
        ((*ENGINE, "weights"), ["rope_cos[0:99999]"], "rows 0 to 99999 of rope_cos are asked for; it is ["),
        ((*SET, "builder_version"), "1." + "9" * 5000, "builder_version"),
        ((*ENGINE, "weights"), ["pooled_text"], "as weight and as input"),
        ((*ENGINE, "plugin_layers"), {"EntropyAttention": 0}, "plugin_layers"),
        ((*ENGINE, "plugin_layers"), {"EntropyAttention": 10**30}, "plugin_layers"),
        ((*ENGINE, "key"), "12", "key"),
        ((*ENGINE, "speed"), 3, "speed"),
    ],
)
def test_engines_that_contradict_the_bundle_are_refused(bundle, path, value, message):
    assert message in refused(bundle, path, value)


@pytest.mark.parametrize(
    "name",
    ["engines/tensorrt/a/b.plan", "engines/cuda/b.plan", "engines//b.plan", "/engines/tensorrt/b.plan", "engines"],
)
def test_only_files_two_folders_deep_are_files_of_engines(name):
    with pytest.raises(ValueError, match="no file of engines"):
        check_engine_file(name)


def test_a_weight_input_is_a_tensor_or_rows_of_one():
    assert tensor_rows("layers.0.qkv") == ("layers.0.qkv", None)
    assert tensor_rows("rope_cos[5:14]") == ("rope_cos", (5, 14))
    for name in ["", "a[", "a[1]", "a[5:5]", "a[05:6]", "[0:1]", "a[0:1][0:1]"]:
        with pytest.raises(ValueError, match=r"rows|tensor"):
            tensor_rows(name)
