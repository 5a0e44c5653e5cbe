from __future__ import annotations

import hashlib
import json
import os
import pickle
import random
import struct
import subprocess
import sys
import tempfile
import zipfile
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="needs PyTorch")

from safetensors.torch import save_file  # noqa: E402

from toprovar.exporter import checkpoints  # noqa: E402
from toprovar.exporter.checkpoints import LazyTensors, check_finite, open_checkpoint  # noqa: E402
from toprovar.exporter.int8_rows import dequantise_rows, quantise_rows  # noqa: E402
from toprovar.runtime.errors import EXIT_WRONG_INPUT, ToprovarError  # noqa: E402

Tensors = dict[str, Any]


@pytest.fixture
def tensors() -> Tensors:
    noise = torch.Generator().manual_seed(17)
    return {
        "word_embed.weight": torch.randn(17, 81, generator=noise),
        "word_embed.bias": torch.randn(17, generator=noise).to(torch.bfloat16),
        "scale": torch.tensor(0.5, dtype=torch.float16),
        "mask": torch.arange(7, dtype=torch.int64),
        "flags": torch.tensor([True, False, True]),
        "nothing": torch.empty(0, 3),
    }


def snapshot(path: Path) -> dict[str, bytes]:
    folder = path if path.is_dir() else path.parent
    return {str(file): file.read_bytes() for file in sorted(folder.rglob("*")) if file.is_file()}


def refusal(path: Path, action: Callable[[Path], object] = open_checkpoint, names: str | None = None) -> str:
    """The message with which a path is refused; checks the form that every user error has, and that no file changed."""
    before = snapshot(path) if path.exists() else {}
    with pytest.raises(ToprovarError) as caught:
        action(path)
    fault = caught.value
    assert fault.exit_code == EXIT_WRONG_INPUT
    assert fault.hint
    assert (names or path.name) in fault.message
    assert "!" not in str(fault)
    assert "\n" not in fault.hint
    assert (snapshot(path) if path.exists() else {}) == before
    return fault.message


def assert_same(found: Any, expected: Tensors) -> None:
    assert set(found) == set(expected)
    assert expected
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype, name
        assert found[name].shape == tensor.shape, name
        assert torch.equal(found[name], tensor), name


def raw_safetensors(path: Path, header: Any, data: bytes = b"", length: int | None = None) -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text) if length is None else length) + text + data)
    return path


def f32(begin: int, end: int, *shape: int) -> dict[str, Any]:
    return {"dtype": "F32", "shape": list(shape), "data_offsets": [begin, end]}


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


def test_torch_file_older_than_zip_comes_back_with_a_note(tmp_path: Path, tensors: Tensors) -> None:
    path = tmp_path / "old.pth"
    torch.save(tensors, path, _use_new_zipfile_serialization=False)
    checkpoint = open_checkpoint(path)
    assert_same(checkpoint.tensors, tensors)
    assert "read at once" in checkpoint.notes[0]


def test_parameters_come_back_without_gradient(tmp_path: Path) -> None:
    torch.save({"w": torch.nn.Parameter(torch.ones(3))}, tmp_path / "w.pth")
    assert not open_checkpoint(tmp_path / "w.pth").tensors["w"].requires_grad


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


@pytest.mark.parametrize(
    ("wrap", "where"),
    [
        (lambda flat: {"trainer": {"gpt_fsdp": flat, "step": 3}, "epoch": 1}, "['trainer']['gpt_fsdp']"),
        (lambda flat: {"vae": flat, "step": 7}, "['vae']"),
        (lambda flat: {"state_dict": flat, "lr": 0.1}, "['state_dict']"),
        (lambda flat: {"model": flat, "args": {"depth": 4}}, "['model']"),
    ],
)
def test_nested_state_dict_is_unwrapped_and_named(tmp_path: Path, tensors: Tensors, wrap: Any, where: str) -> None:
    path = tmp_path / "ar-ckpt-last.pth"
    torch.save(wrap(tensors), path)
    checkpoint = open_checkpoint(path)
    assert_same(checkpoint.tensors, tensors)
    assert where in checkpoint.notes[0]
    assert "left out beside it" in checkpoint.notes[0]


