"""Every form of checkpoint against every damage: one message each, no two alike, and the user's files stay."""

from __future__ import annotations

import json
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_helpers import assert_same, refusal, snapshot
from safetensors.torch import save_file

from toprovar.exporter.checkpoints import open_checkpoint
from toprovar.exporter.infinity.load import load_infinity

TENSORS = {"a.weight": torch.arange(600.0).view(20, 30), "b": torch.ones(17), "c": torch.zeros(3, dtype=torch.int64)}
FORMS = ["model.safetensors", "model.pth", "model.safetensors.index.json", "pytorch_model.bin.index.json"]


def save(tensors: Any, path: Path) -> None:
    if path.suffix == ".safetensors":
        save_file(tensors, path)
    else:
        torch.save(tensors, path)


def write(folder: Path, form: str) -> tuple[Path, Path]:
    """(what is opened, a file whose bytes can be damaged)."""
    if not form.endswith(".json"):
        save(TENSORS, folder / form)
        return folder / form, folder / form
    stem, suffix = form.removesuffix(".index.json").rsplit(".", 1)
    shards = [f"{stem}-{number:05d}-of-00003.{suffix}" for number in (1, 2, 3)]
    for shard, name in zip(shards, TENSORS, strict=True):
        save({name: TENSORS[name]}, folder / shard)
    (folder / form).write_text(json.dumps({"weight_map": dict(zip(TENSORS, shards, strict=True))}))
    return folder / form, folder / shards[0]


