from __future__ import annotations

import pytest

from toprovar.exporter.families import (
    DROPPED_KEYS,
    Family,
    canonical_tokenizer_names,
    expect_shapes,
    recognise_family,
)
from toprovar.runtime.errors import EXIT_WRONG_INPUT, ToprovarError

CHUNK = "block_chunks.0.module.0"

KEYS: list[tuple[Family, list[str]]] = [
    (Family.INFINITY, ["cfg_uncond", f"{CHUNK}.sa.mat_qkv.weight", f"{CHUNK}.ca.mat_q.weight"]),
    (Family.INFINITY, ["blocks.0.sa.mat_qkv.weight", "blocks.0.ca.mat_q.weight"]),
    (Family.INFINITYSTAR, ["cfg_uncond", f"{CHUNK}.attn.q_proj.weight", f"{CHUNK}.attn.k_proj.weight"]),
    (Family.VAR, ["pos_start", "blocks.0.attn.mat_qkv.weight", "blocks.0.ada_lin.1.weight"]),
    (Family.HART, ["context_embed.weight", "blocks.0.attn.qkv_proj.weight", "blocks.0.scale_shift_table"]),
    (
        Family.BIT_TOKENIZER,
        ["decoder.conv_in.conv.weight", "decoder.mid.block_1.conv1.conv.weight", "quantizer.lfq.mask"],
    ),
    (Family.BIT_TOKENIZER, ["decoder.conv_in.weight", "decoder.mid.block_1.conv1.weight"]),
    (
        Family.VQ_TOKENIZER,
        ["decoder.conv_in.weight", "decoder.mid.block_1.conv1.weight", "quantize.embedding.weight"],
    ),
    (Family.VQ_TOKENIZER, ["vae.decoder.conv_in.weight", "vae.quantize.embedding.weight", "disc.w"]),
    (
        Family.VIDEO_TOKENIZER,
        ["decoder.conv_in.conv.weight", "decoder.up_blocks.0.resnets.0.conv1.conv.weight", "proj_up.weight"],
    ),
    (Family.WORD_TEXT_ENCODER, ["word_table.weight", "layer.attn.weight"]),
]


def refusal(caught: pytest.ExceptionInfo[ToprovarError]) -> str:
    assert caught.value.exit_code == EXIT_WRONG_INPUT
    assert caught.value.hint
    assert "!" not in str(caught.value)
    return caught.value.message


@pytest.mark.parametrize(("family", "keys"), KEYS)
def test_family_is_told_by_its_keys(family: Family, keys: list[str]) -> None:
    assert recognise_family({key: (1,) for key in keys}) is family


def test_every_family_is_recognised_by_some_keys() -> None:
    assert {family for family, _ in KEYS} == set(Family)


def test_unknown_family_prints_first_keys_and_what_each_needs() -> None:
    shapes = {f"shared.{i}": (1,) for i in range(17)}
    with pytest.raises(ToprovarError) as caught:
        recognise_family(shapes, "t5.safetensors")
    message = refusal(caught)
    assert message.startswith("t5.safetensors holds no known model family: found 17 tensors, first shared.0, shared.1,")
    assert "shared.5" not in message
    for family in Family:
        assert f"\n    {family.value}: " in message


def test_no_keys_at_all_is_unknown() -> None:
    with pytest.raises(ToprovarError, match="found 0 tensors, first none"):
        recognise_family({})


def test_two_models_in_one_file_are_refused() -> None:
    with pytest.raises(ToprovarError) as caught:
        recognise_family({"word_table.weight": (1,), "blocks.0.attn.mat_qkv.weight": (1,)}, "both.pth")
    assert "both.pth holds more than one model: found the keys of var and word_text_encoder" in refusal(caught)


def test_equal_shapes_pass_and_unexpected_names_are_reported_in_order() -> None:
    found = {"z": (1,), "a": (2, 3), "lvl_1L": (1, 680), "y": ()}
    assert expect_shapes(found, {"a": (2, 3)}, "x.pth") == ["z", "y"]


@pytest.mark.parametrize("name", sorted(DROPPED_KEYS))
def test_dropped_buffers_are_neither_missing_nor_unexpected_nor_compared(name: str) -> None:
    assert expect_shapes({"a": (1,), name: (5,)}, {"a": (1,)}, "x") == []
    assert expect_shapes({"a": (1,)}, {"a": (1,), name: (5,)}, "x") == []
    assert expect_shapes({"a": (1,), name: (4,)}, {"a": (1,), name: (5,)}, "x") == []


