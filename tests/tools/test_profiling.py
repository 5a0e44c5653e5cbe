"""Profiles: scales, operators and layers of a small bundle; floors by hand; traces of a GPU."""

import json
import math

import pytest
from command_line import done, refusal

from toprovar.runtime.bundle import open_bundle
from toprovar.runtime.errors import ToprovarError
from toprovar.runtime.weights import WeightsFile
from toprovar.tools.profiling import ProfileRequest, run_profile
from toprovar.tools.roofline import Work, step_work
from toprovar.tools.traces import aggregated, layers_of_nodes


@pytest.fixture(scope="module")
def profile(tiny_bundle, tmp_path_factory):
    """(what was printed, folder) of the command."""
    folder = tmp_path_factory.mktemp("profile")
    arguments = ("--variant", "planned", "--runs", 2, "--peak-tflops", 0.1, "--peak-gbps", 10)
    return json.loads(done("profile", tiny_bundle, "-o", folder, *arguments, "--json").stdout), folder


def test_the_command_writes_what_it_prints(profile):
    facts, folder = profile
    assert json.loads((folder / "profile.json").read_text()) == facts
    assert facts["variant"] == "planned"
    assert facts["conditions"]["runs"] == 2
    assert "reading results back" in facts["conditions"]["boundary"]
    assert facts["first_call_ms"] > 0


def test_scales_have_medians_and_floors(profile, tiny_bundle):
    facts, _ = profile
    assert [row["scale"] for row in facts["scales"]] == list(range(6))
    for row in facts["scales"]:
        assert row["count"] == len(row["samples_ms"]) == 2
        assert min(row["samples_ms"]) <= row["median_ms"] <= row["p90_ms"] == max(row["samples_ms"])
        assert row["roofline_ms"] == pytest.approx(max(row["flops"] / 0.1e9, row["bytes"] / 10e6))
        assert row["achieved_tflops"] == pytest.approx(row["flops"] / row["median_ms"] / 1e9)
    assert facts["scales"][5]["kept_ratio"] == pytest.approx((400 + 400 + 192 + 128) / 1600)
    assert facts["scales"][4]["kept_ratio"] == 1


def test_operators_and_layers_are_of_every_graph_that_ran(profile, tiny_bundle):
    facts, folder = profile
    manifest = open_bundle(tiny_bundle).manifest
    steps = {step.graph.file for step in manifest.variants["planned"]}
    assert set(facts["traces"]) == {*steps, "prompt.onnx", "decoder.onnx", "text_encoder.onnx"}
    for file in steps:
        traced = facts["traces"][file]
        total = sum(row["ms"] for row in traced["operators"])
        assert total == pytest.approx(sum(row["ms"] for row in traced["layers"]))
        assert {row["layer"] for row in traced["layers"]} >= {0, 1, 2, 3}
        assert traced["operators"] == sorted(traced["operators"], key=lambda row: -row["ms"])
        assert (folder / "traces" / traced["trace"]).exists()
    assert any("Mul" in row["kind"] for row in facts["traces"]["decoder.onnx"]["operators"])


def test_the_api_gives_the_same_counts_and_the_table_prints(tiny_bundle, tmp_path):
    facts = run_profile(ProfileRequest(tiny_bundle, tmp_path, variant="dense", runs=1))
    assert all("roofline_ms" not in row for row in facts["scales"])
    text = done("profile", tiny_bundle, "-o", tmp_path, "--variant", "dense", "--runs", 1).stdout
    assert "operators of all steps" in text
    assert "first call" in text


def test_an_unknown_variant_and_a_bad_place_are_refused(tiny_bundle, tmp_path):
    assert "has no variant fast" in refusal("profile", tiny_bundle, "-o", tmp_path, "--variant", "fast")
    (tmp_path / "file").write_text("")
    assert "file" in refusal("profile", tiny_bundle, "-o", tmp_path / "file")


