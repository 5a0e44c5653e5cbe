"""The loop: chains a bundle's step graphs into an image.

The loop is outside and the arithmetic inside: this file slices buffers, makes noise and keeps time. It knows variants,
counts and names from the manifest, and no method.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from typing import Any, Protocol

import numpy as np

from toprovar.runtime.buffers import Memory
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
from toprovar.runtime.manifest import Graph, Step
from toprovar.runtime.noise import (
    RESIDUAL_PLANE,
    SMOOTHING_PLANE,
    NoiseAhead,
    check_seed,
    normal_noise,
    stream_noise,
    uniform_noise,
)
from toprovar.runtime.table import StepTable
from toprovar.runtime.text import Conditions, EncodedPrompt
from toprovar.runtime.video_decoding import decoded_frames


class Backend(Protocol):
    """Anything that runs a bundle's graphs from buffers into buffers of its memory."""

    @property
    def memory(self) -> Memory: ...

    def prepare(self, graph: Graph) -> None: ...

    def run(self, graph: Graph, inputs: Mapping[str, Any], outputs: Mapping[str, Any]) -> None: ...


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
    none was drawn; families with a codebook have indices [N] int32 instead, -1 where none was drawn; decisions:
    (scale, what, value) as they were taken; frames: [T, H, W, 3] of a video, in place of the image."""

    image: np.ndarray | None
    codes: np.ndarray
    bits: list[np.ndarray]
    steps: list[StepRecord]
    latency_ms: dict[str, float]
    prompt: EncodedPrompt | None
    decisions: list[tuple[int, str, float | str]] = field(default_factory=list)
    indices: list[np.ndarray] = field(default_factory=list)
    frames: np.ndarray | None = None

    @property
    def picture(self) -> np.ndarray | None:
        """The image, or a video's frames on top of one another [T*H, W, 3]."""
        return self.image if self.frames is None else self.frames.reshape(-1, *self.frames.shape[2:])


@dataclass
class Request:
    """One image of a batch; the fields are those of `Pipeline.generate`."""

    prompt: str | None
    seed: int
    negative: str | None = None
    text_rows: np.ndarray | None = None
    negative_rows: np.ndarray | None = None
    noise: Callable[[int, int, int], np.ndarray] | None = None
    text_valid: np.ndarray | None = None
    negative_valid: np.ndarray | None = None


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
        self._conditions = Conditions(bundle, backend)

    def steps(self, variant: str) -> tuple[Step, ...]:
        """Raises: ToprovarError if the bundle has no such variant."""
        if variant not in self.manifest.variants:
            nearest = get_close_matches(variant, self.manifest.variants, 1)
            raise ToprovarError(
                f"bundle {self.bundle.folder} has no variant {variant}; it has {', '.join(self.manifest.variants)}",
                f"did you mean {nearest[0]}?" if nearest else "export it with --plan to get a planned variant",
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
        following = manifest.video.following if manifest.video else None
        for graph in (manifest.prompt, manifest.decoder, following, *further, *(step.graph for step in steps)):
            if graph is not None:
                self.backend.prepare(graph)
        self._conditions.prepare()

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
        text_valid: np.ndarray | None = None,
        negative_valid: np.ndarray | None = None,
    ) -> Result:
        """Makes one image.

        prompt:    the text, or the number of a class; or give `text_rows` [T, text width] float32 made elsewhere, with
                   `text_valid` [T] bool where padding is among them
        negative:  replaces the learned unconditional rows (or `negative_rows`, with `negative_valid` likewise)
        seed:      0 .. 2^63; the same seed draws the same noise whatever is pruned
        noise:     (scale, tokens, bits) -> [tokens, bits], instead of the seeded noise
        on_scale:  called with (scale, codes [d, h, w]) after every scale
        on_watch:  called with (name, scale, array) for outputs a bundle was built to watch
        Raises:    ToprovarError for a bad seed, prompt or variant, and for non-finite values, naming the scale.
        """
        asked = Request(prompt, seed, negative, text_rows, negative_rows, noise, text_valid, negative_valid)
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
        with self.backend.memory.scope():
            pictures = [self._started(request, load_ms) for request in requests]
            _Run(self, table, pictures, guidance, on_scale, on_watch).all_scales()
            return [self._finished(picture) for picture in pictures]

    def _started(self, request: Request, load_ms: float) -> _Picture:
        """The prompt as what the steps need of it."""
        memory, prompt = self.backend.memory, self.manifest.prompt
        begin = time.perf_counter()
        encoded, told = self._conditions.inputs(
            request.prompt,
            request.negative,
            request.text_rows,
            request.negative_rows,
            request.text_valid,
            request.negative_valid,
        )
        text_ms = (time.perf_counter() - begin) * 1e3
        tensors = {name: memory.empty(facts.shape, facts.dtype) for name, facts in prompt.outputs.items()}
        self.backend.run(prompt, {name: memory.place(told[name]) for name in prompt.inputs}, tensors)
        prompt_ms = (time.perf_counter() - begin) * 1e3 - text_ms
        latency_ms = {"load": load_ms, "text": text_ms, "prompt": prompt_ms}
        tokens = int(told["text_valid"].sum(1).max()) if "text_valid" in told else 0
        return _Picture(request, encoded, tensors, latency_ms, tokens)

    def _finished(self, picture: _Picture) -> Result:
        picture.latency_ms["steps"] = sum(record.latency_ms for record in picture.steps)
        begin = time.perf_counter()
        image, frames = None, None
        codes = self.backend.memory.read(picture.codes)[0]
        if self.manifest.decoder and self.manifest.video:
            frames = decoded_frames(self.backend, self.manifest.decoder, self.manifest.video, codes)
            image, frames = (frames[0], None) if len(frames) == 1 else (None, frames)
        elif self.manifest.decoder:
            image = self._decoded(picture.codes)
        picture.latency_ms["decode"] = (time.perf_counter() - begin) * 1e3
        bits, indices = ([], picture.drawn) if self.manifest.model.draws_indices else (picture.drawn, [])
        return Result(
            image, codes, bits, picture.steps, picture.latency_ms, picture.prompt, picture.decisions, indices, frames
        )

    def decode(self, codes: np.ndarray) -> np.ndarray:
        """codes [d, h, w] -> picture [H, W, 3] uint8. Raises: ToprovarError if the bundle draws videos."""
        if self.manifest.video:
            raise ToprovarError(
                f"bundle {self.bundle.folder} draws videos; single pictures of their codes are not made",
                "make the whole video with generate",
            )
        with self.backend.memory.scope():
            return self._decoded(self.backend.memory.place(codes[None].astype(np.float32)))

    def _decoded(self, codes: Any) -> np.ndarray:
        """codes: a buffer [1, d, h, w]."""
        memory, decoder = self.backend.memory, self.manifest.decoder
        if decoder is None:
            raise ToprovarError(f"bundle {self.bundle.folder} holds no decoder", "export it with --tokenizer")
        outputs = {name: memory.empty(facts.shape, facts.dtype) for name, facts in decoder.outputs.items()}
        self.backend.run(decoder, {"codes": codes}, outputs)
        return picture_from_image(memory.read(outputs["image"])[0])