def test_values_beside_tensors_are_noted(tmp_path: Path) -> None:
    torch.save({"a": torch.ones(2), "epoch": 3}, tmp_path / "w.pth")
    checkpoint = open_checkpoint(tmp_path / "w.pth")
    assert list(checkpoint.tensors) == ["a"]
    assert "epoch" in checkpoint.notes[0]


def test_unaligned_safetensors_are_read(tmp_path: Path) -> None:
    header = {"b": {"dtype": "U8", "shape": [1], "data_offsets": [0, 1]}, "a": f32(1, 9, 2)}
    path = raw_safetensors(tmp_path / "u.safetensors", header, b"\7" + struct.pack("<2f", 1.5, -2.0))
    checkpoint = open_checkpoint(path)
    assert checkpoint.tensors["a"].tolist() == [1.5, -2.0]
    assert list(checkpoint.shapes) == ["b", "a"]


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


# safetensors


def test_truncated_safetensors_is_named(tmp_path: Path, tensors: Tensors) -> None:
    path = tmp_path / "m.safetensors"
    save_file(tensors, path)
    os.truncate(path, path.stat().st_size - 5)
    message = refusal(path)
    assert "is truncated" in message
    assert "bytes of tensor data; expected" in message


def test_safetensors_cut_before_the_header_is_truncated(tmp_path: Path) -> None:
    (tmp_path / "m.safetensors").write_bytes(b"\1\0\0")
    assert "is truncated: found 3 bytes" in refusal(tmp_path / "m.safetensors")


@pytest.mark.parametrize("extra", [1, 1497])
def test_trailing_bytes_are_named(tmp_path: Path, tensors: Tensors, extra: int) -> None:
    path = tmp_path / "m.safetensors"
    save_file(tensors, path)
    with path.open("ab") as stream:
        stream.write(b"\0" * extra)
    assert f"has {extra} trailing bytes" in refusal(path)


def test_header_longer_than_file_is_named(tmp_path: Path) -> None:
    path = raw_safetensors(tmp_path / "m.safetensors", {}, length=1000)
    assert "found a length of 1000 bytes; expected at most the 2 that follow" in refusal(path)


def test_header_length_is_bounded_before_it_is_read(tmp_path: Path) -> None:
    path = raw_safetensors(tmp_path / "m.safetensors", b"{}", length=100_000_001)
    os.truncate(path, 200_000_000)
    with pytest.raises(ToprovarError, match="found a length of 100000001 bytes; expected at most 100000000"):
        open_checkpoint(path)


TWICE = b'{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]},"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}'


@pytest.mark.parametrize(
    ("header", "expected"),
    [
        (b"not json at all", "found b'not json at all'; expected JSON"),
        (b"\xff\xfe\xfd\xfc", "expected JSON"),
        (b"[" * 100_000, "expected JSON"),
        (b'{"a": NaN}', "NaN is not JSON"),
        (b"[1, 2]", "found a JSON list; expected an object"),
        (TWICE, "found key 'a' twice"),
        ({"a": {"dtype": "F13", "shape": [1], "data_offsets": [0, 4]}}, "'a' with unknown dtype 'F13'"),
        ({"a": {"dtype": ["F32"], "shape": [1], "data_offsets": [0, 4]}}, "unknown dtype"),
        ({"a": {"dtype": "F32", "shape": [1]}}, "expected dtype, shape and data_offsets"),
        ({"a": 3}, "expected dtype, shape and data_offsets"),
        ({"a": f32(0, 4, -1)}, "with shape [-1]"),
        ({"a": {"dtype": "F32", "shape": [True], "data_offsets": [0, 4]}}, "with shape [True]"),
        ({"a": f32(4, 0, 1)}, "at offsets [4, 0]; expected [begin, end]"),
        ({"a": f32(-4, 0, 1)}, "at offsets [-4, 0]"),
        ({"a": f32(0, 8, 1)}, "'a' with 8 bytes; expected 4 for F32 (1,)"),
        ({"a": f32(0, 8, 2), "b": f32(4, 12, 2)}, "'b' at byte 4, overlapping 'a' that ends at 8"),
        ({"a": f32(0, 8, 2), "b": f32(4000, 4008, 2)}, "'b' out of bounds at bytes 4000 to 4008; expected at most 16"),
        ({"a": f32(0, 4, 1), "b": f32(8, 16, 2)}, "a hole of 4 bytes before tensor 'b'"),
        ({"__metadata__": {"a": 1}}, "__metadata__"),
    ],
)
def test_bad_header_says_what_is_bad(tmp_path: Path, header: Any, expected: str) -> None:
    message = refusal(raw_safetensors(tmp_path / "m.safetensors", header, bytes(16)))
    assert "has a bad safetensors header" in message
    assert expected in message


