from __future__ import annotations

import hashlib
import json
import os
import random
import subprocess
import sys
import tempfile
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="needs PyTorch")

from checkpoint_helpers import Tensors, assert_same, f32, raw_safetensors, refusal  # noqa: E402
from safetensors.torch import save_file  # noqa: E402

from toprovar.exporter import checkpoints  # noqa: E402
from toprovar.exporter.checkpoints import LazyTensors, check_finite, open_checkpoint  # noqa: E402
from toprovar.exporter.int8_rows import dequantise_rows, quantise_rows  # noqa: E402
from toprovar.runtime.errors import EXIT_WRONG_INPUT, ToprovarError  # noqa: E402


def sharded(folder: Path, tensors: Tensors, kind: str = "safetensors") -> Path:
    """Two shards and their index; returns the index."""
    folder.mkdir(exist_ok=True)
    names = list(tensors)
    stem, suffix = ("model", "safetensors") if kind == "safetensors" else ("pytorch_model", "bin")
    weight_map = {}
    for number, part in enumerate((names[:2], names[2:]), start=1):
        shard = f"{stem}-{number:05d}-of-00002.{suffix}"
        weight_map.update(dict.fromkeys(part, shard))
        chosen = {name: tensors[name] for name in part}
        if kind == "safetensors":
            save_file(chosen, folder / shard)
        else:
            torch.save(chosen, folder / shard)
    index = folder / f"{stem}.{suffix}.index.json"
    index.write_text(json.dumps({"metadata": {"total_size": 1}, "weight_map": weight_map}))
    return index


def edit_index(index: Path, change: Callable[[dict[str, str]], object]) -> Path:
    content = json.loads(index.read_text())
    change(content["weight_map"])
    index.write_text(json.dumps(content))
    return index


# Round trips


def test_safetensors_file_comes_back(tmp_path: Path, tensors: Tensors) -> None:
    path = tmp_path / "model.safetensors"
    save_file(tensors, path, metadata={"schema": "1"})
    checkpoint = open_checkpoint(path)
    assert_same(checkpoint.tensors, tensors)
    assert checkpoint.format == "safetensors"
    assert checkpoint.files == (path,)
    assert dict(checkpoint.metadata) == {"schema": "1"}
    assert checkpoint.shapes["word_embed.weight"] == (17, 81)
    assert checkpoint.dtypes["word_embed.bias"] == torch.bfloat16
    assert checkpoint.notes == ()


@pytest.mark.parametrize("suffix", [".pth", ".pt", ".bin"])
def test_torch_file_comes_back(tmp_path: Path, tensors: Tensors, suffix: str) -> None:
    path = tmp_path / f"weights{suffix}"
    torch.save(OrderedDict(tensors), path)
    checkpoint = open_checkpoint(str(path))
    assert_same(checkpoint.tensors, tensors)
    assert checkpoint.format == "torch"
    assert list(checkpoint.shapes) == list(tensors)


@pytest.mark.parametrize("kind", ["safetensors", "torch"])
@pytest.mark.parametrize("by", ["folder", "index"])
def test_shards_come_back_in_index_order(tmp_path: Path, tensors: Tensors, kind: str, by: str) -> None:
    index = sharded(tmp_path / "m", tensors, kind)
    checkpoint = open_checkpoint(index if by == "index" else tmp_path / "m")
    assert_same(checkpoint.tensors, tensors)
    assert checkpoint.format == f"sharded-{kind}"
    assert checkpoint.files[0] == index
    assert len(checkpoint.files) == 3
    assert list(checkpoint.tensors) == list(tensors)


@pytest.mark.parametrize("suffix", [".safetensors", ".pth"])
def test_folder_with_one_file_is_that_file(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"only{suffix}"
    save_file({"a": torch.ones(2)}, path) if suffix == ".safetensors" else torch.save({"a": torch.ones(2)}, path)
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "._only.pth").write_bytes(b"resource fork")
    assert open_checkpoint(tmp_path).files == (path,)


def test_symbolic_link_opens_by_its_own_name(tmp_path: Path) -> None:
    torch.save({"a": torch.ones(2)}, tmp_path / "blob")
    (tmp_path / "s").mkdir()
    (tmp_path / "s" / "weights.pth").symlink_to("../blob")
    assert list(open_checkpoint(tmp_path / "s").tensors) == ["a"]