def truncated(opened: Path, file: Path) -> None:
    file.write_bytes(file.read_bytes()[: file.stat().st_size * 2 // 3])


def trailing(opened: Path, file: Path) -> None:
    file.write_bytes(file.read_bytes() + b"\0" * 9)


def shard_gone(opened: Path, file: Path) -> None:
    file.unlink()


def shard_unnamed(opened: Path, file: Path) -> None:
    index = json.loads(opened.read_text())
    del index["weight_map"]["b"]
    opened.write_text(json.dumps(index))


class Payload:
    def __reduce__(self) -> Any:
        return (open, ("pickle_was_run", "w"))


def pickled(opened: Path, file: Path) -> None:
    if file.suffix == ".safetensors":
        file.write_bytes(pickle.dumps({"a.weight": Payload()}))
    else:
        torch.save({"a.weight": Payload()}, file)


DAMAGES = {
    truncated: "is truncated: found",
    trailing: "has 9 trailing bytes: found",
    shard_gone: "is missing: index",
    shard_unnamed: "leaves shard 2 of 3 out: found 2 of 3 shards named",
    pickled: "which is never loaded: found",
}


@pytest.mark.parametrize("form", FORMS)
def test_a_whole_one_opens_and_stays(tmp_path: Path, form: str) -> None:
    opened, _ = write(tmp_path, form)
    before = snapshot(tmp_path)
    checkpoint = open_checkpoint(opened)
    assert_same(checkpoint.tensors, TENSORS)
    for name in checkpoint.tensors:
        checkpoint.tensors[name].zero_()
        checkpoint.tensors.converted(name, torch.float64)
    assert checkpoint.digest()
    assert snapshot(tmp_path) == before


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("damage", DAMAGES, ids=lambda damage: damage.__name__)
def test_every_damage_has_its_message(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, form: str, damage: Any) -> None:
    if damage in (shard_gone, shard_unnamed) and not form.endswith(".json"):
        damage, expected = trailing, DAMAGES[trailing]  # a single file has no shards: the message must not be theirs
    else:
        expected = DAMAGES[damage]
    monkeypatch.chdir(tmp_path)
    opened, file = write(tmp_path, form)
    damage(opened, file)
    told = refusal(opened, names=opened.name if damage is shard_unnamed else file.name)  # also: no file changed
    assert [words for words in DAMAGES.values() if words in told] == [expected]
    assert not (tmp_path / "pickle_was_run").exists()


@pytest.mark.parametrize("form", FORMS[2:])
def test_one_shard_is_not_taken_for_the_whole(tmp_path: Path, form: str) -> None:
    _, shard = write(tmp_path, form)
    assert "found shard 1 of 3; expected the whole checkpoint" in refusal(shard)


def test_both_parts_of_a_training_checkpoint_are_found(tmp_path: Path) -> None:
    """As VAR and Infinity save them while training."""
    tokenizer = {"decoder.conv_in.weight": torch.ones(2)}
    for key in ("gpt_fsdp", "gpt_wo_ddp", "var_wo_ddp"):
        torch.save(
            {"epoch": 3, "trainer": {"vae_local": tokenizer, key: TENSORS, "opt": {"lr": 1}}}, tmp_path / "t.pth"
        )
        checkpoint = open_checkpoint(tmp_path / "t.pth")
        assert_same(checkpoint.tensors, TENSORS)
        assert f"['trainer']['{key}']" in checkpoint.notes[0]
        assert "left out beside it: epoch, vae_local, opt" in checkpoint.notes[0]
        assert_same(open_checkpoint(tmp_path / "t.pth", "tokenizer").tensors, tokenizer)


@pytest.mark.parametrize("prefix", ["module.", "_orig_mod.", "module._orig_mod.", "_orig_mod.module."])
def test_names_lose_what_a_wrapper_put_before_all_of_them(tmp_path: Path, prefix: str) -> None:
    torch.save({prefix + name: tensor for name, tensor in TENSORS.items()}, tmp_path / "w.pth")
    checkpoint = open_checkpoint(tmp_path / "w.pth")
    assert_same(checkpoint.tensors, TENSORS)
    assert "off every name" in checkpoint.notes[0]
    torch.save({"module.a": torch.ones(1), "b": torch.ones(1)}, tmp_path / "w.pth")
    assert list(open_checkpoint(tmp_path / "w.pth").tensors) == ["module.a", "b"]


# Memory: what a process needs beyond its imports, over the weights that it ends with

MEASURE = """
import resource, sys, torch
from toprovar.exporter.checkpoints import open_checkpoint
from toprovar.exporter.infinity.config import InfinityConfig
from toprovar.exporter.infinity.transformer import Infinity
from toprovar.exporter.infinity.load import load_infinity

with torch.device("meta"):  # loads what meta tensors need
    Infinity(InfinityConfig(depth=2, width=32, heads=2, ffn_width=64, text_width=16, bits=8, pool_heads=2, chunks=2))
torch.ones(100, 100).bfloat16().float().sum()
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
model = load_infinity(open_checkpoint(sys.argv[1]).tensors, sys.argv[1])
peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
print(peak * 1024, sum(tensor.nbytes for tensor in model.state_dict().values()))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="needs Linux, whose pages are counted and let go")
@pytest.mark.parametrize(
    ("form", "dtype"),
    [
        ("w.pth", torch.bfloat16),
        pytest.param("w.pth", torch.float32, marks=pytest.mark.slow),
        pytest.param("w.safetensors", torch.bfloat16, marks=pytest.mark.slow),
        pytest.param("w.safetensors", torch.float32, marks=pytest.mark.slow),
    ],
)
def test_loading_needs_little_more_than_the_weights(tmp_path: Path, form: str, dtype: torch.dtype) -> None:
    """214 MB of fp32 weights out of a file half that size: 0.99 of the weights measured; file and copy would be 1.5."""
    from toprovar.exporter.infinity.config import InfinityConfig
    from toprovar.exporter.infinity.transformer import Infinity

    config = InfinityConfig(
        depth=12, width=512, heads=8, ffn_width=2048, text_width=256, bits=32, pool_heads=4, chunks=4, text_length=64
    )
    with torch.device("meta"):
        shapes = {name: tuple(tensor.shape) for name, tensor in Infinity(config).state_dict().items()}
    save({name: torch.full(shape, 0.01, dtype=dtype) for name, shape in shapes.items()}, tmp_path / form)
    run = subprocess.run(
        [sys.executable, "-c", MEASURE, str(tmp_path / form)], capture_output=True, text=True, check=True, timeout=120
    )
    peak, weights = map(int, run.stdout.split())
    assert weights > 200e6
    assert peak < 1.2 * weights, f"{peak / weights:.2f} times the weights"


def test_a_mapped_tensor_reads_the_same_after_its_pages_went(tmp_path: Path) -> None:
    values = {"w": torch.randn(300, 1000).bfloat16(), "x": torch.randn(5)}
    save(values, tmp_path / "w.safetensors")
    tensors = open_checkpoint(tmp_path / "w.safetensors").tensors
    for _ in range(2):
        assert torch.equal(tensors.converted("w", torch.float32), values["w"].float())
    assert torch.equal(tensors.converted("x", torch.float32), values["x"])
    assert torch.equal(tensors["w"], values["w"])


def test_loaded_weights_do_not_change_with_the_file_gone(tmp_path: Path, tiny: Any) -> None:
    state = {name: tensor.contiguous() for name, tensor in tiny.transformer.state_dict().items()}
    save(state, tmp_path / "w.safetensors")
    model = load_infinity(open_checkpoint(tmp_path / "w.safetensors").tensors, "w")
    (tmp_path / "w.safetensors").unlink()
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, state[name]), name
