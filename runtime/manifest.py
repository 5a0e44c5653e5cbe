"""The manifest: what a bundle is, checked before anything is loaded.

Every file is named with its size and digest, every graph with its signature, so that a C++ or Python server can
allocate before it opens a graph. Paths are plain file names inside the folder, or `engines/<target>/<plain name>`.
"""

from __future__ import annotations

import re
from math import prod
from typing import Annotated, Literal, get_args

import numpy as np
from pydantic import Field, field_validator, model_validator

from toprovar.runtime.decisions import Decision
from toprovar.runtime.guidance import Guidance
from toprovar.runtime.parts import Index, Part, Side
from toprovar.runtime.plan import Backbone

MANIFEST_FILE = "manifest.json"
GRAPHS_FILE = "graphs.json"  # what a folder of graphs without weights has instead
MAX_TENSOR_BYTES = 2**40
FILE_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,120}")
ROWS = re.compile(r"([^\[\]]+)\[(0|[1-9]\d{0,9}):([1-9]\d{0,9})\]")

EngineTarget = Literal["tensorrt", "tensorrt-rtx"]
ENGINES_FOLDER = "engines"

Extent = Annotated[int, Field(ge=0, le=2**31 - 1)]
Dtype = Literal["F32", "F16", "BF16", "I64", "I32", "U8"]
# number format of a bundle -> type of its matrix products and its cache
COMPUTE_DTYPES: dict[str, Dtype] = {"fp32": "F32", "fp16": "F16", "bf16": "BF16"}
NUMPY_DTYPES: dict[Dtype, type] = {
    "F32": np.float32,
    "F16": np.float16,
    "I64": np.int64,
    "I32": np.int32,
    "U8": np.uint8,
}
DTYPE_BYTES = {"F32": 4, "F16": 2, "BF16": 2, "I64": 8, "I32": 4, "U8": 1}


def check_file_name(name: str) -> str:
    """A plain file name; anything that could leave the folder is refused."""
    if not FILE_NAME.fullmatch(name):
        raise ValueError(f"{name!r} is no plain file name; a bundle refers to files inside its own folder only")
    return name


def check_engine_file(name: str) -> str:
    """engines/<target>/<plain name>, and nothing else."""
    folder, _, rest = name.partition("/")
    target, _, plain = rest.partition("/")
    if folder != ENGINES_FOLDER or target not in get_args(EngineTarget) or not FILE_NAME.fullmatch(plain):
        raise ValueError(f"{name!r} is no file of engines; expected engines/<target>/<plain file name>")
    return name


def tensor_rows(name: str) -> tuple[str, tuple[int, int] | None]:
    """What an engine's weight input is: a tensor of the weights file, or rows of one.

    "rope_cos[5:14]" is ("rope_cos", (5, 14)), end excluded; "head" is ("head", None).
    Raises: ValueError for brackets that hold no rows.
    """
    match = ROWS.fullmatch(name)
    if match is None:
        if not name or "[" in name or "]" in name:
            raise ValueError(f"{name!r} names no tensor of the weights file; expected NAME or NAME[START:END]")
        return name, None
    start, end = int(match[2]), int(match[3])
    if start >= end:
        raise ValueError(f"{name!r} holds no rows")
    return match[1], (start, end)


Sha256 = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
LayerCounts = dict[str, Annotated[int, Field(ge=1, le=2**31 - 1)]]


class FileFacts(Part):
    size_bytes: Annotated[int, Field(ge=0)]
    sha256: Sha256


class TensorFacts(Part):
    """is_open: the first axis takes anything up to its extent here."""

    dtype: Dtype
    shape: Annotated[tuple[Extent, ...], Field(max_length=8)]
    is_open: bool = False

    @model_validator(mode="after")
    def _bounded(self) -> TensorFacts:
        if self.size_bytes > MAX_TENSOR_BYTES:
            raise ValueError(f"a tensor of {self.size_bytes} bytes is not plausible")
        return self

    @property
    def size_bytes(self) -> int:
        return prod(self.shape) * DTYPE_BYTES[self.dtype]


class Graph(Part):
    """One ONNX file and what it takes and gives."""

    file: str
    inputs: dict[str, TensorFacts]
    outputs: dict[str, TensorFacts]

    _plain = field_validator("file")(check_file_name)


class Step(Part):
    """One scale of one variant, on one path, with or without unconditional rows.

    counts: tokens that run per layer; past: keys each layer finds in its cache, at most
    along:  text tokens that run besides, in front, and stay in the cache
    images: of one run of the graph
    gates:  {layer: output with its kept positions}
    """

    scale: Annotated[int, Field(ge=0)]
    tokens: Annotated[int, Field(ge=1)]
    counts: tuple[Extent, ...]
    past: tuple[Extent, ...]
    along: Annotated[int, Field(ge=0, le=4096)] = 0
    path: str = ""
    guided: bool = True
    images: Annotated[int, Field(ge=1, le=4096)] = 1
    gates: dict[Index, str] = Field(default_factory=dict)
    graph: Graph

    @property
    def cached(self) -> tuple[int, ...]:
        """Keys that the step leaves in each layer's cache."""
        outputs = self.graph.outputs
        return tuple(
            (count + self.along) if f"k_new_{layer:02d}" in outputs else 0 for layer, count in enumerate(self.counts)
        )