def test_tensors_can_be_saved_again(tmp_path: Path, tensors: Tensors) -> None:
    save_file(tensors, tmp_path / "a.safetensors")
    save_file(dict(open_checkpoint(tmp_path / "a.safetensors").tensors), tmp_path / "b.safetensors")
    assert (tmp_path / "a.safetensors").read_bytes() == (tmp_path / "b.safetensors").read_bytes()


def test_digest_of_one_file_is_its_sha256(tmp_path: Path) -> None:
    torch.save({"a": torch.ones(2)}, tmp_path / "w.pth")
    expected = hashlib.sha256((tmp_path / "w.pth").read_bytes()).hexdigest()
    assert open_checkpoint(tmp_path / "w.pth").digest() == expected


def test_digest_of_shards_covers_every_file_and_moves_with_the_folder(tmp_path: Path, tensors: Tensors) -> None:
    first = open_checkpoint(sharded(tmp_path / "a", tensors))
    lines = sorted((file.name, hashlib.sha256(file.read_bytes()).hexdigest()) for file in first.files)
    text = "".join(f"{digest}  {name}\n" for name, digest in lines)
    assert first.digest() == hashlib.sha256(text.encode()).hexdigest()
    assert open_checkpoint(sharded(tmp_path / "b", tensors)).digest() == first.digest()
    tensors["flags"] = ~tensors["flags"]
    assert open_checkpoint(sharded(tmp_path / "c", tensors)).digest() != first.digest()


# Laziness


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


