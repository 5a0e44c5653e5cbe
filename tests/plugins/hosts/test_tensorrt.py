"""The library's plugins in TensorRT-RTX's parser and builder, which need no GPU. Nothing is executed here."""

import json
import shutil
import subprocess
import sys

import pytest
from engine_helpers import needs_rtx
from onnx import TensorProto, compose, helper
from operator_cases import (
    attention_case,
    gate_case,
    gelu_case,
    heads_case,
    masked_case,
    model_of,
    norm_case,
    residual_case,
    restore_case,
    sampler_case,
)

from toprovar.exporter.engines.child import build_environment
from toprovar.plugins import library
from toprovar.plugins.functions import functions
from toprovar.tools.plugin_building import BuildRequest, find_nvcc, run_build

# argv: library, model, "build" or "parse". Prints {layers, outputs: {name: [type, shape]}, plan: bytes, registered}
CHILD = """
import json, sys
import tensorrt_rtx_bindings as trt

logger = trt.Logger(trt.Logger.WARNING)
registry = trt.get_plugin_registry()
assert registry.load_library(sys.argv[1]) is not None
ours = [c for c in registry.all_creators if c.plugin_namespace == "toprovar" and c.plugin_version == "1"]
builder = trt.Builder(logger)
network = builder.create_network(0)
parser = trt.OnnxParser(network, logger)
if not parser.parse_from_file(sys.argv[2]):
    raise SystemExit("; ".join(str(parser.get_error(i)) for i in range(parser.num_errors)))
layers = [network.get_layer(i).type.name for i in range(network.num_layers)]
outputs = [network.get_output(i) for i in range(network.num_outputs)]
size = 0
if sys.argv[3] == "build":
    config = builder.create_builder_config()
    config.num_compute_capabilities = 1
    config.set_compute_capability(trt.ComputeCapability.SM89, 0)
    plan = builder.build_serialized_network(network, config)
    assert plan is not None
    size = plan.nbytes
print(json.dumps({
    "layers": layers, "outputs": {o.name: [o.dtype.name, list(o.shape)] for o in outputs}, "plan": size,
    "registered": sorted(c.name for c in ours),
}))
"""

TYPES = {"float32": "FLOAT", "float16": "HALF", "int32": "INT32", "int64": "INT64"}


@pytest.fixture(scope="module")
def full_library():
    needs_rtx()
    found = library.find_library()
    if found is None or found.is_stale or not found.has_tensorrt:
        pytest.skip("needs the operator library with its TensorRT host: toprovar plugins build --tensorrt-include DIR")
    return found


@pytest.fixture(scope="module")
def environment():
    with build_environment("tensorrt-rtx") as variables:
        yield variables


