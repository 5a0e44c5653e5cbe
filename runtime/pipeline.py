"""The loop: chains a bundle's step graphs into an image.

The loop is outside and the arithmetic inside: this file slices buffers, makes noise and keeps time. It knows variants,
counts and names from the manifest, and no method.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from toprovar.runtime.bundle import Bundle
from toprovar.runtime.decisions import (
    EnergyMassDecision,
    RhoDecision,
    SatsDecision,
    SkipvarDecision,
    frequency_features,
    low_entropy_ratio,
)
from toprovar.runtime.errors import ToprovarError
from toprovar.runtime.guidance import Guidance
from toprovar.runtime.images import Images, joined_prompts
from toprovar.runtime.manifest import NUMPY_DTYPES, Graph, Step, TensorFacts
from toprovar.runtime.noise import check_seed, uniform_noise
from toprovar.runtime.table import StepTable
from toprovar.runtime.text import EncodedPrompt, TextEncoder


class Backend(Protocol):
    """Anything that runs a bundle's graphs from arrays into arrays."""

    weights: dict[str, np.ndarray]

    def prepare(self, graph: Graph) -> None: ...

    def run(self, graph: Graph, inputs: Mapping[str, np.ndarray], outputs: Mapping[str, np.ndarray]) -> None: ...


@dataclass
class StepRecord:
    """One scale as it ran. counts: tokens per layer; kept: {layer: positions} where some were pruned; latency_ms of the
    whole group that it ran in; guided: with unconditional rows."""

    scale: int
    map: tuple[int, int]
    counts: tuple[int, ...]
    latency_ms: float
    kept: dict[int, np.ndarray] = field(default_factory=dict)
    entropy_nats: dict[int, np.ndarray] = field(default_factory=dict)
    guided: bool = True


@dataclass
class Result:
    """image: uint8 [H, W, 3], or None without a decoder; codes [d, h, w]; bits per scale [N, bits] uint8, 255 where
    none was drawn; decisions: (scale, what, value) as they were taken."""

    image: np.ndarray | None
    codes: np.ndarray
    bits: list[np.ndarray]
    steps: list[StepRecord]
    latency_ms: dict[str, float]
    prompt: EncodedPrompt | None
    decisions: list[tuple[int, str, float | str]] = field(default_factory=list)


@dataclass
class Request:
    """One image of a batch; the fields are those of `Pipeline.generate`."""

    prompt: str | None
    seed: int
    negative: str | None = None
    text_rows: np.ndarray | None = None
    negative_rows: np.ndarray | None = None
    noise: Callable[[int, int, int], np.ndarray] | None = None


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

    def table(self, variant: str) -> StepTable:
        """The steps of a variant with the decisions that choose among them."""
        return StepTable(self.steps(variant), self.manifest.decisions if variant == "planned" else ())

    def prepare(self, variant: str) -> None:
        """Loads every graph of a variant, so that the first image is as fast as the following ones."""
        small = self.manifest.small_decoder if variant == "planned" else None
        self._load(self.steps(variant), small)

    def _load(self, steps: Iterable[Step], *further: Graph | None) -> None:
        manifest = self.manifest
        for graph in (manifest.prompt, manifest.decoder, *further, *(step.graph for step in steps)):
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
        asked = Request(prompt, seed, negative, text_rows, negative_rows, noise)
        seen = None if on_scale is None else lambda image, scale, codes: on_scale(scale, codes)
        return self.generate_batch([asked], variant, guidance, seen, on_watch)[0]

    def generate_batch(
        self,
        requests: Sequence[Request],
        variant: str = "dense",
        guidance: Guidance | None = None,
        on_scale: Callable[[int, int, np.ndarray], None] | None = None,
        on_watch: Callable[[str, int, np.ndarray], None] | None = None,
    ) -> list[Result]:
        """Makes several images; each decides for itself and comes out as it does alone.

        Images run together as long as they take the same decisions and the bundle has steps for so many.
        on_scale: called with (image, scale, codes [d, h, w])
        Raises:   as `generate`.
        """
        if not requests:
            return []
        for request in requests:
            check_seed(request.seed)
        manifest = self.manifest
        guidance = guidance or manifest.guidance
        table = self.table(variant)
        scales = max(step.scale for step in table.steps) + 1
        if guidance.mixes_logits != manifest.guidance.mixes_logits or len(guidance.cfg) < scales:
            raise ValueError("guidance does not fit the bundle: another number of scales, or other layers are mixed")
        if manifest.rows == 1 and guidance.uses_unconditional_row:
            raise ToprovarError(
                f"bundle {self.bundle.folder} was exported without guidance; cfg {list(guidance.cfg)} cannot be used",
                "export it again with --cfg, or leave the value at 1",
            )
        started = time.perf_counter()
        # graphs are held against the manifest before buffers are made; those that a decision may never lead to are
        # loaded when it does
        self._load(table.certain(len(requests)))
        load_ms = (time.perf_counter() - started) * 1e3
        pictures = []
        for request in requests:
            started = time.perf_counter()
            encoded, rows, valid = self._text.rows(
                request.prompt, request.negative, request.text_rows, request.negative_rows
            )
            text_ms = (time.perf_counter() - started) * 1e3
            tensors = _allocate(manifest.prompt.outputs)
            self.backend.run(manifest.prompt, {"text_rows": rows, "text_valid": valid}, tensors)
            prompt_ms = (time.perf_counter() - started) * 1e3 - text_ms
            times = {"load": load_ms, "text": text_ms, "prompt": prompt_ms}
            pictures.append(_Picture(request, encoded, tensors, times))
        run = _Run(self, table, pictures, guidance, on_scale, on_watch)
        run.all_scales()
        results = []
        for picture in pictures:
            begin = time.perf_counter()
            image = self.decode(picture.codes) if manifest.decoder else None
            picture.latency_ms["steps"] = sum(record.latency_ms for record in picture.steps)
            picture.latency_ms["decode"] = (time.perf_counter() - begin) * 1e3
            results.append(
                Result(
                    image,
                    picture.codes,
                    picture.bits,
                    picture.steps,
                    picture.latency_ms,
                    picture.prompt,
                    picture.decisions,
                )
            )
        return results

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


