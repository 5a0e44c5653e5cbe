"""Decoders with attention and with 3-D convolutions build through TensorRT-RTX, weights as inputs. No plan is run."""

from __future__ import annotations

import pytest
from engine_helpers import needs_rtx
from video_reference import random_video_tokenizer
from vq_reference import random_vq_tokenizer

torch = pytest.importorskip("torch", reason="needs PyTorch: pip install 'toprovar[torch]'")

from toprovar.exporter.engines.builder import Job  # noqa: E402
from toprovar.exporter.engines.child import build_environment, run_builder  # noqa: E402
from toprovar.exporter.video_tokenizer import graphs as video_graphs  # noqa: E402
from toprovar.exporter.video_tokenizer.tokenizer import load_video_tokenizer  # noqa: E402
from toprovar.exporter.vq_tokenizer import graphs as vq_graphs  # noqa: E402
from toprovar.exporter.vq_tokenizer.tokenizer import load_vq_tokenizer  # noqa: E402
from toprovar.exporter.weights_file import WEIGHTS_FILE, WeightSpec, layout_weights, write_weights  # noqa: E402

pytestmark = pytest.mark.slow


def tensors(weights):
    return {name: torch.from_numpy(array) for name, array in weights.items()}


def written(thunks, folder):
    layout = layout_weights({name: WeightSpec("F32", tuple(thunk().shape)) for name, thunk in thunks.items()})
    write_weights(folder / WEIGHTS_FILE, layout, lambda name: thunks[name]().contiguous().numpy())
    return layout


def build(graph, path):
    needs_rtx()
    graph.save(path)
    with build_environment("tensorrt-rtx") as environment:
        built = run_builder(Job("tensorrt-rtx", str(path), str(path.with_suffix(".plan")), ("8.9",)), environment)
    assert path.with_suffix(".plan").stat().st_size > 0
    return built


def test_a_picture_decoder_with_attention_builds(tmp_path):
    model = load_vq_tokenizer(tensors(random_vq_tokenizer(8, (64, 128))), "test")
    layout = written(vq_graphs.decoder_weights(model), tmp_path)
    built = build(vq_graphs.decoder_graph(model.config, (8, 6), layout), tmp_path / "vq.onnx")
    assert "decoder.mid.attn_1.qkv.conv.weight" in built.weights


@pytest.mark.parametrize(("maps", "is_first"), [(3, True), (2, False)])
def test_chunks_of_a_video_build(tmp_path, maps, is_first):
    model = load_video_tokenizer(tensors(random_video_tokenizer(4, (64, 64, 64, 32, 16), blocks=1)), "test")
    layout = written(video_graphs.decoder_weights(model), tmp_path)
    graph = video_graphs.decoder_graph(model.config, maps, (4, 3), layout, is_first)
    built = build(graph, tmp_path / "chunk.onnx")
    assert "decoder.up_blocks.2.upsamplers.0.conv.conv.conv.weight" in built.weights
