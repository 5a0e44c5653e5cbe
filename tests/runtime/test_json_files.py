"""JSON files: strict when read, complete or absent when written."""

import os
from pathlib import Path

import pytest

from toprovar.runtime.errors import ToprovarError
from toprovar.runtime.json_files import read_json, write_bytes, write_json


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is empty"),
        (b"{", "not valid JSON"),
        (b'{"a": 1, "a": 2}', "stands twice"),
        (b'{"a": NaN}', "NaN is not a JSON number"),
        (b'{"a": Infinity}', "Infinity is not a JSON number"),
        (b'{"a": 1e999}', "out of range"),
        (b"\xff\xfe", "not UTF-8"),
        (b"[" * 100_000, "not valid JSON"),
        (b'{"a": 1} trailing', "not valid JSON"),
    ],
)
def test_bad_content_is_named(tmp_path, content, message):
    path = tmp_path / "facts.json"
    path.write_bytes(content)
    with pytest.raises(ToprovarError, match=message) as caught:
        read_json(path)
    assert "facts.json" in caught.value.message


def test_a_missing_file_a_folder_and_a_giant_are_named(tmp_path):
    with pytest.raises(ToprovarError, match="does not exist"):
        read_json(tmp_path / "absent.json")
    with pytest.raises(ToprovarError, match="folder"):
        read_json(tmp_path)
    (tmp_path / "big.json").write_bytes(b" " * 100)
    with pytest.raises(ToprovarError, match="at most 10"):
        read_json(tmp_path / "big.json", max_bytes=10)


def test_writing_is_atomic_and_leaves_nothing_behind(tmp_path, monkeypatch):
    path = tmp_path / "deep" / "facts.json"
    write_json(path, {"ö": 1})
    assert read_json(path) == {"ö": 1}

    def full_disk(source, target):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full_disk)
    with pytest.raises(ToprovarError, match="No space left"):
        write_bytes(path, b"new")
    assert read_json(path) == {"ö": 1}
    assert [p.name for p in path.parent.iterdir()] == ["facts.json"]


def test_a_device_or_pipe_is_never_replaced(tmp_path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    (tmp_path / "link").symlink_to(pipe)
    for place in (pipe, tmp_path / "link"):
        with pytest.raises(ToprovarError, match="it is a device or pipe; a file is expected"):
            write_bytes(place, b"new")
    assert pipe.is_fifo()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["link", "pipe"]


def test_nan_is_never_written(tmp_path):
    with pytest.raises(ValueError, match="not JSON compliant"):
        write_json(tmp_path / "facts.json", {"a": float("nan")})
    assert not (tmp_path / "facts.json").exists()


@pytest.mark.skipif(not os.path.exists("/dev/zero"), reason="needs a device without end, /dev/zero")
def test_a_file_without_end_is_read_no_further_than_the_bound():
    with pytest.raises(ToprovarError, match="expected at most 1000"):
        read_json(Path("/dev/zero"), max_bytes=1000)
