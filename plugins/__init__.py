"""The custom operators. Importing this package loads nothing; its function `entropy_attention` needs PyTorch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from toprovar.plugins.attention.entropy import entropy_attention

__all__ = ["entropy_attention"]


def __getattr__(name: str) -> Any:
    if name == "entropy_attention":
        from toprovar.plugins.attention.entropy import entropy_attention

        return entropy_attention
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