class TextEncoder(Part):
    """prompt -> rows. kind "words": word ids by a vocabulary file, then the graph (ids, valid -> rows)."""

    kind: Literal["words"]
    vocabulary: str
    graph: Graph
    max_tokens: Annotated[int, Field(ge=1, le=4096)]

    _plain = field_validator("vocabulary")(check_file_name)


class Text(Part):
    """tokens: padded prompt length T; width: of the rows; unconditional: tensor of the weights file with the learned
    rows, None where no text is zeros and its first token stands for it."""

    tokens: Annotated[int, Field(ge=1, le=4096)]
    width: Annotated[int, Field(ge=1)]
    unconditional: str | None
    encoder: TextEncoder | None = None


class Engine(Part):
    """One graph, built ahead of time.

    graph:         the ONNX file that it was built from; its signature gives the other inputs and the outputs
    weights:       inputs bound to tensors of the weights file, or to rows of them, by name (`tensor_rows`), in
                   binding order
    plugin_layers: {operator: nodes} that run as plugins
    inlined:       {operator: nodes} that want a plugin and were built from the operator's function body
    key:           digest of all that decides the plan's bytes
    """

    file: str
    graph: str
    weights: tuple[str, ...]
    plugin_layers: LayerCounts = Field(default_factory=dict)
    inlined: LayerCounts = Field(default_factory=dict)
    key: Sha256

    _place = field_validator("file")(check_engine_file)
    _plain = field_validator("graph")(check_file_name)

    @field_validator("weights")
    @classmethod
    def _rows(cls, names: tuple[str, ...]) -> tuple[str, ...]:
        for name in names:
            tensor_rows(name)
        if len(set(names)) < len(names):
            raise ValueError("a weight is named twice")
        return names


class EngineSet(Part):
    """The engines of one target; some graphs may have none.

    builder_version:      of TensorRT or TensorRT-RTX; TensorRT loads plans of exactly this version
    compute_capabilities: "8.9", …: GPUs that the plans run on
    plugin_sha256:        digest of the sources of the operator library whose plugins the plans call; None for none
    """

    target: EngineTarget
    builder_version: Annotated[str, Field(pattern=r"^\d{1,9}(\.\d{1,9}){1,3}$")]
    compute_capabilities: Annotated[
        tuple[Annotated[str, Field(pattern=r"^\d{1,2}\.\d$")], ...], Field(min_length=1, max_length=16)
    ]
    plugin_sha256: Sha256 | None = None
    engines: tuple[Engine, ...]

    @property
    def plugin_layers(self) -> dict[str, int]:
        """{operator: nodes} of all engines."""
        total: dict[str, int] = {}
        for engine in self.engines:
            for kind, count in engine.plugin_layers.items():
                total[kind] = total.get(kind, 0) + count
        return total

    def engine_of(self, graph: str) -> Engine | None:
        """The engine built from an ONNX file of the bundle."""
        return next((engine for engine in self.engines if engine.graph == graph), None)


class Video(Part):
    """Of a bundle that draws videos; its `decoder` makes the first frames.

    maps:              of codes over time; they lie on top of one another in `code_shape`
    fps:               frames per second that the model was trained at
    following:         decoder of every further chunk of maps; takes past_## from past_next_## of the chunk before
    first_from_second: the first frame is shown as a copy of the second
    """

    maps: Annotated[int, Field(ge=1, le=65536)]
    fps: Annotated[float, Field(gt=0, le=1000)]
    following: Graph | None = None
    first_from_second: bool = False


