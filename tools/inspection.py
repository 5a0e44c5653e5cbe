"""`toprovar inspect`: what a checkpoint, a plan or a bundle is."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict
from math import prod
from pathlib import Path
from typing import Any

from rich.table import Table

from toprovar.runtime.errors import ToprovarError
from toprovar.runtime.json_files import read_json
from toprovar.runtime.manifest import MANIFEST_FILE, Engine, EngineSet, Manifest
from toprovar.tools import console


def inspect_path(path: str) -> dict[str, Any]:
    """Facts about a path or a packaged model's name, as JSON-ready data.

    Raises: ToprovarError if it is none of the three.
    """
    from toprovar.exporter.model import MODEL_FILE, PACKAGED
    from toprovar.tools.bill import NAMES, published_config

    if path in PACKAGED:
        return _model(PACKAGED[path], path)
    place = Path(path)
    if not place.exists():
        if path in NAMES:
            return {"kind": "published model", "name": path, "config": asdict(published_config(path))}
        hint = f"give a file or folder, or a packaged model: {', '.join(PACKAGED)}"
        raise ToprovarError(f"{path} does not exist", hint)
    if place.is_dir() and (place / MANIFEST_FILE).exists():
        return _bundle(place)
    if place.is_dir() and (place / MODEL_FILE).exists():
        return _model(place, place.name)
    if place.name == MODEL_FILE:
        return _model(place.parent, place.parent.name)
    if place.suffix == ".json" and not place.name.endswith(".index.json"):
        document = read_json(place)
        if isinstance(document, dict) and "method" in document and "backbone" in document:
            return _plan(place)
        raise ToprovarError(f"{path} is JSON but no plan", "give a plan.json, a bundle folder or a checkpoint")
    return _checkpoint(place)


def _checkpoint(path: Path, heads: int | None = None) -> dict[str, Any]:
    """heads: as a model.json names them"""
    console.require_packages("inspecting a checkpoint", "torch")
    from toprovar.exporter.checkpoints import open_checkpoint
    from toprovar.exporter.families import DROPPED_KEYS, Family, canonical_tokenizer_names, recognise_family
    from toprovar.exporter.hart.config import config_from_shapes as hart_config_from_shapes
    from toprovar.exporter.infinity.config import config_from_shapes
    from toprovar.exporter.infinity.tokenizer import tokenizer_config_from_shapes
    from toprovar.exporter.infinitystar.config import config_from_shapes as star_config_from_shapes
    from toprovar.exporter.var.config import config_from_shapes as var_config_from_shapes
    from toprovar.exporter.video_tokenizer.config import video_config_from_shapes
    from toprovar.exporter.vq_tokenizer.config import vq_config_from_shapes

    checkpoint = open_checkpoint(path)
    family = recognise_family(checkpoint.shapes, str(path))
    facts: dict[str, Any] = {
        "kind": "checkpoint",
        "family": family.value,
        "format": checkpoint.format,
        "files": [str(file) for file in checkpoint.files],
        "sha256": checkpoint.digest(),
        "tensors": len(checkpoint.shapes),
        "parameters": sum(prod(shape) for name, shape in checkpoint.shapes.items() if name not in DROPPED_KEYS),
        "dtypes": dict(Counter(str(dtype).removeprefix("torch.") for dtype in checkpoint.dtypes.values())),
        "notes": list(checkpoint.notes),
    }
    if family is Family.INFINITY:
        config = config_from_shapes(checkpoint.shapes)
        facts["config"] = {name: getattr(config, name) for name in config.__dataclass_fields__}
    elif family is Family.HART:
        hart = hart_config_from_shapes(checkpoint.shapes, heads)
        facts["config"] = {name: getattr(hart, name) for name in hart.__dataclass_fields__}
    elif family is Family.INFINITYSTAR:
        star = star_config_from_shapes(checkpoint.shapes)
        facts["config"] = {name: getattr(star, name) for name in star.__dataclass_fields__}
    elif family is Family.VAR:
        var = var_config_from_shapes(checkpoint.shapes, heads)
        facts["config"] = {name: getattr(var, name) for name in var.__dataclass_fields__}
    elif family is Family.BIT_TOKENIZER:
        names = canonical_tokenizer_names(checkpoint.shapes, str(path))
        found = tokenizer_config_from_shapes({names.get(n, n): s for n, s in checkpoint.shapes.items()})
        facts["config"] = {name: getattr(found, name) for name in found.__dataclass_fields__}
        facts["config"]["stride"] = found.stride
    elif family is Family.VQ_TOKENIZER:
        names = canonical_tokenizer_names(checkpoint.shapes, str(path))
        vq = vq_config_from_shapes({names.get(n, n): s for n, s in checkpoint.shapes.items()})
        facts["config"] = {**asdict(vq.shape), "kernel": vq.kernel, "encoder": vq.encoder, "stride": vq.stride}
    elif family is Family.VIDEO_TOKENIZER:
        video = video_config_from_shapes({n.removeprefix("vae."): s for n, s in checkpoint.shapes.items()})
        facts["config"] = {**asdict(video), "stride": video.stride, "frames_per_code": video.frames_per_code}
    return facts


def _model(folder: Path, name: str) -> dict[str, Any]:
    from toprovar.exporter.model import MODEL_FILE, read_model_file

    settings = read_model_file(folder / MODEL_FILE)
    facts: dict[str, Any] = {"kind": "model", "name": name, "settings": settings.model_dump(mode="json")}
    for part in ("transformer", "tokenizer", "text_encoder"):
        file = getattr(settings, part)
        if file:
            facts[part] = _checkpoint(folder / file, settings.heads)
    return facts


def _plan(path: Path) -> dict[str, Any]:
    from toprovar.runtime.plan import load_plan

    plan = load_plan(path)
    return {
        "kind": "plan",
        "method": plan.method,
        "preset": plan.preset,
        "backbone": plan.backbone.model_dump(mode="json"),
        "schedule": [f"{h}x{w}" for h, w in plan.schedule],
        "D": plan.D.model_dump(mode="json"),
        "layers": list(plan.layers.classes),
        "tle_speedup": round(plan.expected_speedup, 4),
        "score": plan.score.kind,
        "gathered_per": plan.score.granularity,
        "decisions": [decision.kind for decision in plan.decisions],
        "cfg_stop": plan.cfg_stop.mode,
        "scales": [
            {"scale": k, "tokens": plan.tokens(k), "per_layer": list(plan.counts(k))} for k in range(plan.scales)
        ],
        "skip_scales": list(plan.skip_scales),
        "restore": plan.restore.model_dump(mode="json"),
        "carried_over_from": plan.calib.template or None,
        "warnings": list(plan.calib.warnings),
    }


def _bundle(folder: Path) -> dict[str, Any]:
    from toprovar.runtime.bundle import open_bundle

    bundle = open_bundle(folder)
    manifest = bundle.manifest
    plan = bundle.plan()
    return {
        "kind": "bundle",
        "sha256": bundle.digest,
        "tool_version": manifest.tool_version,
        "model": manifest.model.model_dump(mode="json"),
        "target": manifest.target,
        "compute": manifest.compute,
        "schedule": [f"{h}x{w}" for h, w in manifest.schedule],
        "guidance": manifest.guidance.model_dump(mode="json"),
        "text_tokens": manifest.text.tokens if manifest.text else None,
        "classes": manifest.classes,
        "variants": {name: len(steps) for name, steps in manifest.variants.items()},
        "method": manifest.method,
        "tle_speedup": round(plan.tle_speedup, 4) if plan else 1.0,
        "bundle_bytes": bundle.size_bytes,
        "weights_bytes": manifest.files[manifest.weights_file].size_bytes,
        "files": len(manifest.files),
        "engines": {target: _engines(manifest, engines) for target, engines in manifest.engines.items()},
    }


def _engines(manifest: Manifest, engines: EngineSet) -> dict[str, Any]:
    """One target's engines: who built them for what, and each of them."""
    return {
        "builder_version": engines.builder_version,
        "compute_capabilities": list(engines.compute_capabilities),
        "plugin_sha256": engines.plugin_sha256,
        "plugin_layers": engines.plugin_layers,
        "graphs_without_engine": [name for name in manifest.graphs if engines.engine_of(name) is None],
        "engines": [_engine(manifest, engine) for engine in engines.engines],
    }


