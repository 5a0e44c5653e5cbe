"""Which model a checkpoint holds, told by its keys, and whether its shapes are those that a module expects."""

from __future__ import annotations

import difflib
import enum
import re
from collections.abc import Mapping

from toprovar.runtime.errors import ToprovarError

Shape = tuple[int, ...]

# Buffers that published checkpoints carry and every loader computes anew.
DROPPED_KEYS = frozenset({"lvl_1L", "attn_bias_for_masking", "Infinity_visible_kvlen", "Infinity_invisible_qlen"})

KEYS_SHOWN = 5


class Family(enum.Enum):
    """What a checkpoint holds: one of four transformers, three tokenizers, or a word-table text encoder."""

    INFINITY = "infinity"
    INFINITYSTAR = "infinitystar"
    VAR = "var"
    HART = "hart"
    BIT_TOKENIZER = "bit_tokenizer"
    VQ_TOKENIZER = "vq_tokenizer"
    VIDEO_TOKENIZER = "video_tokenizer"
    WORD_TEXT_ENCODER = "word_text_encoder"

    @property
    def part(self) -> str:
        """Which part of a training checkpoint holds it."""
        return "tokenizer" if self.value.endswith("tokenizer") else "transformer"


# Blocks are keyed by chunk; with one chunk the prefix is `blocks.{i}`.
_BLOCK = r"(block_chunks\.0\.module\.0|blocks\.0)"
# One published tokenizer keeps all its keys under `vae.`.
_OUTER = r"(vae\.)?"

# (family, every pattern must match some key, no pattern may match any key, the keys in words)
_SIGNS: tuple[tuple[Family, tuple[str, ...], tuple[str, ...], str], ...] = (
    (Family.INFINITY, (_BLOCK + r"\.ca\.mat_q\.weight",), (), "block_chunks.0.module.0.ca.mat_q.weight"),
    (Family.INFINITYSTAR, (_BLOCK + r"\.attn\.q_proj\.weight",), (), "block_chunks.0.module.0.attn.q_proj.weight"),
    (Family.VAR, (r"blocks\.0\.attn\.mat_qkv\.weight",), (), "blocks.0.attn.mat_qkv.weight"),
    (Family.HART, (r"blocks\.0\.attn\.qkv_proj\.weight",), (), "blocks.0.attn.qkv_proj.weight"),
    (
        Family.BIT_TOKENIZER,
        (_OUTER + r"decoder\.conv_in(\.conv)?\.weight", _OUTER + r"decoder\.mid\.block_1\.conv1(\.conv)?\.weight"),
        (_OUTER + r"quantize\.embedding\.weight",),
        "decoder.conv_in.conv.weight and decoder.mid.block_1.conv1.conv.weight without quantize.embedding.weight",
    ),
    (
        Family.VQ_TOKENIZER,
        (_OUTER + r"decoder\.conv_in(\.conv)?\.weight", _OUTER + r"quantize\.embedding\.weight"),
        (),
        "decoder.conv_in.weight and quantize.embedding.weight",
    ),
    (
        Family.VIDEO_TOKENIZER,
        (_OUTER + r"decoder\.conv_in\.conv\.weight", _OUTER + r"decoder\.up_blocks\.0\.resnets\.0\..*"),
        (),
        "decoder.conv_in.conv.weight and decoder.up_blocks.0.resnets.0.*",
    ),
    (Family.WORD_TEXT_ENCODER, (r"word_table\.weight",), (), "word_table.weight"),
)


def recognise_family(shapes: Mapping[str, Shape], what: str = "the checkpoint") -> Family:
    """The family whose telling keys are present.

    shapes:  tensor name -> shape; only the names are read.
    what:    how messages name the checkpoint, usually its path.
    Raises:  ToprovarError if no family, or more than one, fits.
    """
    fits = [
        family
        for family, needed, excluded, _ in _SIGNS
        if all(_any_matches(pattern, shapes) for pattern in needed)
        and not any(_any_matches(pattern, shapes) for pattern in excluded)
    ]
    if len(fits) == 1:
        return fits[0]
    if fits:
        raise ToprovarError(
            f"{what} holds more than one model: found the keys of {' and '.join(family.value for family in fits)}; "
            "expected one",
            "save each model's state dict to a file of its own",
        )
    first = ", ".join(list(shapes)[:KEYS_SHOWN]) or "none"
    wanted = "".join(f"\n    {family.value}: {words}" for family, _, _, words in _SIGNS)
    raise ToprovarError(
        f"{what} holds no known model family: found {len(shapes)} tensors, first {first}; expected the keys of one of"
        + wanted,
        "pass the model's own weights; rename the keys if a wrapper put a prefix such as 'module.' before them",
    )


