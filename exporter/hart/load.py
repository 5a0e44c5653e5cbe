"""HART's modules from a checkpoint's tensors."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from toprovar.exporter.checkpoints import check_finite
from toprovar.exporter.families import DROPPED_KEYS, expect_shapes
from toprovar.exporter.hart.config import config_from_shapes
from toprovar.runtime.errors import ToprovarError

if TYPE_CHECKING:
    from toprovar.exporter.hart.quantizer import Quantizer
    from toprovar.exporter.hart.transformer import Hart

# Parts of `blocks.` that a checkpoint may carry and this project computes.
_COMPUTED = re.compile(r".*(rotary_emb|inv_freq).*")
_CONVOLUTION = re.compile(r"quantize\.quant_resi\.qresi_ls\.(\d+)\.weight")


def load_hart(tensors: Mapping[str, Any], what: str, heads: int | None = None) -> Hart:
    """Builds the transformer whose sizes the tensors have, and loads them (fp32).

    heads:  where attention is not cosine attention
    Raises: ToprovarError for the first tensor that is missing, has another shape, is not finite or is not understood.
    """
    from toprovar.exporter.hart.transformer import Hart

    # the published file's attention mask has 380 MB: it is not even read
    shapes = {name: tuple(tensors[name].shape) for name in tensors if name not in DROPPED_KEYS}
    with torch.device("meta"):
        model = Hart(config_from_shapes(shapes, heads))
    expected = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    for name in expected:
        if name.endswith("zero_k_bias"):
            shapes.setdefault(name, expected[name])
    for name in expect_shapes(shapes, expected, what):
        if name.startswith("blocks.") and not _COMPUTED.match(name):
            raise ToprovarError(
                f"{what}: tensor {name} belongs to no part of hart-0.7b's blocks: found shape {list(shapes[name])}; "
                "expected no such tensor",
                "this variant of HART is not supported; see docs/families/hart.md",
            )
    state = {n: tensors[n].float() if n in tensors else torch.zeros(shape) for n, shape in expected.items()}
    check_finite(state, what)
    model.load_state_dict(state, assign=True)
    return model.eval().requires_grad_(False)


def load_quantizer(tensors: Mapping[str, Any], what: str) -> Quantizer:
    """Codebook and smoothing convolutions of a VQ tokenizer, under `quantize.` or `vae.quantize.` (fp32).

    Raises: ToprovarError for the first tensor that is missing, has another shape or is not finite.
    """
    from toprovar.exporter.hart.quantizer import Quantizer

    own = {name.removeprefix("vae."): name for name in tensors if name.removeprefix("vae.").startswith("quantize.")}
    shapes = {name: tuple(tensors[source].shape) for name, source in own.items()}
    codebook = shapes.get("quantize.embedding.weight", ())
    if len(codebook) != 2 or 0 in codebook:
        raise ToprovarError(
            f"{what}: tensor quantize.embedding.weight is missing or no matrix: found shape {list(codebook)}; expected "
            "[codes, channels]",
            "pass the tokenizer that was published with this transformer",
        )
    convolutions = len([name for name in shapes if _CONVOLUTION.fullmatch(name)])
    with torch.device("meta"):
        quantizer = Quantizer(*codebook, max(convolutions, 1))
    expected = {f"quantize.{name}": tuple(tensor.shape) for name, tensor in quantizer.state_dict().items()}
    expect_shapes(shapes, expected, what)
    state = {name.removeprefix("quantize."): tensors[own[name]].float() for name in expected}
    check_finite(state, what)
    quantizer.load_state_dict(state, assign=True)
    return quantizer.eval().requires_grad_(False)


def check_belong_together(model: Hart, quantizer: Quantizer, what: str) -> None:
    """Raises: ToprovarError if the tokenizer has other codes or channels than the transformer draws."""
    found = tuple(quantizer.embedding.weight.shape)
    expected = (model.config.vocabulary, model.config.code_channels)
    if found != expected:
        raise ToprovarError(
            f"{what}: tokenizer and transformer do not belong together: the codebook has {found[0]} codes of "
            f"{found[1]} channels; the transformer draws {expected[0]} of {expected[1]}",
            "pass the tokenizer that was published with this transformer",
        )
