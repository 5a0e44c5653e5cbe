"""The exported VQ decoder makes the picture that PyTorch makes."""

from __future__ import annotations

import numpy as np
import pytest
from vq_reference import random_vq_tokenizer

torch = pytest.importorskip("torch", reason="needs PyTorch: pip install 'toprovar[torch]'")
onnxruntime = pytest.importorskip("onnxruntime")

from toprovar.exporter.infinity.tokenizer import resize_bilinear  # noqa: E402
from toprovar.exporter.vq_tokenizer.graphs import decoder_graph, decoder_weights  # noqa: E402
from toprovar.exporter.vq_tokenizer.tokenizer import load_vq_tokenizer  # noqa: E402
from toprovar.exporter.weights_file import WEIGHTS_FILE, WeightSpec, layout_weights, write_weights  # noqa: E402

# fp32 on both sides; measured 1.4e-5 on pictures in [-1, 1]: random weights make values of 4 before clamping, and the
# attention sharp
TOLERANCE = 5e-5


@pytest.fixture(scope="module")
def model():
    weights = {n: torch.from_numpy(a) for n, a in random_vq_tokenizer(5, (32, 64), kernel=1).items()}
    return load_vq_tokenizer(weights, "test")


@pytest.mark.parametrize(("size", "images", "resized"), [((3, 5), 2, None), ((7, 1), 1, None), ((6, 6), 1, (3, 2))])
def test_the_graph_makes_the_picture_that_pytorch_makes(model, tmp_path, size, images, resized):
    thunks = decoder_weights(model)
    assert all(name.startswith("decoder.") for name in thunks)
    layout = layout_weights({name: WeightSpec("F32", tuple(thunk().shape)) for name, thunk in thunks.items()})
    write_weights(tmp_path / WEIGHTS_FILE, layout, lambda name: thunks[name]().numpy())
    graph = decoder_graph(model.config, size, layout, images, resized)
    graph.save(tmp_path / "decoder.onnx")
    session = onnxruntime.InferenceSession(tmp_path / "decoder.onnx", providers=["CPUExecutionProvider"])
    z = np.random.default_rng(5).standard_normal((images, 5, *size)).astype(np.float32) * 0.3
    found = session.run(["image"], {"codes": z})[0]
    codes = torch.from_numpy(z)
    expected = model.decode(codes if resized is None else resize_bilinear(codes, resized)).numpy()
    assert found.shape == (images, 3, 2 * (resized or size)[0], 2 * (resized or size)[1])
    assert 0.1 < np.abs(expected).mean() < 0.95  # not all of it clamped
    assert np.abs(found - expected).max() <= TOLERANCE
