"""BitSampler as an ONNX function: bits from pairs of logits and uniform noise.

logits [..., 2] float32   of zero and of one
noise  [...] float32      in [0, 1)
limit  [1] float32        odds beyond it are certain: top-k and top-p in closed form
bits   [...] int32        1 where noise < sigmoid(one - zero)
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from toprovar.plugins.functions import function_of

if TYPE_CHECKING:
    import onnx

_BODY = """
    last = Constant <value_ints = [-1]> ()
    of_zero, of_one = Split <axis = -1, num_outputs = 2> (logits)
    pair_odds = Sub (of_one, of_zero)
    odds = Squeeze (pair_odds, last)
    lowest = Neg (limit)
    is_zero = LessOrEqual (odds, lowest)
    is_one = GreaterOrEqual (odds, limit)
    never = Constant <value_float = 0.0> ()
    always = Constant <value_float = 1.0> ()
    likely = Sigmoid (odds)
    bounded = Where (is_zero, never, likely)
    chance = Where (is_one, always, bounded)
    drawn = Less (noise, chance)
    bits = Cast <to = 6> (drawn)
"""


def bit_sampler_function() -> onnx.FunctionProto:
    return function_of("BitSampler", "", "logits, noise, limit", "bits", _BODY)
