"""`toprovar run`: one image from a bundle. Imports nothing but the runtime."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from toprovar.runtime.bundle import Bundle, open_bundle
from toprovar.runtime.embeddings import read_embeddings
from toprovar.runtime.errors import ToprovarError
from toprovar.runtime.image_files import printable, write_png
from toprovar.runtime.json_files import check_folder
from toprovar.runtime.noise import check_seed
from toprovar.runtime.pipeline import Pipeline, Result
from toprovar.runtime.text import EncodedPrompt
from toprovar.runtime.version import VERSION
from toprovar.tools import console
from toprovar.tools.backends import BackendChoice
from toprovar.tools.options import guidance_with
from toprovar.tools.run_output import check_kind, checked_out, write_result

if TYPE_CHECKING:
    from toprovar.tools.backends import RunningBackend


def default_variant(bundle: Bundle) -> str:
    return "planned" if "planned" in bundle.manifest.variants else "dense"


def default_prompt(bundle: Bundle) -> str:
    """What is drawn where only times count."""
    return "0" if bundle.manifest.classes else "red apple"


def record_of(result: Result, bundle: Bundle, backend: RunningBackend, variant: str, seed: int) -> dict[str, Any]:
    """What a run was and how long it took, as data."""
    prompt = result.prompt
    return {
        "prompt": printable(prompt.text) if prompt else None,
        "prompt_tokens": {"used": prompt.kept, "given": prompt.total} if prompt else None,
        "seed": seed,
        "variant": variant,
        "method": bundle.manifest.method if variant == "planned" else "dense",
        "bundle_sha256": bundle.digest,
        "versions": {"toprovar": VERSION, "backend": backend.version},
        "device": backend.device,
        "operators": backend.operators,
        "latency_ms": {name: round(value, 3) for name, value in result.latency_ms.items()},
        "steps": [
            {
                "scale": step.scale,
                "map": list(step.map),
                "tokens_per_layer": list(step.counts),
                "latency_ms": round(step.latency_ms, 3),
            }
            for step in result.steps
        ],
    }


def run_bundle(
    folder: Path,
    prompt: str | None,
    seed: int,
    out: Path | None = None,
    variant: str | None = None,
    negative: str | None = None,
    cfg: str | None = None,
    tau: str | None = None,
    preview_dir: Path | None = None,
    choice: BackendChoice = BackendChoice(),
    quiet: bool = False,
    embeddings: Path | None = None,
    index: int | None = None,
) -> dict[str, Any]:
    """Makes one image or video and writes it. Returns: the record of the run.

    out: None for image.png or video.mp4
    embeddings, index: a file of prompts encoded beforehand, and which of them where `prompt` does not say

    Raises: ToprovarError before anything is written if the bundle, the variant, the seed or the place is wrong.
    """
    check_seed(seed)
    check_kind(out)
    if preview_dir is not None:
        check_folder(preview_dir)
    bundle = open_bundle(folder)
    if bundle.manifest.decoder is None:
        raise ToprovarError(f"bundle {folder} holds no decoder, so it makes no picture", "export it with --tokenizer")
    out = checked_out(out, bundle.manifest)
    if preview_dir is not None and bundle.manifest.video is not None:
        raise ToprovarError("--preview-dir writes a picture after every scale; the bundle makes videos", "leave it out")
    text_rows, text_valid, negative_rows, negative_valid, encoded = None, None, None, None, None
    if embeddings is not None:
        found = read_embeddings(embeddings)
        place = found.select(prompt, index)
        prompt, text_rows, text_valid = found.prompts[place], found.rows[place], found.valid[place]
        encoded = EncodedPrompt(prompt, int(found.valid[place].sum()), found.token_counts[place])
        if found.negative is not None and negative is None:
            negative, negative_rows, negative_valid = found.negative
    elif index is not None:
        raise ToprovarError("--index picks a prompt of --embeddings, which is not given", "pass --embeddings FILE")
    elif prompt is None:
        raise ToprovarError("no prompt given", "pass --prompt, or --embeddings with --index")
    backend = choice.open(bundle)
    pipeline = Pipeline(bundle, backend)
    variant = variant or default_variant(bundle)
    guidance = guidance_with(bundle.manifest.guidance, cfg, tau)
    snapshots: list[np.ndarray] = []
    result = pipeline.generate(
        prompt,
        seed,
        variant,
        negative=negative,
        text_rows=text_rows,
        text_valid=text_valid,
        negative_rows=negative_rows,
        negative_valid=negative_valid,
        guidance=guidance,
        on_scale=(lambda scale, codes: snapshots.append(codes.copy())) if preview_dir else None,
    )
    if encoded is not None:
        result.prompt = encoded
    facts = {
        "prompt": prompt,
        "negative_prompt": negative or "",
        "seed": str(seed),
        "variant": variant,
        "bundle_sha256": bundle.digest,
        "software": f"toprovar {VERSION}",
    }
    for scale, codes in enumerate(snapshots):
        assert preview_dir is not None
        write_png(preview_dir / f"scale_{scale:02d}.png", pipeline.decode(codes), {**facts, "scale": str(scale)})
    write_result(result, out, bundle.manifest, facts)
    record = {**record_of(result, bundle, backend, variant, seed), "out": str(out)}
    if not quiet:
        total_s = sum(result.latency_ms.values()) / 1e3
        console.say(f"wrote {out} ({variant}, {len(result.steps)} scales) in {total_s:.2f}s")
    return record
