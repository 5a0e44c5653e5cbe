"""Pictures for training: sprites on the device, scenes drawn in batches, captions as ids.

Everything follows from seeds. Sprites are premultiplied RGBA; a single fills 224 of 256 pixels, a scene's objects 112,
and every place is a multiple of 8 pixels, the tokenizer's stride.
"""

from __future__ import annotations

import io
import json
import os
import random
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor

from toprovar.runtime.errors import ToprovarError
from toprovar.runtime.word_tokenizer import PAD_ID, WordTokenizer
from toprovar.tools.train_demo import captions
from toprovar.tools.train_demo.captions import COLOUR_NAMES, COLOURS, LAYOUTS, PATTERNS, Concept, Scene

IMAGE_SIZE = 256
SINGLE_SIZE, SINGLE_AT = 224, 16
OBJECT_SIZE = 112
_LOW, _MIDDLE, _HIGH = 8, 72, 136
# layout -> (y, x) of every object's upper left corner
PLACES = {
    "pair": ((_MIDDLE, _LOW), (_MIDDLE, _HIGH)),
    "above": ((_LOW, _MIDDLE), (_HIGH, _MIDDLE)),
    "two": ((_MIDDLE, _LOW), (_MIDDLE, _HIGH)),
    "three": ((_LOW, _MIDDLE), (_HIGH, _LOW), (_HIGH, _HIGH)),
    "four": ((_LOW, _LOW), (_LOW, _HIGH), (_HIGH, _LOW), (_HIGH, _HIGH)),
    "grid": ((_LOW, _LOW), (_LOW, _HIGH), (_HIGH, _LOW), (_HIGH, _HIGH)),
}
KINDS = ("single", "pattern", "scene")
SCHEMA_VERSION = 1


@dataclass
class Sprites:
    """All drawings on one device.

    concepts: names, tags and styles;  index: (concept, style) -> row
    large:    [S, 4, 224, 224] uint8 premultiplied;  small: [S, 4, 112, 112]
    """

    concepts: list[Concept]
    index: dict[tuple[int, str], int]
    large: Tensor
    small: Tensor

    def to(self, device: torch.device) -> Sprites:
        return Sprites(self.concepts, self.index, self.large.to(device), self.small.to(device))


def premultiplied(image: Image.Image) -> Tensor:
    """[4, H, W] fp32 in 0..1, colour already multiplied by alpha."""
    pixels = torch.from_numpy(np.asarray(image.convert("RGBA"), np.float32) / 255.0).permute(2, 0, 1)
    return torch.cat([pixels[:3] * pixels[3:], pixels[3:]])


def sprites_from_images(concepts: list[Concept], images: dict[tuple[int, str], Image.Image]) -> Sprites:
    """Scales every drawing to its two sizes; images are square RGBA."""
    index: dict[tuple[int, str], int] = {}
    large: list[Tensor] = []
    small: list[Tensor] = []
    for row, (key, image) in enumerate(images.items()):
        index[key] = row
        pixels = premultiplied(image)[None]
        for size, target in ((SINGLE_SIZE, large), (OBJECT_SIZE, small)):
            scaled = F.interpolate(pixels, size=(size, size), mode="bilinear", antialias=True, align_corners=False)
            target.append((scaled[0].clamp(0, 1) * 255).round().to(torch.uint8))
    return Sprites(concepts, index, torch.stack(large), torch.stack(small))