def in_child(plugins, model, environment, tmp_path, what="parse"):
    path = tmp_path / "model.onnx"
    path.write_bytes(model.SerializeToString())
    done = subprocess.run(
        [sys.executable, "-c", CHILD, str(plugins.path), str(path), what],
        capture_output=True, text=True, env=environment, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


def one_of_each(dtype):
    cases = [
        attention_case("EntropyAttention", 17, 81, 2, 3, 64, dtype),
        attention_case("CachedAttention", 17, 0, 2, 3, 64, dtype),
        masked_case(17, 12, 5, dtype), gate_case(3, 987, 500, 2), norm_case(17, 2, 1, 80, dtype),
        heads_case(17, 2, 1, 3, 64, dtype), residual_case(17, 2, 2, 81, dtype), gelu_case((17, 2, 81), dtype),
        sampler_case((81, 2, 16), 3.0), restore_case((2, 3), (5, 4), 7),
    ]  # fmt: skip
    assert {case.kind for case in cases} == set(functions())
    return cases


def joined(cases):
    """One model of several operators beside each other; tensors are named <operator>_<name>."""
    models = [model_of(case, has_body=True) for case in cases]
    graphs = [compose.add_prefix_graph(model.graph, f"{case.kind}_") for model, case in zip(models, cases, strict=True)]
    graph = helper.make_graph(
        [node for g in graphs for node in g.node], "all", [i for g in graphs for i in g.input],
        [o for g in graphs for o in g.output],
    )  # fmt: skip
    made = {f.name: f for model in models for f in model.functions}
    return helper.make_model(graph, opset_imports=models[0].opset_import, functions=list(made.values()), ir_version=10)


def in_bfloat16(model):
    """The same graph with bfloat16 wherever float16 stands."""
    for value in [*model.graph.input, *model.graph.output]:
        if value.type.tensor_type.elem_type == TensorProto.FLOAT16:
            value.type.tensor_type.elem_type = TensorProto.BFLOAT16
    for node in model.graph.node:
        for attribute in node.attribute:
            if attribute.name == "to":
                attribute.i = TensorProto.BFLOAT16
    return model


@pytest.mark.parametrize("dtype", ["f4", "f2", "bf16"])
def test_every_operator_becomes_one_plugin_layer_with_its_types_and_shapes(dtype, full_library, environment, tmp_path):
    cases = one_of_each("f2" if dtype == "bf16" else dtype)
    model = joined(cases)
    if dtype == "bf16":
        model = in_bfloat16(model)
    found = in_child(full_library, model, environment, tmp_path, "build")
    assert found["registered"] == sorted(functions())
    assert found["layers"].count("PLUGIN_V3") == len(cases)
    types = {**TYPES, "float16": "BF16"} if dtype == "bf16" else TYPES
    expected = {
        f"{case.kind}_{name}": [types[case.types[name]], list(value.shape)]
        for case in cases
        for name, value in case.expected.items()
    }
    assert found["outputs"] == expected
    assert found["outputs"]["TokenGate_indices"][0] == "INT64"
    assert 0 < found["plan"] < 5_000_000


def test_types_that_differ_are_refused(full_library, environment, tmp_path):
    case = gelu_case((17, 2, 81), "f2")
    model = model_of(case, has_body=False)
    model.graph.input[1].type.tensor_type.elem_type = TensorProto.FLOAT
    path = tmp_path / "model.onnx"
    path.write_bytes(model.SerializeToString())
    command = [sys.executable, "-c", CHILD, str(full_library.path), str(path), "build"]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode != 0
    assert "Failed to find any supported plugin" in done.stdout


def test_a_missing_attribute_is_told(full_library, environment, tmp_path):
    case = gate_case(1, 81, 17, 4)
    model = model_of(case, has_body=False)
    kept = [a for a in model.graph.node[0].attribute if a.name != "count"]
    del model.graph.node[0].attribute[:]
    model.graph.node[0].attribute.extend(kept)
    path = tmp_path / "model.onnx"
    path.write_bytes(model.SerializeToString())
    command = [sys.executable, "-c", CHILD, str(full_library.path), str(path), "parse"]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode != 0
    assert "toprovar::TokenGate: attribute count is missing" in done.stderr


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.skipif(find_nvcc() is None or shutil.which("cmake") is None, reason="needs nvcc and cmake")
def test_the_whole_library_builds_from_downloaded_headers_and_loads(environment, tmp_path):
    """All architectures and hosts; needs the network for TensorRT's headers."""
    needs_rtx()
    run_build(BuildRequest(cuda=True, tensorrt_from_pip=True, out=tmp_path / library.FILE_NAME), quiet=True)
    built = library.read_library(tmp_path / library.FILE_NAME)
    assert built.cuda_architectures == ("80", "86", "89", "90a", "120")
    assert built.hosts == ("ctypes", "onnxruntime", "tensorrt")
    needed = subprocess.run(["ldd", str(built.path)], capture_output=True, text=True, check=True).stdout
    assert "libcuda" not in needed
    assert "libnvinfer" not in needed
    found = in_child(built, joined(one_of_each("f2")), environment, tmp_path)
    assert found["layers"].count("PLUGIN_V3") == len(functions())