def test_the_work_of_a_step_counted_by_hand(tiny_bundle):
    bundle = open_bundle(tiny_bundle)
    weights = WeightsFile(bundle.path("weights.safetensors")).tensors
    step = bundle.manifest.variants["planned"][5]
    C, F, R, T = 32, 64, 2, 12
    per_token = C * 3 * C + 3 * C * C + 2 * C * F  # qkv; proj, cross_q, cross_proj; fc1, fc2
    flops = size = 0
    for count, past in zip((400, 400, 192, 128), (341,) * 4, strict=True):
        flops += 2 * R * count * per_token + 4 * R * count * (past + count + T) * C
        size += 4 * per_token + 2 * R * (past + 2 * count + T) * C * 4
    flops += 2 * R * 400 * (C * 16 + 8 * C)
    size += 4 * (C * 16 + 8 * C)
    assert step_work(bundle.manifest, weights, step) == Work(flops, size)
    assert step_work(bundle.manifest, {}, step) is None
    assert Work(8_000_000_000, 3_000_000).floor_ms(peak_tflops=4, peak_gbps=1) == 3
    assert Work(8_000_000_000, 3_000_000).floor_ms(peak_tflops=1, peak_gbps=1) == 8


def test_nodes_belong_to_the_layer_whose_weights_came_last(tiny_bundle):
    layers = layers_of_nodes(tiny_bundle / "step_03.onnx")
    assert set(layers.values()) == {0, 1, 2, 3}
    numbers = sorted(layers)
    assert [layers[number] for number in numbers] == sorted(layers.values())


def event(name, ts, dur, cat="Node", **args):
    return {"name": name, "ts": ts, "dur": dur, "cat": cat, "args": args}


def test_kernels_of_a_gpu_count_instead_of_the_host_and_the_first_run_is_dropped(tmp_path):
    run = [
        event("n1_MatMul_kernel_time", 10, 3, op_name="MatMul", provider="CUDAExecutionProvider"),
        event("gemm<128>", 11, 2000, "Kernel", op_name="MatMul", parent_name="n1_MatMul_kernel_time"),
        event("Softmax_7_kernel_time", 13, 3, op_name="Softmax", provider="CUDAExecutionProvider"),
        event("softmax", 14, 500, "Kernel", op_name="Softmax", parent_name="Softmax_7_kernel_time"),
        event("n9_Add_kernel_time", 20, 3, op_name="Add", provider="CUDAExecutionProvider"),
        event("add", 21, 100, "Kernel", op_name="Add", parent_name="n9_Add_kernel_time"),
    ]
    events = []
    for start, slower in ((0, 50), (10_000_000, 1), (20_000_000, 3)):
        events += [{**e, "ts": e["ts"] + start, "dur": e["dur"] * slower} for e in run]
        events.append(event("model_run", start, 1_000_000, "Session"))
    trace = tmp_path / "t.json"
    trace.write_text(json.dumps([{"name": "meta", "ph": "M"}, *events]))
    found = aggregated(trace, {1: 0, 2: 0, 9: 1})
    assert found["runs"] == 2
    assert found["measured"] == "kernels on the GPU"
    assert [(row["kind"], row["calls"], row["ms"]) for row in found["operators"]] == [
        ("MatMul", 1, 4.0),
        ("Softmax", 1, 1.0),
        ("Add", 1, 0.2),
    ]
    assert found["layers"] == [{"layer": 0, "ms": 5.0}, {"layer": 1, "ms": 0.2}]
    trace.write_text(json.dumps(events[:7]))
    assert aggregated(trace, {})["runs"] == 0
    assert math.isclose(sum(row["ms"] for row in aggregated(trace, {})["operators"]), 0)


@pytest.mark.parametrize("text", ["", '[{"name": "model_run", "ts": 1, "d'])
def test_a_trace_that_a_full_disk_cut_short_is_told(text, tmp_path):
    trace = tmp_path / "t.json"
    with pytest.raises(ToprovarError, match=r"did not write .*t\.json whole"):
        aggregated(trace, {})
    trace.write_text(text)
    with pytest.raises(ToprovarError, match=r"did not write .*t\.json whole") as caught:
        aggregated(trace, {})
    assert "free some space" in caught.value.hint


@pytest.mark.parametrize("option", ["--peak-tflops", "--peak-gbps"])
@pytest.mark.parametrize("value", ["inf", "nan", "1e400", "0"])
def test_a_peak_that_is_no_finite_positive_number_is_refused(option, value, tiny_bundle, tmp_path):
    assert f"invalid value '{value}' for '{option}'" in refusal("profile", tiny_bundle, option, value, "-o", tmp_path)
    assert list(tmp_path.iterdir()) == []
