"""RotaryHeads as an ONNX function: from the packed projection to attention's operands.

    qkv      [n, R, 3 * H * D]        the product, without bias
    bias     [3 * H * D]              in qkv's type
    gain     [H, 1] float32           length of a query
    cos, sin [n, 1 or R, 1, D/2] float32
    q, k, v  [n, R, H, D]             in qkv's type; q and k of unit length before gain and rotation

Rotation turns the pairs (x_i, x_(i + D/2)). k and v leave in cache layout.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from toprovar.plugins.functions import function_of

if TYPE_CHECKING:
    import onnx


def _unit(name: str) -> str:
    return f"""
    {name}_wide = Cast <to = 1> ({name}_heads)
    {name}_length = ReduceL2 <keepdims = 1> ({name}_wide, last)
    {name}_safe = Max ({name}_length, least)
    {name}_unit = Div ({name}_wide, {name}_safe)
"""


def _rotated(name: str, source: str) -> str:
    return f"""
    {name}_a, {name}_b = Split <axis = -1, num_outputs = 2> ({source})
    {name}_ac = Mul ({name}_a, cos)
    {name}_bs = Mul ({name}_b, sin)
    {name}_as = Mul ({name}_a, sin)
    {name}_bc = Mul ({name}_b, cos)
    {name}_first = Sub ({name}_ac, {name}_bs)
    {name}_second = Add ({name}_as, {name}_bc)
    {name}_turned = Concat <axis = -1> ({name}_first, {name}_second)
    {name} = CastLike ({name}_turned, qkv)
"""


_BODY = (
    """
    packed = Add (qkv, bias)
    q_flat, k_flat, v_flat = Split <axis = -1, num_outputs = 3> (packed)
    same = Constant <value_ints = [0, 0]> ()
    count = Constant <value_ints: ints = @heads> ()
    rest = Constant <value_ints = [-1]> ()
    shape = Concat <axis = 0> (same, count, rest)
    q_heads = Reshape (q_flat, shape)
    k_heads = Reshape (k_flat, shape)
    v = Reshape (v_flat, shape)
    last = Constant <value_ints = [-1]> ()
    least = Constant <value_float = 1e-12> ()
"""
    + _unit("q")
    + _unit("k")
    + """
    q_long = Mul (q_unit, gain)
"""
    + _rotated("q", "q_long")
    + _rotated("k", "k_unit")
)


def rotary_heads_function() -> onnx.FunctionProto:
    return function_of("RotaryHeads", "heads", "qkv, bias, gain, cos, sin", "q, k, v", _BODY)
