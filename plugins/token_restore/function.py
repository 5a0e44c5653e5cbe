"""TokenRestore as an ONNX function: computed tokens among those that take a cached residual.

x        [h' * w', R, C] float32   tokens before the part that was pruned
residual [h * w, R, C] float32     what that part added at an earlier scale
rows     [h', h], columns [w', w]  resampling matrices
kept     [n] int64, ascending      positions that ran, with results y [n, R, C]
out      [h' * w', R, C]: y at the kept positions, elsewhere x plus the resampled residual
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from toprovar.plugins.functions import function_of

if TYPE_CHECKING:
    import onnx

# along x: [h] batches of [w', w] @ [w, R*C]; then along y: [h', h] @ [h, w'*R*C]
_BODY = """
    height = Shape <start = 1> (rows)
    width = Shape <start = 1> (columns)
    rest = Constant <value_ints = [-1]> ()
    map = Concat <axis = 0> (height, width, rest)
    lines = Reshape (residual, map)
    wide = MatMul (columns, lines)
    stacked = Concat <axis = 0> (height, rest)
    whole = Reshape (wide, stacked)
    high = MatMul (rows, whole)
    shape = Shape (x)
    change = Reshape (high, shape)
    base = Add (x, change)
    places = Unsqueeze (kept, rest)
    out = ScatterND (base, places, y)
"""


def token_restore_function() -> onnx.FunctionProto:
    return function_of("TokenRestore", "", "x, residual, rows, columns, kept, y", "out", _BODY)