def test_safetensors_without_tensors_is_refused(tmp_path: Path) -> None:
    assert "holds no tensors" in refusal(raw_safetensors(tmp_path / "m.safetensors", {}))


def test_torch_file_named_safetensors_is_told_apart(tmp_path: Path) -> None:
    torch.save({"a": torch.ones(1)}, tmp_path / "w.pth")
    (tmp_path / "w.pth").rename(tmp_path / "w.safetensors")
    assert "holds a torch file" in refusal(tmp_path / "w.safetensors")


# torch files


def torch_file(path: Path) -> bytes:
    torch.save({"a": torch.arange(1497.0), "b": torch.ones(17)}, path)
    return path.read_bytes()


@pytest.mark.parametrize("keep_ratio", [0.01, 0.5, 0.99])
def test_truncated_zip_is_named(tmp_path: Path, keep_ratio: float) -> None:
    path = tmp_path / "w.pth"
    data = torch_file(path)
    path.write_bytes(data[: int(len(data) * keep_ratio)])
    assert "is truncated: found" in refusal(path)


@pytest.mark.parametrize("cut", [1, 21, 22])
def test_zip_cut_inside_its_end_record_is_truncated(tmp_path: Path, cut: int) -> None:
    path = tmp_path / "w.pth"
    path.write_bytes(torch_file(path)[:-cut])
    assert "is truncated" in refusal(path)


@pytest.mark.parametrize(("change", "expected"), [(-64, "64 bytes missing"), (64, "64 bytes too many")])
def test_zip_with_another_length_of_data_is_damaged(tmp_path: Path, change: int, expected: str) -> None:
    path = tmp_path / "w.pth"
    data = torch_file(path)
    path.write_bytes(data[:2000] + (b"\0" * change + data[2000:] if change > 0 else data[2000 - change :]))
    message = refusal(path)
    assert "is damaged" in message
    assert expected in message


def test_zip_record_overwritten_is_damaged(tmp_path: Path) -> None:
    path = tmp_path / "w.pth"
    data = bytearray(torch_file(path))
    with zipfile.ZipFile(path) as archive:
        at = next(record for record in archive.infolist() if record.filename.endswith("data/1")).header_offset
    data[at : at + 4] = b"\0\0\0\0"
    path.write_bytes(data)
    assert "data/1 isn't where the zip directory says" in refusal(path)


@pytest.mark.parametrize("extra", [1, 17, 200_000])
def test_trailing_bytes_behind_zip_are_named(tmp_path: Path, extra: int) -> None:
    path = tmp_path / "w.pth"
    path.write_bytes(torch_file(path) + b"x" * extra)
    assert f"has {extra} trailing bytes" in refusal(path)


def test_compressed_zip_is_refused(tmp_path: Path) -> None:
    torch_file(tmp_path / "w.pth")
    with zipfile.ZipFile(tmp_path / "w.pth") as source, zipfile.ZipFile(tmp_path / "c.pth", "w") as packed:
        for record in source.infolist():
            packed.writestr(record.filename, source.read(record), zipfile.ZIP_DEFLATED)
    assert "was compressed" in refusal(tmp_path / "c.pth")


def test_other_zip_is_not_a_torch_file(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "w.pth", "w") as archive:
        archive.writestr("inner/weights.pth", b"x")
    assert "is a zip file but not a torch file: found inner/weights.pth" in refusal(tmp_path / "w.pth")


def test_torchscript_is_told_apart(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "w.pt", "w") as archive:
        archive.writestr("w/data.pkl", b"x")
        archive.writestr("w/constants.pkl", b"x")
    assert "TorchScript" in refusal(tmp_path / "w.pt")


