"""Runs an Infinity model on a recorded run's own bits; what it computed comes under the names of the parity files.

Two ways: PyTorch, and the exported graphs in ONNX Runtime. Both give row-major arrays in the layout of the files:
activations [R, L, C], caches [R, H, S, c] with neighbouring rotation pairs. A name that a way cannot see is absent.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from toprovar.tools.parity_file import RecordedRun

if TYPE_CHECKING:
    from toprovar.exporter.infinity.config import InfinityConfig
    from toprovar.exporter.infinity.transformer import Infinity
    from toprovar.runtime.backends.onnxruntime import OnnxRuntimeBackend
    from toprovar.runtime.bundle import Bundle
    from toprovar.runtime.manifest import TensorFacts

Arrays = dict[str, np.ndarray]

# With this noise `noise < chance` draws exactly the recorded bit, whatever the chance in [0, 1].
NOISE_FOR_ONE, NOISE_FOR_ZERO = -1.0, 2.0


def observe_torch(model: Infinity, run: RecordedRun) -> Arrays:
    """The PyTorch loop, teacher-forced."""
    import torch

    from toprovar.exporter.infinity.generate import generate
    from toprovar.exporter.infinity.rope import rope_table

    rows, valid = padded_text(run, model.cfg_uncond.numpy())
    wanted = {array.rpartition("/")[0] for array in run.recorded} | {"logits", "next"}
    last_block = f"block{model.config.depth - 1}"
    seen: Arrays = {}

    def observe(name: str, scale: int, tensor: torch.Tensor) -> None:
        if name in wanted or (name == last_block and "blockN" in wanted):
            seen[f"{name}/{scale}"] = tensor.numpy()
        elif name[0] in "kv" and f"cache_{name}" in run.recorded:  # grows from scale to scale: the last one stays
            seen[f"cache_{name}"] = tensor.permute(1, 2, 0, 3).numpy()

    with torch.inference_mode():
        prompt = model.prompt(torch.from_numpy(rows), torch.from_numpy(valid))
        cross_text = model.text_proj_for_ca(model.text_norm(torch.from_numpy(rows))).numpy()
    bits = [torch.from_numpy(b) for b in run.bits]
    done = generate(model, prompt, run.schedule, run.guidance, forced_bits=bits, observe=observe)
    seen |= {
        "cond_BD": prompt.pooled.numpy(),
        "gss": prompt.modulation.numpy(),
        "ca_kv": cross_text[valid],
        "summed_codes": done.codes.numpy(),
        "rope": rope_table(model.config.head_width, run.schedule),
        **{f"bits/{s}": b for s, b in enumerate(run.bits)},
    }
    return _named_as_recorded(seen, model, run)


def observe_onnxruntime(model: Infinity, run: RecordedRun) -> Arrays:
    """The exported graphs, step by step; the bits are forced through the noise input."""
    from toprovar.exporter.bundle_writer import export_bundle
    from toprovar.exporter.model import Model, ModelFile
    from toprovar.exporter.planned.step import StepOptions
    from toprovar.runtime.backends.onnxruntime import OnnxRuntimeBackend
    from toprovar.runtime.bundle import open_bundle

    rows, valid = padded_text(run, model.cfg_uncond.numpy())
    depth, guidance = model.config.depth, run.guidance
    watched = {array.rpartition("/")[0] for array in run.recorded} | {"logits", "next", "in"}
    if "blockN" in watched:
        watched.add(f"block{depth - 1}")
    options = StepOptions(
        rows=2 if run.is_guided else 1,
        images=run.images,
        text_tokens=rows.shape[1],
        mixes_logits=guidance.mixes_logits,
        mixed_layers=guidance.mixed_layers(depth) if run.is_guided else frozenset(),
        watched=watched,
    )
    settings = ModelFile(transformer="parity")
    exported = Model("parity", model.config, model, None, None, None, settings, "")
    with tempfile.TemporaryDirectory(prefix="toprovar-parity-") as folder:
        export_bundle(exported, Path(folder) / "bundle", guidance, options, schedule=run.schedule)
        bundle = open_bundle(Path(folder) / "bundle")
        seen = _run_steps(bundle, OnnxRuntimeBackend(bundle), run, rows, valid)
    return _named_as_recorded(seen, model, run)


def padded_text(run: RecordedRun, learned: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Conditional rows, then unconditional ones. Returns: [R, T, width] fp32 and [R, T] bool, True on text."""
    rows = [*run.text, *run.unconditional(learned)]
    length = max(len(row) for row in rows)
    padded = np.zeros((len(rows), length, rows[0].shape[1]), np.float32)
    valid = np.zeros((len(rows), length), bool)
    for r, row in enumerate(rows):
        padded[r, : len(row)] = row
        valid[r, : len(row)] = True
    return padded, valid


