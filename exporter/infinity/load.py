"""Infinity's transformer and bit tokenizer from checkpoints' tensors."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from toprovar.exporter.families import canonical_tokenizer_names, expect_shapes
from toprovar.exporter.infinity.config import config_from_shapes
from toprovar.exporter.loading import fp32, shapes_of

if TYPE_CHECKING:
    from toprovar.exporter.infinity.tokenizer import BitTokenizer
    from toprovar.exporter.infinity.transformer import Infinity


def load_infinity(tensors: Mapping[str, Any], what: str, patchify: bool = False) -> Infinity:
    """Builds the transformer whose sizes the tensors have, and loads them (fp32).

    Raises: ToprovarError for the first tensor that is missing or has another shape.
    """
    import torch

    from toprovar.exporter.infinity.transformer import Infinity

    shapes = shapes_of(tensors)
    config = config_from_shapes(shapes, patchify)
    with torch.device("meta"):
        model = Infinity(config)
    expected = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    for name in list(expected):  # the custom training kernel stores this factor with two axes swapped
        if name.endswith("scale_mul_1H11") and shapes.get(name) == (1, 1, config.heads, 1):
            shapes[name] = expected[name]
        if name.endswith("zero_k_bias"):
            shapes.setdefault(name, expected[name])
    expect_shapes(shapes, expected, what)
    state = {}
    for name, shape in expected.items():
        state[name] = fp32(tensors, name, what).reshape(shape) if name in tensors else torch.zeros(shape)
    model.load_state_dict(state, assign=True)
    return model.eval().requires_grad_(False)


def load_tokenizer(tensors: Mapping[str, Any], what: str) -> BitTokenizer:
    """Builds the bit tokenizer whose sizes the tensors have, under either naming, and loads them (fp32)."""
    import torch

    from toprovar.exporter.infinity.tokenizer import BitTokenizer, tokenizer_config_from_shapes

    shapes = shapes_of(tensors)
    canonical = canonical_tokenizer_names(shapes, what)
    renamed = {canonical.get(name, name): shape for name, shape in shapes.items()}
    with torch.device("meta"):
        model = BitTokenizer(tokenizer_config_from_shapes(renamed))
    expected = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    expect_shapes(renamed, expected, what)
    state = {canonical[name]: fp32(tensors, name, what) for name in shapes if canonical[name] in expected}
    model.load_state_dict(state, assign=True)
    return model.eval().requires_grad_(False)