def test_first_wrong_shape_in_checkpoint_order_is_named_with_both_shapes() -> None:
    found = {"b": (2048, 32), "c": (1,), "a": (3,)}
    expected = {"a": (4,), "b": (2048, 56), "c": (1,), "d": (1,)}
    with pytest.raises(ToprovarError) as caught:
        expect_shapes(found, expected, "w.pth (infinity)")
    message = refusal(caught)
    assert message == (
        "w.pth (infinity): tensor b has the wrong shape: found (2048, 32), expected (2048, 56) "
        "(and 1 more tensors differ)"
    )


def test_missing_name_comes_with_count_and_nearest_name() -> None:
    found = {"a": (1,), "blocks.0.sa.mat_qvk.weight": (6, 2)}
    expected = {"a": (1,), "blocks.0.sa.mat_qkv.weight": (6, 2), "q": ()}
    with pytest.raises(ToprovarError) as caught:
        expect_shapes(found, expected, "w.pth")
    message = refusal(caught)
    assert "tensor blocks.0.sa.mat_qkv.weight is missing: found 1 of 3 expected tensors, 2 missing" in message
    assert "expected shape (6, 2)" in message
    assert message.endswith("nearest name in the file: blocks.0.sa.mat_qvk.weight (6, 2)")


def test_missing_name_without_a_near_one_says_nothing_about_it() -> None:
    with pytest.raises(ToprovarError) as caught:
        expect_shapes({"zzz": (1,)}, {"head.weight": (64, 2048)}, "w.pth")
    assert "nearest" not in refusal(caught)


@pytest.mark.parametrize(
    ("plain", "canonical"),
    [
        ("decoder.conv_in.weight", "decoder.conv_in.conv.weight"),
        ("decoder.conv_out.bias", "decoder.conv_out.conv.bias"),
        ("decoder.norm_out.weight", "decoder.norm_out.norm.weight"),
        ("decoder.mid.block_1.conv1.weight", "decoder.mid.block_1.conv1.conv.weight"),
        ("decoder.mid.block_2.norm2.bias", "decoder.mid.block_2.norm2.norm.bias"),
        ("decoder.up.3.block.2.nin_shortcut.weight", "decoder.up.3.block.2.nin_shortcut.conv.weight"),
        ("decoder.up.1.upsample.conv.weight", "decoder.up.1.upsample.conv.conv.weight"),
        ("encoder.down.0.downsample.conv.bias", "encoder.down.0.downsample.conv.conv.bias"),
        ("encoder.down.4.block.1.conv2.weight", "encoder.down.4.block.1.conv2.conv.weight"),
        ("decoder.mid.attn_1.q.weight", "decoder.mid.attn_1.q.conv.weight"),
        ("decoder.mid.attn_1.k.weight", "decoder.mid.attn_1.k.conv.weight"),
        ("decoder.mid.attn_1.v.bias", "decoder.mid.attn_1.v.conv.bias"),
        ("decoder.up.4.attn.0.proj_out.weight", "decoder.up.4.attn.0.proj_out.conv.weight"),
        ("decoder.up.4.attn.0.norm.weight", "decoder.up.4.attn.0.norm.norm.weight"),
    ],
)
def test_plain_and_inner_names_become_one(plain: str, canonical: str) -> None:
    assert canonical_tokenizer_names({plain: ()}) == {plain: canonical}
    assert canonical_tokenizer_names({canonical: ()}) == {canonical: canonical}
    assert canonical_tokenizer_names({f"vae.{plain}": ()}) == {f"vae.{plain}": canonical}


@pytest.mark.parametrize(
    "name",
    [
        "quantizer.lfq.mask",
        "quantize.embedding.weight",
        "post_quant_conv.weight",
        "decoder.mid_block.resnets.0.norm1.norm_layer.gamma",
        "decoder.mid_block.resnets.0.conv1.conv.weight",
        "decoder.up_blocks.0.upsamplers.0.conv.conv.conv.weight",
        "disc.conv1.weight",
    ],
)
def test_other_names_stay(name: str) -> None:
    assert canonical_tokenizer_names({name: ()}) == {name: name}


def test_names_keep_checkpoint_order() -> None:
    shapes = {"decoder.norm_out.weight": (1,), "decoder.conv_in.bias": (1,), "a": ()}
    assert list(canonical_tokenizer_names(shapes)) == list(shapes)


def test_one_tensor_under_two_names_is_refused() -> None:
    with pytest.raises(ToprovarError) as caught:
        canonical_tokenizer_names({"decoder.conv_in.weight": (), "decoder.conv_in.conv.weight": ()}, "vae.pth")
    message = refusal(caught)
    assert "vae.pth holds one tensor under two names" in message
    assert "found decoder.conv_in.weight and decoder.conv_in.conv.weight" in message
