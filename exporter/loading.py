"""A module filled with a checkpoint's tensors, whatever the family."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, TypeVar

from toprovar.exporter.checkpoints import LazyTensors, check_finite
from toprovar.exporter.families import DROPPED_KEYS, Shape, expect_shapes
from toprovar.runtime.errors import ToprovarError

if TYPE_CHECKING:
    from torch import Tensor, nn

Module = TypeVar("Module", bound="nn.Module")


def shapes_of(tensors: Mapping[str, Any]) -> dict[str, Shape]:
    """Without reading the tensors of a checkpoint; buffers in `DROPPED_KEYS` are left out."""
    if isinstance(tensors, LazyTensors):
        return {name: tensors.shape_of(name) for name in tensors if name not in DROPPED_KEYS}
    return {name: tuple(tensor.shape) for name, tensor in tensors.items() if name not in DROPPED_KEYS}


def fp32(tensors: Mapping[str, Any], name: str, what: str) -> Tensor:
    """One tensor, checked; of a checkpoint, no more stays in memory than the tensor itself.

    Raises: ToprovarError if it is not finite, or holds integers.
    """
    import torch

    dtype = tensors.entry(name).dtype if isinstance(tensors, LazyTensors) else tensors[name].dtype
    if not dtype.is_floating_point:
        raise ToprovarError(
            f"{what}: tensor {name} holds {str(dtype).removeprefix('torch.')}; expected floating point numbers",
            "quantized checkpoints are not read: pass the one in fp32, fp16 or bf16",
        )
    tensor = tensors.converted(name, torch.float32) if isinstance(tensors, LazyTensors) else tensors[name].float()
    check_finite({name: tensor}, what)
    return tensor


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

    shapes = shapes_of(tensors)
    with torch.device("meta"):
        model = build(shapes)
    expected = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    for name in expected:
        if name.endswith("zero_k_bias"):
            shapes.setdefault(name, expected[name])
    refuse(expect_shapes(shapes, expected, what))
    state = {n: fp32(tensors, n, what) if n in tensors else torch.zeros(shape) for n, shape in expected.items()}
    model.load_state_dict(state, assign=True)
    return model.eval().requires_grad_(False)
