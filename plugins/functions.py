"""All operators as ONNX functions: the definitions every host falls back to.

A node of the domain `toprovar` with the attributes of `PLUGIN` becomes a TensorRT plugin where one is registered;
without them TensorRT inlines the body and fuses it itself. ONNX Runtime takes a registered custom operator in either
case.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import onnx

DOMAIN = "toprovar"
PLUGIN_VERSION = "1"
PLUGIN = {"plugin_namespace": DOMAIN, "plugin_version": PLUGIN_VERSION}
OPSET = 20


def function_of(name: str, attributes: str, inputs: str, outputs: str, body: str) -> onnx.FunctionProto:
    """One operator from its signature and body in ONNX's textual form."""
    from onnx import parser

    declared = ", ".join(filter(None, (attributes, "plugin_namespace, plugin_version")))
    header = f'<domain: "{DOMAIN}", opset_import: ["" : {OPSET}]>\n{name} <{declared}>'
    return parser.parse_function(f"{header} ({inputs}) => ({outputs}) {{{body}}}")


def functions() -> dict[str, Callable[[], onnx.FunctionProto]]:
    """{operator: its function}."""
    from toprovar.plugins.attention import function as attention
    from toprovar.plugins.bias_gelu.function import bias_gelu_function
    from toprovar.plugins.bit_sampler.function import bit_sampler_function
    from toprovar.plugins.gated_residual.function import gated_residual_function
    from toprovar.plugins.modulated_norm.function import modulated_norm_function
    from toprovar.plugins.rotary_heads.function import rotary_heads_function
    from toprovar.plugins.token_gate.function import token_gate_function
    from toprovar.plugins.token_restore.function import token_restore_function

    return {
        "BiasGelu": bias_gelu_function,
        "BitSampler": bit_sampler_function,
        "CachedAttention": attention.cached_attention_function,
        "EntropyAttention": attention.entropy_attention_function,
        "GatedResidual": gated_residual_function,
        "MaskedAttention": attention.masked_attention_function,
        "ModulatedNorm": modulated_norm_function,
        "RotaryHeads": rotary_heads_function,
        "TokenGate": token_gate_function,
        "TokenRestore": token_restore_function,
    }
