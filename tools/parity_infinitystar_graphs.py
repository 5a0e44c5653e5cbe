"""Runs InfinityStar's exported graphs in ONNX Runtime on a recorded run's own bits."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from toprovar.runtime.guidance import UNLIMITED
from toprovar.tools.parity_infinitystar import Arrays, StarRun, chances, recorded_part

if TYPE_CHECKING:
    from toprovar.exporter.infinitystar.transformer import InfinityStar

NOISE_FOR_ONE, NOISE_FOR_ZERO = -1.0, 2.0  # below and above every probability


def observe_onnxruntime(model: InfinityStar, run: StarRun) -> Arrays:
    """The exported graphs, pass by pass; what they computed under the names of the parity files, row-major."""
    from toprovar.exporter.infinitystar.graphs import prompt_graph
    from toprovar.exporter.infinitystar.step import step_graph
    from toprovar.exporter.infinitystar.weights import star_weights
    from toprovar.exporter.planned.step import StepOptions
    from toprovar.exporter.routes import routes
    from toprovar.exporter.weights_file import WEIGHTS_FILE, WeightSpec, layout_weights, write_weights
    from toprovar.runtime.plan import Backbone, dense_plan

    config, video = model.config, run.schedule
    rows, valid = _text(model, run)
    wanted = {array.partition("/")[0] for array in run.recorded}
    watched = {"in", "raw", "logits", "blockN", *(f"block{layer}" for layer in range(config.depth))}
    options = StepOptions(
        len(rows), rows.shape[1], watched=watched & (wanted | {"logits"}), projection=run.guidance.projection
    )
    backbone = Backbone(
        family="infinitystar", layers=config.depth, width=config.width, heads=config.heads, bits=config.detail_bits
    )
    weights = star_weights(model, video)
    layout = layout_weights({name: WeightSpec("F32", tuple(make().shape)) for name, make in weights.items()})
    seen: Arrays = {}
    with tempfile.TemporaryDirectory(prefix="toprovar-parity-") as place:
        folder = Path(place)
        write_weights(folder / WEIGHTS_FILE, layout, lambda name: weights[name]().contiguous().numpy())
        path = folder / "prompt.onnx"
        prompt_graph(config, layout, options).save(path)
        state = _run(path, {"text_rows": rows, "text_valid": valid})
        for name, array in state.items():
            if name.startswith("watch_"):
                seen[f"{name.removeprefix('watch_')}/text"] = array.swapaxes(0, 1)
        path = folder / "step.onnx"
        for route in routes(dense_plan(backbone, video.flat), run.guided)[: len(run.bits)]:
            index = route.scale
            step_graph(config, video, route, layout, options).save(path)
            state |= {
                "pass_index": np.array([index], np.float32),
                "noise": _noise(run.bits[index], config.detail_bits),
                "cfg": np.array([run.guidance.cfg[index]], np.float32),
                "tau": np.array([run.guidance.tau[index]], np.float32),
                "bit_limit": np.array([UNLIMITED], np.float32),
            }
            outputs = _run(path, state)
            state["codes"] = outputs["codes_next"]
            state |= {name: array for name, array in outputs.items() if name.startswith("context_")}
            seen[f"bits/{index}"] = outputs["bits"].swapaxes(0, 1)
            for name, array in outputs.items():
                if name.startswith("watch_"):
                    seen[f"{name.removeprefix('watch_')}/{index}"] = array.swapaxes(0, 1)
            seen[f"prob/{index}"] = chances(seen[f"logits/{index}"])
    frames = state["codes"].reshape(1, config.detail_bits, video.frames, *video.last)
    seen["codes"] = recorded_part(frames, run)
    return seen


def _text(model: InfinityStar, run: StarRun) -> tuple[np.ndarray, np.ndarray]:
    """Rows [R, T, text width] and which of them are text [R, T]."""
    texts = [run.text]
    if run.guided:
        texts.append(model.cfg_uncond[: len(run.text)].numpy() if run.negative is None else run.negative)
    shape = len(texts), max(len(text) for text in texts)
    rows, valid = np.zeros((*shape, run.text.shape[1]), np.float32), np.zeros(shape, np.float32)
    for row, text in enumerate(texts):
        rows[row, : len(text)], valid[row, : len(text)] = text, 1
    return rows, valid


def _noise(bits: np.ndarray, columns: int) -> np.ndarray:
    """[1, L, n] as noise that draws them, [L, 1, columns]."""
    noise = np.full((bits.shape[1], 1, columns), NOISE_FOR_ZERO, np.float32)
    noise[..., : bits.shape[-1]][bits.swapaxes(0, 1) == 1] = NOISE_FOR_ONE
    return noise


def _run(path: Path, available: Arrays) -> Arrays:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    needed = {item.name: np.ascontiguousarray(available[item.name]) for item in session.get_inputs()}
    names = [item.name for item in session.get_outputs()]
    return dict(zip(names, session.run(names, needed), strict=True))
