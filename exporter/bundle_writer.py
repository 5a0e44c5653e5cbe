"""Writes a bundle: one weights file, the graphs that point into it, and the manifest that describes them.

An interrupted export leaves no half bundle (output_folder.py). The same inputs give the same bytes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from toprovar.exporter.engines.engine_store import carry_finished
from toprovar.exporter.output_folder import replacing
from toprovar.exporter.routes import Route, routes
from toprovar.exporter.weights_file import WEIGHTS_FILE, WeightsLayout, WeightSpec, layout_weights, write_weights
from toprovar.runtime.bundle import sha256_of
from toprovar.runtime.decisions import SkipvarDecision
from toprovar.runtime.errors import ToprovarError
from toprovar.runtime.guidance import Guidance
from toprovar.runtime.json_files import write_json
from toprovar.runtime.manifest import (
    COMPUTE_DTYPES,
    GRAPHS_FILE,
    MANIFEST_FILE,
    FileFacts,
    Graph,
    Manifest,
    Step,
    Text,
    TextEncoder,
)
from toprovar.runtime.plan import Plan, dense_plan, save_plan
from toprovar.runtime.version import VERSION

if TYPE_CHECKING:
    from toprovar.exporter.graph_builder import GraphBuilder
    from toprovar.exporter.model import Model
    from toprovar.exporter.planned.step import StepOptions

PLAN_FILE = "plan.json"
VOCABULARY_FILE = "vocabulary.json"


@dataclass(frozen=True)
class Bill:
    """What an export would make. weights_bytes and graph_bytes on disk; cache_bytes of K and V, dense."""

    graphs: int
    weights_bytes: int
    graph_bytes: int
    largest_graph_bytes: int
    cache_bytes: int
    scales: list[dict[str, int]]


def _check_tables(model: Model, plan: Plan, options: StepOptions) -> None:
    """Graphs take rows of learned tables by position: a table with fewer rows is an error, not the next tensor's bytes.

    Raises: ToprovarError naming both numbers.
    """
    model.family.check(model, plan.schedule, options)
    if model.text_encoder is not None:
        positions = model.text_encoder.position_table.num_embeddings
        if options.text_tokens > positions:
            raise ToprovarError(
                f"{options.text_tokens} text tokens asked for; the text encoder has positions for {positions}",
                f"pass --text-tokens {positions}, or fewer",
            )


class BundleGraphs:
    """All graphs of a bundle, built one at a time from a layout; needs no weights, so it also serves dry runs."""

    def __init__(self, model: Model, plan: Plan, options: StepOptions) -> None:
        _check_tables(model, plan, options)
        self.model, self.plan, self.options = model, plan, options
        self.dense = dense_plan(plan.backbone, plan.schedule)
        self.thunks = model.exported_weights(plan.schedule)
        compute = COMPUTE_DTYPES[options.compute]
        self.dtypes = {name: "F32" if model.family.is_fp32(name) else compute for name in self.thunks}
        specs = {name: WeightSpec(self.dtypes[name], tuple(thunk().shape)) for name, thunk in self.thunks.items()}
        self.layout: WeightsLayout = layout_weights(specs)

    def array(self, name: str) -> np.ndarray:
        """A tensor in the type it is stored in; bf16 as uint16 bits."""
        import torch

        tensor = self.thunks[name]().detach().contiguous()
        dtype = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}[self.dtypes[name]]
        if not torch.isfinite(tensor).all():
            raise ToprovarError(f"weight {name} holds non-finite values", "check the checkpoint with: toprovar inspect")
        tensor = tensor.to(dtype)
        if not torch.isfinite(tensor).all():
            raise ToprovarError(
                f"weight {name} does not fit into {self.dtypes[name]}: it holds values beyond its range",
                "export with --dtype bf16 or fp32",
            )
        return (tensor.view(torch.uint16) if dtype == torch.bfloat16 else tensor).cpu().numpy()

    def prompt(self) -> GraphBuilder:
        return self.model.family.prompt_graph(self.model, self.layout, replace(self.options, images=1))

    def decoder(self) -> GraphBuilder | None:
        if self.model.tokenizer is None:
            return None
        height, width = self.code_shape[-2:]
        return self.model.family.decoder_graph(self.model, (height, width), self.layout)

    def text_encoder(self) -> GraphBuilder | None:
        from toprovar.exporter.demo.graph import text_encoder_graph

        if self.model.text_encoder is None:
            return None
        return text_encoder_graph(self.model.text_encoder, self.options.text_tokens, self.layout)

    @property
    def code_shape(self) -> tuple[int, int, int]:
        return self.model.family.code_shape(self.model, self.plan.schedule)

    def small_decoder(self) -> GraphBuilder | None:
        """Codes to the small picture that a skipvar decision looks at."""
        decision = self.plan.decision(SkipvarDecision)
        if decision is None:
            return None
        patch = self.model.family.patch(self.model.config)
        height, width = self.plan.schedule[decision.feature_scale]
        size, small = self.code_shape[-2:], (height * patch, width * patch)
        graph = None
        if self.model.tokenizer is not None:
            graph = self.model.family.decoder_graph(self.model, (size[0], size[1]), self.layout, small)
        if graph is None:
            raise ToprovarError("the plan decides by small pictures; the model has no decoder", "pass --tokenizer")
        return graph

    def following_decoder(self) -> GraphBuilder | None:
        """Codes of a video's further chunks to frames."""
        if self.model.tokenizer is None:
            return None
        height, width = self.code_shape[-2:]
        return self.model.family.following_decoder_graph(self.model, (height, width), self.layout)

    def along(self, scale: int) -> int:
        """Text tokens that run along at a scale and stay in the cache."""
        return self.model.family.along(scale, self.options)

    def variants(self) -> dict[str, list[tuple[str, Route, int]]]:
        """Per variant: (file name, route, images); steps that are equal share their file."""
        guided = self.options.rows == 2
        files: dict[tuple[object, ...], str] = {}
        taken: set[str] = set()
        found = {}
        plans = {"dense": self.dense} | ({"planned": self.plan} if self.plan.method != "dense" else {})
        sizes = sorted({1, self.options.images})
        for name, plan in plans.items():
            steps = []
            for route in routes(plan, guided, self.along, self.model.family.has_cache):
                for images in sizes:
                    key = (images, *self.model.family.step_key(self.model, route, self.options.gate_whole_layers))
                    if key not in files:
                        start = f"step_{route.scale:02d}" + ("_planned" if name == "planned" else "")
                        start += f"_of_{images}" if images > 1 else ""
                        number = next(n for n in count(1) if _numbered(start, n) not in taken)
                        files[key] = _numbered(start, number)
                        taken.add(files[key])
                    steps.append((files[key], route, images))
            found[name] = steps
        return found

    def step(self, route: Route, images: int = 1) -> GraphBuilder:
        return self.model.family.step_graph(self.model, route, self.layout, replace(self.options, images=images))

    def gates(self, route: Route) -> dict[int, str]:
        """{layer: output with its kept positions}."""
        from toprovar.exporter.planned.step import gate_outputs

        return gate_outputs(route, self.options.gate_whole_layers)


