"""A module filled with a checkpoint's tensors, whatever the family."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, TypeVar

from toprovar.exporter.checkpoints import check_finite
from toprovar.exporter.families import DROPPED_KEYS, Shape, expect_shapes

if TYPE_CHECKING:
    from torch import nn

Module = TypeVar("Module", bound="nn.Module")


def loaded(
    tensors: Mapping[str, Any],
    what: str,
    build: Callable[[dict[str, Shape]], Module],
    refuse: Callable[[list[str]], None] = lambda unexpected: None,
) -> Module:
    """The module that `build` makes of the tensors' shapes, with the tensors in it: fp32, in eval mode.

    Buffers in `DROPPED_KEYS` are not even read; a `zero_k_bias` may be missing.
    refuse: gets the names that nothing expects, before anything is read
    Raises: ToprovarError for the first tensor that is missing, has another shape or is not finite.
    """
    import torch

    shapes = {name: tuple(tensors[name].shape) for name in tensors if name not in DROPPED_KEYS}
    with torch.device("meta"):
        model = build(shapes)
    expected = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    for name in expected:
        if name.endswith("zero_k_bias"):
            shapes.setdefault(name, expected[name])
    refuse(expect_shapes(shapes, expected, what))
    state = {n: tensors[n].float() if n in tensors else torch.zeros(shape) for n, shape in expected.items()}
    check_finite(state, what)
    model.load_state_dict(state, assign=True)
    return model.eval().requires_grad_(False)