@dataclass
class _Picture:
    """One image while it is made."""

    request: Request
    prompt: EncodedPrompt | None
    tensors: dict[str, np.ndarray]
    latency_ms: dict[str, float]
    codes: np.ndarray = field(default_factory=lambda: np.empty(0, np.float32))
    bits: list[np.ndarray] = field(default_factory=list)
    steps: list[StepRecord] = field(default_factory=list)
    decisions: list[tuple[int, str, float | str]] = field(default_factory=list)


class _Run:
    """All scales of a batch: groups of images that took the same decisions, each on its own row of the table."""

    def __init__(
        self,
        pipeline: Pipeline,
        table: StepTable,
        pictures: list[_Picture],
        guidance: Guidance,
        on_scale: Callable[[int, int, np.ndarray], None] | None,
        on_watch: Callable[[str, int, np.ndarray], None] | None,
    ) -> None:
        self.manifest = pipeline.manifest
        self.backend, self.table, self.pictures, self.guidance = pipeline.backend, table, pictures, guidance
        self.on_scale, self.on_watch = on_scale, on_watch
        self.limit = np.array([guidance.bit_limit], np.float32)
        self.last_use = {name: step.scale for step in table.steps for name in step.graph.inputs}

    def all_scales(self) -> None:
        prompt = joined_prompts([picture.tensors for picture in self.pictures], self.manifest.rows)
        groups = [Images(self.manifest, self.table, list(range(len(self.pictures))), prompt)]
        for scale in range(len(self.manifest.schedule)):
            following = []
            for group in groups:
                for part, step in self._steps(group, scale):
                    following += self._run(part, step)
            groups = following

    def _steps(self, group: Images, scale: int) -> list[tuple[Images, Step]]:
        """The group by the step its images take; nothing where their path has ended."""
        found = self.table.at(scale, group.path, group.guided)
        if not found:
            return []
        choice = [0] * group.count
        if len(found) > 1:
            decision, energy = self.table.decision(EnergyMassDecision), group.carried
            assert decision is not None
            assert energy is not None
            ladder = tuple(step.counts[0] for step in found)
            choice = [ladder.index(decision.count(row, ladder)) for row in energy]
            for place, index in zip(group.places, choice, strict=True):
                self.pictures[place].decisions.append((scale, "tokens", float(ladder[index])))
        parts = []
        for index in sorted(set(choice)):
            same = [i for i, mine in enumerate(choice) if mine == index]
            while same:
                size = next(size for size in self.table.sizes() if size <= len(same))
                step = self.table.at(scale, group.path, group.guided, size)[index]
                parts.append((group.take(same[:size], step.guided), step))
                same = same[size:]
        return parts

    def _run(self, group: Images, step: Step) -> list[Images]:
        """Runs one step, moves the buffers on, and decides. Returns: the group by what its images decided."""
        begin = time.perf_counter()
        outputs = self._outputs(group, step)
        self.backend.run(step.graph, self._inputs(group, step), outputs)
        if not np.isfinite(outputs["codes_next"]).all():
            raise ToprovarError(
                f"codes of scale {step.scale} are not finite", "check the weights with: toprovar inspect"
            )
        group.before_last, group.codes = group.codes, outputs["codes_next"]
        group.carried, group.own_codes = outputs.get("score_next"), outputs.get("own_codes")
        for layer, count in enumerate(step.counts):
            group.filled[layer] += count
        group.residuals |= {name: array for name, array in outputs.items() if name.startswith("residual_")}
        group.residuals = {n: a for n, a in group.residuals.items() if self.last_use.get(n, -1) > step.scale}
        parts = self._decide(group, step, outputs)
        latency_ms = (time.perf_counter() - begin) * 1e3
        for i, place in enumerate(group.places):
            self._record(self.pictures[place], i, step, outputs, latency_ms)
            self.pictures[place].codes = group.codes[i]
            if self.on_scale:
                self.on_scale(place, step.scale, group.codes[i])
        if self.on_watch:
            for name, array in outputs.items():
                if name.startswith("watch_"):
                    self.on_watch(name.removeprefix("watch_"), step.scale, array)
        return parts

    def _inputs(self, group: Images, step: Step) -> dict[str, np.ndarray]:
        scale = step.scale
        bits = self.manifest.model.bits
        noise = []
        for place in group.places:
            request = self.pictures[place].request
            made = request.noise(scale, step.tokens, bits) if request.noise else None
            noise.append(uniform_noise(request.seed, scale, step.tokens, bits) if made is None else made)
        inputs = {
            "codes": np.ascontiguousarray(group.codes),
            "noise": np.stack(noise, 1),  # [L, B, bits]
            "cfg": np.array([self.guidance.cfg[scale]], np.float32),
            "tau": np.array([self.guidance.tau[scale]], np.float32),
            "bit_limit": self.limit,
            **group.prompt,
            **group.residuals,
        }
        if group.carried is not None:
            inputs["score"] = np.ascontiguousarray(group.carried)
        if group.own_codes is not None:
            inputs["codes_before"] = np.ascontiguousarray(group.own_codes)
        for name in step.graph.inputs:
            if name.startswith(("k_past_", "v_past_")):
                layer = int(name[7:])
                inputs[name] = group.cache[name[0]][layer][: group.filled[layer]]
        return inputs

    def _outputs(self, group: Images, step: Step) -> dict[str, np.ndarray]:
        outputs: dict[str, np.ndarray] = {}
        for name, facts in step.graph.outputs.items():
            if name.startswith(("k_new_", "v_new_")):
                layer = int(name[6:])
                start = group.filled[layer]
                outputs[name] = group.cache[name[0]][layer][start : start + step.counts[layer]]
            else:
                outputs[name] = np.empty(facts.shape, NUMPY_DTYPES[facts.dtype])
        return outputs

    def _record(
        self, picture: _Picture, image: int, step: Step, outputs: dict[str, np.ndarray], latency_ms: float
    ) -> None:
        record = StepRecord(step.scale, self.manifest.schedule[step.scale], step.counts, latency_ms)

        def own(array: np.ndarray) -> np.ndarray:
            return array if array.ndim == 1 else array[image]

        for name, array in outputs.items():
            if name.startswith("entropy_") and name != "entropy_mean":
                record.entropy_nats[int(name[8:])] = own(array)
        record.kept = {layer: own(outputs[gate]) for layer, gate in step.gates.items()}
        record.guided = step.guided
        picture.steps.append(record)
        picture.bits.append(outputs["bits"][:, image].astype(np.uint8))

    # -- decisions -------------------------------------------------------------------------------------------------

    def _decide(self, group: Images, step: Step, outputs: dict[str, np.ndarray]) -> list[Images]:
        taken = []
        ends = self._guidance_ends(group, step, outputs)
        for i in range(group.count):
            taken.append((self._path(group, step, i, outputs), group.guided and not ends[i]))
        parts = []
        for path, guided in dict.fromkeys(taken):
            part = group.take([i for i, mine in enumerate(taken) if mine == (path, guided)], guided)
            part.path = path
            parts.append(part)
        return parts

    def _path(self, group: Images, step: Step, image: int, outputs: dict[str, np.ndarray]) -> str:
        rho, skipvar, scale = self.table.decision(RhoDecision), self.table.decision(SkipvarDecision), step.scale
        if group.path:
            return group.path
        if rho and scale in rho.paths:
            path = rho.path(scale, low_entropy_ratio(outputs["entropy_mean"][image]))
        elif skipvar and scale == skipvar.scale:
            path = skipvar.path(self._frequencies(group, image))
        else:
            return ""
        self.pictures[group.places[image]].decisions.append((scale, "path", path or "main"))
        return path or ""

    def _frequencies(self, group: Images, image: int) -> np.ndarray:
        graph = self.manifest.small_decoder
        assert graph is not None
        pictures = []
        for codes in (group.before_last, group.codes):
            outputs = _allocate(graph.outputs)
            self.backend.run(graph, {"codes": np.ascontiguousarray(codes[image : image + 1])}, outputs)
            pictures.append(outputs["image"][0])
        return frequency_features(*pictures)

    def _guidance_ends(self, group: Images, step: Step, outputs: dict[str, np.ndarray]) -> list[bool]:
        rms, bits = outputs.get("guidance_gap"), outputs["bits"]
        decision, before = self.table.decision(SatsDecision), group.gap
        group.gap = None
        if decision is None or rms is None:
            return [False] * group.count
        logits = [2 * int((bits[:, i] >= 0).sum()) for i in range(group.count)]  # two of every bit that was drawn
        group.gap = [decision.gap(float(value), count) for value, count in zip(rms, logits, strict=True)]
        if before is None or step.scale not in decision.scales:
            return [False] * group.count
        ends = [decision.ends_guidance(now, then) for now, then in zip(group.gap, before, strict=True)]
        for place, end in zip(group.places, ends, strict=True):
            self.pictures[place].decisions.append((step.scale, "guidance", "ends" if end else "goes on"))
        return ends
