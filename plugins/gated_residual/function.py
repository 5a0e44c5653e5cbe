"""GatedResidual as an ONNX function: what closes a sub-layer.

x    [n, R, C] float32
y    [n, R, C]          the product, without bias
bias [C]                in y's type
gate [1, R, C] float32, or [1, 1, C]
out  [n, R, C] float32: x + (y + bias) * gate
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from toprovar.plugins.functions import function_of

if TYPE_CHECKING:
    import onnx

_BODY = """
    biased = Add (y, bias)
    wide = Cast <to = 1> (biased)
    gated = Mul (wide, gate)
    out = Add (x, gated)
"""


def gated_residual_function() -> onnx.FunctionProto:
    return function_of("GatedResidual", "", "x, y, bias, gate", "out", _BODY)
