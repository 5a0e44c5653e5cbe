"""A video decoded chunk by chunk from buffers is the video that PyTorch decodes at once, in memory for two chunks."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from video_reference import random_video_tokenizer

torch = pytest.importorskip("torch", reason="needs PyTorch: pip install 'toprovar[torch]'")
onnxruntime = pytest.importorskip("onnxruntime")

from toprovar.exporter.video_tokenizer.graphs import decoder_graph, decoder_weights  # noqa: E402
from toprovar.exporter.video_tokenizer.tokenizer import load_video_tokenizer  # noqa: E402
from toprovar.exporter.weights_file import WEIGHTS_FILE, WeightSpec, layout_weights, write_weights  # noqa: E402
from toprovar.runtime.buffers import HostMemory  # noqa: E402
from toprovar.runtime.errors import ToprovarError  # noqa: E402
from toprovar.runtime.manifest import Graph, Video  # noqa: E402
from toprovar.runtime.video_decoding import decoded_frames  # noqa: E402
from toprovar.runtime.video_files import frames_from_video  # noqa: E402

SIZE = (2, 3)
# 8 bits, truncated: a value next to a step may fall on either side of it
STEPS_OF_8_BITS = 1


class CountingMemory(HostMemory):
    def __init__(self):
        self.made = Counter()

    def empty(self, shape, dtype):
        self.made[tuple(shape)] += 1
        return super().empty(shape, dtype)


class Sessions:
    """A backend of two graphs in a folder."""

    def __init__(self, folder):
        self.folder, self.memory, self.sessions = folder, CountingMemory(), {}

    def run(self, graph, inputs, outputs):
        if graph.file not in self.sessions:
            path = self.folder / graph.file
            self.sessions[graph.file] = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
        assert {name: tuple(buffer.shape) for name, buffer in inputs.items()} == {
            name: facts.shape for name, facts in graph.inputs.items()
        }
        given = {id(buffer) for buffer in inputs.values()}
        assert not given & {id(buffer) for buffer in outputs.values()}, "a chunk reads what it writes"
        arrays = self.sessions[graph.file].run([*outputs], dict(inputs))
        for buffer, array in zip(outputs.values(), arrays, strict=True):
            buffer[...] = array


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    """The model, and its graphs for first chunks of 1 and 3 maps and for following ones of 2."""
    folder = tmp_path_factory.mktemp("decoder")
    model = load_video_tokenizer({n: torch.from_numpy(a) for n, a in random_video_tokenizer(blocks=1).items()}, "test")
    thunks = decoder_weights(model)
    layout = layout_weights({name: WeightSpec("F32", tuple(thunk().shape)) for name, thunk in thunks.items()})
    write_weights(folder / WEIGHTS_FILE, layout, lambda name: thunks[name]().contiguous().numpy())
    graphs = []
    for maps, is_first in ((1, True), (3, True), (2, False)):
        built = decoder_graph(model.config, maps, SIZE, layout, is_first)
        built.save(folder / f"{maps}.onnx")
        graphs.append(Graph(file=f"{maps}.onnx", inputs=built.signature("inputs"), outputs=built.signature("outputs")))
    return folder, model, graphs


def codes_of(maps: int) -> np.ndarray:
    return np.random.default_rng(maps).standard_normal((8, maps * SIZE[0], SIZE[1])).astype(np.float32) * 0.3


@pytest.mark.parametrize(("maps", "first"), [(1, 0), (3, 1), (7, 1), (9, 0)])
@pytest.mark.parametrize("first_from_second", [False, True])
def test_chunks_make_the_frames_of_the_whole(exported, maps, first, first_from_second):
    folder, model, graphs = exported
    codes, backend = codes_of(maps), Sessions(folder)
    video = Video(maps=maps, fps=16, following=graphs[2], first_from_second=first_from_second)
    found = decoded_frames(backend, graphs[first], video, codes)
    whole = model.decode(torch.from_numpy(codes).unflatten(1, (maps, SIZE[0]))[None])[0].numpy()
    expected = frames_from_video(whole, first_from_second)
    assert found.shape == expected.shape == (4 * maps - 3, 32, 48, 3)
    assert np.abs(found.astype(int) - expected).max() <= STEPS_OF_8_BITS
    assert (found != expected).mean() < 0.01
    pasts = Counter(facts.shape for name, facts in graphs[2].outputs.items() if name != "video")
    for shape, count in pasts.items():
        assert backend.memory.made[shape] <= 2 * count


def test_values_that_are_not_finite_are_refused(exported):
    folder, _, graphs = exported
    codes = codes_of(1)
    codes[0, 0, 0] = np.nan
    with pytest.raises(ToprovarError, match="non-finite values"):
        decoded_frames(Sessions(folder), graphs[0], Video(maps=1, fps=16), codes)
