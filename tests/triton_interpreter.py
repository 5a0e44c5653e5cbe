"""Triton's interpreter in this process: import this before triton, which fixes its mode when it is first imported.

On a machine with a CUDA GPU nothing is changed and the same tests run the compiled kernels.
"""

from __future__ import annotations

import contextlib
import os

import numpy as np
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


def _addresses(tensor: torch.Tensor) -> np.ndarray:
    """Where the elements of a strided tensor start."""
    at = np.full((1,), tensor.data_ptr(), np.uint64)
    for size, step in zip(tensor.shape, tensor.stride(), strict=True):
        at = (at[:, None] + np.arange(size, dtype=np.uint64) * np.uint64(step * tensor.element_size())).ravel()
    return at


@contextlib.contextmanager
def touching_only(*inputs: torch.Tensor):
    """Fails on a load that isn't an element of `inputs`, and on a load or store outside what `torch` makes meanwhile.

    Yields the numbers of loads and stores seen. For the interpreter only.
    """
    from triton.runtime import interpreter

    made: list[torch.Tensor] = []
    counts = {"load": 0, "store": 0}
    readable = np.concatenate([_addresses(x) for x in inputs])
    real_c, real_empty, real_like = interpreter._interpreter, torch.empty, torch.empty_like

    def kept(make):
        def call(*arguments, **options):
            made.append(make(*arguments, **options))
            return made[-1]

        return call

    def checked(name, pointers, mask, allowed):
        asked = np.asarray(pointers)[np.asarray(mask, bool)].astype(np.uint64)
        counts[name] += asked.size
        allowed = np.concatenate([allowed, *(_addresses(x) for x in made)])
        strays = np.setdiff1d(asked, allowed)
        assert not strays.size, f"{name} of {strays.size} addresses outside the tensors, the first is {strays[0]:#x}"

    class Guard:
        def __getattr__(self, name):
            return getattr(real_c, name)

        def load(self, pointers, mask, *rest):
            checked("load", pointers, mask, readable)
            return real_c.load(pointers, mask, *rest)

        def store(self, pointers, value, mask):
            checked("store", pointers, mask, readable[:0])
            return real_c.store(pointers, value, mask)

    interpreter._interpreter, torch.empty, torch.empty_like = Guard(), kept(real_empty), kept(real_like)
    try:
        yield counts
    finally:
        interpreter._interpreter, torch.empty, torch.empty_like = real_c, real_empty, real_like


if DEVICE == "cpu":
    os.environ["TRITON_INTERPRET"] = "1"
    _numbers_as_loop_bounds()
    _products_of_bfloat16()
