"""Merged weights are W + scale * B @ A, whatever the family's and the adapter's names."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from command_line import done, refusal, write_model
from safetensors.torch import load_file, save_file

from toprovar.exporter.checkpoints import Checkpoint, open_checkpoint
from toprovar.exporter.lora import LoraFile, LoraReport, merge_lora
from toprovar.runtime.errors import ToprovarError

C, RANK = 12, 3
TOLERANCE = 1e-6  # fp32 products of rank 3 against float64, values of size 1

# family -> linear layers of one block in the base, out x in
FAMILIES = {
    "infinity": {
        f"block_chunks.{chunk}.module.{i}.{part}": size
        for chunk in (0, 1)
        for i in (0, 1)
        for part, size in {
            "sa.mat_qkv": (3 * C, C), "sa.proj": (C, C), "ca.mat_q": (C, C), "ca.mat_kv": (2 * C, 8), "ca.proj": (C, C),
            "ffn.fc1": (4 * C, C), "ffn.fc2": (C, 4 * C),
        }.items()
    },
    "var": {
        f"blocks.{i}.{part}": size
        for i in (0, 1)
        for part, size in {
            "attn.mat_qkv": (3 * C, C), "attn.proj": (C, C), "ffn.fc1": (4 * C, C), "ffn.fc2": (C, 4 * C),
            "ada_lin.1": (6 * C, C),
        }.items()
    },
    "hart": {
        f"blocks.{i}.{part}": size
        for i in (0, 1)
        for part, size in {
            "attn.qkv_proj": (3 * C, C), "attn.proj": (C, C), "ffn.gate_proj": (16, C), "ffn.up_proj": (16, C),
            "ffn.down_proj": (C, 16),
        }.items()
    },
    "infinitystar": {
        f"block_chunks.{chunk}.module.{i}.{part}": size
        for chunk in (0, 1)
        for i in (0, 1)
        for part, size in {
            "attn.q_proj": (C, C), "attn.k_proj": (4, C), "attn.v_proj": (4, C), "attn.o_proj": (C, C),
            "mlp.gate_proj": (16, C), "mlp.up_proj": (16, C), "mlp.down_proj": (C, 16),
        }.items()
    },
}  # fmt: skip


def base(folder: Path, family: str, dtype: torch.dtype = torch.float32) -> Checkpoint:
    torch.manual_seed(1)
    tensors = {f"{name}.weight": torch.randn(size).to(dtype) for name, size in FAMILIES[family].items()}
    tensors |= {"word_embed.bias": torch.randn(C), "norm.weight": torch.randn(C)}
    save_file(tensors, folder / "base.safetensors")
    return open_checkpoint(folder / "base.safetensors")


def factors(out: int, into: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(RANK, into, generator=generator), torch.randn(out, RANK, generator=generator)


def product(out: int, into: int, scale: float, seed: int = 0) -> torch.Tensor:
    down, up = factors(out, into, seed)
    return scale * up.double() @ down.double()


def check(checkpoint: Checkpoint, merged: Checkpoint, deltas: dict[str, torch.Tensor]) -> None:
    """Weights with a delta got it; all others are as they were."""
    assert deltas
    assert list(merged.tensors) == list(checkpoint.tensors)
    for name, before in checkpoint.tensors.items():
        after = merged.tensors[name]
        assert after.shape == before.shape
        if name in deltas:
            torch.testing.assert_close(after.double(), before.double() + deltas[name], atol=TOLERANCE, rtol=TOLERANCE)
            assert after.dtype == torch.float32
        else:
            assert torch.equal(after, before), name


def write_peft(folder: Path, targets: dict[str, tuple[int, int]], **config: Any) -> Path:
    tensors = {}
    for seed, (name, size) in enumerate(targets.items()):
        down, up = factors(*size, seed)
        tensors |= {f"base_model.model.{name}.lora_A.weight": down, f"base_model.model.{name}.lora_B.weight": up}
    save_file(tensors, folder / "adapter_model.safetensors")
    facts = {"peft_type": "LORA", "r": RANK, "lora_alpha": 6, **config}
    (folder / "adapter_config.json").write_text(json.dumps(facts))
    return folder


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("rslora", [False, True])
def test_peft_adapters_merge_into_every_family(tmp_path: Path, family: str, rslora: bool) -> None:
    checkpoint = base(tmp_path, family)
    (tmp_path / "adapter").mkdir()
    write_peft(tmp_path / "adapter", FAMILIES[family], use_rslora=rslora)
    merged, (report,) = merge_lora(checkpoint, [LoraFile(tmp_path / "adapter", 0.5)])
    scale = 0.5 * 6 / (math.sqrt(RANK) if rslora else RANK)
    sizes = FAMILIES[family].items()
    deltas = {f"{name}.weight": product(*size, scale, seed) for seed, (name, size) in enumerate(sizes)}
    check(checkpoint, merged, deltas)
    assert report.merged == dict.fromkeys(deltas, 1)
    assert report.lines() == [
        f"lora {tmp_path / 'adapter'}: {len(deltas)} of {len(deltas)} targets merged into {len(deltas)} weights "
        "(rank 3, scale 0.5)"
    ]


STYLES = {
    "lora_A": ("", ".lora_A.weight", ".lora_B.weight"),
    "default": ("transformer.", ".lora_A.default.weight", ".lora_B.default.weight"),
    "lora_down": ("model.", ".lora_down.weight", ".lora_up.weight"),
    "diffusers": ("diffusion_model.", ".lora.down.weight", ".lora.up.weight"),
    "flat": ("lora_unet_", ".lora_down.weight", ".lora_up.weight"),
}


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("alpha", [None, 1.5])
def test_plain_adapters_merge_into_every_family(tmp_path: Path, family: str, style: str, alpha: float | None) -> None:
    checkpoint = base(tmp_path, family, torch.bfloat16)
    prefix, below, above = STYLES[style]
    tensors = {}
    for seed, (name, size) in enumerate(FAMILIES[family].items()):
        down, up = factors(*size, seed)
        target = prefix + (name.replace(".", "_") if style == "flat" else name)
        tensors |= {target + below: down, target + above: up}
        if alpha is not None:
            tensors[target + ".alpha"] = torch.tensor(alpha)
    save_file(tensors, tmp_path / "lora.safetensors")
    merged, _ = merge_lora(checkpoint, [LoraFile(tmp_path / "lora.safetensors")])
    scale = 1.0 if alpha is None else alpha / RANK
    sizes = FAMILIES[family].items()
    check(checkpoint, merged, {f"{n}.weight": product(*size, scale, seed) for seed, (n, size) in enumerate(sizes)})


@pytest.mark.parametrize(
    ("family", "fused", "into", "letters"),
    [
        ("infinity", "block_chunks.1.module.0.sa.mat_qkv", C, "qkv"),
        ("infinity", "block_chunks.1.module.0.ca.mat_kv", 8, "kv"),
        ("var", "blocks.1.attn.mat_qkv", C, "qkv"),
        ("hart", "blocks.1.attn.qkv_proj", C, "qkv"),
    ],
)
@pytest.mark.parametrize("naming", ["{}_proj", "to_{}"])
@pytest.mark.parametrize("flat", [False, True])
def test_targets_apart_go_into_their_rows_of_a_fused_weight(
    tmp_path: Path, family: str, fused: str, into: int, letters: str, naming: str, flat: bool
) -> None:
    checkpoint = base(tmp_path, family)
    stem = fused.rpartition(".")[0]
    tensors, delta = {}, torch.zeros(len(letters) * C, into, dtype=torch.float64)
    for seed, letter in enumerate(letters):
        if letter == "k":
            continue  # not every adapter trains all three
        down, up = factors(C, into, seed)
        name = f"{stem}.{naming.format(letter)}"
        name = f"lora_unet_{name.replace('.', '_')}" if flat else name
        tensors |= {f"{name}.lora_down.weight": down, f"{name}.lora_up.weight": up}
        row = letters.index(letter) * C
        delta[row : row + C] = product(C, into, 1.0, seed)
    save_file(tensors, tmp_path / "lora.safetensors")
    merged, (report,) = merge_lora(checkpoint, [LoraFile(tmp_path / "lora.safetensors")])
    check(checkpoint, merged, {f"{fused}.weight": delta})
    assert report.merged == {f"{fused}.weight": len(letters) - 1}


@pytest.mark.parametrize("name", ["qkv", "mat_qkv", "qkv_proj"])
def test_a_fused_target_goes_into_weights_that_are_apart(tmp_path: Path, name: str) -> None:
    checkpoint = base(tmp_path, "infinitystar")
    down, up = factors(C + 8, C)
    stem = "block_chunks.0.module.1.attn"
    save_file({f"{stem}.{name}.lora_A.weight": down, f"{stem}.{name}.lora_B.weight": up}, tmp_path / "l.safetensors")
    merged, _ = merge_lora(checkpoint, [LoraFile(tmp_path / "l.safetensors")])
    delta = product(C + 8, C, 1.0)
    rows = {"q_proj": (0, C), "k_proj": (C, C + 4), "v_proj": (C + 4, C + 8)}
    check(checkpoint, merged, {f"{stem}.{part}.weight": delta[a:b] for part, (a, b) in rows.items()})


@pytest.mark.parametrize("prefix", ["blocks", "unregistered_blocks"])
def test_blocks_by_number_stand_for_blocks_by_chunk(tmp_path: Path, prefix: str) -> None:
    checkpoint = base(tmp_path, "infinity")
    down, up = factors(C, C)
    save_file({f"{prefix}.3.sa.proj.lora_A": down, f"{prefix}.3.sa.proj.lora_B": up}, tmp_path / "l.safetensors")
    merged, _ = merge_lora(checkpoint, [LoraFile(tmp_path / "l.safetensors")])
    check(checkpoint, merged, {"block_chunks.1.module.1.sa.proj.weight": product(C, C, 1.0)})


def test_two_adapters_add_up_and_patterns_of_alpha_count(tmp_path: Path) -> None:
    checkpoint = base(tmp_path, "var")
    name = "blocks.0.attn.proj"
    for folder, alpha in (("a", 6), ("b", 3)):
        (tmp_path / folder).mkdir()
        write_peft(tmp_path / folder, {name: (C, C)}, lora_alpha=99, alpha_pattern={r"attn\.proj": alpha})
    merged, reports = merge_lora(checkpoint, [LoraFile(tmp_path / "a"), LoraFile(tmp_path / "b", -0.25)])
    check(checkpoint, merged, {f"{name}.weight": product(C, C, 6 / 3 - 0.25 * 3 / 3)})
    assert len(reports) == 2


def test_the_digest_tells_every_merge_apart(tmp_path: Path) -> None:
    checkpoint = base(tmp_path, "var")
    folders = []
    for folder, alpha in (("a", 6), ("b", 3)):
        (tmp_path / folder).mkdir()
        folders.append(write_peft(tmp_path / folder, {"blocks.0.attn.proj": (C, C)}, lora_alpha=alpha))
    cases = [
        [], [LoraFile(folders[0])], [LoraFile(folders[1])], [LoraFile(folders[0], 0.5)],
        [LoraFile(folders[0]), LoraFile(folders[1])],
    ]  # fmt: skip
    digests = [merge_lora(checkpoint, files)[0].digest() for files in cases]
    assert digests[0] == checkpoint.digest()
    assert len(set(digests)) == len(cases)
    assert digests == [merge_lora(checkpoint, files)[0].digest() for files in cases]


def unmatched(folder: Path) -> Path:
    down, up = factors(C, C)
    path = folder / "l.safetensors"
    names = ("blocks.0.attn.proj", "blocks.7.attn.proj", "lora_te_text_model_mlp")
    tensors = {f"{n}.{end}": t.clone() for n in names for end, t in (("lora_A.weight", down), ("lora_B.weight", up))}
    save_file(tensors, path)
    return path


def test_unmatched_targets_are_refused_unless_allowed(tmp_path: Path) -> None:
    checkpoint, path = base(tmp_path, "var"), unmatched(tmp_path)
    with pytest.raises(
        ToprovarError, match=r"fits 1 of its 3 targets: .* no weight for blocks\.7\.attn\.proj"
    ) as fault:
        merge_lora(checkpoint, [LoraFile(path)])
    assert "--lora-allow-unmatched" in fault.value.hint
    merged, (report,) = merge_lora(checkpoint, [LoraFile(path)], allow_unmatched=True)
    check(checkpoint, merged, {"blocks.0.attn.proj.weight": product(C, C, 1.0)})
    assert report.unmatched == ("blocks.7.attn.proj", "lora_te_text_model_mlp")
    assert "no weight for blocks.7.attn.proj, lora_te_text_model_mlp" in report.lines()[1]


def test_an_adapter_that_fits_nowhere_is_refused_even_then(tmp_path: Path) -> None:
    down, up = factors(C, C)
    save_file({"x.lora_A": down, "x.lora_B": up}, tmp_path / "l.safetensors")
    with pytest.raises(ToprovarError, match="fits 0 of its 1 targets"):
        merge_lora(base(tmp_path, "var"), [LoraFile(tmp_path / "l.safetensors")], allow_unmatched=True)


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({"blocks.0.attn.proj.lora_A": (RANK, C)}, "expected both factors"),
        ({"blocks.0.attn.proj.lora_A": (RANK, C), "blocks.0.attn.proj.lora_B": (C, 2)}, r"\(3, 12\) and \(12, 2\)"),
        (
            {"blocks.0.attn.proj.lora_A": (RANK, C + 1), "blocks.0.attn.proj.lora_B": (C, RANK)},
            r"found factors for \(12, 13\), expected \(12, 12\) of its shape \(12, 12\)",
        ),
        (
            {"blocks.0.attn.q_proj.lora_A": (RANK, C), "blocks.0.attn.q_proj.lora_B": (3 * C, RANK)},
            r"found factors for \(36, 12\), expected \(12, 12\)",
        ),
        ({"blocks.0.attn.proj.lora_magnitude_vector": (C,)}, "no low-rank factors: found .*magnitude"),
        ({"blocks.0.attn.proj.weight": (C, C)}, "no low-rank factors"),
        ({"base_model.model.blocks.0.attn.proj.lora_A.weight": (RANK, C)}, "found none in"),
    ],
)
def test_files_that_cannot_be_merged_say_why(tmp_path: Path, tensors: dict[str, tuple[int, ...]], message: str) -> None:
    save_file({name: torch.ones(shape) for name, shape in tensors.items()}, tmp_path / "l.safetensors")
    with pytest.raises(ToprovarError, match=message) as fault:
        merge_lora(base(tmp_path, "var"), [LoraFile(tmp_path / "l.safetensors")])
    assert fault.value.hint


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"use_dora": True}, "use_dora"), ({"fan_in_fan_out": True}, "fan_in_fan_out"), ({"peft_type": "LOHA"}, "LOHA"),
        ({"lora_alpha": None}, "lora_alpha None"),
    ],
)  # fmt: skip
def test_configurations_that_would_merge_wrong_are_refused(tmp_path: Path, config: Any, message: str) -> None:
    checkpoint = base(tmp_path, "var")
    (tmp_path / "adapter").mkdir()
    write_peft(tmp_path / "adapter", {"blocks.0.attn.proj": (C, C)}, **config)
    with pytest.raises(ToprovarError, match=message):
        merge_lora(checkpoint, [LoraFile(tmp_path / "adapter")])


def test_factors_that_are_not_finite_are_named(tmp_path: Path) -> None:
    down, up = factors(C, C)
    up[3, 1] = torch.nan
    save_file({"blocks.0.attn.proj.lora_A": down, "blocks.0.attn.proj.lora_B": up}, tmp_path / "l.safetensors")
    with pytest.raises(ToprovarError, match="lora_B isn't finite"):
        merge_lora(base(tmp_path, "var"), [LoraFile(tmp_path / "l.safetensors")])


def test_the_command_exports_merged_weights_and_says_so(tiny: Any, tmp_path: Path) -> None:
    """The bundle is byte for byte that of a checkpoint whose weights were merged by hand, but for the digest."""
    model = write_model(tiny, tmp_path / "model")
    config = tiny.config
    name = "block_chunks.1.module.0.ffn.fc2"
    down, up = factors(config.width, config.ffn_width)
    save_file({f"{name}.lora_A.weight": down, f"{name}.lora_B.weight": up}, tmp_path / "l.safetensors")
    arguments = ["--lora", tmp_path / "l.safetensors", "--lora-scale", 0.5]
    told = done("export", model, "-o", tmp_path / "lora", *arguments).stderr
    assert "1 of 1 targets merged into 1 weights (rank 3, scale 0.5)" in " ".join(told.split())

    weights = load_file(model / "transformer.safetensors")
    weights[f"{name}.weight"] += 0.5 * (up @ down)
    save_file(weights, model / "transformer.safetensors")
    done("export", model, "-o", tmp_path / "hand")
    found = {kind: (tmp_path / kind / "weights.safetensors").read_bytes() for kind in ("lora", "hand")}
    assert found["lora"] == found["hand"]
    digests = {json.loads((tmp_path / kind / "manifest.json").read_text())["model"]["weights_sha256"] for kind in found}
    assert len(digests) == 2


def test_wrong_options_of_the_command_are_refused(tiny: Any, tmp_path: Path) -> None:
    model, path = write_model(tiny, tmp_path / "model"), unmatched(tmp_path)
    for arguments, message in [
        (["--lora-scale", 1], "1 --lora-scale for 0 --lora"),
        (["--lora", path, "--lora-scale", 1, "--lora-scale", 2], "2 --lora-scale for 1 --lora"),
        (["--lora", path], "fits 0 of its 3 targets"),
        (["--lora", path, "--lora-scale", "nan"], "not a finite number"),
        (["--lora", tmp_path / "none.safetensors"], "does not exist"),
    ]:
        told = refusal("export", model, "-o", tmp_path / "out", *arguments)
        assert message in told.replace("doesn't", "does not"), told
        assert not (tmp_path / "out").exists()


def test_a_name_without_weights_takes_no_adapter(tmp_path: Path) -> None:
    told = refusal("export", "infinity-2b", "--dry-run", "-o", tmp_path / "out", "--lora", unmatched(tmp_path))
    assert "--lora needs weights" in told


def test_reports_tell_ranks_that_differ() -> None:
    report = LoraReport(Path("l"), 1.0, 2, {"a": 2}, (), (4, 8))
    assert "rank 4 to 8" in report.lines()[0]
