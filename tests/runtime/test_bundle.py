"""Bundles: opened whole or refused, with the file and the value that is wrong; moved and linked ones open."""

import copy
import hashlib
import json
import os
import shutil

import numpy as np
import pytest
from command_line import done, refusal
from safetensors.numpy import load_file, save_file

from toprovar.runtime.bundle import open_bundle
from toprovar.runtime.errors import ToprovarError


@pytest.fixture
def bundle(tiny_bundle, tmp_path):
    """A bundle to damage."""
    return shutil.copytree(tiny_bundle, tmp_path / "bundle")


def manifest_of(folder):
    return json.loads((folder / "manifest.json").read_text())


def write_manifest(folder, manifest):
    """Writes a manifest whose sizes and digests are those of the files: only what was edited is wrong."""
    for name, facts in manifest["files"].items():
        if (folder / name).is_file():
            raw = (folder / name).read_bytes()
            facts |= {"size_bytes": len(raw), "sha256": hashlib.sha256(raw).hexdigest()}
    (folder / "manifest.json").write_text(json.dumps(manifest))


def refused(folder):
    with pytest.raises(ToprovarError) as caught:
        open_bundle(folder)
    assert refusal("run", folder, "--prompt", "red apple") == " ".join(
        f"error: {caught.value.message} hint: {caught.value.hint}".split()
    )
    return caught.value.message


def test_a_whole_bundle_opens_and_tells_its_digest(tiny_bundle):
    bundle = open_bundle(tiny_bundle)
    assert bundle.digest == hashlib.sha256((tiny_bundle / "manifest.json").read_bytes()).hexdigest()
    assert bundle.size_bytes == sum(path.stat().st_size for path in tiny_bundle.iterdir())
    assert set(bundle.weights()) >= {"cfg_uncond", "word_embed"}
    assert bundle.plan().method == "toprovar"


# -- files -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["weights.safetensors", "step_03.onnx", "vocabulary.json", "plan.json"])
def test_missing_short_long_and_changed_files_are_four_messages(bundle, name):
    path = bundle / name
    raw = path.read_bytes()
    path.write_bytes(raw[:-1])
    assert f"{path} is cut short: {len(raw) - 1} bytes, {len(raw)} expected" in refused(bundle)
    path.write_bytes(raw + b"\0")
    assert f"{path} is longer than it was" in refused(bundle)
    path.write_bytes(raw[:-1] + bytes([raw[-1] ^ 1]))
    assert f"{path} was changed: its sha256 differs" in refused(bundle)
    path.unlink()
    assert f"lacks {name}" in refused(bundle)
    path.mkdir()
    assert f"lacks {name}" in refused(bundle)


def test_what_is_no_bundle_is_named(tmp_path):
    assert "is missing; expected a bundle folder" in refused(tmp_path / "absent")
    assert "holds no manifest.json" in refused(tmp_path)
    (tmp_path / "graphs.json").write_text("{}")
    assert "is no bundle: it holds graphs without weights (graphs.json)" in refused(tmp_path)
    (tmp_path / "plan.json").write_text("{}")
    assert "is a file; expected a bundle folder" in refused(tmp_path / "plan.json")


def test_a_name_too_long_for_the_file_system_is_one_message():
    assert "file name too long" in refusal("run", "n" * 5000, "--prompt", "red")
    assert "file name too long" in refusal("inspect", "n" * 5000)


# -- the manifest itself -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "is empty"),
        ("{", "not valid JSON"),
        ('{"schema_version": 1, "schema_version": 1}', "stands twice"),
        ('{"schema_version": NaN}', "NaN is not a JSON number"),
        ("[" * 100_000, "not valid JSON"),
        ("[]", "manifest.json"),
        ('{"tool_version": "0"}', "has no schema_version; expected 2"),
        ('{"schema_version": 1}', "schema version 1; this toprovar reads version 2"),
    ],
)
def test_an_unreadable_manifest_says_why(bundle, text, message):
    (bundle / "manifest.json").write_text(text)
    assert message in refused(bundle)


def at(manifest, path):
    for part in path:
        manifest = manifest[part]
    return manifest