MIB = 1 << 20


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="needs /proc/self/statm")
@pytest.mark.parametrize("suffix", [".safetensors", ".pth"])
def test_opening_reads_no_data_and_access_reads_one_tensor_once(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"large{suffix}"
    each = 32 * MIB
    if suffix == ".pth":
        torch.save({str(i): torch.zeros(each // 4) for i in range(4)}, path)
    else:
        header = {str(i): f32(i * each, (i + 1) * each, each // 4) for i in range(4)}
        raw_safetensors(path, header)
        os.truncate(path, path.stat().st_size + 4 * each)
    torch.ones(each // 4).sum()  # warms up what the sum below allocates
    before = resident_bytes()
    checkpoint = open_checkpoint(path)
    assert len(checkpoint.shapes) == 4
    tensor = checkpoint.tensors["2"]
    assert resident_bytes() - before < 8 * MIB
    assert float(tensor.sum()) == 0.0
    assert resident_bytes() - before < each + 16 * MIB


def test_shapes_need_no_tensor(tmp_path: Path, tensors: Tensors, monkeypatch: pytest.MonkeyPatch) -> None:
    save_file(tensors, tmp_path / "m.safetensors")

    def refuse(*_: object) -> None:
        raise AssertionError("data was mapped")

    monkeypatch.setattr(torch.UntypedStorage, "from_file", refuse)
    checkpoint = open_checkpoint(tmp_path / "m.safetensors")
    assert checkpoint.shapes["mask"] == (7,)
    with pytest.raises(AssertionError, match="data was mapped"):
        checkpoint.tensors["mask"]


@pytest.mark.parametrize("suffix", [".safetensors", ".pth"])
def test_writing_to_a_tensor_leaves_the_file_unchanged(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"w{suffix}"
    save_file({"a": torch.ones(5)}, path) if suffix == ".safetensors" else torch.save({"a": torch.ones(5)}, path)
    before = path.read_bytes()
    open_checkpoint(path).tensors["a"].zero_()
    assert path.read_bytes() == before
    assert open_checkpoint(path).tensors["a"].tolist() == [1.0] * 5


def test_mapping_is_read_only(tmp_path: Path) -> None:
    torch.save({"a": torch.ones(2)}, tmp_path / "w.pth")
    checkpoint = open_checkpoint(tmp_path / "w.pth")
    assert isinstance(checkpoint.tensors, LazyTensors)
    assert not hasattr(checkpoint.tensors, "__setitem__")
    assert "a" in checkpoint.tensors
    assert "b" not in checkpoint.tensors
    with pytest.raises(KeyError):
        checkpoint.tensors["b"]
    with pytest.raises(TypeError):
        checkpoint.shapes["a"] = (1,)  # type: ignore[index]


# Paths


def test_missing_path_is_named(tmp_path: Path) -> None:
    assert "doesn't exist" in refusal(tmp_path / "absent.pth")


def test_path_below_a_file_does_not_exist(tmp_path: Path) -> None:
    (tmp_path / "a.pth").write_bytes(b"x")
    assert "doesn't exist" in refusal(tmp_path / "a.pth" / "b.pth")


@pytest.mark.skipif(os.sep == "\\", reason="needs a system where a backslash is part of a name")
def test_windows_path_gets_its_own_hint() -> None:
    with pytest.raises(ToprovarError) as caught:
        open_checkpoint("C:\\models\\infinity_2b_reg.pth")
    assert "forward slashes" in caught.value.hint


def test_broken_symbolic_link_names_its_target(tmp_path: Path) -> None:
    (tmp_path / "w.pth").symlink_to("gone.pth")
    assert "symbolic link to gone.pth" in refusal(tmp_path / "w.pth")


def test_symbolic_link_to_itself_cannot_be_read(tmp_path: Path) -> None:
    (tmp_path / "w.pth").symlink_to("w.pth")
    with pytest.raises(ToprovarError, match=r"w\.pth can't be read: too many levels") as caught:
        open_checkpoint(tmp_path / "w.pth")
    assert caught.value.hint


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs named pipes")
def test_named_pipe_is_refused_without_waiting(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "w.pth")
    assert "neither a file nor a folder" in refusal(tmp_path / "w.pth")


def test_nul_in_path_is_refused() -> None:
    with pytest.raises(ToprovarError, match="NUL"):
        open_checkpoint("a\0b.pth")


def test_tilde_is_the_home_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("USERPROFILE", str(tmp_path))
    torch.save({"a": torch.ones(1)}, tmp_path / "w.pth")
    assert list(open_checkpoint("~/w.pth").tensors) == ["a"]


@contextmanager
def ordinary_user() -> Iterator[None]:
    """Root may read everything, so the right to read is tested as another user."""
    if os.geteuid() != 0:
        yield
        return
    os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(0)


@pytest.mark.skipif(not hasattr(os, "geteuid"), reason="needs POSIX permissions")
@pytest.mark.parametrize("locked", ["file", "folder"])
def test_unreadable_file_is_not_called_missing(locked: str) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name, "weights")
        folder.mkdir()
        Path(name).chmod(0o755)
        path = folder / "w.pth"
        torch.save({"a": torch.ones(1)}, path)
        (path if locked == "file" else folder).chmod(0)
        try:
            with ordinary_user(), pytest.raises(ToprovarError, match="permission denied") as caught:
                open_checkpoint(path)
            if locked == "folder":
                with ordinary_user(), pytest.raises(ToprovarError, match="permission denied"):
                    open_checkpoint(folder)
        finally:
            folder.chmod(0o755)
        assert str(path) in caught.value.message
        assert "chmod u+r" in caught.value.hint
        assert caught.value.exit_code == EXIT_WRONG_INPUT


@pytest.mark.parametrize("name", ["w.pth", "w.safetensors", "model.safetensors.index.json"])
def test_empty_file_is_named(tmp_path: Path, name: str) -> None:
    (tmp_path / name).touch()
    assert "is empty: found 0 bytes" in refusal(tmp_path / name)


def test_unknown_ending_lists_the_known_ones(tmp_path: Path) -> None:
    (tmp_path / "w.gguf").write_bytes(b"GGUF")
    assert "found '.gguf'; expected .safetensors, .pth, .pt, .bin" in refusal(tmp_path / "w.gguf")


def test_folder_named_like_a_file_is_searched(tmp_path: Path) -> None:
    (tmp_path / "w.pth").mkdir()
    assert "holds no checkpoint: found nothing" in refusal(tmp_path / "w.pth")


def test_folder_without_checkpoint_lists_what_it_holds(tmp_path: Path) -> None:
    (tmp_path / "readme.md").write_text("x")
    assert "holds no checkpoint: found readme.md" in refusal(tmp_path)


def test_folder_with_several_checkpoints_lists_them(tmp_path: Path, tensors: Tensors) -> None:
    sharded(tmp_path, tensors)
    torch.save({"a": torch.ones(1)}, tmp_path / "ema_model.bin")
    message = refusal(tmp_path)
    assert "holds 2 checkpoints: found model.safetensors.index.json, ema_model.bin; expected one" in message


def test_folder_with_both_indexes_lists_them(tmp_path: Path, tensors: Tensors) -> None:
    sharded(tmp_path, tensors)
    sharded(tmp_path, tensors, "torch")
    assert "model.safetensors.index.json, pytorch_model.bin.index.json" in refusal(tmp_path)


@pytest.mark.parametrize("keep", [1, 2])
def test_shards_without_index_are_not_taken_for_a_whole(tmp_path: Path, tensors: Tensors, keep: int) -> None:
    sharded(tmp_path, tensors).unlink()
    if keep == 1:
        (tmp_path / "model-00002-of-00002.safetensors").unlink()
    assert "shards without their index" in refusal(tmp_path)


def test_git_lfs_pointer_is_told_apart(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    path.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n")
    assert "Git LFS pointer" in refusal(path)


def test_torch_file_named_safetensors_is_told_apart(tmp_path: Path) -> None:
    torch.save({"a": torch.ones(1)}, tmp_path / "w.pth")
    (tmp_path / "w.pth").rename(tmp_path / "w.safetensors")
    assert "holds a torch file" in refusal(tmp_path / "w.safetensors")


@pytest.mark.parametrize("form", ["safetensors", "zip", "old"])
def test_random_damage_is_refused_in_form_or_harmless(tmp_path: Path, tensors: Tensors, form: str) -> None:
    path = tmp_path / ("w.safetensors" if form == "safetensors" else "w.pth")
    if form == "safetensors":
        save_file(tensors, path)
    else:
        torch.save(tensors, path, _use_new_zipfile_serialization=form == "zip")
    whole = path.read_bytes()
    dice = random.Random(987)
    refused: list[ToprovarError] = []
    for _ in range(300):
        at, length = dice.randrange(len(whole)), dice.choice([1, 8, 64])
        noise = dice.randbytes(dice.choice([0, 1, length]))
        path.write_bytes(whole[:at] + noise + whole[at + length :])
        try:
            assert len(open_checkpoint(path).shapes) > 0
        except ToprovarError as fault:
            refused.append(fault)
    assert len(refused) > 100
    assert all(path.name in fault.message and fault.hint for fault in refused)


# Shards


def test_missing_shard_is_named(tmp_path: Path, tensors: Tensors) -> None:
    index = sharded(tmp_path, tensors)
    (tmp_path / "model-00002-of-00002.safetensors").unlink()
    message = refusal(index, names="model-00002-of-00002.safetensors is missing")
    assert "expects 2 shards, 4 tensors in this one" in message


def test_key_that_its_shard_lacks_is_named(tmp_path: Path, tensors: Tensors) -> None:
    index = edit_index(sharded(tmp_path, tensors), lambda m: m.update(absent="model-00001-of-00002.safetensors"))
    assert "model-00001-of-00002.safetensors lacks tensor absent" in refusal(index)


def test_key_in_another_shard_says_where(tmp_path: Path, tensors: Tensors) -> None:
    index = edit_index(sharded(tmp_path, tensors), lambda m: m.update(mask="model-00001-of-00002.safetensors"))
    assert "(it is in model-00002-of-00002.safetensors)" in refusal(index)


def test_key_in_two_shards_is_named(tmp_path: Path, tensors: Tensors) -> None:
    index = sharded(tmp_path, tensors, "torch")
    torch.save(tensors, tmp_path / "pytorch_model-00002-of-00002.bin")
    message = refusal(index)
    assert "tensor word_embed.weight is in two shards" in message


def test_tensor_that_the_index_does_not_name_is_left_out_with_a_note(tmp_path: Path, tensors: Tensors) -> None:
    checkpoint = open_checkpoint(edit_index(sharded(tmp_path, tensors), lambda m: m.pop("mask")))
    assert "mask" not in checkpoint.tensors
    assert "left out 1 tensors" in checkpoint.notes[0]


def test_damaged_shard_is_named(tmp_path: Path, tensors: Tensors) -> None:
    index = sharded(tmp_path, tensors)
    shard = tmp_path / "model-00002-of-00002.safetensors"
    os.truncate(shard, shard.stat().st_size - 1)
    assert "is truncated" in refusal(index, names=shard.name)


@pytest.mark.parametrize(
    "shard", ["../x.safetensors", "/etc/x.safetensors", "a/../../x.safetensors", "C:\\x.bin", "..\\x.bin"]
)
def test_index_that_leaves_its_folder_is_refused(tmp_path: Path, tensors: Tensors, shard: str) -> None:
    folder = tmp_path / "m"
    index = edit_index(sharded(folder, tensors), lambda m: m.update(mask=shard))
    save_file({"mask": tensors["mask"]}, tmp_path / "x.safetensors")
    message = refusal(index)
    assert "leaves its folder" in message
    assert repr(shard) in message


@pytest.mark.parametrize("shard", ["a\\b.safetensors", "x.txt", "./x.safetensors", "x\0.safetensors", ""])
def test_odd_shard_name_is_refused(tmp_path: Path, tensors: Tensors, shard: str) -> None:
    index = edit_index(sharded(tmp_path, tensors), lambda m: m.update(mask=shard))
    assert "names an odd shard" in refusal(index)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("{'a': 1}", "isn't JSON"),
        ('{"weight_map": {"a": ', "isn't JSON"),
        ("{}", "names no shards: found nothing"),
        ('{"model_type": "t5"}', "names no shards: found model_type"),
        ("[]", "names no shards: found no object"),
        ('{"weight_map": {}}', "names no shards"),
        ('{"weight_map": {"a": 3}}', "names no shards"),
        ('{"weight_map": {"a": "x.bin", "a": "y.bin"}}', "names 'a' twice"),
    ],
)
def test_bad_index_says_what_is_bad(tmp_path: Path, text: str, expected: str) -> None:
    path = tmp_path / "model.safetensors.index.json"
    path.write_text(text)
    assert expected in refusal(path)
    assert expected in refusal(tmp_path, names=path.name)


def test_index_of_mixed_formats_is_refused(tmp_path: Path, tensors: Tensors) -> None:
    index = sharded(tmp_path, tensors)
    torch.save({"mask": tensors["mask"]}, tmp_path / "x.bin")
    assert "mixes formats" in refusal(edit_index(index, lambda m: m.update(mask="x.bin")))


def test_shard_that_is_a_folder_is_named(tmp_path: Path, tensors: Tensors) -> None:
    index = sharded(tmp_path, tensors)
    (tmp_path / "x.safetensors").mkdir()
    edit_index(index, lambda m: m.update(mask="x.safetensors"))
    assert "is missing" in refusal(index, names="x.safetensors")


# Non-finite values


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", "float64", "complex64", "float8_e4m3fn"])
def test_first_tensor_that_is_not_finite_is_named(tmp_path: Path, dtype: str) -> None:
    values = torch.zeros(3, 17)
    values[1, 4] = float("nan")
    values[2, 0] = float("nan")
    torch.save(
        {"fine": torch.ones(2), "ids": torch.arange(3), "bad": values.to(getattr(torch, dtype))}, tmp_path / "w.pth"
    )
    checkpoint = open_checkpoint(tmp_path / "w.pth")
    message = refusal(tmp_path / "w.pth", lambda _: check_finite(checkpoint.tensors))
    assert "tensor bad isn't finite: found 2 of 51 values" in message
    assert "(2 NaN, 0 infinite, first at [1, 4])" in message


def test_infinity_is_counted_apart_and_the_source_can_be_given() -> None:
    with pytest.raises(ToprovarError, match=r"model x: tensor a isn't finite.*\(0 NaN, 1 infinite, first at \[\]\)"):
        check_finite({"a": torch.tensor(float("-inf"))}, "model x")


def test_finite_tensors_pass(tensors: Tensors) -> None:
    check_finite(tensors)


# Int8 rows


@pytest.mark.parametrize("shape", [(1, 1), (17, 81), (3, 5, 3, 3), (7,), (0, 4), (4, 0)])
def test_int8_rows_are_within_half_a_step(shape: tuple[int, ...]) -> None:
    weights = torch.randn(shape, generator=torch.Generator().manual_seed(1)) * 10
    values, row_scale = quantise_rows(weights)
    assert (values.dtype, row_scale.dtype) == (torch.int8, torch.float32)
    assert tuple(row_scale.shape) == shape[:1]
    back = dequantise_rows(values, row_scale)
    assert back.shape == weights.shape
    step = row_scale.reshape(-1, *[1] * (weights.dim() - 1))
    assert bool(((back - weights).abs() <= step * 0.5001).all())


def test_largest_value_of_a_row_is_127_and_zero_rows_stay_zero() -> None:
    weights = torch.tensor([[0.0, 0.0], [1.0, -2.0], [1e-38, 0.0], [1e-44, 0.0]])
    values, row_scale = quantise_rows(weights)
    assert values.tolist()[:2] == [[0, 0], [64, -127]]
    assert bool((row_scale > 0).all())
    assert dequantise_rows(values, row_scale)[0].tolist() == [0.0, 0.0]
    assert bool(torch.isfinite(dequantise_rows(values, row_scale)).all())


@pytest.mark.parametrize(
    "weights", [torch.ones(2, 2, dtype=torch.int32), torch.tensor(1.0), torch.tensor([float("nan")])]
)
def test_what_has_no_rows_is_not_quantised(weights: Any) -> None:
    with pytest.raises(ValueError, match="expected"):
        quantise_rows(weights)


def test_scale_of_another_length_is_not_applied() -> None:
    with pytest.raises(ValueError, match="one scale per row"):
        dequantise_rows(torch.ones(2, 3, dtype=torch.int8), torch.ones(3))
    with pytest.raises(ValueError, match="int8 values and a float32 scale"):
        dequantise_rows(torch.ones(2, 3), torch.ones(2))


def int8_pair() -> tuple[Tensors, Any]:
    weights = torch.randn(17, 5, generator=torch.Generator().manual_seed(3))
    values, row_scale = quantise_rows(weights)
    return {"w": values, "b": torch.ones(2), "w.row_scale": row_scale}, dequantise_rows(values, row_scale)


@pytest.mark.parametrize("kind", ["safetensors", "torch", "sharded-safetensors", "sharded-torch"])
def test_int8_rows_are_presented_as_one_float_tensor(tmp_path: Path, kind: str) -> None:
    stored, expected = int8_pair()
    if kind == "safetensors":
        save_file(stored, tmp_path / "w.safetensors")
    elif kind == "torch":
        torch.save(stored, tmp_path / "w.pth")
    else:
        sharded(tmp_path, stored, kind.removeprefix("sharded-"))
    checkpoint = open_checkpoint(tmp_path)
    assert_same(checkpoint.tensors, {"w": expected, "b": stored["b"]})
    assert dict(checkpoint.shapes) == {"w": (17, 5), "b": (2,)}
    assert checkpoint.dtypes["w"] == torch.float32
    assert checkpoint.format == kind


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (lambda t: t.pop("w.row_scale"), "int8 tensor w (17, 5) has no scale: expected w.row_scale"),
        (
            lambda t: t.update({"w.row_scale": torch.ones(16)}),
            "found torch.float32 (16,), expected torch.float32 (17,)",
        ),
        (lambda t: t.update({"w.row_scale": torch.ones(17, 1)}), "found torch.float32 (17, 1)"),
        (lambda t: t.update({"w.row_scale": torch.ones(17).half()}), "found torch.float16 (17,)"),
        (lambda t: t.update({"w": torch.tensor(1, dtype=torch.int8)}), "expected torch.float32 (rows,)"),
        (lambda t: t.pop("w"), "row scale w.row_scale has no int8 tensor w beside it: found none"),
        (lambda t: t.update({"w": torch.ones(17, 5)}), "beside it: found one of torch.float32"),
    ],
)
def test_int8_rows_without_a_fitting_scale_are_refused(tmp_path: Path, change: Any, expected: str) -> None:
    stored, _ = int8_pair()
    change(stored)
    save_file(stored, tmp_path / "w.safetensors")
    assert expected in refusal(tmp_path / "w.safetensors")


def test_scale_that_is_not_finite_is_named_on_access(tmp_path: Path) -> None:
    stored, _ = int8_pair()
    stored["w.row_scale"][3] = float("inf")
    save_file(stored, tmp_path / "w.safetensors")
    checkpoint = open_checkpoint(tmp_path)
    message = refusal(tmp_path / "w.safetensors", lambda _: checkpoint.tensors["w"])
    assert "tensor w.row_scale isn't finite: found 1 of 17 values" in message


# Without PyTorch


def test_module_imports_and_says_what_is_missing_without_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoints.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ToprovarError, match="needs PyTorch") as caught:
        open_checkpoint("w.pth")
    assert caught.value.exit_code == 3
    assert "pip install" in caught.value.hint


def test_import_does_not_pull_in_torch() -> None:
    code = (
        "import sys, toprovar.exporter.checkpoints, toprovar.exporter.families, toprovar.exporter.int8_rows;"
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