class Manifest(Part):
    """text, classes: a prompt is text, or the number of one of so many classes
    kv_head: heads of keys and values, and their width
    images: pictures that one run of the step graphs can draw together; one alone always goes.
    decisions: of the variant planned; small_decoder: codes to the small picture that they look at.
    """

    schema_version: Literal[2] = 2
    tool_version: str
    model: Backbone
    schedule: tuple[tuple[Side, Side], ...]
    code_shape: tuple[Side, Side, Side]
    target: Literal["onnxruntime"] = "onnxruntime"
    compute: Literal["fp32", "fp16", "bf16"]
    rows: Literal[1, 2]
    images: Annotated[int, Field(ge=1, le=4096)] = 1
    guidance: Guidance
    text: Text | None
    classes: Annotated[int, Field(ge=1, le=2**31 - 1)] | None = None
    kv_head: tuple[Side, Side] | None = None
    prompt: Graph
    decoder: Graph | None
    small_decoder: Graph | None = None
    video: Video | None = None
    decisions: tuple[Decision, ...] = ()
    variants: dict[str, tuple[Step, ...]]
    plan_file: str | None = None
    method: str = "dense"
    weights_file: str
    engines: dict[EngineTarget, EngineSet] = Field(default_factory=dict)
    files: dict[str, FileFacts]

    _plain = field_validator("weights_file")(check_file_name)

    @field_validator("plan_file")
    @classmethod
    def _plain_plan(cls, name: str | None) -> str | None:
        return None if name is None else check_file_name(name)

    @field_validator("files")
    @classmethod
    def _plain_files(cls, files: dict[str, FileFacts]) -> dict[str, FileFacts]:
        for name in files:
            check_engine_file(name) if name.startswith(f"{ENGINES_FOLDER}/") else check_file_name(name)
        return files

    @property
    def head(self) -> tuple[int, int]:
        """Heads of keys and values, and their width."""
        return self.kv_head or (self.model.heads, self.model.width // self.model.heads)

    @property
    def drawn(self) -> tuple[str, int]:
        """Output of a step with what was drawn, and numbers per token."""
        return ("indices", 1) if self.model.draws_indices else ("bits", self.model.bits)

    @property
    def graphs(self) -> dict[str, Graph]:
        """Every ONNX file of the bundle, in the order in which they run; the decoders last."""
        encoder = self.text.encoder if self.text else None
        steps = [step.graph for steps in self.variants.values() for step in steps]
        decoders = (self.small_decoder, self.decoder, self.video.following if self.video else None)
        named = (encoder.graph if encoder else None, self.prompt, *steps, *decoders)
        return {graph.file: graph for graph in named if graph is not None}

    @model_validator(mode="after")
    def _consistent(self) -> Manifest:
        named = {self.weights_file, self.prompt.file}
        named |= {step.graph.file for steps in self.variants.values() for step in steps}
        decoders = (self.decoder, self.small_decoder, self.video.following if self.video else None)
        named |= {graph.file for graph in decoders if graph}
        named |= {self.plan_file} if self.plan_file else set()
        if self.text and self.text.encoder:
            named |= {self.text.encoder.vocabulary, self.text.encoder.graph.file}
        if (self.text is None) == (self.classes is None):
            raise ValueError("a bundle takes either text or classes")
        missing = sorted(named - self.files.keys())
        if missing:
            raise ValueError(f"file {missing[0]} is used but has no entry under files")
        self._check_engines()
        self._check_video()
        if "dense" not in self.variants:
            raise ValueError("a bundle needs the variant dense")
        for name, steps in self.variants.items():
            scales = list(dict.fromkeys(step.scale for step in steps if not step.path))
            if scales != list(range(len(scales))) or not 0 < len(scales) <= len(self.schedule):
                raise ValueError(f"variant {name} does not run scales 0, 1, 2, … of the schedule")
            if sorted(steps, key=lambda step: step.scale) != list(steps) or steps[-1].scale >= len(self.schedule):
                raise ValueError(f"variant {name} does not run scales 0, 1, 2, … of the schedule")
            for step in steps:
                if len(step.counts) != self.model.layers or len(step.past) != self.model.layers:
                    raise ValueError(f"variant {name}, scale {step.scale} has {len(step.counts)} layer counts")
        if len(self.guidance.cfg) != len(self.schedule) or len(self.guidance.tau) != len(self.schedule):
            raise ValueError("guidance must give one cfg and one tau per scale")
        if len(self.guidance.top_k) not in (0, len(self.schedule)):
            raise ValueError("guidance must give one top_k per scale, or none")
        if self.images != max(step.images for steps in self.variants.values() for step in steps):
            raise ValueError(f"there are no steps for {self.images} images")
        return self

    def _check_video(self) -> None:
        if self.video is None or self.decoder is None:
            return
        maps, height = self.video.maps, self.code_shape[1]
        taken = [graph.inputs.get("codes") for graph in (self.decoder, self.video.following) if graph]
        chunks = [facts.shape[2] if facts and len(facts.shape) == 5 else 0 for facts in taken]
        first, *others = chunks
        rest = maps - first
        if first < 1 or rest < 0 or (rest and (not others or others[0] < 1 or rest % others[0])) or height % maps:
            raise ValueError(f"decoders of {chunks} maps do not make a video of {maps} maps of codes")

    def _check_engines(self) -> None:
        graphs = self.graphs
        for target, engines in self.engines.items():
            if engines.target != target:
                raise ValueError(f"engines.{target} holds engines of target {engines.target}")
            for engine in engines.engines:
                if engine.file not in self.files:
                    raise ValueError(f"file {engine.file} is used but has no entry under files")
                if not engine.file.startswith(f"{ENGINES_FOLDER}/{target}/"):
                    raise ValueError(f"engines.{target} names {engine.file}, which lies in another target's folder")
                if engine.graph not in graphs:
                    raise ValueError(f"{engine.file} was built from {engine.graph}, which is no graph of this bundle")
                if clash := set(engine.weights) & graphs[engine.graph].inputs.keys():
                    raise ValueError(f"{engine.file} takes {min(clash)} as weight and as input")
                if engine.plugin_layers and engines.plugin_sha256 is None:
                    raise ValueError(f"{engine.file} calls plugins; engines.{target} names no plugin library")
            for kind in ("file", "graph"):
                named = [getattr(engine, kind) for engine in engines.engines]
                if len(set(named)) < len(named):
                    raise ValueError(f"engines.{target} names a {kind} twice")
