"""The cached training set: latents and caption ids on the device, so that a training step draws and encodes nothing.

Placement is canonical, so all singles (drawings x colours) are encoded once; patterns and scenes come from a pool whose
seed changes from run to run.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from toprovar.exporter.infinity.tokenizer import BitTokenizer
from toprovar.runtime.word_tokenizer import PAD_ID, WordTokenizer
from toprovar.tools.train_demo.captions import Scene, caption
from toprovar.tools.train_demo.data import KINDS, Composer, SceneSampler, encode_captions

CAPTIONS_PER_SCENE = {"single": 12, "pattern": 2, "scene": 2}


@dataclass
class Bank:
    """latents: [N, d, h, w] fp16, kind after kind; captions: per kind [n, K, T] int16; starts: first row of each."""

    latents: Tensor
    captions: dict[str, Tensor]
    starts: dict[str, int]

    def batch(self, counts: dict[str, int], generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """Random rows. counts: rows per kind. Returns: latents [B, d, h, w] fp32, ids [B, T] int64."""
        latents, ids = [], []
        for kind, count in counts.items():
            captions = self.captions[kind]
            device = captions.device
            rows = torch.randint(captions.shape[0], (count,), device=device, generator=generator)
            which = torch.randint(captions.shape[1], (count,), device=device, generator=generator)
            latents.append(self.latents[self.starts[kind] + rows])
            ids.append(captions[rows, which])
        return torch.cat(latents).float(), torch.cat(ids).long()


@torch.no_grad()
def encode_scenes(tokenizer: BitTokenizer, composer: Composer, scenes: Sequence[Scene], batch: int = 256) -> Tensor:
    """Latents of scenes. Returns: [len(scenes), d, h, w] fp16 on the composer's device."""
    parts = []
    cuda = composer.device.type == "cuda"
    for start in range(0, len(scenes), batch):
        image = composer.draw(scenes[start : start + batch]).contiguous(memory_format=torch.channels_last)
        with torch.autocast(composer.device.type, torch.bfloat16, enabled=cuda):
            parts.append(tokenizer.encode(image).half())
    return torch.cat(parts)


def build_bank(
    tokenizer: BitTokenizer,
    composer: Composer,
    words: WordTokenizer,
    *,
    seed: int,
    pool: int,
    held_out: bool = False,
    singles: int | None = None,
    versions: dict[str, int] | None = None,
) -> Bank:
    """Encodes singles and a pool of scenes (two thirds) and patterns (one third).

    singles:  only that many random ones; None takes every drawing on every colour.
    versions: captions per scene of each kind; None for one plain caption (validation).
    """
    rng = random.Random(seed)
    concepts = composer.sprites.concepts
    sampler = SceneSampler(concepts, held_out)
    of_kind: dict[str, list[Scene]] = {
        "single": sampler.all_singles() if singles is None else [sampler.draw("single", rng) for _ in range(singles)],
        "pattern": [sampler.draw("pattern", rng) for _ in range(pool // 3)],
        "scene": [sampler.draw("scene", rng) for _ in range(pool - pool // 3)]
        if not held_out or sampler.has_hidden_pairs
        else [],
    }
    scenes: list[Scene] = []
    starts: dict[str, int] = {}
    ids: dict[str, Tensor] = {}
    for kind in KINDS:
        if not of_kind[kind]:
            continue
        starts[kind] = len(scenes)
        scenes += of_kind[kind]
        count = versions[kind] if versions else 1
        texts = [caption(s, concepts, rng, vary=versions is not None) for s in of_kind[kind] for _ in range(count)]
        ids[kind] = encode_captions(texts, words).view(len(of_kind[kind]), count, -1).to(composer.device)
    return Bank(encode_scenes(tokenizer, composer, scenes), ids, starts)


def mask_of(ids: Tensor) -> Tensor:
    return ids != PAD_ID
