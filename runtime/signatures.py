"""Whether a manifest's graph signatures agree with each other and with the manifest's own facts.

The loop allocates buffers from these shapes and hands out pointers into them, so a shape that contradicts its
neighbours is refused before anything is allocated; the backend then holds each signature against the graph itself.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from toprovar.runtime.errors import ToprovarError
from toprovar.runtime.manifest import COMPUTE_DTYPES, Graph, Manifest, Step, TensorFacts

_LAYERED = re.compile(r"([kv]_past|[kv]_new|residual|entropy)_(\d{2,4})")
HINT = "export the bundle again; a manifest is not meant to be edited by hand"


def check_signatures(manifest: Manifest) -> None:
    """Raises: ToprovarError for the first tensor whose shape or type the rest of the manifest contradicts."""
    if manifest.model.width % manifest.model.heads:
        raise ToprovarError(
            f"manifest has width {manifest.model.width} over {manifest.model.heads} heads; expected a multiple", HINT
        )
    text = manifest.text
    rows = (manifest.rows * manifest.images, text.tokens)
    prompt = manifest.prompt
    _expect(prompt, "inputs", {"text_rows": _facts("F32", *rows, text.width), "text_valid": _facts("F32", *rows)})
    codes = _facts("F32", manifest.images, *manifest.code_shape)
    if manifest.decoder:
        _expect(manifest.decoder, "inputs", {"codes": codes})
        _expect_decoded(manifest.decoder)
    if text.encoder:
        ids, valid = _facts("I64", 1, text.tokens), _facts("F32", 1, text.tokens)
        _expect(text.encoder.graph, "inputs", {"ids": ids, "valid": valid})
        _expect(text.encoder.graph, "outputs", {"rows": _facts("F32", 1, text.tokens, text.width)})
        if text.encoder.max_tokens > text.tokens:
            raise ToprovarError(
                f"manifest has text.encoder.max_tokens {text.encoder.max_tokens}; expected at most {text.tokens}", HINT
            )
    for name, steps in manifest.variants.items():
        filled = [0] * manifest.model.layers
        residuals: dict[str, TensorFacts] = {}
        for step in steps:
            height, width = manifest.schedule[step.scale]
            if step.tokens != height * width or max(step.counts) > step.tokens:
                raise ToprovarError(
                    f"manifest has {step.tokens} tokens and counts {list(step.counts)} at scale {step.scale} of "
                    f"variant {name}; expected {height * width} tokens and no count above",
                    HINT,
                )
            _check_step(manifest, step, filled, residuals, step is steps[-1])
            for layer, count in enumerate(step.counts):
                filled[layer] += count
            residuals |= {o: facts for o, facts in step.graph.outputs.items() if o.startswith("residual_")}
    _check_shared(manifest)


def _check_shared(manifest: Manifest) -> None:
    """A file that several steps share has one signature: it is held against the graph once."""
    encoder = manifest.text.encoder
    known: dict[str, Graph] = {}
    steps = [step.graph for variant in manifest.variants.values() for step in variant]
    for graph in (manifest.prompt, manifest.decoder, encoder.graph if encoder else None, *steps):
        if graph is not None and known.setdefault(graph.file, graph) != graph:
            raise ToprovarError(f"manifest gives {graph.file} two different signatures", HINT)


def _check_step(
    manifest: Manifest, step: Step, filled: list[int], residuals: Mapping[str, TensorFacts], is_last: bool
) -> None:
    model, graph = manifest.model, step.graph
    cache = COMPUTE_DTYPES[manifest.compute]
    head = (manifest.rows * manifest.images, model.heads, model.width // model.heads)
    draws, one = (step.tokens, manifest.images, model.bits), _facts("F32", 1)
    codes = _facts("F32", manifest.images, *manifest.code_shape)
    known = {"noise": _facts("F32", *draws), "cfg": one, "tau": one, "bit_limit": one, "codes": codes}
    inputs = {**known, **manifest.prompt.outputs, **residuals}
    outputs = {"bits": _facts("I32", *draws), "codes_next": codes}
    for name in (*graph.inputs, *graph.outputs):
        match = _LAYERED.fullmatch(name)
        if not match or int(match[2]) >= model.layers:
            continue
        layer = int(match[2])
        if match[1].endswith("_past"):
            inputs[name] = _facts(cache, filled[layer], *head)
        elif match[1].endswith("_new") and not is_last:
            outputs[name] = _facts(cache, step.counts[layer], *head)
        elif match[1] == "residual":
            outputs[name] = _facts("F32", step.tokens, manifest.rows * manifest.images, model.width)
        elif match[1] == "entropy":
            outputs[name] = _facts("F32", step.tokens)
    for layer, gate in step.gates.items():
        if not 0 <= layer < model.layers or gate not in graph.outputs:
            raise ToprovarError(
                f"manifest names gate {gate} for layer {layer} of {graph.file}; expected one of its outputs", HINT
            )
        outputs[gate] = _facts("I32", step.counts[layer])
    for name, facts in graph.outputs.items():
        if name.startswith(("watch_", "kept_")):
            outputs.setdefault(name, facts)  # read as it is, never written into
    for name in graph.inputs:
        if name not in inputs:
            raise ToprovarError(f"manifest gives {graph.file} an input {name}, which nothing provides", HINT)
    for name in graph.outputs:
        if name not in outputs:
            raise ToprovarError(f"manifest gives {graph.file} an output {name}, which nothing takes", HINT)
    missing = [name for name in ("bits", "codes_next") if name not in graph.outputs]
    if not is_last:
        run = [layer for layer, count in enumerate(step.counts) if count]
        missing += [f"{kind}_new_{layer:02d}" for layer in run for kind in "kv"]
    for name in missing:
        if name not in graph.outputs:
            raise ToprovarError(f"manifest gives {graph.file} no output {name}, which later steps need", HINT)
    _expect(graph, "inputs", {name: inputs[name] for name in graph.inputs})
    _expect(graph, "outputs", {name: outputs[name] for name in graph.outputs})


def _expect_decoded(decoder: Graph) -> None:
    found = decoder.outputs.get("image")
    if len(decoder.outputs) != 1 or found is None or found.dtype != "F32" or found.shape[1:2] != (3,):
        raise ToprovarError(
            f"manifest gives {decoder.file} the outputs {_listed(decoder.outputs)}; expected image F32[1, 3, H, W]",
            HINT,
        )
    if len(found.shape) != 4 or 0 in found.shape:
        raise ToprovarError(f"manifest gives {decoder.file} image {text_of(found)}; expected [1, 3, H, W]", HINT)


def _expect(graph: Graph, side: str, expected: Mapping[str, TensorFacts]) -> None:
    found: Mapping[str, TensorFacts] = getattr(graph, side)
    if found.keys() != expected.keys():
        raise ToprovarError(
            f"manifest gives {graph.file} the {side} {_listed(found)}; expected {_listed(expected)}", HINT
        )
    for name, facts in expected.items():
        if found[name] != facts:
            raise ToprovarError(
                f"manifest gives {graph.file} {side[:-1]} {name} {text_of(found[name])}; expected {text_of(facts)}",
                HINT,
            )


def text_of(facts: TensorFacts) -> str:
    return f"{facts.dtype}{list(facts.shape)}"


def _listed(names: Mapping[str, object]) -> str:
    return ", ".join(sorted(names)) or "none"


def _facts(dtype: str, *shape: int) -> TensorFacts:
    return TensorFacts.model_construct(dtype=dtype, shape=shape)  # made of checked numbers: nothing to validate
