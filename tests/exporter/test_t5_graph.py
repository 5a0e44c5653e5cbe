import numpy as np
import pytest
import torch

pytest.importorskip("transformers", reason="needs the extra 'text'")

import onnxruntime as ort
from command_line import done, listing, refusal
from text_encoder_files import tiny_t5_config, write_t5

from toprovar.exporter.text_encoders.t5 import T5TextEncoder
from toprovar.exporter.text_encoders.t5_graph import distance_buckets, t5_graph
from toprovar.exporter.weights_file import layout_weights
from toprovar.runtime.errors import ToprovarError

FP32 = 2e-5  # other order of sums than PyTorch's: measured 4e-7 of rows of size 1


@pytest.mark.parametrize(("buckets", "max_distance"), [(32, 128), (8, 20)])
def test_buckets_are_transformers_own(buckets, max_distance):
    from transformers.models.t5.modeling_t5 import T5Attention

    positions = torch.arange(512)
    expected = T5Attention._relative_position_bucket(
        positions[None, :] - positions[:, None], num_buckets=buckets, max_distance=max_distance
    )
    found = distance_buckets(512, buckets, max_distance)
    np.testing.assert_array_equal(found, expected.numpy())
    assert len(np.unique(found)) == buckets - 1  # distance 0 counts as in front


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    folder = tmp_path_factory.mktemp("t5graph")
    model = write_t5(folder / "t5")
    for _ in range(2):  # the second replaces the first
        done("export-text-encoder", folder / "t5", "-o", folder / "graph", "--tokens", 40)
    return folder, model


@pytest.mark.parametrize("prompt", ["a red apple", "", "x" * 38])
def test_the_graph_gives_the_rows_of_the_encoder(exported, prompt):
    folder, _ = exported
    encoder = T5TextEncoder(folder / "t5")
    expected = encoder.encode(prompt).rows
    ids, valid = np.zeros((1, 40), np.int64), np.zeros((1, 40), np.float32)
    tokens = encoder.tokenizer(prompt)["input_ids"]
    ids[0, : len(tokens)], valid[0, : len(tokens)] = tokens, 1
    session = ort.InferenceSession(folder / "graph" / "text_encoder.onnx", providers=["CPUExecutionProvider"])
    (rows,) = session.run(["rows"], {"ids": ids, "valid": valid})
    assert rows.shape == (1, 40, 16)
    assert np.isfinite(rows).all()
    np.testing.assert_allclose(rows[0, : len(tokens)], expected, atol=FP32)


def test_the_folder_says_what_it_holds(exported):
    import json

    folder = exported[0] / "graph"
    assert listing(folder) == ["text_encoder.json", "text_encoder.onnx", "weights.safetensors"]
    facts = json.loads((folder / "text_encoder.json").read_text())
    assert (facts["tokens"], facts["width"]) == (40, 16)
    assert len(facts["encoder"]["weights_sha256"]) == 64


def test_a_foreign_folder_stays(exported, tmp_path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes.txt").write_text("x")
    refusal("export-text-encoder", exported[0] / "t5", "-o", tmp_path / "mine")
    assert listing(tmp_path / "mine") == ["notes.txt"]
    told = refusal("export-text-encoder", exported[0] / "t5", "-o", tmp_path / "g", "--tokens", 513)
    assert "at most 512" in told


def test_an_older_feed_forward_layer_is_refused():
    config = tiny_t5_config()
    config.is_gated_act = False
    with pytest.raises(ToprovarError, match="gated-gelu"):
        t5_graph(config, 4, layout_weights({}))
