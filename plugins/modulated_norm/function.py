"""ModulatedNorm as an ONNX function: layer norm, then scale and shift of adaptive modulation.

    x            [n, R, C] float32
    scale, shift [1, R, C] float32, or [1, 1, C]
    y            [n, R, C] in the type `to`: normal(x) * scale + shift

Source: Infinity's adaptive layer norm (models.md lists it per family).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from toprovar.plugins.functions import function_of

if TYPE_CHECKING:
    import onnx

_BODY = """
    width = Shape <start = -1> (x)
    one = Constant <value_float = 1.0> ()
    ones = Expand (one, width)
    normal = LayerNormalization <axis = -1, epsilon: float = @epsilon> (x, ones)
    scaled = Mul (normal, scale)
    moved = Add (scaled, shift)
    y = Cast <to: int = @to> (moved)
"""


def modulated_norm_function() -> onnx.FunctionProto:
    return function_of("ModulatedNorm", "epsilon, to", "x, scale, shift", "y", _BODY)
