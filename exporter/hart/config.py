"""Sizes of a HART transformer, read from the shapes of its checkpoint."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from toprovar.exporter.checkpoint_shapes import CheckpointShapes
from toprovar.runtime.errors import ToprovarError

Shapes = Mapping[str, tuple[int, ...]]

PUBLISHED_SIDES = (1, 2, 3, 4, 5, 7, 9, 12, 16, 21, 27, 36, 48, 64)
STEPS = 8  # reverse steps of the residual head
TEXT_TOKENS = 300  # every prompt is padded or cut to it; padding takes part in attention

CHANGED = "the checkpoint belongs to another model, or was changed"

# Options of the reference code that change the arithmetic, told by a key that only they have.
_UNSUPPORTED = (
    (re.compile(r"blocks\.\d+\.(ada_lin\.|ada_gss)"), "AdaLN per block"),
    (re.compile(r"blocks\.\d+\.(cross_attn|ca|cross_attention)\."), "cross attention to the text"),
    (re.compile(r"blocks\.\d+\.ffn\.(fc1|fc2)\."), "GPT-2 feed-forward layers"),
    (re.compile(r"lvl_embed\.weight"), "a learned level embedding"),
)


@dataclass(frozen=True)
class HartConfig:
    """What fixes every shape of the model.

    text_width:      width of the text encoder's rows
    code_channels:   channels of the tokenizer's latent, d
    level_width:     width of the sinusoid that a scale's index becomes
    residual_width:  width of the residual head's layers; residual_depth of them
    time_width:      width of the sinusoid that a diffusion step becomes
    cosine:          unit q and k with a learned factor per head; else q.k scaled by 0.25/sqrt(head width)
    """

    depth: int
    width: int
    heads: int
    ffn_width: int
    text_width: int
    vocabulary: int
    code_channels: int
    residual_width: int
    residual_depth: int
    level_width: int = 256
    time_width: int = 256
    cosine: bool = True

    @property
    def head_width(self) -> int:
        return self.width // self.heads


# mit-han-lab/hart; the sizes that no public source states give 732.6 M parameters, in line with the published 0.7 B.
PUBLISHED = {"hart-0.7b": HartConfig(24, 1536, 24, 4096, 1536, 4096, 32, 1024, 6)}


def config_from_shapes(shapes: Shapes, heads: int | None = None) -> HartConfig:
    """Reads the configuration off a checkpoint's names and shapes.

    heads:  needed only where attention is not cosine attention, whose learned factor tells them
    Raises: ToprovarError naming the first key that is missing, contradicts another one, or belongs to an option of the
            reference code that is not supported.
    """
    for pattern, option in _UNSUPPORTED:
        for name in shapes:
            if pattern.match(name):
                raise ToprovarError(
                    f"HART checkpoint with {option}: found tensor {name}; expected the options of hart-0.7b",
                    "this variant of HART is not supported; see docs/families/hart.md",
                )

    found = CheckpointShapes(shapes, "HART", "the transformer (llm/ema_model.bin)")
    shape = found.of
    width, code_channels = shape("word_embed.weight", 2)
    heads, cosine = found.heads(heads, 'name those of its llm/config.json in a model.json: "heads": 24')
    if width % heads or (width // heads) % 4:
        raise ToprovarError(f"width {width} over {heads} heads: the head width must be a multiple of 4", CHANGED)
    time = shape("diffloss.net.time_embed.mlp.0.weight", 2)
    levels = shape("lvl_embed.mlp.0.weight", 2)
    for name, columns in (("lvl_embed.mlp.0.weight", levels[1]), ("diffloss.net.time_embed.mlp.0.weight", time[1])):
        if columns % 2:
            raise ToprovarError(f"{name} has {columns} columns; expected an even number, cosines and sines", CHANGED)
    return HartConfig(
        depth=found.layers("blocks"),
        width=width,
        heads=heads,
        ffn_width=shape("blocks.0.ffn.gate_proj.weight", 2)[0],
        text_width=shape("context_embed.weight", 2)[1],
        vocabulary=shape("head.weight", 2)[0],
        code_channels=code_channels,
        residual_width=time[0],
        residual_depth=found.layers("diffloss.net.res_blocks"),
        level_width=levels[1],
        time_width=time[1],
        cosine=cosine,
    )
