"""The exported chunks of the video decoder, run one behind the other, make the video that PyTorch makes."""

from __future__ import annotations

import numpy as np
import pytest
from video_reference import random_video_tokenizer

torch = pytest.importorskip("torch", reason="needs PyTorch: pip install 'toprovar[torch]'")
onnxruntime = pytest.importorskip("onnxruntime")

from toprovar.exporter.video_tokenizer.graphs import decoder_graph, decoder_weights, past_shapes  # noqa: E402
from toprovar.exporter.video_tokenizer.tokenizer import load_video_tokenizer  # noqa: E402
from toprovar.exporter.weights_file import WEIGHTS_FILE, WeightSpec, layout_weights, write_weights  # noqa: E402

# fp32 on both sides; measured 9e-6: random weights make values of 15 before clamping
TOLERANCE = 3e-5


@pytest.mark.parametrize(
    ("chunks", "projection"), [([1], True), ([3, 2, 2], True), ([2, 2], True), ([1, 1, 2], False)], ids=str
)
def test_chunks_make_the_video_that_pytorch_makes(tmp_path, chunks, projection):
    weights = {n: torch.from_numpy(a) for n, a in random_video_tokenizer(blocks=1).items()}
    model = load_video_tokenizer({n: w for n, w in weights.items() if projection or "proj" not in n}, "test")
    thunks = decoder_weights(model)
    assert all(name.startswith("decoder.") for name in thunks)
    layout = layout_weights({name: WeightSpec("F32", tuple(thunk().shape)) for name, thunk in thunks.items()})
    write_weights(tmp_path / WEIGHTS_FILE, layout, lambda name: thunks[name]().contiguous().numpy())
    size, shapes = (3, 2), past_shapes(model.config, (3, 2))
    sessions = {}
    for index, maps in enumerate(chunks):
        if (index == 0, maps) not in sessions:
            path = tmp_path / f"{index}.onnx"
            graph = decoder_graph(model.config, maps, size, layout, index == 0)
            graph.save(path)
            sessions[index == 0, maps] = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
            assert len(graph.signature("outputs")) == 1 + len(shapes)
    codes = np.random.default_rng(1).standard_normal((1, 8, sum(chunks), *size)).astype(np.float32)
    videos, past = [], {}
    for index, part in enumerate(np.split(codes, np.cumsum(chunks)[:-1], axis=2)):
        session = sessions[index == 0, part.shape[2]]
        video, *left = session.run(None, {"codes": part, **past})
        past = {f"past_{i:02d}": array for i, array in enumerate(left)}
        assert [array.shape for array in left] == shapes
        videos.append(video)
    found = np.concatenate(videos, axis=2)
    expected = model.decode_raw(torch.from_numpy(codes)).numpy()
    assert found.shape == expected.shape == (1, 3, model.config.frames(sum(chunks)), 48, 32)
    assert np.abs(expected).mean() > 0.3
    assert np.abs(found - expected.clip(-1, 1)).max() <= TOLERANCE