def _kv_head(model: Model) -> tuple[int, int] | None:
    """None where the backbone tells it."""
    found, config = model.family.kv_head(model.config), model.config
    return None if found == (config.heads, config.width // config.heads) else found


def _numbered(start: str, number: int) -> str:
    return f"{start}.onnx" if number == 1 else f"{start}_{number}.onnx"


def export_bundle(
    model: Model,
    out: Path,
    guidance: Guidance,
    options: StepOptions,
    plan: Plan | None = None,
    schedule: tuple[tuple[int, int], ...] | None = None,
    overwrite: bool = True,
    on_progress: Callable[[str, int, int], None] = lambda what, done, total: None,
    keep_engines: bool = False,
) -> Manifest:
    """Exports a model, dense and (with a plan that prunes) planned.

    out:          the bundle's folder; an existing bundle there is replaced when the new one is whole
    on_progress:  (what, done, total)
    keep_engines: engines of a bundle that is replaced are kept aside, for a build to take those that still fit
    Raises:       ToprovarError if the plan belongs to another model or the folder cannot be written.
    """
    if plan is None:
        if schedule is None:
            raise ValueError("a schedule or a plan is needed")
        plan = dense_plan(model.backbone, schedule)
    plan.check()
    plan.check_backbone(model.backbone, plan.schedule)
    graphs = BundleGraphs(model, plan, options)
    with replacing(out, overwrite) as folder:
        manifest = _write(graphs, folder, guidance, on_progress)
        if keep_engines and out.is_dir():
            carry_finished(out, folder)
        return manifest


def _write(
    graphs: BundleGraphs, folder: Path, guidance: Guidance, on_progress: Callable[[str, int, int], None]
) -> Manifest:
    model, plan, options = graphs.model, graphs.plan, graphs.options
    variants = graphs.variants()
    unique = {file: (route, images) for steps in variants.values() for file, route, images in steps}
    total = len(unique) + 4
    done = 0

    def advance(what: str) -> None:
        nonlocal done
        done += 1
        on_progress(what, done, total)

    write_weights(folder / WEIGHTS_FILE, graphs.layout, graphs.array)
    advance("weights")
    signatures: dict[str, Graph] = {}

    def save(builder: GraphBuilder, file: str) -> Graph:
        builder.save(folder / file)
        signatures[file] = Graph(file=file, inputs=builder.signature("inputs"), outputs=builder.signature("outputs"))
        advance(file)
        return signatures[file]

    prompt = save(graphs.prompt(), "prompt.onnx")
    decoder_builder, text_builder = graphs.decoder(), graphs.text_encoder()
    decoder = save(decoder_builder, "decoder.onnx") if decoder_builder else None
    encoder = None
    if text_builder:
        write_json(folder / VOCABULARY_FILE, model.vocabulary)
        encoder = TextEncoder(
            kind="words",
            vocabulary=VOCABULARY_FILE,
            graph=save(text_builder, "text_encoder.onnx"),
            max_tokens=options.text_tokens,
        )
    small_builder = graphs.small_decoder()
    small_decoder = save(small_builder, "small_decoder.onnx") if small_builder else None
    following_builder, video = graphs.following_decoder(), model.family.video(model)
    if video and following_builder:
        following = save(following_builder, "decoder_following.onnx")
        video = video.model_copy(update={"following": following})
    for file, (route, images) in unique.items():
        save(graphs.step(route, images), file)
    if plan.method != "dense":
        save_plan(plan, folder / PLAN_FILE)
    manifest = Manifest(
        tool_version=VERSION,
        model=plan.backbone,
        schedule=plan.schedule,
        code_shape=graphs.code_shape,
        compute=options.compute,  # type: ignore[arg-type]
        rows=options.rows,  # type: ignore[arg-type]
        images=options.images,
        guidance=guidance,
        text=None
        if model.family.takes_classes
        else Text(
            tokens=options.text_tokens,
            width=model.config.text_width,
            unconditional=model.family.unconditional,
            encoder=encoder,
        ),
        classes=model.config.classes if model.family.takes_classes else None,
        kv_head=_kv_head(model),
        prompt=prompt,
        decoder=decoder,
        small_decoder=small_decoder,
        video=video,
        decisions=plan.decisions,
        variants={
            name: tuple(
                Step(
                    scale=route.scale,
                    tokens=route.plan.tokens(route.scale),
                    counts=route.counts,
                    past=route.past,
                    along=graphs.along(route.scale),
                    path=route.path,
                    guided=route.guided,
                    images=images,
                    gates=graphs.gates(route),
                    graph=signatures[file],
                )
                for file, route, images in steps
            )
            for name, steps in variants.items()
        },
        plan_file=PLAN_FILE if plan.method != "dense" else None,
        method=plan.method,
        weights_file=WEIGHTS_FILE,
        files={
            path.name: FileFacts(size_bytes=path.stat().st_size, sha256=sha256_of(path))
            for path in sorted(folder.iterdir())
        },
    )
    write_json(folder / MANIFEST_FILE, manifest.model_dump(mode="json"))
    return manifest


def export_graphs(
    graphs: BundleGraphs,
    out: Path,
    overwrite: bool = True,
    on_progress: Callable[[str, int, int], None] = lambda what, done, total: None,
) -> dict[str, Any]:
    """Writes the graphs alone, with `graphs.json`: signatures, and where each weight would lie in the weights file.

    For shape and build checks of models whose weights are not at hand; no bundle, since nothing can run it.
    """
    with replacing(out, overwrite, GRAPHS_FILE) as folder:
        builders: dict[str, Callable[[], GraphBuilder | None]] = {
            "prompt.onnx": graphs.prompt,
            "decoder.onnx": graphs.decoder,
            "text_encoder.onnx": graphs.text_encoder,
        }
        builders["small_decoder.onnx"] = graphs.small_decoder
        builders["decoder_following.onnx"] = graphs.following_decoder
        for steps in graphs.variants().values():
            for file, route, images in steps:
                builders[file] = lambda route=route, images=images: graphs.step(route, images)  # type: ignore[misc]
        signatures = {}
        for done, (file, build) in enumerate(builders.items()):
            builder = build()
            if builder is not None:
                builder.save(folder / file)
                graph = Graph(file=file, inputs=builder.signature("inputs"), outputs=builder.signature("outputs"))
                signatures[file] = graph.model_dump(mode="json")
            on_progress(file, done + 1, len(builders))
        weights = {
            name: {"dtype": spec.dtype, "shape": list(spec.shape), "offset": graphs.layout.offsets[name]}
            for name, spec in graphs.layout.specs.items()
        }
        facts = {"schema_version": 1, "tool_version": VERSION, "graphs": signatures, "weights": weights}
        write_json(folder / GRAPHS_FILE, facts)
        graph_bytes = sum(path.stat().st_size for path in folder.glob("*.onnx"))
    return {"out": str(out), "graphs": len(signatures), "graph_bytes": graph_bytes}


def bill(graphs: BundleGraphs) -> Bill:
    """Builds every graph in memory and counts, without weights or files."""
    import onnx_ir as ir

    variants = graphs.variants()
    unique = {file: (route, images) for steps in variants.values() for file, route, images in steps}
    builders = [graphs.prompt(), graphs.text_encoder()]
    builders += [graphs.decoder(), graphs.small_decoder(), graphs.following_decoder()]
    sizes = [ir.serde.serialize_model(b.model()).ByteSize() for b in builders if b is not None]
    for route, images in unique.values():
        sizes.append(ir.serde.serialize_model(graphs.step(route, images).model()).ByteSize())
    item = 4 if graphs.options.compute == "fp32" else 2
    heads, head_width = graphs.model.family.kv_head(graphs.model.config)
    row = graphs.options.rows * heads * head_width * item * 2
    cache_bytes = graphs.model.family.cached_tokens(graphs.model, graphs.dense) * row * graphs.options.images
    scales = []
    for k in range(graphs.plan.scales):
        counts = graphs.plan.counts(k)
        scales.append({"scale": k, "tokens": graphs.plan.tokens(k), "planned": sum(counts) // len(counts)})
    return Bill(len(sizes), graphs.layout.size_bytes, sum(sizes), max(sizes), cache_bytes, scales)
