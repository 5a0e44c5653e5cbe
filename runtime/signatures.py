"""Whether a manifest's graph signatures agree with each other and with the manifest's own facts.

The loop allocates buffers from these shapes and hands out pointers into them, so a shape that contradicts its
neighbours is refused before anything is allocated; the backend then holds each signature against the graph itself.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from toprovar.runtime.decisions import EnergyMassDecision, RhoDecision, SatsDecision, SkipvarDecision
from toprovar.runtime.errors import ToprovarError
from toprovar.runtime.manifest import COMPUTE_DTYPES, Graph, Manifest, Step, TensorFacts, Video
from toprovar.runtime.table import StepTable, rows_axis

_LAYERED = re.compile(r"([kv]_past|[kv]_new|entropy)_(\d{2,4})")
_RESIDUAL = re.compile(r"residual_(\d{2,4})_(\d{2,4})(?:_(?:attention|cross|ffn))?")
_CONTEXT = re.compile(r"context_[kv]_\d{2,4}_(\d{2,4})")
MAX_RESIDUAL_STEPS = 1000
HINT = "export the bundle again; a manifest is not meant to be edited by hand"


def check_signatures(manifest: Manifest) -> None:
    """Raises: ToprovarError for the first tensor whose shape or type the rest of the manifest contradicts."""
    if manifest.model.width % manifest.model.heads:
        raise ToprovarError(
            f"manifest has width {manifest.model.width} over {manifest.model.heads} heads; expected a multiple", HINT
        )
    _check_prompt(manifest)
    codes = _facts("F32", 1, *manifest.code_shape)
    if manifest.decoder and manifest.video:
        _check_video(manifest, manifest.decoder, manifest.video)
    elif manifest.decoder:
        _expect(manifest.decoder, "inputs", {"codes": codes})
        _expect_decoded(manifest.decoder)
    if manifest.small_decoder:
        _expect(manifest.small_decoder, "inputs", {"codes": codes})
        _expect_decoded(manifest.small_decoder)
    for name, steps in manifest.variants.items():
        table = StepTable(steps, manifest.decisions if name == "planned" else ())
        if 1 not in table.sizes():
            raise ToprovarError(f"manifest has no steps of variant {name} for one image", HINT)
        for images in table.sizes():
            _check_variant(manifest, name, table, images)
        _check_decided(manifest, name, table)
    _check_shared(manifest)


def _check_prompt(manifest: Manifest) -> None:
    text, prompt = manifest.text, manifest.prompt
    for name, facts in prompt.outputs.items():
        if facts.shape[rows_axis(name) :][:1] != (manifest.rows,):
            raise ToprovarError(
                f"manifest gives {prompt.file} output {name} {text_of(facts)}; expected {manifest.rows} on axis "
                f"{rows_axis(name)}",
                HINT,
            )
    if text is None:
        _expect(prompt, "inputs", {"labels": _facts("I64", manifest.rows)})
        return
    rows = (manifest.rows, text.tokens)
    inputs = {"text_rows": _facts("F32", *rows, text.width), "text_valid": _facts("F32", *rows)}
    if "text_positions" in prompt.inputs:
        inputs["text_positions"] = _facts("F32", *rows)
    _expect(prompt, "inputs", inputs)
    if text.encoder:
        ids, valid = _facts("I64", 1, text.tokens), _facts("F32", 1, text.tokens)
        _expect(text.encoder.graph, "inputs", {"ids": ids, "valid": valid})
        _expect(text.encoder.graph, "outputs", {"rows": _facts("F32", 1, text.tokens, text.width)})
        if text.encoder.max_tokens > text.tokens:
            raise ToprovarError(
                f"manifest has text.encoder.max_tokens {text.encoder.max_tokens}; expected at most {text.tokens}", HINT
            )


def _check_video(manifest: Manifest, decoder: Graph, video: Video) -> None:
    """The decoder of the first chunk, and that of the following ones, which takes what the one before it left."""
    channels, height, width = manifest.code_shape
    left = {name: facts for name, facts in decoder.outputs.items() if name != "video"}
    for graph in (decoder, video.following):
        if graph is None:
            continue
        maps = graph.inputs["codes"].shape[2]  # looked at by the manifest
        inputs = {"codes": _facts("F32", 1, channels, maps, height // video.maps, width)}
        if graph is not decoder:
            inputs |= {name.replace("past_next_", "past_"): facts for name, facts in left.items()}
        _expect(graph, "inputs", inputs)
        frames = graph.outputs.get("video")
        if frames is None or frames.dtype != "F32" or len(frames.shape) != 5 or frames.shape[:2] != (1, 3):
            raise ToprovarError(
                f"manifest gives {graph.file} the outputs {_listed(graph.outputs)}; expected video F32[1, 3, T, H, W]",
                HINT,
            )
        if 0 in frames.shape or frames.shape[3:] != decoder.outputs["video"].shape[3:]:
            raise ToprovarError(
                f"manifest gives {graph.file} video {text_of(frames)}; expected frames of one size, none empty", HINT
            )
        if any(not name.startswith("past_next_") for name in left):
            raise ToprovarError(
                f"manifest gives {decoder.file} the outputs {_listed(left)}; expected past_next_##", HINT
            )
        _expect(graph, "outputs", {"video": frames, **left})


def _check_variant(manifest: Manifest, name: str, table: StepTable, images: int) -> None:
    """Walks through all that can happen: every step fits what the steps before it leave behind."""
    left: dict[int, set[str]] = {}  # residuals by scale
    contexts: dict[str, set[int]] = {}  # keys of earlier clips, and how many there may be
    has_cache = any(name.startswith("k_past_") for step in table.steps for name in step.graph.inputs)
    seen: set[int] = set()
    steps = [step for step in table.steps if step.images == images]
    for step in steps:
        height, width = manifest.schedule[step.scale]
        if step.tokens != height * width or max(step.counts) > step.tokens:
            raise ToprovarError(
                f"manifest has {step.tokens} tokens and counts {list(step.counts)} at scale {step.scale} of "
                f"variant {name}; expected {height * width} tokens and no count above",
                HINT,
            )
        earlier = set().union(*(names for scale, names in left.items() if scale < step.scale))
        before = {o for other in steps if other.scale == step.scale - 1 for o in other.graph.outputs}
        is_last = not any(other.scale > step.scale and step.path in ("", other.path) for other in steps)
        _check_step(manifest, step, earlier, before, contexts, is_last or not has_cache)
        for output, facts in step.graph.outputs.items():
            if _CONTEXT.fullmatch(output):
                contexts.setdefault(output, set()).add(facts.shape[0])
        left.setdefault(step.scale, set()).update(o for o in step.graph.outputs if o.startswith("residual_"))
    for step, filled in table.meetings(len(manifest.schedule), manifest.model.layers, images, manifest.rows == 2):
        seen.add(id(step))
        is_open = any(f.is_open for name, f in step.graph.inputs.items() if name.startswith("k_past_"))
        fits = all(a <= b for a, b in zip(filled, step.past, strict=True)) if is_open else filled == step.past
        if not fits:
            raise ToprovarError(
                f"manifest gives {step.graph.file} {list(step.past)} cached keys; the steps before it leave "
                f"{list(filled)}",
                HINT,
            )
    for step in steps:
        if id(step) not in seen:
            raise ToprovarError(f"manifest names {step.graph.file}, which no decision leads to", HINT)


def _check_decided(manifest: Manifest, name: str, table: StepTable) -> None:
    """What decisions read is there, and steps for several images cover what those for one do."""
    kinds = {
        size: {(s.scale, s.path, s.guided, s.counts) for s in table.steps if s.images == size} for size in table.sizes()
    }
    for size, found in kinds.items():
        if found != kinds[1]:
            raise ToprovarError(f"manifest has other steps of variant {name} for {size} images than for one", HINT)
    rho, sats = table.decision(RhoDecision), table.decision(SatsDecision)
    needed = [(step, "entropy_mean") for step in table.steps if rho and not step.path and step.scale in rho.paths]
    needed += [(step, "guidance_gap") for step in table.steps if sats and step.guided and step.scale in sats.scales]
    for step, output in needed:
        if output not in step.graph.outputs:
            raise ToprovarError(f"manifest gives {step.graph.file} no output {output}, which a decision reads", HINT)
    if table.decision(SkipvarDecision) and manifest.small_decoder is None:
        raise ToprovarError("manifest has a skipvar decision and no small_decoder", HINT)
    choices = {(s.scale, s.path, s.guided): 0 for s in table.steps}
    for step in table.steps:
        choices[step.scale, step.path, step.guided] += step.images == 1
    for (scale, _, _), count in choices.items():
        if count > 1 and table.decision(EnergyMassDecision) is None:
            raise ToprovarError(f"manifest has {count} steps of variant {name} at scale {scale} and no choice", HINT)


def _check_shared(manifest: Manifest) -> None:
    """A file that several steps share has one signature: it is held against the graph once."""
    encoder = manifest.text.encoder if manifest.text else None
    known: dict[str, Graph] = {}
    steps = [step.graph for variant in manifest.variants.values() for step in variant]
    following = manifest.video.following if manifest.video else None
    named = (manifest.prompt, manifest.decoder, manifest.small_decoder, following, encoder.graph if encoder else None)
    for graph in (*named, *steps):
        if graph is not None and known.setdefault(graph.file, graph) != graph:
            raise ToprovarError(f"manifest gives {graph.file} two different signatures", HINT)


def _check_step(
    manifest: Manifest,
    step: Step,
    residuals: set[str],
    before: set[str],
    contexts: Mapping[str, set[int]],
    is_last: bool,
) -> None:
    """residuals, before: residuals left by earlier scales, and all outputs of the scale before.

    contexts: keys and values that earlier scales left by name, and how many tokens they may have
    is_last:  nothing is cached
    """
    model, graph, B = manifest.model, step.graph, step.images
    cache = COMPUTE_DTYPES[manifest.compute]
    R = B * (2 if step.guided else 1)
    head = (R, *manifest.head)
    draws, one = (step.tokens, B, model.bits), _facts("F32", 1)
    drawn, columns = manifest.drawn
    codes = _facts("F32", B, *manifest.code_shape)
    inputs = {"noise": _facts("F32", *draws), "cfg": one, "tau": one, "codes": codes}
    if model.draws_indices:
        inputs["smooth_noise"] = _facts("F32", *draws)
        inputs["residual_start"] = _facts("F32", step.tokens, B, manifest.code_shape[0])
        steps = graph.inputs.get("residual_noise")
        count = min(steps.shape[0], MAX_RESIDUAL_STEPS) if steps and steps.shape else 0
        inputs["residual_noise"] = _facts("F32", count, step.tokens, B, manifest.code_shape[0])
    else:
        inputs["bit_limit"] = one
    inputs["pass_index"] = one
    for name, facts in manifest.prompt.outputs.items():
        is_open = name in graph.inputs and graph.inputs[name].is_open  # text without its padding
        inputs[name] = _with_rows(name, facts, R, is_open)
    for name, found in graph.inputs.items():
        kept = _CONTEXT.fullmatch(name)
        if kept and int(kept[1]) < model.layers and found.shape and (found.is_open or name in contexts):
            counts = contexts.get(name, {0})  # an open one may be empty: the layer was skipped
            most = max(*counts, found.shape[0]) if found.is_open else max(counts)
            inputs[name] = _facts(cache, most, *head, is_open=found.is_open)
    if not model.draws_indices and drawn in graph.outputs and len(graph.outputs[drawn].shape) == 3:
        columns = min(max(graph.outputs[drawn].shape[2], 1), columns)  # a pass of InfinityStar may have fewer bits
    outputs = {drawn: _facts("I32", step.tokens, B, columns), "codes_next": codes, "guidance_gap": _facts("F32", B)}
    outputs["entropy_mean"] = _facts("F32", B, step.tokens)
    if step.scale + 1 < len(manifest.schedule):
        height, width = manifest.schedule[step.scale + 1]
        outputs["score_next"] = _facts("F32", B, height * width)
    channels, *full = manifest.code_shape
    patch = full[1] // manifest.schedule[-1][1]
    if (given := graph.outputs.get("own_codes") or graph.inputs.get("codes_before")) and len(given.shape) == 4:
        channels = min(max(given.shape[1], 1), channels)  # as many as bits, in a pass of InfinityStar
    own, previous = (
        _facts("F32", B, channels, *(side * patch for side in manifest.schedule[scale]))
        for scale in (step.scale, max(step.scale - 1, 0))
    )
    outputs["own_codes"] = own
    if "score_next" in before:
        inputs["score"] = _facts("F32", B, step.tokens)
    if "own_codes" in before:
        inputs["codes_before"] = previous
    for name in residuals:
        height, width = manifest.schedule[int(_RESIDUAL.fullmatch(name)[1])]  # type: ignore[index]  # checked below
        inputs[name] = _facts("F32", height * width, R, model.width)
    for name in (*graph.inputs, *graph.outputs):
        left = _RESIDUAL.fullmatch(name)
        if left and int(left[1]) == step.scale and int(left[2]) < model.layers:
            outputs[name] = _facts("F32", step.tokens, R, model.width)
        kept = _CONTEXT.fullmatch(name)
        if kept and int(kept[1]) < model.layers:
            outputs[name] = _facts(cache, step.counts[int(kept[1])], *head)
        match = _LAYERED.fullmatch(name)
        if not match or int(match[2]) >= model.layers:
            continue
        layer = int(match[2])
        if match[1].endswith("_past"):
            is_open = name in graph.inputs and graph.inputs[name].is_open
            inputs[name] = _facts(cache, step.past[layer], *head, is_open=is_open)
        elif match[1].endswith("_new") and not is_last:
            outputs[name] = _facts(cache, step.counts[layer] + step.along, *head)
        elif match[1] == "entropy":
            outputs[name] = _facts("F32", *((step.tokens,) if B == 1 else (B, step.tokens)))
    for layer, gate in step.gates.items():
        if not 0 <= layer < model.layers or gate not in graph.outputs:
            raise ToprovarError(
                f"manifest names gate {gate} for layer {layer} of {graph.file}; expected one of its outputs", HINT
            )
        by_row = graph.outputs[gate].shape[:-1] == (R,) and R > 1
        outputs[gate] = _facts("I32", *((R,) if by_row else (B,) if B > 1 else ()), step.counts[layer])
    for name, facts in graph.outputs.items():
        if name.startswith(("watch_", "kept_")):
            outputs.setdefault(name, facts)  # read as it is, never written into
    for name in graph.inputs:
        if name not in inputs:
            raise ToprovarError(f"manifest gives {graph.file} an input {name}, which nothing provides", HINT)
    for name in graph.outputs:
        if name not in outputs:
            raise ToprovarError(f"manifest gives {graph.file} an output {name}, which nothing takes", HINT)
    missing = [name for name in (drawn, "codes_next") if name not in graph.outputs]
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


def _facts(dtype: str, *shape: int, is_open: bool = False) -> TensorFacts:
    # made of checked numbers: nothing to validate
    return TensorFacts.model_construct(dtype=dtype, shape=shape, is_open=is_open)


def _with_rows(name: str, facts: TensorFacts, rows: int, is_open: bool = False) -> TensorFacts:
    shape = list(facts.shape)
    shape[rows_axis(name)] = rows
    return _facts(facts.dtype, *shape, is_open=is_open)