def _any_matches(pattern: str, names: Mapping[str, Shape]) -> bool:
    compiled = re.compile(pattern)
    return any(compiled.fullmatch(name) for name in names)


def expect_shapes(found: Mapping[str, Shape], expected: Mapping[str, Shape], what: str) -> list[str]:
    """Check that every expected tensor is there with its shape; the buffers in `DROPPED_KEYS` are passed over.

    found:    tensor name -> shape, in checkpoint order.
    expected: tensor name -> shape, as the module has them.
    what:     how messages name the checkpoint, usually its path and role.
    Returns:  names in `found` that nothing expects, in checkpoint order; strict callers refuse a non-empty list.
    Raises:   ToprovarError for the first name in checkpoint order whose shape differs, else for the first expected
              name that is missing, with the number of missing names and the nearest name that nothing expects.
    """
    different = [
        name for name in found if name in expected and name not in DROPPED_KEYS and _differ(found[name], expected[name])
    ]
    if different:
        name = different[0]
        more = f" (and {len(different) - 1} more tensors differ)" if len(different) > 1 else ""
        raise ToprovarError(
            f"{what}: tensor {name} has the wrong shape: found {_text(found[name])}, "
            f"expected {_text(expected[name])}{more}",
            "the checkpoint belongs to another size or variant of the model; pass its own configuration",
        )
    unexpected = [name for name in found if name not in expected and name not in DROPPED_KEYS]
    missing = [name for name in expected if name not in found and name not in DROPPED_KEYS]
    if missing:
        name = missing[0]
        nearest = difflib.get_close_matches(name, unexpected, n=1) or difflib.get_close_matches(name, list(found), n=1)
        near = f"; nearest name in the file: {nearest[0]} {_text(found[nearest[0]])}" if nearest else ""
        raise ToprovarError(
            f"{what}: tensor {name} is missing: found {len(expected) - len(missing)} of {len(expected)} expected "
            f"tensors, {len(missing)} missing, expected shape {_text(expected[name])}{near}",
            "pass the whole checkpoint of this model (all shards, not an adapter or an optimizer state)",
        )
    return unexpected


def _differ(a: Shape, b: Shape) -> bool:
    return tuple(a) != tuple(b)


def _text(shape: Shape) -> str:
    return "(" + ", ".join(str(n) for n in shape) + ")"


_RES_BLOCK = r"(?:mid\.block_\d+|(?:up|down)\.\d+\.block\.\d+)"
_ATTENTION = r"(?:mid\.attn_\d+|(?:up|down)\.\d+\.attn\.\d+)"
_CONV_SITE = (
    rf"(?:conv_in|conv_out|{_RES_BLOCK}\.(?:conv1|conv2|nin_shortcut)|{_ATTENTION}\.(?:q|k|v|qkv|proj_out)"
    r"|up\.\d+\.upsample\.conv|down\.\d+\.downsample\.conv)"
)
_NORM_SITE = rf"(?:norm_out|{_RES_BLOCK}\.(?:norm1|norm2)|{_ATTENTION}\.norm)"
_PLAIN_CONV = re.compile(rf"((?:encoder|decoder)\.{_CONV_SITE})\.(weight|bias)")
_PLAIN_NORM = re.compile(rf"((?:encoder|decoder)\.{_NORM_SITE})\.(weight|bias)")


def canonical_tokenizer_names(shapes: Mapping[str, Shape], what: str = "the tokenizer") -> dict[str, str]:
    """The one name every tensor of an image tokenizer goes by, whichever way the file spells it.

    Files carry `decoder.mid.block_1.conv1.conv.weight` or plain `decoder.mid.block_1.conv1.weight`; the canonical name
    is the first, with `.conv` inside every convolution and `.norm` inside every norm of encoder and decoder. A leading
    `vae.` is taken off. All other names, and those already canonical, stay as they are.

    shapes:  tensor name -> shape; only the names are read.
    Returns: name in the file -> canonical name, in checkpoint order.
    Raises:  ToprovarError if the file holds a tensor under both names.
    """
    names: dict[str, str] = {}
    taken: dict[str, str] = {}
    for name in shapes:
        canonical = name.removeprefix("vae.")
        if match := _PLAIN_CONV.fullmatch(canonical):
            canonical = f"{match[1]}.conv.{match[2]}"
        elif match := _PLAIN_NORM.fullmatch(canonical):
            canonical = f"{match[1]}.norm.{match[2]}"
        if canonical in taken:
            raise ToprovarError(
                f"{what} holds one tensor under two names: found {taken[canonical]} and {name}; expected one of them",
                "save the tokenizer again with one spelling of its names",
            )
        taken[canonical] = name
        names[name] = canonical
    return names
