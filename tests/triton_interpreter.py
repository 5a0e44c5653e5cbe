"""Triton's interpreter in this process: import this before triton, which fixes its mode when it is first imported.

On a machine with a CUDA GPU nothing is changed and the same tests run the compiled kernels.
"""

from __future__ import annotations

import os

import torch

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def _numbers_as_loop_bounds() -> None:
    """Triton 3.6 turns one-element arrays into loop bounds by int(array), which NumPy 2.4 refuses."""
    from triton.runtime import interpreter

    patch = interpreter._patch_lang_tensor

    def patched(tensor, scope):
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    interpreter._patch_lang_tensor = patched


def _products_of_bfloat16() -> None:
    """Triton 3.6's interpreter keeps bfloat16 as its 16 bits, and multiplies those bits as integers in `dot`."""
    import triton.language as tl
    from triton.runtime import interpreter

    builder = interpreter.InterpreterBuilder
    dot = builder.create_dot

    def create_dot(self, a, b, d, *options):
        a, b = (self.cast_impl(x, tl.float32) if x.dtype.scalar == tl.bfloat16 else x for x in (a, b))
        return dot(self, a, b, d, *options)

    builder.create_dot = create_dot


if DEVICE == "cpu":
    os.environ["TRITON_INTERPRET"] = "1"
    _numbers_as_loop_bounds()
    _products_of_bfloat16()
