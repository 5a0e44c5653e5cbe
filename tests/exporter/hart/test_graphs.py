"""Exported graphs in ONNX Runtime against the PyTorch loop: with the same noise both draw the same picture."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import hart_reference as reference
import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="needs PyTorch: pip install 'toprovar[torch]'")
onnxruntime = pytest.importorskip("onnxruntime", reason="needs ONNX Runtime: pip install 'toprovar[onnxruntime]'")

from toprovar.exporter.codebook import load_quantizer  # noqa: E402
from toprovar.exporter.hart.generate import Sampling, SeededNoise, generate  # noqa: E402
from toprovar.exporter.hart.graph_files import PROMPT_FILE, step_file, write_graphs  # noqa: E402
from toprovar.exporter.hart.graphs import HartGraphs  # noqa: E402
from toprovar.exporter.hart.load import load_hart  # noqa: E402
from toprovar.exporter.hart.residual import STEPS  # noqa: E402
from toprovar.exporter.hart.rope import image_angles, text_angles  # noqa: E402
from toprovar.exporter.hart.weights import hart_weights, weights_layout  # noqa: E402

# The residual head multiplies rounding (tools/parity_report.py, "diffusion"); all else is within 1e-5.
LATENT_TOLERANCE = 1e-4


def run(path: Path, values: dict[str, Any]) -> dict[str, Any]:
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    needed = {item.name: np.ascontiguousarray(values[item.name]) for item in session.get_inputs()}
    names = [item.name for item in session.get_outputs()]
    return dict(zip(names, session.run(names, needed), strict=True))


@pytest.mark.parametrize(
    ("case", "settings", "guided"),
    [
        (reference.Case(prompts=(4, 2)), Sampling(2.0, (30, 20, 9)), True),
        (reference.Case((1, 3, 4, 5), (5,), seed=2), Sampling(3.0, (0,), top_p=0.6, smooth=True), True),
        (reference.Case((1, 2), (1,), text_tokens=1, depth=1, seed=4), Sampling(0.0, (5,), residual=False), False),
        (reference.Case((1, 2, 3), (2,), depth=1, seed=6), Sampling(0.0, (1,), 1e-6), False),
    ],
    ids=["top-k, two prompts", "top-p, smooth", "one row, one text token", "always the likeliest"],
)
def test_graphs_draw_what_the_loop_draws(
    tmp_path: Path, case: reference.Case, settings: Sampling, guided: bool
) -> None:
    weights = {k: torch.from_numpy(a) for k, a in reference.random_weights(case).items()}
    model, quantizer = load_hart(weights, "case"), load_quantizer(weights, "case")
    B, R, D, scales = case.images, case.images * (1 + guided), case.width // case.heads, len(case.sides)
    noise = SeededNoise(range(B))
    rng = np.random.default_rng(7)
    valid = np.arange(case.text_tokens) < np.array(case.prompts)[:, None]
    text = rng.standard_normal((B, case.text_tokens, case.text_width)).astype(np.float32)
    positions = valid.cumsum(1) - 1
    prompt = model.prompt(*(torch.from_numpy(array) for array in (text, valid, positions)), guided)
    expected = generate(model, quantizer, prompt, case.sides, settings, noise)

    thunks = hart_weights(model, quantizer, scales)
    graphs = HartGraphs(
        model.config, weights_layout(thunks), case.sides, tuple(settings.candidates(s) for s in range(scales)),
        case.text_tokens, B, guided, settings.residual, settings.top_p, settings.smooth,
    )  # fmt: skip
    write_graphs(graphs, thunks, tmp_path)
    if guided:
        first = np.zeros_like(valid)
        first[:, 0] = True
        text, valid = np.concatenate([text, 0 * text]), np.concatenate([valid, first])
    values = run(tmp_path / PROMPT_FILE, {"text_rows": text, "text_valid": valid.astype(np.float32)})
    for layer in range(case.depth):
        values |= {f"{kind}_past_{layer:02d}": np.zeros((0, R, case.heads, D), np.float32) for kind in "kv"}
    for scale, side in enumerate(case.sides):
        if scale == 0:
            angles = text_angles(prompt.positions, D)
        else:
            angles = image_angles(side, case.sides[-1], prompt.last_position, D)
        turned = angles.permute(1, 0, 2)[:, :, None]
        plane = (scale, side * side, case.vocabulary)
        values |= {
            "cos": turned.cos().numpy(),
            "sin": turned.sin().numpy(),
            "noise": noise.indices(*plane).transpose(0, 1).numpy(),
            "smooth_noise": noise.smoothing(*plane).transpose(0, 1).numpy(),
            "guidance": np.array([settings.guidance(scale, scales)], np.float32),
            "residual_start": noise.residual_start(side * side, case.channels).unflatten(0, (B, -1)).transpose(0, 1),
            "residual_noise": noise.residual_steps(side * side, case.channels, B)[: STEPS - 1]
            .unflatten(1, (B, -1))
            .transpose(1, 2),
        }
        outputs = run(tmp_path / step_file(scale), values)
        assert np.array_equal(outputs["indices"].T, expected.indices[scale].numpy()), scale
        values["latent"] = outputs["latent_next"]
        for layer in range(case.depth if scale < scales - 1 else 0):
            for kind in "kv":
                name = f"{kind}_past_{layer:02d}"
                values[name] = np.concatenate([values[name], outputs[name.replace("past", "new")]])
    assert np.isfinite(values["latent"]).all()
    assert np.abs(values["latent"] - expected.codes.numpy()).max() <= LATENT_TOLERANCE