def test_damaged_pickle_in_zip_is_named(tmp_path: Path) -> None:
    torch_file(tmp_path / "w.pth")
    with zipfile.ZipFile(tmp_path / "w.pth") as source, zipfile.ZipFile(tmp_path / "d.pth", "w") as damaged:
        for record in source.infolist():
            content = source.read(record)
            damaged.writestr(record.filename, b"\xf0" + content if record.filename.endswith("data.pkl") else content)
    assert "is damaged" in refusal(tmp_path / "d.pth")


def test_tensor_that_asks_for_more_than_its_record_is_damaged(tmp_path: Path) -> None:
    path = tmp_path / "w.pth"
    torch.save({"a": torch.zeros(17)}, path)
    data = path.read_bytes()
    path.write_bytes(data.replace(b"K\x11", b"K\x12"))  # 17 elements become 18 in the pickled record
    assert path.read_bytes() != data
    assert "tensor a asks for 72 bytes of data" in refusal(path)


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


@pytest.mark.parametrize("keep", [18, 40, 200, -10])
def test_truncated_old_torch_file_is_named(tmp_path: Path, keep: int) -> None:
    path = tmp_path / "w.pth"
    torch.save({"a": torch.arange(600.0)}, path, _use_new_zipfile_serialization=False)
    path.write_bytes(path.read_bytes()[:keep])
    assert "is truncated" in refusal(path)


def test_trailing_bytes_behind_old_torch_file_are_named(tmp_path: Path) -> None:
    path = tmp_path / "w.pth"
    torch.save({"a": torch.arange(600.0)}, path, _use_new_zipfile_serialization=False)
    path.write_bytes(path.read_bytes() + b"xyz")
    assert "has 3 trailing bytes" in refusal(path)


class Malicious:
    """Makes a folder when it is unpickled."""

    def __init__(self, target: Path) -> None:
        self.target = target

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.target),)


@pytest.mark.parametrize("form", ["zip", "old", "plain"])
def test_malicious_pickle_is_not_executed(tmp_path: Path, form: str) -> None:
    target = tmp_path / "executed"
    folder = tmp_path / "in"
    folder.mkdir()
    path = folder / "w.pth"
    content = {"a": torch.ones(1), "b": Malicious(target)}
    if form == "plain":
        path.write_bytes(pickle.dumps({"b": Malicious(target)}))
    else:
        torch.save(content, path, _use_new_zipfile_serialization=form == "zip")
    message = refusal(path)
    assert "never loaded" in message
    assert form == "plain" or f"found {os.mkdir.__module__}.mkdir" in message
    assert not target.exists()
    pickle.loads(pickle.dumps(Malicious(target)))  # the attack itself works
    assert target.exists()


def test_malicious_pickle_is_not_executed_when_torch_is_told_to_trust(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", "1")
    path = tmp_path / "w.pth"
    torch.save({"a": torch.ones(1), "b": Malicious(tmp_path / "executed")}, path)
    assert "never loaded" in refusal(path)
    assert not (tmp_path / "executed").exists()


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ({"epoch": 3, "lr": 0.1}, "found epoch, lr; expected tensors at the top, or a flat dict of them at"),
        ({}, "found nothing"),
        ({"model": {"encoder": {"w": torch.ones(1)}}}, "found model"),
        ({0: torch.ones(1)}, "found 0"),
        ([1, 2], "found a list; expected a dict of tensors"),
        (torch.ones(3), "found a Tensor; expected a dict of tensors"),
    ],
)
def test_torch_file_without_named_tensors_is_refused(tmp_path: Path, content: Any, expected: str) -> None:
    torch.save(content, tmp_path / "w.pth")
    message = refusal(tmp_path / "w.pth")
    assert "holds no tensors by name" in message
    assert expected in message


def test_sparse_tensor_is_named(tmp_path: Path) -> None:
    torch.save({"a": torch.eye(3).to_sparse()}, tmp_path / "w.pth")
    assert "tensor a isn't a plain dense tensor" in refusal(tmp_path / "w.pth")


def test_safetensors_named_torch_is_told_apart(tmp_path: Path) -> None:
    save_file({"a": torch.ones(1)}, tmp_path / "w.pth")
    assert "holds safetensors data" in refusal(tmp_path / "w.pth")


def test_text_named_torch_is_told_apart(tmp_path: Path) -> None:
    (tmp_path / "w.pth").write_text("<html>404</html>")
    assert "isn't a torch file: found magic b'<html>40'" in refusal(tmp_path / "w.pth")


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
