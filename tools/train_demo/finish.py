"""Packs a trained model into the files of `exporter/demo/`: int8 rows for matrices, fp16 or fp32 for the rest."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from toprovar.exporter.demo.text_encoder import VOCABULARY_FILE, WEIGHTS_FILE, vocabulary_document
from toprovar.exporter.infinity.tokenizer import BitTokenizer
from toprovar.exporter.int8_rows import ROW_SCALE_SUFFIX, quantise_rows, widened
from toprovar.exporter.schedules import Schedule
from toprovar.runtime.errors import ToprovarError
from toprovar.runtime.word_tokenizer import WordTokenizer
from toprovar.tools.train_demo import state
from toprovar.tools.train_demo.tokenizer_stage import psnr_by_scale
from toprovar.tools.train_demo.transformer_stage import DemoModel

INFINITY_FILE, TOKENIZER_FILE = "infinity_demo.safetensors", "tokenizer_demo.safetensors"
MAX_BYTES = 16_000_000
INT8_DECODER_LOSS_DB = 0.1  # an int8 decoder is taken if it loses no more PSNR than this on any kind
_SMALL = 4096  # tensors of fewer values stay fp32


def packed(tensors: Mapping[str, Tensor], int8: bool = True) -> dict[str, Tensor]:
    """Matrices and convolutions as int8 rows with `.row_scale` (or fp16), everything small as fp32."""
    result = {}
    for name, tensor in tensors.items():
        tensor = tensor.detach().float().cpu()
        rows_are_outputs = tensor.dim() >= 2 and tensor.numel() >= _SMALL and tensor.shape[0] > 1
        if not rows_are_outputs:
            result[name] = tensor
        elif int8:
            result[name], result[name + ROW_SCALE_SUFFIX] = quantise_rows(tensor)
        else:
            result[name] = tensor.half()
    return result


def packed_tokenizer(tokenizer: BitTokenizer, int8_decoder: bool) -> dict[str, Tensor]:
    """Encoder int8; decoder int8 or fp16."""
    weights = tokenizer.state_dict()
    decoder = {k: v for k, v in weights.items() if k.startswith("decoder.")}
    rest = {k: v for k, v in weights.items() if not k.startswith("decoder.")}
    return packed(rest) | packed(decoder, int8=int8_decoder)


def _psnr_after(
    tokenizer: BitTokenizer, stored: dict[str, Tensor], images: Mapping[str, Tensor], schedule: Schedule
) -> dict[str, float]:
    kept = {k: v.clone() for k, v in tokenizer.state_dict().items()}
    tokenizer.load_state_dict(widened(stored))
    result = {kind: psnr_by_scale(tokenizer, image, schedule)[-1] for kind, image in images.items()}
    tokenizer.load_state_dict(kept)
    return result


def write_demo(
    folder: Path,
    model: DemoModel,
    tokenizer: BitTokenizer,
    words: WordTokenizer,
    schedule: Schedule,
    images: Mapping[str, Tensor],
    metadata: dict[str, str],
) -> dict[str, object]:
    """Writes the four files and puts the stored, rounded weights into `model` and `tokenizer` to be judged as shipped.

    images: validation pictures per kind, which decide whether the decoder is int8.
    Raises: ToprovarError if the files exceed 16 MB together.
    """
    before = {kind: psnr_by_scale(tokenizer, image, schedule)[-1] for kind, image in images.items()}
    stored = packed_tokenizer(tokenizer, int8_decoder=True)
    with_int8 = _psnr_after(tokenizer, stored, images, schedule)
    int8_decoder = all(before[kind] - with_int8[kind] <= INT8_DECODER_LOSS_DB for kind in images)
    if not int8_decoder:
        stored = packed_tokenizer(tokenizer, int8_decoder=False)
    after = _psnr_after(tokenizer, stored, images, schedule)
    infinity, text = packed(model.infinity.state_dict()), packed(model.text.state_dict())
    folder.mkdir(parents=True, exist_ok=True)
    for name, tensors in ((INFINITY_FILE, infinity), (TOKENIZER_FILE, stored), (WEIGHTS_FILE, text)):
        state.save_tensors(tensors, folder / name, metadata)
    (folder / VOCABULARY_FILE).write_text(
        vocabulary_document(words.vocabulary, model.text.max_tokens), encoding="utf-8"
    )
    sizes = {
        name: (folder / name).stat().st_size for name in (INFINITY_FILE, TOKENIZER_FILE, WEIGHTS_FILE, VOCABULARY_FILE)
    }
    if sum(sizes.values()) > MAX_BYTES:
        raise ToprovarError(f"{folder} holds {sum(sizes.values())} bytes; expected at most {MAX_BYTES}: {sizes}")
    model.infinity.load_state_dict(widened(infinity))
    model.text.load_state_dict(widened(text))
    tokenizer.load_state_dict(widened(stored))
    return {
        "size_bytes": sizes,
        "decoder_dtype": "int8" if int8_decoder else "fp16",
        "psnr_db_unrounded": before,
        "psnr_db_int8": with_int8,
        "psnr_db_shipped": after,
        "parameters": {
            "infinity": sum(p.numel() for p in model.infinity.parameters()),
            "text_encoder": sum(p.numel() for p in model.text.parameters()),
            "tokenizer": sum(p.numel() for p in tokenizer.parameters()),
        },
    }


def is_finite(model: torch.nn.Module) -> bool:
    return all(bool(torch.isfinite(p).all()) for p in model.parameters())
