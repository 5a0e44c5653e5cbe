from __future__ import annotations

import os
import pickle
import zipfile
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="needs PyTorch")

from checkpoint_helpers import Tensors, assert_same, refusal  # noqa: E402
from safetensors.torch import save_file  # noqa: E402

from toprovar.exporter.checkpoints import open_checkpoint  # noqa: E402


def test_torch_file_older_than_zip_comes_back_with_a_note(tmp_path: Path, tensors: Tensors) -> None:
    path = tmp_path / "old.pth"
    torch.save(tensors, path, _use_new_zipfile_serialization=False)
    checkpoint = open_checkpoint(path)
    assert_same(checkpoint.tensors, tensors)
    assert "read at once" in checkpoint.notes[0]


def test_parameters_come_back_without_gradient(tmp_path: Path) -> None:
    torch.save({"w": torch.nn.Parameter(torch.ones(3))}, tmp_path / "w.pth")
    assert not open_checkpoint(tmp_path / "w.pth").tensors["w"].requires_grad


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
