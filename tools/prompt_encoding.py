"""`toprovar encode-prompts`: a list of prompts to text rows, once, so that other commands need no text encoder."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from toprovar.calibrate.statistics import read_prompts
from toprovar.exporter.text_encoders.encoding import KINDS, encode_all
from toprovar.exporter.text_encoders.folder import encoder_folder, open_encoder, require_transformers
from toprovar.runtime.embeddings import write_embeddings
from toprovar.runtime.errors import EnvironmentFault, ToprovarError
from toprovar.runtime.json_files import check_folder, check_replaceable, read_text
from toprovar.tools import console

MAX_SYSTEM_PROMPT_BYTES = 2**20


@dataclass(frozen=True)
class EncodingRequest:
    """The command's options."""

    prompts: Path
    encoder: str
    kind: str
    out: Path
    dtype: str = "fp32"
    device: str = "cpu"
    negative: str | None = None
    prefix: str = ""
    system_prompt: Path | None = None
    limit: int | None = None
    download: bool = False


def _check_device(device: str) -> None:
    import torch

    if device == "cuda" and not torch.cuda.is_available():
        raise EnvironmentFault("PyTorch sees no CUDA GPU", "leave --device out, or install PyTorch with CUDA")


def run_graph_export(
    encoder: str, tokens: int, out: Path, download: bool = False, overwrite: bool = True, quiet: bool = False
) -> dict[str, Any]:
    """Writes T5's encoder as an ONNX graph. Returns: the facts beside it."""
    from toprovar.exporter.output_folder import check_out
    from toprovar.exporter.text_encoders.t5 import MAX_TOKENS, load_t5_model
    from toprovar.exporter.text_encoders.t5_graph import FACTS_FILE, GRAPH_FILE, export_t5

    started = time.perf_counter()
    check_out(out, overwrite, FACTS_FILE)
    if tokens > MAX_TOKENS:
        raise ToprovarError(f"--tokens is {tokens}; T5's prompts have at most {MAX_TOKENS}", f"give 1 to {MAX_TOKENS}")
    require_transformers()
    files = open_encoder(encoder_folder(encoder, download), ("t5",))
    facts = {"kind": "t5", "weights_sha256": files.weights.digest(), "tokenizer_sha256": files.tokenizer_sha256()}
    document = export_t5(load_t5_model(files), tokens, out, facts, overwrite)
    if not quiet:
        console.say(
            f"wrote {out / GRAPH_FILE} ({tokens} tokens, width {document['width']}, fp32) in "
            f"{time.perf_counter() - started:.1f}s; it reads ids and valid, and gives rows"
        )
    return document


def run_encoding(request: EncodingRequest, quiet: bool = False) -> dict[str, Any]:
    """Returns: what was written. Raises: ToprovarError before anything is loaded if it could not be written."""
    started = time.perf_counter()
    if request.out.suffix != ".safetensors":
        raise ToprovarError(f"{request.out} does not end in .safetensors", f"pass -o {request.out.stem}.safetensors")
    check_replaceable(request.out)
    check_folder(request.out.absolute().parent)
    if request.system_prompt is not None and request.kind != "qwen2-vl":
        raise ToprovarError(
            f"--system-prompt is not read by kind {request.kind}", "leave it out, or pass --kind qwen2-vl"
        )
    prompts = read_prompts(request.prompts)[: request.limit]
    options: dict[str, Any] = {"dtype": request.dtype, "device": request.device}
    if request.system_prompt is not None:
        options["system_prompt"] = read_text(
            request.system_prompt, f"system prompt {request.system_prompt}", MAX_SYSTEM_PROMPT_BYTES
        )
    elif request.kind == "qwen2-vl":
        console.say(
            "note: no system prompt; HART's published runs put llm_system_prompt of hart/utils/constants.py in front "
            "(--system-prompt FILE)"
        )
    require_transformers()
    _check_device(request.device)
    encoder = KINDS[request.kind](encoder_folder(request.encoder, request.download), **options)
    with console.progress("encode") as advance:
        found = encode_all(encoder, prompts, request.negative, request.prefix, request.encoder, request.dtype, advance)
    write_embeddings(request.out, found)
    kept = [int(valid.sum()) for valid in found.valid]
    cut = sum(total > mine for total, mine in zip(found.token_counts, kept, strict=True))
    if not quiet:
        console.say(
            f"wrote {request.out} ({len(prompts)} prompts, {min(kept)} to {max(kept)} tokens, width {found.width}"
            f"{f', {cut} cut' if cut else ''}) in {time.perf_counter() - started:.1f}s; "
            f"next: toprovar run BUNDLE --embeddings {console.quoted(request.out)} --index 0"
        )
    return {
        "out": str(request.out),
        "prompts": len(prompts),
        "tokens": kept,
        "cut": cut,
        "width": found.width,
        "negative": found.negative is not None,
        "encoder": dict(found.encoder),
    }
