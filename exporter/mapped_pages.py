"""Memory-mapped tensors: letting go of what has been read, so that a conversion does not hold file and copy at once."""

from __future__ import annotations

import ctypes
import mmap
import sys
from functools import cache
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


@cache
def _madvise() -> Any:
    return getattr(ctypes.CDLL(None, use_errno=True), "madvise", None) if sys.platform == "linux" else None


def release_pages(tensor: torch.Tensor) -> None:
    """Takes the pages of a tensor that is mapped from a file out of memory; its next reader gets them from the file.

    Only whole pages between first and last byte; a neighbour's stay. Nothing happens where the system has no such call,
    and what was written into the pages would be lost: only for tensors of an opened checkpoint that nobody else holds.
    """
    madvise = _madvise()
    if madvise is None:
        return
    storage = tensor.untyped_storage()
    start = storage.data_ptr() + tensor.storage_offset() * tensor.element_size()
    end = start + tensor.numel() * tensor.element_size()
    start += -start % mmap.PAGESIZE
    end -= end % mmap.PAGESIZE
    if start < end:
        madvise(ctypes.c_void_p(start), ctypes.c_size_t(end - start), mmap.MADV_DONTNEED)
