from __future__ import annotations

from typing import Any

import pytest


@pytest.fixture
def tensors() -> dict[str, Any]:
    """Tensors of awkward sizes, one of each kind of dtype."""
    torch = pytest.importorskip("torch", reason="needs PyTorch")
    noise = torch.Generator().manual_seed(17)
    return {
        "word_embed.weight": torch.randn(17, 81, generator=noise),
        "word_embed.bias": torch.randn(17, generator=noise).to(torch.bfloat16),
        "scale": torch.tensor(0.5, dtype=torch.float16),
        "mask": torch.arange(7, dtype=torch.int64),
        "flags": torch.tensor([True, False, True]),
        "nothing": torch.empty(0, 3),
    }