def _run_steps(
    bundle: Bundle, backend: OnnxRuntimeBackend, run: RecordedRun, rows: np.ndarray, valid: np.ndarray
) -> Arrays:
    """Drives the dense steps of any number of images."""
    from toprovar.runtime.images import joined_prompts

    manifest = bundle.manifest

    def allocate(outputs: Mapping[str, TensorFacts]) -> Arrays:
        return {name: backend.memory.empty(facts.shape, facts.dtype) for name, facts in outputs.items()}

    prompts = []
    for image in range(run.images):
        own = slice(image, None, run.images)  # the conditional row, and under guidance the unconditional one
        tensors = allocate(manifest.prompt.outputs)
        texts = {"text_rows": rows[own], "text_valid": valid[own].astype(np.float32)}
        backend.run(manifest.prompt, {name: np.ascontiguousarray(text) for name, text in texts.items()}, tensors)
        prompts.append(tensors)
    prompt = joined_prompts(backend.memory, prompts, manifest.rows)
    weights = bundle.weights()
    seen = {
        "cond_BD": prompt["pooled_text"],
        "gss": prompt["modulation"].transpose(1, 0, 2)[:, None],  # [R, 1, 6, C]
        "rope": np.stack([weights["rope_cos"], weights["rope_sin"]]),
    }
    heads, head_width = manifest.model.heads, manifest.model.width // manifest.model.heads
    empty = np.empty((0, len(rows), heads, head_width), np.float32)
    cache = {f"{kind}_past_{layer:02d}": empty for kind in "kv" for layer in range(manifest.model.layers)}
    codes = np.zeros((run.images, *manifest.code_shape), np.float32)
    limit = np.array([run.guidance.bit_limit], np.float32)
    for step in [step for step in manifest.variants["dense"] if step.images == run.images][: run.scales]:
        s = step.scale
        inputs = {
            **prompt,
            **cache,
            "codes": codes,
            "noise": np.where(run.bits[s], np.float32(NOISE_FOR_ONE), np.float32(NOISE_FOR_ZERO)).transpose(1, 0, 2),
            "cfg": np.array([run.guidance.cfg[s]], np.float32),
            "tau": np.array([run.guidance.tau[s]], np.float32),
            "bit_limit": limit,
        }
        outputs = allocate(step.graph.outputs)
        needed = {name: np.ascontiguousarray(inputs[name]) for name in step.graph.inputs}
        backend.run(step.graph, needed, outputs)
        codes = outputs["codes_next"]
        seen[f"bits/{s}"] = outputs["bits"].transpose(1, 0, 2)
        for name, array in outputs.items():
            if name.startswith("watch_"):
                grid = name == "watch_next"
                seen[f"{name.removeprefix('watch_')}/{s}"] = array if grid else array.transpose(1, 0, 2)
            elif name.startswith(("k_new_", "v_new_")):
                past = name.replace("new", "past")
                cache[past] = np.concatenate([cache[past], array])
    for layer in range(manifest.model.layers):
        keys, values = cache[f"k_past_{layer:02d}"], cache[f"v_past_{layer:02d}"]
        # the graphs keep rotation pairs half-split inside a head: [evens, odds] -> neighbours
        pairs = keys.reshape(*keys.shape[:-1], 2, head_width // 2).swapaxes(-1, -2).reshape(keys.shape)
        seen[f"cache_k{layer}"] = pairs.transpose(1, 2, 0, 3)
        seen[f"cache_v{layer}"] = values.transpose(1, 2, 0, 3)
    seen["summed_codes"] = codes
    return seen


def tokens_of(grid: np.ndarray, config: InfinityConfig) -> np.ndarray:
    """[B, d, h*patch, w*patch] -> [B, h*w, bits]: channel first, then the place inside the patch."""
    B, d, height, width = grid.shape
    p = config.patch
    parts = grid.reshape(B, d, height // p, p, width // p, p).transpose(0, 2, 4, 1, 3, 5)
    return parts.reshape(B, (height // p) * (width // p), d * p * p)


def _named_as_recorded(seen: Arrays, model: Infinity, run: RecordedRun) -> Arrays:
    """From what the implementations watch to what the files hold.

    in/s:     the implementations watch the input with the level embedding of its scale, for all rows; files hold it
              without, for the conditional rows alone behind scale 0
    blockN/s: the output of the last block, before rows are mixed; what follows it is kept as `blockN mixed/s`
    """
    levels = model.lvl_embed.weight.numpy()
    last_block = f"block{model.config.depth - 1}"
    named = {}
    for name, array in seen.items():
        kind, _, scale = name.rpartition("/")
        if kind == "in":
            named[name] = array - levels[int(scale)]
        elif kind == "next":
            named[name] = array
            named[f"codes_in/{scale}"] = tokens_of(array, model.config)
        elif kind == last_block:
            named[name] = named[f"blockN/{scale}"] = array
        elif kind == "blockN":
            named[f"blockN mixed/{scale}"] = array
        else:
            named[name] = array
    return named
