"""Runs HART's exported graphs in ONNX Runtime on a recorded run's own indices and noise."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from toprovar.tools.parity_hart import Arrays, HartRun

if TYPE_CHECKING:
    from toprovar.exporter.codebook import Quantizer
    from toprovar.exporter.hart.transformer import Hart

# With this noise the recorded index wins: one becomes an infinite Gumbel number.
NOISE_FOR_DRAWN, NOISE_FOR_OTHERS = 1.0, 0.5


def observe_onnxruntime(model: Hart, quantizer: Quantizer, run: HartRun) -> Arrays:
    """The exported graphs, step by step; what they computed under the names of the parity files, row-major."""
    import torch

    from toprovar.exporter.hart.generate import Sampling
    from toprovar.exporter.hart.graph_files import PROMPT_FILE, step_file, write_graphs
    from toprovar.exporter.hart.graphs import HartGraphs
    from toprovar.exporter.hart.residual import STEPS
    from toprovar.exporter.hart.rope import image_angles, text_angles
    from toprovar.exporter.hart.weights import hart_weights, weights_layout

    B, T, _ = run.text.shape
    scales, config = len(run.sides), model.config
    sampling = Sampling(run.cfg, top_p=run.top_p)
    has_residual = run.start is not None and run.steps is not None
    steps = len(run.steps) if run.steps is not None else STEPS
    weights = hart_weights(model, quantizer, scales, steps)
    graphs = HartGraphs(
        config=config,
        layout=weights_layout(weights),
        sides=run.sides,
        top_k=tuple(sampling.candidates(scale) for scale in range(scales)),
        text_tokens=T,
        images=B,
        residual=has_residual,
        top_p=run.top_p,
        steps=steps,
        watched={"raw", "logits", "next", "diff/z", "diff/out", *(f"block{i}" for i in range(config.depth))},
    )
    valid = np.zeros((2 * B, T), np.float32)
    valid[:B], valid[B:, 0] = run.mask, 1
    positions = torch.from_numpy(np.concatenate([run.positions, np.zeros_like(run.positions)]))
    shape = (0, 2 * B, config.heads, config.head_width)
    cache = {f"{kind}_past_{i:02d}": np.zeros(shape, np.float32) for kind in "kv" for i in range(config.depth)}
    seen: Arrays = {}
    with tempfile.TemporaryDirectory(prefix="toprovar-parity-") as place:
        folder = Path(place)
        write_graphs(graphs, weights, folder)
        state = _run(folder / PROMPT_FILE, {"text_rows": np.concatenate([run.text, 0 * run.text]), "text_valid": valid})
        for scale, indices in enumerate(run.indices):
            if scale == 0:
                angles = text_angles(positions, config.head_width)
            else:
                angles = image_angles(run.sides[scale], run.sides[-1], positions[:, -1], config.head_width)
            turned = angles.permute(1, 0, 2)[:, :, None]  # [L, R, 1, D]
            noise = np.full((indices.shape[1], B, config.vocabulary), NOISE_FOR_OTHERS, np.float32)
            np.put_along_axis(noise, indices.T[..., None], NOISE_FOR_DRAWN, axis=2)
            state |= {
                **cache,
                "cos": turned.cos().numpy(),
                "sin": turned.sin().numpy(),
                "noise": noise,
                "guidance": np.array([sampling.guidance(scale, scales)], np.float32),
            }
            if scale in run.maps:
                state["latent"] = _latent_of(run.maps[scale], run.sides[-1])
            if scale == scales - 1 and has_residual:
                state |= _residual_noise(run, B)
            outputs = _run(folder / step_file(scale), state)
            state["latent"] = outputs["latent_next"]
            for name, array in outputs.items():
                kind = name.removeprefix("watch_")
                if name.startswith(("k_new", "v_new")):
                    past = name.replace("new", "past")
                    cache[past] = np.concatenate([cache[past], array])
                elif kind == "next":
                    seen[f"next/{scale}"] = array
                elif kind.startswith("diff/"):
                    seen[kind] = array.swapaxes(0, 1).reshape(-1, array.shape[-1])
                elif kind != name:
                    seen[f"{kind}/{scale}"] = array.swapaxes(0, 1)
            seen[f"idx/{scale}"] = outputs["indices"].T
    seen["f_hat"] = state["latent"]
    return seen


def _residual_noise(run: HartRun, images: int) -> Arrays:
    """Rows to [n*n, B, d]; of the steps' noise the conditional half, without the last step's."""
    assert run.start is not None
    assert run.steps is not None
    start = run.start.reshape(images, -1, run.start.shape[-1])
    steps = run.steps[:-1, : len(run.start)].reshape(len(run.steps) - 1, *start.shape)
    return {"residual_start": start.swapaxes(0, 1), "residual_noise": steps.swapaxes(1, 2)}


def _latent_of(small: np.ndarray, side: int) -> np.ndarray:
    """A latent whose area means are the given map: every cell takes the value its bins agree on, by least squares."""
    from toprovar.exporter.resize_matrices import area_matrix

    up = np.linalg.pinv(area_matrix(side, small.shape[-1]).astype(np.float64))
    return (up @ small @ up.T).astype(np.float32)


def _run(path: Path, available: Arrays) -> Arrays:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    needed = {item.name: np.ascontiguousarray(available[item.name]) for item in session.get_inputs()}
    names = [item.name for item in session.get_outputs()]
    return dict(zip(names, session.run(names, needed), strict=True))