LIES = [
    (["surprise"], 1, "surprise: extra inputs are not permitted"),
    (["weights_file"], "../weights.safetensors", "is no plain file name"),
    (["prompt", "file"], "/etc/passwd", "is no plain file name"),
    (["plan_file"], "..", "is no plain file name"),
    (["plan_file"], "other.json", "other.json is used but has no entry under files"),
    (["files", "../../x"], {"size_bytes": 1, "sha256": "0" * 64}, "is no plain file name"),
    (["files", "prompt.onnx", "sha256"], "0", "should match pattern"),
    (["model", "layers"], 5, "4 layer counts"),
    (["model", "width"], 33, "width 33 over 2 heads"),
    (["model", "heads"], 4, "k_"),
    (["rows"], 1, "output pooled_text F32[2, 32]; expected 1 on axis 0"),
    (["schedule", 2], [4, 5], "16 tokens"),
    (["schedule", 2], [4, -4], "schedule.2.1"),
    (["schedule", 2], [4, 10**30], "schedule.2.1"),
    (["code_shape"], [8, 20, 21], "codes"),
    (["code_shape"], [8, 2**40, 20], "code_shape.1"),
    (["guidance", "cfg"], [2.5], "one cfg and one tau per scale"),
    (["text", "tokens"], 13, "text_rows F32[2, 12, 16]; expected F32[2, 13, 16]"),
    (["text", "encoder", "max_tokens"], 13, "max_tokens 13; expected at most 12"),
    (["text", "encoder", "graph", "outputs", "rows", "shape"], [1, 12, 8], "rows F32[1, 12, 8]"),
    (["decoder", "outputs", "image", "shape"], [1, 3, 10**9, 10**9], "not plausible"),
    (["decoder", "outputs", "image", "shape"], [1, 4, 40, 40], "expected image F32[1, 3, H, W]"),
    (["decoder", "inputs", "codes", "shape"], [1, 8, 20, 19], "decoder.onnx input codes"),
    (["variants", "dense"], [], "does not run scales 0, 1, 2"),
    (["variants", "dense", 3, "scale"], 4, "does not run scales 0, 1, 2"),
    (["variants", "dense", 3, "tokens"], 63, "63 tokens"),
    (["variants", "dense", 3, "counts"], [64, 64, 64], "3 layer counts"),
    (["variants", "dense", 3, "counts"], [64, 64, 64, 65], "no count above"),
    (["variants", "dense", 3, "counts"], [64, 64, 64, 32], "k_new_03 F32[64, 2, 2, 16]; expected F32[32, 2, 2, 16]"),
    (["variants", "dense", 3, "graph", "inputs", "k_past_00", "shape"], [2**20, 2, 2, 16], "k_past_00"),
    (["variants", "dense", 3, "graph", "inputs", "k_past_77"], {"dtype": "F32", "shape": [1]}, "nothing provides"),
    (["variants", "dense", 3, "graph", "inputs", "k_past_xx"], {"dtype": "F32", "shape": [1]}, "nothing provides"),
    (["variants", "dense", 3, "graph", "outputs", "extra"], {"dtype": "F32", "shape": [1]}, "nothing takes"),
    (["variants", "dense", 3, "graph", "outputs", "bits", "dtype"], "F16", "bits F16"),
    (["variants", "dense", 3, "graph", "outputs", "codes_next", "shape"], [1, 8, 20], "codes_next"),
    (["variants", "planned", 5, "gates", "9"], "kept_01_192", "gate kept_01_192 for layer 9"),
    (["variants", "planned", 5, "gates", "2"], "nothing", "gate nothing for layer 2"),
    (["variants", "planned", 2, "graph", "outputs", "watch_x"], {"dtype": "F32", "shape": [1]}, "two different"),
]


@pytest.mark.parametrize(("path", "value", "message"), LIES)
def test_a_manifest_that_contradicts_itself_is_refused_before_anything_is_loaded(bundle, path, value, message):
    manifest = manifest_of(bundle)
    at(manifest, path[:-1])[path[-1]] = value
    (bundle / "manifest.json").write_text(json.dumps(manifest))
    assert message in refused(bundle)


@pytest.mark.parametrize("output", ["bits", "codes_next", "k_new_02", "v_new_00"])
def test_an_output_that_later_steps_need_may_not_be_left_out(bundle, output):
    manifest = manifest_of(bundle)
    del manifest["variants"]["dense"][3]["graph"]["outputs"][output]
    write_manifest(bundle, manifest)
    assert f"no output {output}, which later steps need" in refused(bundle)


def test_a_bundle_without_the_dense_variant_is_refused(bundle):
    manifest = manifest_of(bundle)
    del manifest["variants"]["dense"]
    write_manifest(bundle, manifest)
    assert "needs the variant dense" in refused(bundle)


# -- graphs and weights that are not what the manifest says ------------------------------------------------------------


def self_consistent_lies(manifest):
    """Manifests that agree with themselves and not with their graphs: pointers bound by them would be wrong."""
    smaller = copy.deepcopy(manifest)
    smaller["decoder"]["outputs"]["image"]["shape"] = [1, 3, 2, 2]
    yield (
        "decoder.onnx has output image tensor(float)[1, 3, 40, 40]; the manifest says tensor(float)[1, 3, 2, 2]",
        smaller,
    )
    watched = copy.deepcopy(manifest)
    for variant in ("dense", "planned"):
        watched["variants"][variant][2]["graph"]["outputs"]["watch_x"] = {"dtype": "F32", "shape": [1]}
    yield "step_02.onnx has output watch_x no such tensor; the manifest says tensor(float)[1]", watched
    cached = copy.deepcopy(manifest)
    cached["prompt"]["outputs"]["pooled_text"]["shape"] = [2, 31]
    for steps in cached["variants"].values():
        for step in steps:
            if "pooled_text" in step["graph"]["inputs"]:
                step["graph"]["inputs"]["pooled_text"]["shape"] = [2, 31]
    yield "prompt.onnx has output pooled_text tensor(float)[2, 32]", cached
    narrow = copy.deepcopy(manifest)
    narrow["code_shape"] = [8, 1, 1]
    text = json.dumps(narrow).replace("[1, 8, 20, 20]", "[1, 8, 1, 1]")
    yield "codes tensor(float)[1, 8, 20, 20]; the manifest says tensor(float)[1, 8, 1, 1]", json.loads(text)


