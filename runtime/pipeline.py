"""The loop: chains a bundle's step graphs into an image.

The loop is outside and the arithmetic inside: this file slices buffers, makes noise and keeps time. It knows variants,
counts and names from the manifest, and no method.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from toprovar.runtime.bundle import Bundle
from toprovar.runtime.errors import ToprovarError
from toprovar.runtime.guidance import Guidance
from toprovar.runtime.manifest import COMPUTE_DTYPES, NUMPY_DTYPES, Graph, Step, TensorFacts
from toprovar.runtime.noise import check_seed, uniform_noise
from toprovar.runtime.text import EncodedPrompt, TextEncoder


class Backend(Protocol):
    """Anything that runs a bundle's graphs from arrays into arrays."""

    weights: dict[str, np.ndarray]

    def prepare(self, graph: Graph) -> None: ...

    def run(self, graph: Graph, inputs: Mapping[str, np.ndarray], outputs: Mapping[str, np.ndarray]) -> None: ...


@dataclass
class StepRecord:
    """One scale as it ran. counts: tokens per layer; kept: {layer: positions} where some were pruned."""

    scale: int
    map: tuple[int, int]
    counts: tuple[int, ...]
    latency_ms: float
    kept: dict[int, np.ndarray] = field(default_factory=dict)
    entropy_nats: dict[int, np.ndarray] = field(default_factory=dict)


@dataclass
class Result:
    """image: uint8 [H, W, 3], or None without a decoder; codes [d, h, w]; bits per scale [N, bits] uint8."""

    image: np.ndarray | None
    codes: np.ndarray
    bits: list[np.ndarray]
    steps: list[StepRecord]
    latency_ms: dict[str, float]
    prompt: EncodedPrompt | None


def picture_from_image(image: np.ndarray) -> np.ndarray:
    """[3, H, W] float in [-1, 1] -> [H, W, 3] uint8, truncated as the reference does."""
    if not np.isfinite(image).all():
        raise ToprovarError("decoder output holds non-finite values", "check the weights with: toprovar inspect")
    return ((np.clip(image, -1, 1) + 1) * 127.5).astype(np.uint8).transpose(1, 2, 0).copy()


class Pipeline:
    """A bundle on a backend.

    Example:
        pipeline = Pipeline(bundle, OnnxRuntimeBackend(bundle))
        result = pipeline.generate("a red apple", seed=7, variant="planned")
    """

    def __init__(self, bundle: Bundle, backend: Backend) -> None:
        self.bundle = bundle
        self.manifest = bundle.manifest
        self.backend = backend
        self._text = TextEncoder(bundle, backend)

    def steps(self, variant: str) -> tuple[Step, ...]:
        """Raises: ToprovarError if the bundle has no such variant."""
        if variant not in self.manifest.variants:
            raise ToprovarError(
                f"bundle {self.bundle.folder} has no variant {variant}; it has {', '.join(self.manifest.variants)}",
                "export it with --plan to get a planned variant",
            )
        return self.manifest.variants[variant]

    def prepare(self, variant: str) -> None:
        """Loads every graph of a variant, so that the first image is as fast as the following ones."""
        for graph in (self.manifest.prompt, self.manifest.decoder, *(step.graph for step in self.steps(variant))):
            if graph is not None:
                self.backend.prepare(graph)
        self._text.prepare()

    def generate(
        self,
        prompt: str | None,
        seed: int,
        variant: str = "dense",
        negative: str | None = None,
        text_rows: np.ndarray | None = None,
        negative_rows: np.ndarray | None = None,
        guidance: Guidance | None = None,
        noise: Callable[[int, int, int], np.ndarray] | None = None,
        on_scale: Callable[[int, np.ndarray], None] | None = None,
        on_watch: Callable[[str, int, np.ndarray], None] | None = None,
    ) -> Result:
        """Makes one image.

        prompt:    the text; or give `text_rows` [T, text width] float32 made elsewhere
        negative:  replaces the learned unconditional rows (or `negative_rows`)
        seed:      0 .. 2^63; the same seed draws the same noise whatever is pruned
        noise:     (scale, tokens, bits) -> [tokens, bits], instead of the seeded noise
        on_scale:  called with (scale, codes [d, h, w]) after every scale
        on_watch:  called with (name, scale, array) for outputs a bundle was built to watch
        Raises:    ToprovarError for a bad seed, prompt or variant, and for non-finite values, naming the scale.
        """
        check_seed(seed)
        manifest = self.manifest
        guidance = guidance or manifest.guidance
        steps = self.steps(variant)
        if guidance.mixes_logits != manifest.guidance.mixes_logits or len(guidance.cfg) < len(steps):
            raise ValueError("guidance does not fit the bundle: another number of scales, or other layers are mixed")
        if manifest.rows == 1 and guidance.uses_unconditional_row:
            raise ToprovarError(
                f"bundle {self.bundle.folder} was exported without guidance; cfg {list(guidance.cfg)} cannot be used",
                "export it again with --cfg, or leave the value at 1",
            )
        started = time.perf_counter()
        self.prepare(variant)  # holds every graph against the manifest before buffers are made
        load_ms = (time.perf_counter() - started) * 1e3
        started = time.perf_counter()
        encoded, rows, valid = self._text.rows(prompt, negative, text_rows, negative_rows)
        text_ms = (time.perf_counter() - started) * 1e3
        tensors = _allocate(manifest.prompt.outputs)
        self.backend.run(manifest.prompt, {"text_rows": rows, "text_valid": valid}, tensors)
        prompt_ms = (time.perf_counter() - started) * 1e3 - text_ms
        run = _Run(self, steps, tensors, guidance, seed, noise)
        records = []
        for step in steps:
            begin = time.perf_counter()
            record = run.step(step, on_watch)
            record.latency_ms = (time.perf_counter() - begin) * 1e3
            records.append(record)
            if on_scale:
                on_scale(step.scale, run.codes[0])
        begin = time.perf_counter()
        image = self.decode(run.codes[0]) if manifest.decoder else None
        latency = {
            "load": load_ms,
            "text": text_ms,
            "prompt": prompt_ms,
            "steps": sum(record.latency_ms for record in records),
            "decode": (time.perf_counter() - begin) * 1e3,
        }
        return Result(image, run.codes[0], run.bits, records, latency, encoded)

    def decode(self, codes: np.ndarray) -> np.ndarray:
        """codes [d, h, w] -> picture [H, W, 3] uint8."""
        decoder = self.manifest.decoder
        if decoder is None:
            raise ToprovarError(f"bundle {self.bundle.folder} holds no decoder", "export it with --tokenizer")
        outputs = _allocate(decoder.outputs)
        self.backend.run(decoder, {"codes": np.ascontiguousarray(codes[None], np.float32)}, outputs)
        return picture_from_image(outputs["image"][0])


