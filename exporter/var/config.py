"""Sizes of a class-conditional VAR transformer, read from the shapes of its checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from toprovar.exporter.checkpoint_shapes import CheckpointShapes
from toprovar.runtime.errors import ToprovarError

Shapes = Mapping[str, tuple[int, ...]]

SIDES_256 = (1, 2, 3, 4, 5, 6, 8, 10, 13, 16)
SIDES_512 = (1, 2, 3, 4, 6, 9, 13, 18, 24, 32)


@dataclass(frozen=True)
class VarConfig:
    """What fixes every shape of the model.

    classes:       without the null class, whose embedding follows theirs
    tokens:        of all scales together, L
    code_channels: channels of the tokenizer's latent, d
    shared_ada:    one AdaLN layer for all blocks, each adding a pack of its own; else a layer per block
    cosine:        unit q and k with a learned factor per head; else q.k scaled by 0.25/sqrt(head width)
    """

    depth: int
    width: int
    heads: int
    ffn_width: int
    classes: int
    vocabulary: int
    code_channels: int
    levels: int
    tokens: int
    shared_ada: bool = False
    cosine: bool = True

    @property
    def head_width(self) -> int:
        return self.width // self.heads

    @property
    def published_sides(self) -> tuple[int, ...] | None:
        """Sides of the published maps that this model has positions for, or None."""
        for sides in (SIDES_256, SIDES_512):
            if len(sides) == self.levels and sum(n * n for n in sides) == self.tokens:
                return sides
        return None


def _published(depth: int, sides: tuple[int, ...], shared_ada: bool = False) -> VarConfig:
    tokens = sum(n * n for n in sides)
    return VarConfig(depth, 64 * depth, depth, 256 * depth, 1000, 4096, 32, len(sides), tokens, shared_ada)


# FoundationVision/VAR; the last one draws 512 pixels, the others 256.
PUBLISHED = {
    "var-d16": _published(16, SIDES_256),
    "var-d20": _published(20, SIDES_256),
    "var-d24": _published(24, SIDES_256),
    "var-d30": _published(30, SIDES_256),
    "var-d36": _published(36, SIDES_512, shared_ada=True),
}


def config_from_shapes(shapes: Shapes, heads: int | None = None) -> VarConfig:
    """Reads the configuration off a checkpoint's names and shapes.

    heads:  needed only where attention is not cosine attention, whose learned factor tells them
    Raises: ToprovarError naming the first key that is missing or contradicts another one.
    """

    found = CheckpointShapes(shapes, "VAR", "the transformer (var_d*.pth)")
    shape = found.of
    width, code_channels = shape("word_embed.weight", 2)
    hint = 'name those it was trained with in a model.json: "heads": 16; published checkpoints have this tensor'
    heads, cosine = found.heads(heads, hint)
    if width % heads:
        raise ToprovarError(f"VAR checkpoint: width {width} does not divide by {heads} heads", "check the file")
    rows = shape("class_emb.weight", 2)[0]
    if rows < 2:
        raise ToprovarError(
            f"VAR checkpoint: class_emb.weight has {rows} row; expected at least a class and the null class",
            "the checkpoint belongs to another model, or was changed",
        )
    return VarConfig(
        depth=found.layers("blocks"),
        width=width,
        heads=heads,
        ffn_width=shape("blocks.0.ffn.fc1.weight", 2)[0],
        classes=rows - 1,
        vocabulary=shape("head.weight", 2)[0],
        code_channels=code_channels,
        levels=shape("lvl_embed.weight", 2)[0],
        tokens=shape("pos_1LC", 3)[1],
        shared_ada="shared_ada_lin.1.weight" in shapes,
        cosine=cosine,
    )
