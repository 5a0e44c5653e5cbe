"""Sizes of an InfinityStar transformer, read from the shapes of its checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from toprovar.exporter.checkpoint_shapes import CheckpointShapes
from toprovar.runtime.errors import ToprovarError

Shapes = Mapping[str, tuple[int, ...]]

# Options of the reference code that change the arithmetic, told by a key that only they have.
_UNSUPPORTED = {"text_norm.weight": "a norm of the text", "lvl_embed.weight": "a level embedding"}


@dataclass(frozen=True)
class InfinityStarConfig:
    """What fixes every shape of the model.

    kv_heads:      heads of keys and values; each serves heads / kv_heads query heads
    text_length:   rows of `cfg_uncond`, the longest prompt
    detail_bits:   bits per token of large maps, and channels of the tokenizer's latent
    semantic_bits: bits per token of small maps
    chunks:        how many `block_chunks` the layers are spread over; 1 means plain `blocks.{i}` names
    """

    depth: int
    width: int
    heads: int
    kv_heads: int
    head_width: int
    ffn_width: int
    text_width: int
    text_length: int
    detail_bits: int
    semantic_bits: int
    chunks: int = 1

    @property
    def code_channels(self) -> int:
        """Channels of the tokenizer's latent."""
        return self.detail_bits

    def block_prefix(self, layer: int) -> str:
        if self.chunks == 1:
            return f"blocks.{layer}"
        per_chunk = self.depth // self.chunks
        return f"block_chunks.{layer // per_chunk}.module.{layer % per_chunk}"

    def bits(self, is_semantic: bool) -> int:
        return self.semantic_bits if is_semantic else self.detail_bits


# FoundationVision/InfinityStar, infinity/models/infinity.py: infinity_qwen8b.
PUBLISHED = {"infinitystar-8b": InfinityStarConfig(36, 4096, 32, 8, 128, 16384, 2048, 512, 64, 16, 6)}


def config_from_shapes(shapes: Shapes) -> InfinityStarConfig:
    """Reads the configuration off a checkpoint's names and shapes.

    Raises: ToprovarError naming the first key that is missing, contradicts another one, or belongs to an option of the
            reference code that is not supported.
    """
    for name, option in _UNSUPPORTED.items():
        if name in shapes:
            raise ToprovarError(
                f"InfinityStar checkpoint with {option}: found tensor {name}; expected the options of infinitystar-8b",
                "this variant of InfinityStar is not supported; see docs/families/infinitystar.md",
            )
    found = CheckpointShapes(shapes, "InfinityStar")
    shape = found.of
    width, detail_bits = shape("word_embed.weight", 2)
    text_length, text_width = shape("cfg_uncond", 2)
    chunked = {name.split(".")[1] for name in shapes if name.startswith("block_chunks.")}
    layers = {n.partition(".attn.")[0] for n in shapes if n.endswith(".attn.q_proj.weight")}
    chunks, depth = len(chunked) or 1, len(layers)
    if depth % chunks:
        raise ToprovarError(f"{depth} layers do not spread evenly over {chunks} block chunks")
    first = "block_chunks.0.module.0" if chunked else "blocks.0"
    (head_width,) = shape(f"{first}.attn.q_norm.weight", 1)
    heads, kv_heads = (_heads(shape, f"{first}.attn.{kind}_proj.weight", head_width) for kind in "qk")
    if heads % kv_heads:
        raise ToprovarError(f"{heads} query heads do not spread evenly over {kv_heads} key heads")
    if head_width % 8:
        raise ToprovarError(
            f"{first}.attn.q_norm.weight has {head_width} entries; expected a multiple of 8, pairs of four rotated axes"
        )
    return InfinityStarConfig(
        depth=depth,
        width=width,
        heads=heads,
        kv_heads=kv_heads,
        head_width=head_width,
        ffn_width=shape(f"{first}.mlp.gate_proj.weight", 2)[0],
        text_width=text_width,
        text_length=text_length,
        detail_bits=_bits(shape("head.weight", 2)[0], "head.weight", detail_bits),
        semantic_bits=_bits(shape("semantic_head2.weight", 2)[0], "semantic_head2.weight", None),
        chunks=chunks,
    )


def _heads(shape: Callable[[str, int], tuple[int, ...]], name: str, head_width: int) -> int:
    rows = shape(name, 2)[0]
    if rows % head_width:
        raise ToprovarError(f"{name} has {rows} rows; expected a multiple of the head width {head_width}")
    return rows // head_width


def _bits(rows: int, name: str, expected: int | None) -> int:
    """Bits that a head predicts, two rows each."""
    if rows % 2 or expected not in (None, rows // 2):
        wanted = f"{2 * expected}, two per channel of word_embed.weight" if expected else "an even number"
        raise ToprovarError(f"{name} has {rows} rows; expected {wanted}", "the checkpoint mixes two models")
    return rows // 2