def _allocate(signature: Mapping[str, TensorFacts]) -> dict[str, np.ndarray]:
    return {name: np.empty(facts.shape, NUMPY_DTYPES[facts.dtype]) for name, facts in signature.items()}


class _Run:
    """Buffers of one image: cache per layer, accumulated codes, residuals of the reference scale."""

    def __init__(
        self,
        pipeline: Pipeline,
        steps: tuple[Step, ...],
        prompt: dict[str, np.ndarray],
        guidance: Guidance,
        seed: int,
        noise: Callable[[int, int, int], np.ndarray] | None,
    ) -> None:
        manifest = pipeline.manifest
        self.backend = pipeline.backend
        self.schedule = manifest.schedule
        self.bits_per_token = manifest.model.bits
        self.guidance = guidance
        self.noise = noise or (lambda scale, tokens, bits: uniform_noise(seed, scale, tokens, bits))
        self.prompt = prompt
        self.codes = np.zeros((1, *manifest.code_shape), np.float32)
        self.bits: list[np.ndarray] = []
        self.residuals: dict[str, np.ndarray] = {}
        self.limit = np.array([guidance.bit_limit], np.float32)
        layers = manifest.model.layers
        shape = (manifest.rows, manifest.model.heads, manifest.model.width // manifest.model.heads)
        dtype = NUMPY_DTYPES[COMPUTE_DTYPES[manifest.compute]]
        totals = [sum(step.counts[layer] for step in steps[:-1]) for layer in range(layers)]
        self.cache = {kind: [np.empty((max(total, 1), *shape), dtype) for total in totals] for kind in ("k", "v")}
        self.filled = [0] * layers

    def step(self, step: Step, on_watch: Callable[[str, int, np.ndarray], None] | None) -> StepRecord:
        """Runs one scale and moves the buffers on."""
        scale, graph = step.scale, step.graph
        inputs = {
            "codes": self.codes,
            "noise": self.noise(scale, step.tokens, self.bits_per_token)[:, None, :],
            "cfg": np.array([self.guidance.cfg[scale]], np.float32),
            "tau": np.array([self.guidance.tau[scale]], np.float32),
            "bit_limit": self.limit,
            **self.prompt,
            **self.residuals,
        }
        outputs: dict[str, np.ndarray] = {}
        for name in graph.inputs:
            if name.startswith(("k_past_", "v_past_")):
                layer = int(name[-2:])
                inputs[name] = self.cache[name[0]][layer][: self.filled[layer]]
        for name, facts in graph.outputs.items():
            if name.startswith(("k_new_", "v_new_")):
                layer = int(name[-2:])
                start = self.filled[layer]
                outputs[name] = self.cache[name[0]][layer][start : start + step.counts[layer]]
            else:
                outputs[name] = np.empty(facts.shape, NUMPY_DTYPES[facts.dtype])
        self.backend.run(graph, inputs, outputs)
        self.codes = outputs["codes_next"]
        if not np.isfinite(self.codes).all():
            raise ToprovarError(f"codes of scale {scale} are not finite", "check the weights with: toprovar inspect")
        for layer, count in enumerate(step.counts):
            self.filled[layer] += count
        self.bits.append(outputs["bits"][:, 0].astype(np.uint8))
        record = StepRecord(scale, self.schedule[scale], step.counts, 0.0)
        for name, array in outputs.items():
            if name.startswith("residual_"):
                self.residuals[name] = array
            elif name.startswith("entropy_"):
                record.entropy_nats[int(name[-2:])] = array
            elif name.startswith("watch_") and on_watch:
                on_watch(name.removeprefix("watch_"), scale, array)
        record.kept = {layer: outputs[gate] for layer, gate in step.gates.items()}
        return record