def load_sprites(folder: Path, limit: int | None = None) -> Sprites:
    """Reads what `prepare` wrote. limit: only that many concepts, evenly spread (for rehearsals).

    Raises: ToprovarError if the pack is missing or of another version.
    """
    path = folder / "concepts.json"
    if not path.exists():
        raise ToprovarError(
            f"{path} does not exist", f"make the pack: python -m toprovar.tools.train_demo.prepare --out {folder}"
        )
    document = json.loads(path.read_text(encoding="utf-8"))
    if document.get("schema_version") != SCHEMA_VERSION:
        raise ToprovarError(
            f"{path} has schema_version {document.get('schema_version')}, expected {SCHEMA_VERSION}",
            "make the pack again with this version of prepare",
        )
    entries = document["concepts"]
    if limit is not None and limit < len(entries):
        entries = [entries[i * len(entries) // limit] for i in range(limit)]
    concepts = [Concept(e["name"], tuple(e["tags"]), tuple(e["styles"])) for e in entries]
    keys = [(i, style) for i, concept in enumerate(concepts) for style in concept.styles]
    with np.load(folder / "sprites.npz", allow_pickle=False) as pack:
        data = [pack[f"{entries[i]['hexcode']}/{style}"].tobytes() for i, style in keys]
    with ThreadPoolExecutor(max_workers=os.cpu_count() or 1) as pool:
        images = list(pool.map(lambda raw: Image.open(io.BytesIO(raw)).convert("RGBA"), data))
    return sprites_from_images(concepts, dict(zip(keys, images, strict=True)))


# --- Scenes -------------------------------------------------------------------------------------------------------


class SceneSampler:
    """Draws scenes of one side of the split: training (nothing held out) or held out (only held-out combinations)."""

    def __init__(self, concepts: Sequence[Concept], held_out: bool = False) -> None:
        self.concepts = concepts
        hidden = [captions.held_out_styles(concept) for concept in concepts]
        self.singles = [
            (i, style)
            for i, concept in enumerate(concepts)
            for style in concept.styles
            if (style in hidden[i]) == held_out
        ]
        self._of_style = {
            style: [i for i, concept in enumerate(concepts) if style in concept.styles and style not in hidden[i]]
            for family in captions.FAMILIES
            for style in family
        }
        self._of_style = {style: found for style, found in self._of_style.items() if len(found) >= 4}
        self._held_out = held_out
        names = [concept.name for concept in concepts]
        self._hidden_pair = np.array([[captions.is_held_out_pair(a, b) for b in names] for a in names])

    def single(self, concept: int, style: str, colour: str) -> Scene:
        return Scene("single", (concept,), style, "plain", colour)

    def all_singles(self) -> list[Scene]:
        """Every drawing of this side on every colour."""
        return [self.single(i, style, colour) for i, style in self.singles for colour in COLOUR_NAMES]

    def draw(self, kind: str, rng: random.Random) -> Scene:
        """One random scene of a kind. Held-out scenes are pairs that training never combines."""
        if kind == "single":
            concept, style = rng.choice(self.singles)
            return self.single(concept, style, rng.choice(COLOUR_NAMES))
        if kind == "pattern":
            concept, style = rng.choice(self.singles)
            first, second = rng.sample(COLOUR_NAMES, 2)
            return Scene("single", (concept,), style, rng.choice(PATTERNS[1:]), first, second)
        style = rng.choice(list(self._of_style))
        layout = rng.choice(("pair", "above") if self._held_out else LAYOUTS[1:])
        while True:
            chosen = rng.sample(self._of_style[style], captions.OBJECTS_IN[layout])
            hidden = any(self._hidden_pair[a, b] for a in chosen for b in chosen)
            if hidden == self._held_out:
                return Scene(layout, tuple(chosen), style, "plain", rng.choice(COLOUR_NAMES))

    @property
    def has_hidden_pairs(self) -> bool:
        return any(self._hidden_pair[np.ix_(found, found)].any() for found in self._of_style.values())


# --- Drawing ------------------------------------------------------------------------------------------------------


def pattern_masks(device: torch.device) -> Tensor:
    """Share of the second colour per pattern. Returns: [4, 256, 256] fp32, in the order of PATTERNS."""
    y, x = torch.meshgrid(torch.arange(IMAGE_SIZE), torch.arange(IMAGE_SIZE), indexing="ij")
    return torch.stack(
        [
            torch.zeros(IMAGE_SIZE, IMAGE_SIZE),
            ((y // 32 + x // 32) % 2).float(),
            (x // 32 % 2).float(),
            y.float() / (IMAGE_SIZE - 1),
        ]
    ).to(device)


class Composer:
    """Draws scenes on the device that holds the sprites."""

    def __init__(self, sprites: Sprites) -> None:
        self.sprites = sprites
        self.device = sprites.large.device
        self._masks = pattern_masks(self.device)
        self._palette = torch.tensor([COLOURS[name] for name in COLOUR_NAMES], device=self.device) / 255.0  # [13, 3]

    def _paste(self, canvas: Tensor, rows: slice, drawings: Tensor, which: Tensor, y: int, x: int) -> None:
        picked = drawings[which].float() / 255.0
        size = picked.shape[-1]
        region = canvas[rows, :, y : y + size, x : x + size]
        region.mul_(1 - picked[:, 3:]).add_(picked[:, :3])

    def draw(self, scenes: Sequence[Scene]) -> Tensor:
        """Pictures in the order of `scenes`. Returns: [B, 3, 256, 256] fp32 in [-1, 1]."""
        order = sorted(range(len(scenes)), key=lambda i: LAYOUTS.index(scenes[i].layout))
        ordered = [scenes[i] for i in order]
        facts = torch.tensor(
            [
                (PATTERNS.index(s.pattern), COLOUR_NAMES.index(s.first), COLOUR_NAMES.index(s.second or s.first))
                for s in ordered
            ]
        ).to(self.device, non_blocking=True)
        share = self._masks[facts[:, 0]][:, None]  # [B, 1, 256, 256]
        first, second = (self._palette[facts[:, c]][:, :, None, None] for c in (1, 2))
        canvas = first + (second - first) * share
        start = 0
        for layout in LAYOUTS:
            group = [s for s in ordered if s.layout == layout]
            if not group:
                continue
            rows = slice(start, start + len(group))
            start += len(group)
            if layout == "single":
                which = self._rows(group, 0)
                self._paste(canvas, rows, self.sprites.large, which, SINGLE_AT, SINGLE_AT)
                continue
            for slot, (y, x) in enumerate(PLACES[layout]):
                self._paste(canvas, rows, self.sprites.small, self._rows(group, slot), y, x)
        back = torch.empty(len(order), dtype=torch.long)
        back[torch.tensor(order)] = torch.arange(len(order))
        return canvas[back.to(self.device, non_blocking=True)] * 2 - 1

    def _rows(self, group: Sequence[Scene], slot: int) -> Tensor:
        rows = [self.sprites.index[s.concepts[slot if len(s.concepts) > slot else 0], s.style] for s in group]
        return torch.tensor(rows).to(self.device, non_blocking=True)


def encode_captions(
    texts: Sequence[str], tokenizer: WordTokenizer, length: int = captions.MAX_CAPTION_TOKENS
) -> Tensor:
    """Padded ids. Returns: [len(texts), length] int16."""
    ids = np.full((len(texts), length), PAD_ID, np.int16)
    for row, text in enumerate(texts):
        found = tokenizer.encode(text, length).ids
        ids[row, : len(found)] = found
    return torch.from_numpy(ids)