def _engine(manifest: Manifest, engine: Engine) -> dict[str, Any]:
    """scale, tokens and kept (tokens per layer) are None for graphs that run once per picture."""
    uses = [(name, step) for name, steps in manifest.variants.items() for step in steps]
    uses = [(name, step) for name, step in uses if step.graph.file == engine.graph]
    step = uses[0][1] if uses else None
    return {
        "file": engine.file,
        "graph": engine.graph,
        "scale": step.scale if step else None,
        "variants": list(dict.fromkeys(name for name, _ in uses)),
        "paths": list(dict.fromkeys(step.path for _, step in uses)),
        "images": step.images if step else 1,
        "tokens": step.tokens if step else None,
        "kept": list(step.counts) if step else None,
        "size_bytes": manifest.files[engine.file].size_bytes,
        "weight_inputs": len(engine.weights),
        "plugin_layers": engine.plugin_layers,
        "inlined": engine.inlined,
    }


def print_facts(facts: dict[str, Any]) -> None:
    """Facts as a two-column table; nested values on lines of their own."""
    table = Table(show_header=False, box=None, pad_edge=False)
    table.add_column()
    table.add_column(overflow="fold")
    engines = facts.get("engines", {}) if facts.get("kind") == "bundle" else {}
    for key, value in facts.items():
        if value is not engines:
            table.add_row(key, _text(value))
    console.out.print(table, markup=False)
    for target, found in engines.items():
        _print_engines(target, found)


