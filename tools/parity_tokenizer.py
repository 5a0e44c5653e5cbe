"""Compares a bit tokenizer with a parity file: decoder, codes of bits, and the encoder where the file has one.

Names: dec/z -> dec/x (not clamped); codes/from_bits<s>, the latent of the bits of scale s at its own size;
enc/<image> -> enc/<latent> and, with meta.enc_sched, enc/bits/s and enc/<sum>. Several spellings are known for these.
"""

from __future__ import annotations

import re
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from toprovar.runtime.errors import ToprovarError
from toprovar.tools.parity_file import MAKE_AGAIN, ParityFile, schedule_of

if TYPE_CHECKING:
    from toprovar.exporter.infinity.tokenizer import BitTokenizer

Arrays = dict[str, np.ndarray]

ENCODER_IMAGES = ("enc/x", "enc/img", "enc/image", "enc/input", "enc/inp")
ENCODER_LATENTS = ("enc/z", "enc/h", "enc/latent", "enc/features", "enc/raw")
ENCODER_SUMS = ("enc/summed_codes", "enc/codes", "enc/z_q", "enc/zq", "enc/quant", "enc/f_hat")
FROM_BITS = re.compile(r"codes/from_bits(\d*)")


def inputs_of() -> set[str]:
    """Arrays that are fed in and not compared."""
    return {"dec/z", *ENCODER_IMAGES}


def observe_tokenizer_torch(model: BitTokenizer, file: ParityFile) -> Arrays:
    import torch

    from toprovar.exporter.infinity.tokenizer import latent_from_bits, quantise_residual

    seen: Arrays = {}
    with torch.inference_mode():
        if "dec/z" in file.shapes:
            z = _latent(file, "dec/z", model.config.channels)
            seen["dec/x"] = model.decode_raw(torch.from_numpy(z)).numpy()
        for name in filter(FROM_BITS.fullmatch, file.shapes):
            bits = torch.from_numpy(_bits_of(file, name, model.config.channels))
            seen[name] = latent_from_bits(bits).numpy()
        image = next((name for name in ENCODER_IMAGES if name in file.shapes), None)
        latent = next((name for name in ENCODER_LATENTS if name in file.shapes), None)
        if image and model.config.encoder:
            encoded = model.encode(torch.from_numpy(file.read(image)))
            if latent:
                seen[latent] = encoded.numpy()
        if latent and "enc_sched" in file.meta:
            # from the recorded latent, so that a value next to 0 cannot flip a bit and everything behind it
            z = torch.from_numpy(_latent(file, latent, model.config.channels))
            schedule = schedule_of(file, file.meta["enc_sched"], "meta.enc_sched")
            codes = quantise_residual(z, schedule)
            seen |= {f"enc/bits/{s}": bits.numpy() for s, bits in enumerate(codes.bits)}
            seen |= {f"enc/codes_in/{s + 1}": tokens.numpy() for s, tokens in enumerate(codes.inputs)}
            seen |= {name: codes.summed.numpy() for name in ENCODER_SUMS}
    return seen


def observe_tokenizer_onnxruntime(model: BitTokenizer, file: ParityFile) -> Arrays:
    """The exported decoder; its picture is clamped to [-1, 1]."""
    if "dec/z" not in file.shapes:
        return {}
    import onnxruntime

    from toprovar.exporter.graph_builder import WEIGHTS_FILE
    from toprovar.exporter.infinity.graphs import decoder_graph
    from toprovar.exporter.infinity.weights import decoder_weights
    from toprovar.exporter.weights_file import WeightSpec, layout_weights, write_weights

    z = _latent(file, "dec/z", model.config.channels)
    thunks = decoder_weights(model)
    layout = layout_weights({name: WeightSpec("F32", tuple(thunk().shape)) for name, thunk in thunks.items()})
    height, width = z.shape[-2:]
    with tempfile.TemporaryDirectory(prefix="toprovar-parity-") as folder:
        write_weights(Path(folder) / WEIGHTS_FILE, layout, lambda name: thunks[name]().numpy())
        path = Path(folder) / "decoder.onnx"
        decoder_graph(model.config, (height, width), layout, len(z)).save(path)
        session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
        return {"dec/x": session.run(None, {"codes": z})[0]}


def clamped_alike(found: np.ndarray, expected: np.ndarray, backend: str) -> tuple[np.ndarray, np.ndarray, str]:
    """The exported decoder clamps its picture to [-1, 1], the PyTorch one is asked not to; recordings do either."""
    if not (np.abs(expected) > 1).any():
        return found.clip(-1, 1), expected, ""
    if backend == "onnxruntime":
        return found, expected.clip(-1, 1), "recording clamped as the exported graph"
    return found, expected, ""


def _latent(file: ParityFile, name: str, channels: int) -> np.ndarray:
    """[B, d, h, w]; a time axis of 1 is taken out."""
    z = file.read(name)
    if z.ndim == 5 and z.shape[2] == 1:
        z = z[:, :, 0]
    if z.ndim != 4 or z.shape[1] != channels or z.dtype.kind != "f" or 0 in z.shape:
        raise ToprovarError(
            f"{file.path}: array {name} is {z.dtype}{list(z.shape)}; expected float [B, {channels}, h, w]", MAKE_AGAIN
        )
    return z


def _bits_of(file: ParityFile, name: str, channels: int) -> np.ndarray:
    """The bits behind a codes/from_bits array, [B, h, w, d]: recorded ones, else the signs of the array itself."""
    codes = _latent(file, name, channels)
    height, width = codes.shape[-2:]
    match = FROM_BITS.fullmatch(name)
    scale = match[1] if match else ""
    for source in (f"enc/bits/{scale}", f"codes/bits{scale}", f"codes/bits/{scale}", f"enc/bits{scale}"):
        if source in file.shapes:
            bits = file.read(source)
            if bits.size % (height * width * channels) == 0:
                return (bits > 0).reshape(-1, height, width, channels)
    return (codes > 0).transpose(0, 2, 3, 1)
