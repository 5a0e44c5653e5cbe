"""Token gate: NumPy reference, PyTorch and ONNX body choose the same tokens."""

import numpy as np
import onnxruntime
import pytest
import torch
from onnx import TensorProto, helper

from toprovar.exporter.planned.scores import lowest_scores as lowest_in_torch
from toprovar.plugins.token_gate.function import token_gate_function
from toprovar.plugins.token_gate.reference import lowest_scores


def onnx_gate(score, count):
    node = helper.make_node(
        "TokenGate", ["score"], ["indices"], domain="toprovar", count=[count], plugin_namespace="toprovar",
        plugin_version="1",
    )  # fmt: skip
    graph = helper.make_graph(
        [node],
        "test",
        [helper.make_tensor_value_info("score", TensorProto.FLOAT, [score.size])],
        [helper.make_tensor_value_info("indices", TensorProto.INT64, [count])],
    )
    opsets = [helper.make_opsetid("", 20), helper.make_opsetid("toprovar", 1)]
    model = helper.make_model(graph, opset_imports=opsets, functions=[token_gate_function()], ir_version=10)
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    return session.run(None, {"score": score})[0]


@pytest.mark.parametrize(("tokens", "count"), [(1, 1), (17, 5), (81, 81), (987, 64), (4096, 4032), (10521, 3841)])
def test_all_three_choose_the_same_tokens(tokens, count):
    score = np.random.default_rng(tokens).random(tokens).astype(np.float32)
    expected = lowest_scores(score, count)
    assert sorted(score[expected]) == sorted(np.sort(score)[:count])
    assert np.array_equal(onnx_gate(score, count), expected)
    assert np.array_equal(lowest_in_torch(torch.from_numpy(score), count).numpy(), expected)


@pytest.mark.parametrize("score", [np.zeros(300, np.float32), np.repeat(np.float32([2, 1, 1, 3]), 75)])
def test_ties_go_to_the_smaller_index(score):
    expected = lowest_scores(score, 100)
    assert np.array_equal(onnx_gate(score, 100), expected)
    assert np.array_equal(lowest_in_torch(torch.from_numpy(score), 100).numpy(), expected)
    ranked = sorted(range(score.size), key=lambda i: (score[i], i))[:100]
    assert expected.tolist() == sorted(ranked)


def test_nan_and_bad_counts_are_refused_by_the_reference():
    with pytest.raises(ValueError, match="NaN"):
        lowest_scores(np.float32([1, np.nan]), 1)
    with pytest.raises(ValueError, match=r"outside 0\.\.2"):
        lowest_scores(np.float32([1, 2]), 3)
