"""Sizes of an Infinity transformer, read from the shapes of its checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from toprovar.exporter.checkpoint_shapes import CheckpointShapes
from toprovar.runtime.errors import ToprovarError

Shapes = Mapping[str, tuple[int, ...]]


@dataclass(frozen=True)
class InfinityConfig:
    """What fixes every shape of the model.

    bits:        bits per token that the transformer predicts (32 for 2B, 56 for 8B).
    patchify:    a token covers a 2x2 patch of the tokenizer's grid, so the tokenizer sees bits/4 channels (8B).
    pool_heads:  heads of the pooling attention over the text (16 for text width 2048).
    chunks:      how many `block_chunks` the layers are spread over; 1 means plain `blocks.{i}` names.
    text_length: rows of `cfg_uncond`, the longest prompt.
    """

    depth: int
    width: int
    heads: int
    ffn_width: int
    text_width: int
    bits: int
    patchify: bool = False
    pool_heads: int = 1
    chunks: int = 1
    text_length: int = 512
    levels: int = 15

    @property
    def head_width(self) -> int:
        return self.width // self.heads

    @property
    def code_channels(self) -> int:
        """Channels of the tokenizer's latent."""
        return self.bits // 4 if self.patchify else self.bits

    @property
    def patch(self) -> int:
        return 2 if self.patchify else 1

    def block_prefix(self, layer: int) -> str:
        if self.chunks == 1:
            return f"blocks.{layer}"
        per_chunk = self.depth // self.chunks
        return f"block_chunks.{layer // per_chunk}.module.{layer % per_chunk}"

    def with_code_channels(self, channels: int) -> InfinityConfig:
        """The same model beside a tokenizer of that many channels; decides whether tokens are 2x2 patches.

        Raises: ToprovarError if neither reading fits.
        """
        if channels == self.bits:
            return replace(self, patchify=False)
        if channels * 4 == self.bits:
            return replace(self, patchify=True)
        raise ToprovarError(
            f"tokenizer and transformer do not belong together: the transformer predicts {self.bits} bits per token, "
            f"the tokenizer has {channels} channels (expected {self.bits}, or {self.bits / 4:g} with 2x2 patches)",
            "pass the tokenizer that was published with this transformer",
        )


# The published models (FoundationVision/Infinity, tools/run_infinity.py). The names also stand for full-size graphs
# without weights.
PUBLISHED = {
    "infinity-2b": InfinityConfig(32, 2048, 16, 8192, 2048, 32, False, 16, 8),
    "infinity-8b": InfinityConfig(40, 3584, 28, 14336, 2048, 56, True, 16, 8),
}


def config_from_shapes(shapes: Shapes, patchify: bool = False) -> InfinityConfig:
    """Reads the configuration off a checkpoint's names and shapes.

    Raises: ToprovarError naming the first key that is missing or contradicts another one.
    """

    shape = CheckpointShapes(shapes, "Infinity").of
    width, bits = shape("word_embed.weight", 2)
    chunked = {n.split(".")[1] for n in shapes if n.startswith("block_chunks.")}
    layers = {n.split(".ada_gss")[0] for n in shapes if n.endswith(".ada_gss")}
    first = "block_chunks.0.module.0" if chunked else "blocks.0"
    heads = max(shape(f"{first}.sa.scale_mul_1H11", 4))
    ffn_width = shape(f"{first}.ffn.fc1.weight", 2)[0]
    text_length, text_width = shape("cfg_uncond", 2)
    chunks = len(chunked) or 1
    if len(layers) % chunks:
        raise ToprovarError(f"{len(layers)} layers do not spread evenly over {chunks} block chunks")
    if width % heads or (width // heads) % 4:
        raise ToprovarError(f"width {width} over {heads} heads: the head width must be a multiple of 4")
    head_rows = shape("head.weight", 2)[0]
    if head_rows != 2 * bits:
        raise ToprovarError(
            f"head.weight has {head_rows} rows; expected {2 * bits}, two per bit of word_embed.weight",
            "the checkpoint mixes two models",
        )
    return InfinityConfig(
        depth=len(layers),
        width=width,
        heads=heads,
        ffn_width=ffn_width,
        text_width=text_width,
        bits=bits,
        patchify=patchify,
        pool_heads=shape("text_proj_for_sos.ca.mat_q", 3)[1],
        chunks=chunks,
        text_length=text_length,
        levels=shape("lvl_embed.weight", 2)[0],
    )
