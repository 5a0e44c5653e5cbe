"""Real decoders in tiles: close to the whole, the same through an exported graph, and for videos chunk by chunk."""

from __future__ import annotations

import numpy as np
import pytest
from infinity_reference import random_tokenizer
from video_reference import random_video_tokenizer

torch = pytest.importorskip("torch", reason="needs PyTorch: pip install 'toprovar[torch]'")
onnxruntime = pytest.importorskip("onnxruntime")

from toprovar.exporter.checkpoints import open_checkpoint  # noqa: E402
from toprovar.exporter.infinity.graphs import decoder_graph  # noqa: E402
from toprovar.exporter.infinity.load import load_tokenizer  # noqa: E402
from toprovar.exporter.infinity.weights import decoder_weights  # noqa: E402
from toprovar.exporter.model import PACKAGED  # noqa: E402
from toprovar.exporter.video_tokenizer.tokenizer import load_video_tokenizer  # noqa: E402
from toprovar.exporter.weights_file import WEIGHTS_FILE, WeightSpec, layout_weights, write_weights  # noqa: E402
from toprovar.runtime.tiling import decode_in_tiles  # noqa: E402

# PyTorch and ONNX Runtime in fp32 on pictures in [-1, 1]; measured 4e-6
GRAPH_TOLERANCE = 2e-5
# a disc on a plain ground in four tiles against the whole, demo tokenizer; measured 38.4 dB
LEAST_PSNR_DB = 35.0
# the chunked video decoder in one tile against the decoder itself: the same operations, blended with weight 1
VIDEO_TOLERANCE = 1e-6


def in_torch(decode):
    def run(codes: np.ndarray) -> np.ndarray:
        with torch.inference_mode():
            return decode(torch.from_numpy(codes)).numpy()

    return run


def psnr_db(a: np.ndarray, b: np.ndarray) -> float:
    return float(10 * np.log10(4 / np.mean((a - b) ** 2)))  # pictures in [-1, 1]


def test_the_demo_decodes_in_tiles_nearly_as_at_once():
    path = PACKAGED["demo"] / "tokenizer_demo.safetensors"
    tokenizer = load_tokenizer(open_checkpoint(path).tensors, str(path))
    y, x = np.mgrid[:128, :192]
    disc = (y - 64) ** 2 + (x - 96) ** 2 < 40**2
    picture = np.where(disc[..., None], (200, 40, 40), (240, 240, 235)).transpose(2, 0, 1) / 127.5 - 1
    with torch.inference_mode():
        codes = tokenizer.encode(torch.from_numpy(picture[None].astype(np.float32))).numpy()
    decode = in_torch(tokenizer.decode)
    found = decode_in_tiles(decode, codes, (16, 14), 4, tokenizer.config.stride)
    assert psnr_db(found, decode(codes)) >= LEAST_PSNR_DB


def test_tiles_run_on_one_exported_graph(tmp_path):
    model = load_tokenizer({n: torch.from_numpy(a) for n, a in random_tokenizer(5, (32, 64)).items()}, "test")
    thunks = decoder_weights(model)
    layout = layout_weights({name: WeightSpec("F32", tuple(thunk().shape)) for name, thunk in thunks.items()})
    write_weights(tmp_path / WEIGHTS_FILE, layout, lambda name: thunks[name]().numpy())
    decoder_graph(model.config, (5, 6), layout).save(tmp_path / "tile.onnx")
    session = onnxruntime.InferenceSession(tmp_path / "tile.onnx", providers=["CPUExecutionProvider"])
    codes = np.random.default_rng(2).standard_normal((1, 5, 11, 9)).astype(np.float32) * 0.3
    found = decode_in_tiles(lambda part: session.run(None, {"codes": part})[0], codes, (5, 6), 2, 2)
    expected = decode_in_tiles(in_torch(model.decode), codes, (5, 6), 2, 2)
    assert found.shape == (1, 3, 22, 18)
    assert np.abs(found - expected).max() <= GRAPH_TOLERANCE


def test_every_tile_of_a_video_runs_through_all_its_chunks():
    model = load_video_tokenizer({n: torch.from_numpy(a) for n, a in random_video_tokenizer(blocks=1).items()}, "test")
    codes = np.random.default_rng(3).standard_normal((1, 8, 3, 4, 3)).astype(np.float32)
    decode = in_torch(lambda part: model.decode(part, [1, 2]))
    whole = decode(codes)
    assert np.abs(decode_in_tiles(decode, codes, (4, 3), 1, 16) - whole).max() <= VIDEO_TOLERANCE
    found = decode_in_tiles(decode, codes, (3, 3), 2, 16)
    assert found.shape == whole.shape == (1, 3, 9, 64, 48)
    assert 20 < psnr_db(found, whole) < 80
