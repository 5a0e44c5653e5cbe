"""Runs the exported bundle of a family that draws indices on a recorded run's own indices and noise."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from toprovar.exporter.codebook import Quantizer
    from toprovar.exporter.family import ModelFamily
    from toprovar.exporter.model import ModelFile
    from toprovar.runtime.guidance import Guidance

Arrays = dict[str, np.ndarray]
# With this noise the recorded index wins: one becomes an infinite Gumbel number.
NOISE_FOR_DRAWN, NOISE_FOR_OTHERS = 1.0, 0.5


@dataclass
class Recorded:
    """What the graphs are fed.

    told:    the prompt graph's inputs, conditional rows of all images, then unconditional ones
    indices: per scale [B, n*n]; maps: {scale: [B, d, n, n]} inputs instead of the resized codes
    further: further inputs of the last scale
    """

    told: Arrays
    guidance: Guidance
    sides: tuple[int, ...]
    indices: list[np.ndarray]
    maps: Mapping[int, np.ndarray]
    text_tokens: int = 1
    further: Arrays = field(default_factory=dict)

    @property
    def images(self) -> int:
        return len(self.indices[0])


def observe_bundle(
    family: ModelFamily, transformer: Any, quantizer: Quantizer, settings: ModelFile, run: Recorded, watched: set[str]
) -> Arrays:
    """The bundle's steps, one by one; what they computed under the names of the parity files, row-major."""
    from dataclasses import replace

    from toprovar.exporter.bundle_writer import export_bundle
    from toprovar.exporter.codec import Codec
    from toprovar.exporter.model import Model
    from toprovar.exporter.planned.step import StepOptions
    from toprovar.exporter.schedules import square
    from toprovar.runtime.backends.onnxruntime import OnnxRuntimeBackend
    from toprovar.runtime.bundle import open_bundle
    from toprovar.runtime.images import joined_prompts

    config, B = transformer.config, run.images
    model = Model("parity", config, transformer, Codec(quantizer, None), None, None, settings, "", family=family)
    options = StepOptions.for_guidance(run.guidance, config.depth, run.text_tokens)
    watched = {*watched, *(f"block{layer}" for layer in range(config.depth))}
    options = replace(options, rows=2, images=B, watched=watched)
    seen: Arrays = {}
    with tempfile.TemporaryDirectory(prefix="toprovar-parity-") as place:
        folder = Path(place) / "bundle"
        export_bundle(model, folder, run.guidance, options, schedule=square(run.sides))
        bundle = open_bundle(folder)
        backend, manifest = OnnxRuntimeBackend(bundle), bundle.manifest

        def ran(graph: Any, inputs: Arrays) -> Arrays:
            outputs = {name: backend.memory.empty(facts.shape, facts.dtype) for name, facts in graph.outputs.items()}
            backend.run(graph, {name: np.ascontiguousarray(inputs[name]) for name in graph.inputs}, outputs)
            return outputs

        own = [slice(image, None, B) for image in range(B)]  # an image's conditional and unconditional row
        prompts = [ran(manifest.prompt, {name: rows[rows_of] for name, rows in run.told.items()}) for rows_of in own]
        state = joined_prompts(backend.memory, prompts, 2)
        empty = np.zeros((0, 2 * B, *manifest.head), np.float32)
        state |= {f"{kind}_past_{layer:02d}": empty for kind in "kv" for layer in range(config.depth)}
        for step in [step for step in manifest.variants["dense"] if step.images == B][: len(run.indices)]:
            scale, indices = step.scale, run.indices[step.scale]
            noise = np.full((indices.shape[1], B, config.vocabulary), NOISE_FOR_OTHERS, np.float32)
            np.put_along_axis(noise, indices.T[..., None], NOISE_FOR_DRAWN, axis=2)
            state |= {
                "noise": noise,
                "smooth_noise": noise,
                "cfg": np.array([run.guidance.cfg[scale]], np.float32),
                "tau": np.array([run.guidance.tau[scale]], np.float32),
                **run.further,
            }
            if scale in run.maps:
                state["codes"] = _codes_of(run.maps[scale], run.sides[-1])
            outputs = ran(step.graph, state)
            state["codes"] = outputs["codes_next"]
            for name, array in outputs.items():
                kind = name.removeprefix("watch_")
                if name.startswith(("k_new", "v_new")):
                    past = name.replace("new", "past")
                    state[past] = np.concatenate([state[past], array])
                elif kind == "next":
                    seen[f"next/{scale}"] = array
                elif kind.startswith("diff/"):
                    seen[kind] = array.swapaxes(0, 1).reshape(-1, array.shape[-1])
                elif kind != name:
                    seen[f"{kind}/{scale}"] = array.swapaxes(0, 1)
                    if kind == f"block{config.depth - 1}":
                        seen[f"blockN/{scale}"] = seen[f"{kind}/{scale}"]
            seen[f"idx/{scale}"] = outputs["indices"][..., 0].T
    seen["f_hat"] = state["codes"]
    return seen


def _codes_of(small: np.ndarray, side: int) -> np.ndarray:
    """Codes whose area means are the given map: every cell takes the value its bins agree on, by least squares."""
    from toprovar.exporter.resize_matrices import area_matrix

    up = np.linalg.pinv(area_matrix(side, small.shape[-1]).astype(np.float64))
    return (up @ small @ up.T).astype(np.float32)
