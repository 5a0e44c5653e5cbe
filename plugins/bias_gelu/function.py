"""BiasGelu as an ONNX function: gelu(x + bias), tanh form. x: [..., C]; bias: [C] in x's type."""

from __future__ import annotations

from typing import TYPE_CHECKING

from toprovar.plugins.functions import function_of

if TYPE_CHECKING:
    import onnx

_BODY = """
    biased = Add (x, bias)
    y = Gelu <approximate = "tanh"> (biased)
"""


def bias_gelu_function() -> onnx.FunctionProto:
    return function_of("BiasGelu", "", "x, bias", "y", _BODY)