def _print_engines(target: str, found: dict[str, Any]) -> None:
    plugins = found["plugin_sha256"][:12] if found["plugin_sha256"] else "none"
    table = Table(
        title=f"engines/{target}, built by {found['builder_version']} for {', '.join(found['compute_capabilities'])}; "
        f"operator library {plugins}",
        title_justify="left",
        box=None,
    )
    table.add_column("file", no_wrap=True)
    table.add_column("scale")
    table.add_column("variant", overflow="fold", min_width=7)
    for name in ("tokens", "kept", "MB", "weights", "plugins", "bodies"):
        table.add_column(name, justify="right", no_wrap=True)
    for engine in found["engines"]:
        kept = engine["kept"]
        table.add_row(
            engine["file"].rsplit("/", 1)[1],
            "" if engine["scale"] is None else str(engine["scale"]),
            ", ".join(engine["variants"]),
            "" if engine["tokens"] is None else str(engine["tokens"]),
            f"{sum(kept) / len(kept):.0f}" if kept else "",
            f"{engine['size_bytes'] / 1e6:.2f}",
            str(engine["weight_inputs"]),
            str(sum(engine["plugin_layers"].values())),
            str(sum(engine["inlined"].values())),
        )
    console.out.print(table, markup=False)
    for what in ("plugin_layers", "inlined"):
        total = Counter[str]()
        for engine in found["engines"]:
            total.update(engine[what])
        if total:
            listed = ", ".join(f"{count} {kind}" for kind, count in sorted(total.items()))
            console.out.print(f"{what.replace('_', ' ')}: {listed}", markup=False)
    if found["graphs_without_engine"]:
        console.out.print(f"without an engine: {', '.join(found['graphs_without_engine'])}", markup=False)


def _text(value: Any) -> str:
    if isinstance(value, dict):
        return "\n".join(f"{key}: {item}" for key, item in value.items())
    if isinstance(value, list):
        lines = [str(item) for item in value]
        return "\n".join(lines) if any(len(line) > 24 for line in lines) else " ".join(lines)
    return str(value)
