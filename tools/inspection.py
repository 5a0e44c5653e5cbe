"""`toprovar inspect`: what a checkpoint, a plan or a bundle is."""

from __future__ import annotations

from collections import Counter
from math import prod
from pathlib import Path
from typing import Any

from rich.table import Table

from toprovar.runtime.errors import ToprovarError
from toprovar.runtime.json_files import read_json
from toprovar.runtime.manifest import MANIFEST_FILE
from toprovar.tools import console


def inspect_path(path: str) -> dict[str, Any]:
    """Facts about a path or a packaged model's name, as JSON-ready data.

    Raises: ToprovarError if it is none of the three.
    """
    from toprovar.exporter.model import MODEL_FILE, PACKAGED

    if path in PACKAGED:
        return _model(PACKAGED[path], path)
    place = Path(path)
    if not place.exists():
        hint = f"give a file or folder, or a packaged model: {', '.join(PACKAGED)}"
        raise ToprovarError(f"{path} does not exist", hint)
    if place.is_dir() and (place / MANIFEST_FILE).exists():
        return _bundle(place)
    if place.is_dir() and (place / MODEL_FILE).exists():
        return _model(place, place.name)
    if place.suffix == ".json" and not place.name.endswith(".index.json"):
        document = read_json(place)
        if isinstance(document, dict) and "method" in document and "backbone" in document:
            return _plan(place)
        raise ToprovarError(f"{path} is JSON but no plan", "give a plan.json, a bundle folder or a checkpoint")
    return _checkpoint(place)


def _checkpoint(path: Path) -> dict[str, Any]:
    console.require_packages("inspecting a checkpoint", "torch")
    from toprovar.exporter.checkpoints import open_checkpoint
    from toprovar.exporter.families import Family, canonical_tokenizer_names, recognise_family
    from toprovar.exporter.infinity.config import config_from_shapes
    from toprovar.exporter.infinity.tokenizer import tokenizer_config_from_shapes

    checkpoint = open_checkpoint(path)
    family = recognise_family(checkpoint.shapes, str(path))
    facts: dict[str, Any] = {
        "kind": "checkpoint",
        "family": family.value,
        "format": checkpoint.format,
        "files": [str(file) for file in checkpoint.files],
        "sha256": checkpoint.digest(),
        "tensors": len(checkpoint.shapes),
        "parameters": sum(prod(shape) for shape in checkpoint.shapes.values()),
        "dtypes": dict(Counter(str(dtype).removeprefix("torch.") for dtype in checkpoint.dtypes.values())),
        "notes": list(checkpoint.notes),
    }
    if family is Family.INFINITY:
        config = config_from_shapes(checkpoint.shapes)
        facts["config"] = {name: getattr(config, name) for name in config.__dataclass_fields__}
    elif family is Family.BIT_TOKENIZER:
        names = canonical_tokenizer_names(checkpoint.shapes, str(path))
        found = tokenizer_config_from_shapes({names.get(n, n): s for n, s in checkpoint.shapes.items()})
        facts["config"] = {name: getattr(found, name) for name in found.__dataclass_fields__}
        facts["config"]["stride"] = found.stride
    return facts


def _model(folder: Path, name: str) -> dict[str, Any]:
    from toprovar.exporter.model import MODEL_FILE, ModelFile
    from toprovar.runtime.plan import model_from_json

    settings = model_from_json(ModelFile, read_json(folder / MODEL_FILE), str(folder / MODEL_FILE))
    facts: dict[str, Any] = {"kind": "model", "name": name, "settings": settings.model_dump(mode="json")}
    for part in ("transformer", "tokenizer", "text_encoder"):
        file = getattr(settings, part)
        if file:
            facts[part] = _checkpoint(folder / file)
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
        "text_tokens": manifest.text.tokens,
        "variants": {name: len(steps) for name, steps in manifest.variants.items()},
        "method": manifest.method,
        "tle_speedup": round(plan.tle_speedup, 4) if plan else 1.0,
        "bundle_bytes": bundle.size_bytes,
        "weights_bytes": manifest.files[manifest.weights_file].size_bytes,
        "files": len(manifest.files),
    }


def print_facts(facts: dict[str, Any]) -> None:
    """Facts as a two-column table; nested values on lines of their own."""
    table = Table(show_header=False, box=None, pad_edge=False)
    table.add_column()
    table.add_column(overflow="fold")
    for key, value in facts.items():
        table.add_row(key, _text(value))
    console.out.print(table, markup=False)


def _text(value: Any) -> str:
    if isinstance(value, dict):
        return "\n".join(f"{key}: {item}" for key, item in value.items())
    if isinstance(value, list):
        lines = [str(item) for item in value]
        return "\n".join(lines) if any(len(line) > 24 for line in lines) else " ".join(lines)
    return str(value)
