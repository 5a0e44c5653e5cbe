"""Weights as inputs: no large weight stays in a graph, small ones are those of the file, and the results are equal."""

import shutil

import numpy as np
import onnx
import onnxruntime
import pytest
from safetensors import safe_open

from toprovar.exporter.engines.trtexec_files import raw_weight
from toprovar.exporter.engines.weights_as_inputs import MIN_INPUT_BYTES, weights_as_inputs
from toprovar.runtime.bundle import open_bundle
from toprovar.runtime.errors import ToprovarError
from toprovar.runtime.manifest import NUMPY_DTYPES, tensor_rows

DTYPES = {onnx.TensorProto.FLOAT: "F32", onnx.TensorProto.BFLOAT16: "BF16", onnx.TensorProto.FLOAT16: "F16"}


def converted(folder, name, **options):
    model = onnx.load(folder / name, load_external_data=False)
    before = {t.name: t for t in onnx.load(folder / name, load_external_data=False).graph.initializer}
    return before, model, weights_as_inputs(model, folder, **options)


def external(tensor):
    return {entry.key: entry.value for entry in tensor.external_data}


@pytest.mark.parametrize("name", ["step_01.onnx", "step_09_planned.onnx", "prompt.onnx", "decoder.onnx"])
def test_no_large_weight_of_the_demo_stays_in_a_graph(demo_bundle, name):
    before, model, moved = converted(demo_bundle, name)
    signature = open_bundle(demo_bundle, verify=False).manifest.graphs[name]
    inputs = {value.name: value.type.tensor_type for value in model.graph.input}
    assert list(inputs) == [*signature.inputs, *moved]
    from_file = {name for name, tensor in before.items() if tensor.data_location == onnx.TensorProto.EXTERNAL}
    stay = {tensor.name for tensor in model.graph.initializer} & from_file
    assert stay | set(moved) == from_file
    assert not stay & set(moved)
    assert all(len(tensor.raw_data) < MIN_INPUT_BYTES for tensor in model.graph.initializer if tensor.name in stay)
    with safe_open(demo_bundle / "weights.safetensors", "numpy") as file:
        for item in moved:
            tensor, rows = tensor_rows(item)
            found = file.get_slice(tensor)
            shape = found.get_shape()
            if rows:
                shape = [rows[1] - rows[0], *shape[1:]]
            assert [extent.dim_value for extent in inputs[item].shape.dim] == shape
            assert DTYPES[inputs[item].elem_type] == found.get_dtype()
            assert int(external(before[item])["length"]) >= MIN_INPUT_BYTES
    onnx.checker.check_model(model)


def test_rows_of_a_tensor_are_inputs_too(demo_bundle):
    _, _, moved = converted(demo_bundle, "step_05.onnx")
    assert {"rope_cos[121:265]", "rope_sin[121:265]"} <= set(moved)


def test_what_stays_has_the_bytes_of_the_file(demo_bundle):
    before, model, _ = converted(demo_bundle, "step_05.onnx")
    raw = (demo_bundle / "weights.safetensors").read_bytes()
    checked = 0
    for tensor in model.graph.initializer:
        place = external(before[tensor.name])
        if place:
            start = int(place["offset"])
            assert tensor.raw_data == raw[start : start + int(place["length"])]
            checked += 1
    assert checked > 50


@pytest.mark.parametrize("min_bytes", [0, MIN_INPUT_BYTES, 10**9])
def test_a_graph_with_weights_as_inputs_computes_the_same(tiny_bundle, min_bytes):
    _, model, moved = converted(tiny_bundle, "prompt.onnx", min_bytes=min_bytes)
    bundle = open_bundle(tiny_bundle)
    random = np.random.default_rng(7)
    feeds = {
        name: random.random(facts.shape, np.float32).astype(NUMPY_DTYPES[facts.dtype])
        for name, facts in bundle.manifest.prompt.inputs.items()
    }
    kinds = {value.name: value.type.tensor_type for value in model.graph.input}
    weights = {
        name: np.frombuffer(raw_weight(bundle, name), np.float32).reshape([d.dim_value for d in kinds[name].shape.dim])
        for name in moved
    }
    mine = onnxruntime.InferenceSession(model.SerializeToString()).run(None, feeds | weights)
    theirs = onnxruntime.InferenceSession(tiny_bundle / "prompt.onnx").run(None, feeds)
    assert len(mine) == len(theirs) == len(bundle.manifest.prompt.outputs)
    for a, b in zip(mine, theirs, strict=True):
        # the host may fold constants in another order: a few units in the last place
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)
    assert bool(moved) == (min_bytes < 10**9)


def test_a_weights_file_that_ends_early_is_named(tiny_bundle, tmp_path):
    folder = shutil.copytree(tiny_bundle, tmp_path / "bundle")
    path = folder / "weights.safetensors"
    path.write_bytes(path.read_bytes()[:9000])
    with pytest.raises(ToprovarError, match=r"weights\.safetensors ends inside "):
        converted(folder, "step_01.onnx")
    path.unlink()
    with pytest.raises(ToprovarError, match=r"weights\.safetensors cannot be read"):
        converted(folder, "step_01.onnx")