@dataclass
class _Picture:
    """One image while it is made. tensors: what the prompt graph gave; codes: [1, d, h, w]; both are buffers.

    text_tokens: of the longer of its rows
    """

    request: Request
    prompt: EncodedPrompt | None
    tensors: dict[str, Any]
    latency_ms: dict[str, float]
    text_tokens: int
    codes: Any = None
    drawn: list[np.ndarray] = field(default_factory=list)
    steps: list[StepRecord] = field(default_factory=list)
    decisions: list[tuple[int, str, float | str]] = field(default_factory=list)


@dataclass
class _Ran:
    """One step as it ran on a group of images; what its record needs is read when all scales are done."""

    places: list[int]
    step: Step
    latency_ms: float
    codes: Any
    outputs: dict[str, Any]


class _Run:
    """All scales of a batch: groups of images that took the same decisions, each on its own row of the table.

    Nothing is read from the backend's memory before all scales are done but what decisions and callbacks look at.
    """

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
        self.memory = pipeline.backend.memory
        self.on_scale, self.on_watch = on_scale, on_watch
        self.limit = self.memory.place(np.array([guidance.bit_limit], np.float32))
        self.last_use = {name: step.scale for step in table.steps for name in step.graph.inputs}
        self.ran: list[_Ran] = []

    def all_scales(self) -> None:
        prompt = joined_prompts(self.memory, [picture.tensors for picture in self.pictures], self.manifest.rows)
        groups = [Images(self.memory, self.manifest, self.table, list(range(len(self.pictures))), prompt)]
        seeds = [None if picture.request.noise else picture.request.seed for picture in self.pictures]
        make = stream_noise if self.manifest.model.draws_indices else uniform_noise
        with NoiseAhead(seeds, self._planes(), make) as self.noise:
            for scale in range(len(self.manifest.schedule)):
                following = []
                for group in groups:
                    for part, step in self._steps(group, scale):
                        following += self._run(part, step)
                groups = following
        self._check_finite(*(picture.codes for picture in self.pictures))
        for ran in self.ran:
            self._record(ran)

    def _planes(self) -> dict[int, tuple[int, int]]:
        """Noise that the variant's steps take, in order."""
        planes = {}
        columns = self.manifest.model.bits
        for scale, (height, width) in enumerate(self.manifest.schedule):
            planes[scale] = height * width, columns
            if self.manifest.guidance.smooth:
                planes[SMOOTHING_PLANE + scale] = height * width, columns
        return planes

    def _check_finite(self, *codes: Any) -> None:
        """Values that are not finite stay so: the last codes tell, the earlier ones name the scale."""
        if all(np.isfinite(self.memory.read(buffer)).all() for buffer in codes):
            return
        scale = min(ran.step.scale for ran in self.ran if not np.isfinite(self.memory.read(ran.codes)).all())
        raise ToprovarError(f"codes of scale {scale} are not finite", "check the weights with: toprovar inspect")

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
            choice = [ladder.index(decision.count(row, ladder)) for row in self._seen(group, energy)]
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
        group.before_last, group.codes = group.codes, outputs["codes_next"]
        group.carried, group.own_codes = outputs.get("score_next"), outputs.get("own_codes")
        for layer, count in enumerate(step.cached):
            group.filled[layer] += count
        group.residuals |= {name: buffer for name, buffer in outputs.items() if name.startswith(CARRIED)}
        group.residuals = {n: b for n, b in group.residuals.items() if self.last_use.get(n, -1) > step.scale}
        noted = {name: buffer for name, buffer in outputs.items() if _is_noted(name, step)}
        self.ran.append(_Ran(group.places, step, 0.0, group.codes, noted))
        parts = self._decide(group, step, outputs)
        self.ran[-1].latency_ms = (time.perf_counter() - begin) * 1e3
        for i, place in enumerate(group.places):
            self.pictures[place].codes = self.ran[-1].codes[i : i + 1]
            if self.on_scale:
                self.on_scale(place, step.scale, self.memory.read(self.pictures[place].codes)[0])
        if self.on_watch:
            for name, buffer in outputs.items():
                if name.startswith("watch_"):
                    self.on_watch(name.removeprefix("watch_"), step.scale, self.memory.read(buffer))
        return parts

    def _inputs(self, group: Images, step: Step) -> dict[str, Any]:
        scale, place = step.scale, self.memory.place
        noise = []
        for image in group.places:
            request = self.pictures[image].request
            made = request.noise(scale, step.tokens, self.manifest.model.bits) if request.noise else None
            noise.append(self.noise.of(image, request.seed, scale) if made is None else made)
        inputs = {
            "codes": group.codes,
            "noise": place(_side_by_side(noise)),  # [L, B, columns]
            "cfg": place(np.array([self.guidance.cfg[scale]], np.float32)),
            "tau": place(np.array([self.guidance.tau[scale]], np.float32)),
            "bit_limit": self.limit,
            "pass_index": place(np.array([scale], np.float32)),
            **group.prompt,
            **group.residuals,
        }
        inputs |= self._further_noise(group, step)
        for name, facts in step.graph.inputs.items():
            if facts.is_open and name in group.prompt:  # without padding
                inputs[name] = group.prompt[name][: self.pictures[group.places[0]].text_tokens]
            elif (
                facts.is_open and name.startswith("context_") and name not in group.residuals
            ):  # that layer was skipped
                inputs[name] = self.memory.empty((0, *facts.shape[1:]), facts.dtype)
        if group.carried is not None:
            inputs["score"] = group.carried
        if group.own_codes is not None:
            inputs["codes_before"] = group.own_codes
        for name in step.graph.inputs:
            if name.startswith(("k_past_", "v_past_")):
                layer = int(name[7:])
                inputs[name] = group.cache[name[0]][layer][: group.filled[layer]]
        return inputs

    def _further_noise(self, group: Images, step: Step) -> dict[str, Any]:
        """What smoothing and a residual head need, where a step has them; images are the last axis but one."""
        found = {}
        for name in FURTHER_NOISE & step.graph.inputs.keys():
            shape = step.graph.inputs[name].shape
            tokens, columns = shape[-3], shape[-1]
            made = []
            for image in group.places:
                seed = self.pictures[image].request.seed
                if name == "smooth_noise":
                    made.append(self.noise.of(image, seed, SMOOTHING_PLANE + step.scale))
                elif name == "residual_start":
                    made.append(normal_noise(seed, RESIDUAL_PLANE, tokens, columns))
                else:
                    planes = range(RESIDUAL_PLANE + 1, RESIDUAL_PLANE + 1 + shape[0])
                    made.append(np.stack([normal_noise(seed, plane, tokens, columns) for plane in planes]))
            found[name] = self.memory.place(_side_by_side(made))
        return found

    def _outputs(self, group: Images, step: Step) -> dict[str, Any]:
        outputs: dict[str, Any] = {}
        for name, facts in step.graph.outputs.items():
            if name.startswith(("k_new_", "v_new_")):
                layer = int(name[6:])
                start = group.filled[layer]
                outputs[name] = group.cache[name[0]][layer][start : start + step.counts[layer] + step.along]
            else:
                outputs[name] = self.memory.empty(facts.shape, facts.dtype)
        return outputs

    def _record(self, ran: _Ran) -> None:
        step = ran.step
        arrays = {name: self.memory.read(buffer) for name, buffer in ran.outputs.items()}
        for image, place in enumerate(ran.places):

            def own(array: np.ndarray, image: int = image) -> np.ndarray:
                return array if array.ndim == 1 else array[image]

            record = StepRecord(step.scale, self.manifest.schedule[step.scale], step.counts, ran.latency_ms)
            record.entropy_nats = {
                int(name[8:]): own(array) for name, array in arrays.items() if name.startswith("entropy_")
            }
            record.kept = {layer: own(arrays[gate]) for layer, gate in step.gates.items()}
            record.guided = step.guided
            self.pictures[place].steps.append(record)
            drawn = arrays[self.manifest.drawn[0]][:, image]
            self.pictures[place].drawn.append(
                drawn[:, 0] if self.manifest.model.draws_indices else drawn.astype(np.uint8)
            )

    # -- decisions -------------------------------------------------------------------------------------------------

    def _decide(self, group: Images, step: Step, outputs: dict[str, Any]) -> list[Images]:
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

    def _seen(self, group: Images, buffer: Any) -> np.ndarray:
        """What a decision looks at, which means nothing once codes are not finite."""
        self._check_finite(group.codes)
        return self.memory.read(buffer)

    def _path(self, group: Images, step: Step, image: int, outputs: dict[str, Any]) -> str:
        rho, skipvar, scale = self.table.decision(RhoDecision), self.table.decision(SkipvarDecision), step.scale
        if group.path:
            return group.path
        if rho and scale in rho.paths:
            path = rho.path(scale, low_entropy_ratio(self._seen(group, outputs["entropy_mean"])[image]))
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
            outputs = {name: self.memory.empty(facts.shape, facts.dtype) for name, facts in graph.outputs.items()}
            self.backend.run(graph, {"codes": codes[image : image + 1]}, outputs)
            pictures.append(self._seen(group, outputs["image"])[0])
        return frequency_features(*pictures)

    def _guidance_ends(self, group: Images, step: Step, outputs: dict[str, Any]) -> list[bool]:
        rms = outputs.get("guidance_gap")
        decision, before = self.table.decision(SatsDecision), group.gap
        group.gap = None
        if decision is None or rms is None:
            return [False] * group.count
        drawn, gaps = self._seen(group, outputs[self.manifest.drawn[0]]), self.memory.read(rms)
        each = self.manifest.model.logits if self.manifest.model.draws_indices else 2  # of every number that was drawn
        logits = [each * int((drawn[:, i] >= 0).sum()) for i in range(group.count)]
        group.gap = [decision.gap(float(value), count) for value, count in zip(gaps, logits, strict=True)]
        if before is None or step.scale not in decision.scales:
            return [False] * group.count
        ends = [decision.ends_guidance(now, then) for now, then in zip(group.gap, before, strict=True)]
        for place, end in zip(group.places, ends, strict=True):
            self.pictures[place].decisions.append((step.scale, "guidance", "ends" if end else "goes on"))
        return ends


FURTHER_NOISE = {"smooth_noise", "residual_start", "residual_noise"}


def _side_by_side(arrays: Sequence[np.ndarray]) -> np.ndarray:
    """Images as the last axis but one; one image's is not copied, since maps of a codebook take 67 MB."""
    return arrays[0][..., None, :] if len(arrays) == 1 else np.stack(arrays, -2)


# outputs of a step that later ones take by the same name: residuals, and keys of a video's clip for the next one
CARRIED = ("residual_", "context_")


def _is_noted(name: str, step: Step) -> bool:
    """Whether a record holds an output: what was drawn, entropy maps of layers, kept positions."""
    is_map = name.startswith("entropy_") and name != "entropy_mean"
    return name in ("bits", "indices") or is_map or name in step.gates.values()
