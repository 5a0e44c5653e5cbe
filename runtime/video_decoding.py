"""A video bundle's codes as frames, chunk by chunk: the decoder is causal, so that a chunk takes what the one before
left behind and memory does not grow with the video."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import numpy as np

from toprovar.runtime.buffers import Memory
from toprovar.runtime.errors import ToprovarError
from toprovar.runtime.manifest import Graph, Video
from toprovar.runtime.video_files import frames_from_video

PAST, PAST_NEXT = "past_", "past_next_"


class Backend(Protocol):
    """What runs the graphs."""

    @property
    def memory(self) -> Memory: ...

    def run(self, graph: Graph, inputs: Mapping[str, Any], outputs: Mapping[str, Any]) -> None: ...


def decoded_frames(backend: Backend, decoder: Graph, video: Video, codes: np.ndarray) -> np.ndarray:
    """codes: [d, F*H, W], the maps of all frames on top of one another -> [T, H', W', 3] uint8.

    Raises: ToprovarError if the decoder gives values that are not finite.
    """
    maps = codes.reshape(codes.shape[0], video.maps, -1, codes.shape[2])
    memory, start = backend.memory, 0
    parts: list[np.ndarray] = []
    # chunks fill one of two sets in turn and read the other: at 480p a set takes 2.3 GB
    buffers: dict[tuple[str, tuple[int, ...], int], Any] = {}
    past: dict[str, Any] = {}
    while start < video.maps:
        graph = decoder if start == 0 else video.following
        assert graph is not None  # the manifest was checked
        count = graph.inputs["codes"].shape[2]
        chunk = np.ascontiguousarray(maps[None, :, start : start + count])
        outputs = {}
        for name, facts in graph.outputs.items():
            key = name, facts.shape, len(parts) % 2
            if key not in buffers:
                buffers[key] = memory.empty(facts.shape, facts.dtype)
            outputs[name] = buffers[key]
        backend.run(graph, {"codes": memory.place(chunk), **past}, outputs)
        parts.append(memory.read(outputs["video"])[0].copy())
        past = {
            PAST + name.removeprefix(PAST_NEXT): buffer
            for name, buffer in outputs.items()
            if name.startswith(PAST_NEXT)
        }
        start += count
    pictures = np.concatenate(parts, axis=1)  # [3, T, H', W']
    if not np.isfinite(pictures).all():
        raise ToprovarError("decoder output holds non-finite values", "check the weights with: toprovar inspect")
    return frames_from_video(pictures, video.first_from_second)
