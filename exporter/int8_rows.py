"""Int8 weights with one fp32 scale per row: `X` [rows, ...] int8 is stored beside `X.row_scale` [rows] fp32."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

    import torch

ROW_SCALE_SUFFIX = ".row_scale"
INT8_LARGEST = 127  # -128 is left out, so that a row and its negative quantise alike


def quantise_rows(tensor: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Nearest int8 of every value, with one scale per row that maps the row's largest magnitude to 127.

    tensor:  [rows, ...] of any floating dtype; a row is one index of the first dimension.
    Returns: (values [rows, ...] int8 in -127..127, row_scale [rows] float32 > 0).
             `values · row_scale` is within `row_scale / 2` of the input. An all-zero row gets the smallest normal
             float32 as its scale, so that it comes back as zeros and not as 0/0.
    Raises:  ValueError if the tensor isn't floating, has no first dimension, or isn't finite.
    """
    import torch

    if tensor.dim() == 0 or not tensor.is_floating_point():
        raise ValueError(f"expected a floating tensor [rows, ...]; found {tensor.dtype} of shape {tuple(tensor.shape)}")
    rows = tensor.shape[0]
    weights = tensor.detach().to(torch.float32)
    if not bool(torch.isfinite(weights).all()):
        raise ValueError(f"expected finite values; found NaN or infinity in a tensor of shape {tuple(tensor.shape)}")
    largest = weights.abs().reshape(rows, -1).amax(dim=1) if weights.numel() else torch.zeros(rows)  # [rows]
    row_scale = (largest / INT8_LARGEST).clamp(min=torch.finfo(torch.float32).tiny)  # [rows]
    scaled = weights / _over_rows(row_scale, weights)  # [rows, ...]
    values = scaled.round().clamp(-INT8_LARGEST, INT8_LARGEST).to(torch.int8)
    return values, row_scale


def dequantise_rows(values: torch.Tensor, row_scale: torch.Tensor) -> torch.Tensor:
    """The float tensor that `quantise_rows` stored.

    values:    [rows, ...] int8.
    row_scale: [rows] float32.
    Returns:   [rows, ...] float32, `values · row_scale`.
    Raises:    ValueError if the dtypes or the number of rows differ from that.
    """
    import torch

    if values.dtype != torch.int8 or row_scale.dtype != torch.float32:
        raise ValueError(f"expected int8 values and a float32 scale; found {values.dtype} and {row_scale.dtype}")
    if values.dim() == 0 or tuple(row_scale.shape) != (values.shape[0],):
        raise ValueError(
            f"expected one scale per row; found values {tuple(values.shape)} and scale {tuple(row_scale.shape)}"
        )
    return values.to(torch.float32).mul_(_over_rows(row_scale, values))  # [rows, ...]


def _over_rows(row_scale: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """row_scale [rows] as [rows, 1, ..., 1] with as many dimensions as `like`."""
    return row_scale.reshape(-1, *([1] * (like.dim() - 1)))


def widened(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """float32 tensors by name: int8 rows with their scales multiplied out, everything else cast."""
    return {
        name: dequantise_rows(tensor, tensors[name + ROW_SCALE_SUFFIX])
        if name + ROW_SCALE_SUFFIX in tensors
        else tensor.float()
        for name, tensor in tensors.items()
        if not name.endswith(ROW_SCALE_SUFFIX)
    }
