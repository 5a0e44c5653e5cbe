"""TokenGate as an ONNX function: positions of the `count` lowest scores, ascending; ties to the smaller index.

    score   [N] float32, or [B, N]: every row for itself
    indices [count] int64, or [B, count]

The second TopK sorts the chosen positions; they pass through float32, exact below 2^24, since some hosts have no
TopK of integers.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from toprovar.plugins.functions import function_of

if TYPE_CHECKING:
    import onnx

_BODY = """
    k = Constant <value_ints: ints = @count> ()
    lowest, chosen = TopK <axis = -1, largest = 0, sorted = 1> (score, k)
    positions = Cast <to = 1> (chosen)
    ascending, order = TopK <axis = -1, largest = 0, sorted = 1> (positions, k)
    indices = Cast <to = 7> (ascending)
"""


def token_gate_function() -> onnx.FunctionProto:
    return function_of("TokenGate", "count", "score", "indices", _BODY)
