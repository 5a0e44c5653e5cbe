"""Writes HART's graphs and the weights file they point into; a folder of plain files, not yet a bundle."""

from __future__ import annotations

from pathlib import Path

import torch

from toprovar.exporter.hart.graphs import HartGraphs, prompt_graph, step_graph
from toprovar.exporter.hart.weights import Thunks
from toprovar.exporter.weights_file import WEIGHTS_FILE, write_weights

PROMPT_FILE = "prompt.onnx"


def step_file(scale: int) -> str:
    return f"step_{scale:02d}.onnx"


@torch.inference_mode()
def write_graphs(graphs: HartGraphs, weights: Thunks, folder: Path) -> None:
    """The prompt's graph, one graph per scale, and the weights, of which one tensor at a time is in memory."""
    folder.mkdir(parents=True, exist_ok=True)
    write_weights(folder / WEIGHTS_FILE, graphs.layout, lambda name: weights[name]().float().contiguous().numpy())
    prompt_graph(graphs).save(folder / PROMPT_FILE)
    for scale in range(len(graphs.sides)):
        step_graph(graphs, scale).save(folder / step_file(scale))