@pytest.mark.parametrize("number", range(4))
def test_a_graph_with_other_shapes_than_its_manifest_never_gets_a_pointer(bundle, number):
    message, manifest = list(self_consistent_lies(manifest_of(bundle)))[number]
    write_manifest(bundle, manifest)
    open_bundle(bundle)
    assert message in refusal("run", bundle, "--prompt", "red", "--plan", "dense", "-o", bundle / "x.png")
    assert not (bundle / "x.png").exists()


def test_a_graph_file_that_is_none_is_named(bundle):
    (bundle / "step_02.onnx").write_bytes(b"not a graph")
    write_manifest(bundle, manifest_of(bundle))
    assert "step_02.onnx cannot be loaded" in refusal("run", bundle, "-p", "red", "-o", bundle / "x.png")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda w: w.pop("cfg_uncond"), "tensor cfg_uncond is missing"),
        (
            lambda w: w.update(cfg_uncond=np.zeros((3, 5), np.float32)),
            "cfg_uncond is float32[3, 5]; expected [rows, 16]",
        ),
    ],
)
def test_the_unconditional_table_is_checked(bundle, change, message):
    weights = dict(load_file(bundle / "weights.safetensors"))
    change(weights)
    save_file(weights, bundle / "weights.safetensors")
    write_manifest(bundle, manifest_of(bundle))
    assert message in refusal("run", bundle, "-p", "red", "-o", bundle / "x.png")


def test_weights_that_are_no_safetensors_are_named(bundle):
    (bundle / "weights.safetensors").write_bytes(b"\xff" * 100)
    write_manifest(bundle, manifest_of(bundle))
    assert "is not readable as safetensors" in refusal("run", bundle, "-p", "red", "-o", bundle / "x.png")


@pytest.mark.parametrize(
    ("document", "message"),
    [
        ("[]", "found schema_version list"),
        ('{"words": []}', "found schema_version None"),
        ('{"schema_version": 1, "words": "red"}', "no list of words"),
        ('{"schema_version": 1, "words": ["red"]}', "vocabulary starts with"),
        ('{"schema_version": 1, "words": ["<pad>", "<unk>", "<end>", "red", "red"]}', "'red' twice"),
        ("\x00", "not valid JSON"),
    ],
)
def test_a_damaged_vocabulary_is_named(bundle, document, message):
    (bundle / "vocabulary.json").write_text(document)
    write_manifest(bundle, manifest_of(bundle))
    said = refusal("run", bundle, "-p", "red", "-o", bundle / "x.png")
    assert message in said
    assert "vocabulary.json" in said


def test_a_word_beyond_the_word_table_is_an_error_and_no_crash(bundle):
    words = ["<pad>", "<unk>", "<end>", *(f"w{i}" for i in range(500)), "red"]
    (bundle / "vocabulary.json").write_text(json.dumps({"schema_version": 1, "words": words}))
    write_manifest(bundle, manifest_of(bundle))
    assert "text_encoder.onnx failed" in refusal("run", bundle, "-p", "red", "-o", bundle / "x.png")


def test_a_plan_of_another_model_inside_a_bundle_is_refused(bundle):
    plan = json.loads((bundle / "plan.json").read_text())
    plan["backbone"]["heads"] = 4
    (bundle / "plan.json").write_text(json.dumps(plan))
    write_manifest(bundle, manifest_of(bundle))
    assert "another model: heads" in refusal("inspect", bundle)


# -- bundles that are where they are -----------------------------------------------------------------------------------


def test_linked_read_only_and_oddly_named_bundles_run(bundle, tmp_path):
    moved = tmp_path / "with space" / "größe 图 [red]"
    moved.parent.mkdir()
    bundle.rename(moved)
    link = tmp_path / "link"
    link.symlink_to(moved)
    for path in moved.iterdir():
        path.chmod(0o444)
    moved.chmod(0o555)
    before = sorted(os.listdir(moved))
    try:
        done("run", link, "-p", "red apple", "-o", tmp_path / "a.png")
        done("run", moved, "-p", "red apple", "-o", tmp_path / "b.png")
    finally:
        moved.chmod(0o755)
    assert sorted(os.listdir(moved)) == before
    assert (tmp_path / "a.png").read_bytes() == (tmp_path / "b.png").read_bytes()
