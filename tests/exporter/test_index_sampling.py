from __future__ import annotations

import math

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="needs PyTorch: pip install 'toprovar[torch]'")

from toprovar.exporter.index_sampling import draw_indices, mask_unlikely, soft_embeddings  # noqa: E402
from toprovar.runtime.noise import uniform_noise  # noqa: E402


def kept(logits: list[float], top_k: int = 0, top_p: float = 0.0) -> list[int]:
    masked = mask_unlikely(torch.tensor(logits), top_k, top_p)
    return torch.isfinite(masked).nonzero().flatten().tolist()


def test_top_k_keeps_ties() -> None:
    assert kept([1.0, 3.0, 2.0, 2.0, 0.0], top_k=2) == [1, 2, 3]
    assert kept([1.0, 3.0, 2.0], top_k=3) == kept([1.0, 3.0, 2.0]) == [0, 1, 2]


def test_top_p_removes_from_the_least_likely_and_never_the_largest() -> None:
    logits = [math.log(p) for p in (0.1, 0.5, 0.15, 0.25)]
    assert kept(logits, top_p=0.76) == [1, 2, 3]  # 0.1 <= 0.24 < 0.25
    assert kept(logits, top_p=0.7) == [1, 3]  # 0.25 <= 0.3 < 0.5
    assert kept(logits, top_p=1e-9) == [1]


def test_draws_follow_the_chances() -> None:
    chances = torch.tensor([0.5, 0.3, 0.2, 0.0])
    noise = torch.from_numpy(uniform_noise(3, 0, 4000, 4))[None]
    drawn = draw_indices(chances.log().expand(1, 4000, 4), noise)[0]
    counts = np.bincount(drawn.numpy(), minlength=4) / 4000
    assert np.abs(counts - chances.numpy()).max() < 0.03
    assert counts[3] == 0


def test_noise_of_zero_draws_something() -> None:
    logits = mask_unlikely(torch.tensor([[[0.0, 5.0, 1.0]]]), 1, 0.0)
    assert draw_indices(logits, torch.zeros(1, 1, 3)).tolist() == [[1]]
    assert torch.isfinite(soft_embeddings(logits, torch.zeros(1, 1, 3), torch.eye(3), 0.5)).all()


def test_soft_embedding_of_one_candidate_is_its_code() -> None:
    codebook = torch.arange(6.0).reshape(3, 2)
    logits = mask_unlikely(torch.tensor([[[0.0, 5.0, 1.0]]]), 1, 0.0)
    assert torch.equal(soft_embeddings(logits, torch.full((1, 1, 3), 0.4), codebook, 1.0)[0, 0], codebook[1])
