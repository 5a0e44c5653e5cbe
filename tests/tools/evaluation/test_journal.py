import base64
import json

import numpy as np
import pytest

from toprovar.runtime.errors import ToprovarError
from toprovar.tools.evaluation.journal import Journal, Record

VERDICT = {
    "concepts": [3], "in_top5": [True], "style": "flat", "pattern": "plain", "colours": ["white"],
    "arrangement": "single", "swapped": False, "right": {"concept": False, "count": True},
}  # fmt: skip


def record(prompt=0):
    features = np.random.default_rng(prompt).normal(size=(2, 5)).astype(np.float32)
    return Record(prompt, "full@2", 7 + prompt, 361.25, 0.875, 23.5, VERDICT, features)


def written(path, count):
    journal = Journal(path, resume=True)
    for i in range(count):
        journal.add(f"id{i}", record(i))
    return path.read_bytes()


def test_records_come_back(tmp_path):
    path = tmp_path / "out" / "pictures.jsonl"
    written(path, 3)
    stored = Journal(path, resume=True)
    assert list(stored.done) == ["id0", "id1", "id2"]
    for i, (found, expected) in enumerate(zip(stored.done.values(), map(record, range(3)), strict=True)):
        assert np.array_equal(found.features, expected.features), i
        assert {**vars(found), "features": 0} == {**vars(expected), "features": 0}
    assert stored.damaged == 0


@pytest.mark.parametrize("lost", [1, 2, 30, 200])
def test_a_line_cut_off_by_an_interruption_is_dropped_and_the_file_goes_on(tmp_path, lost):
    path = tmp_path / "pictures.jsonl"
    whole = written(path, 3)
    path.write_bytes(whole[:-lost])
    journal = Journal(path, resume=True)
    kept = 3 if lost == 1 else 2  # without its line end alone, a record is whole
    assert len(journal.done) == kept
    assert journal.damaged == 3 - kept
    journal.add("id2", record(2))
    again = Journal(path, resume=True)
    assert set(again.done) == {"id0", "id1", "id2"}
    assert again.damaged == 0


def features(values):
    return base64.b64encode(np.array(values, "<f4").tobytes()).decode()


@pytest.mark.parametrize(
    "edit",
    [
        {"identity": [1]},
        {"prompt": -1},
        {"prompt": True},
        {"seed": 1.5},
        {"ssim": "0.5"},
        {"ssim": 7},
        {"steps_ms": 0},
        {"steps_ms": True},
        {"verdict": []},
        {"verdict": {"right": {"concept": True}}},
        {"verdict": {**VERDICT, "right": {}}},
        {"verdict": {**VERDICT, "right": {"concept": "yes"}}},
        {"verdict": {**VERDICT, "swapped": None}},
        {"features": ""},
        {"features": "AAAA"},
        {"features": features([1, 2, float("nan"), 4])},
        {"places": 3},
        {"places": 0},
        {"surprise": 1},
    ],
)
def test_a_line_that_is_no_whole_record_is_dropped(tmp_path, edit):
    path = tmp_path / "pictures.jsonl"
    first, second = written(path, 2).splitlines(keepends=True)
    path.write_text(json.dumps({**json.loads(first), **edit}) + "\n" + second.decode())
    journal = Journal(path, resume=True)
    assert (list(journal.done), journal.damaged) == (["id1"], 1)
    assert path.read_bytes() == second


@pytest.mark.parametrize(
    "line", [b"null", b"[]", b"7", b"[" * 100_000, b"\xff\xfe\x00", b'{"seed": 1e999}', b'{"ssim": NaN}', b""]
)
def test_a_foreign_line_is_dropped(tmp_path, line):
    path = tmp_path / "pictures.jsonl"
    whole = written(path, 1)
    path.write_bytes(line + b"\n" + whole)
    journal = Journal(path, resume=True)
    assert (list(journal.done), journal.damaged) == (["id0"], 1)
    assert path.read_bytes() == whole


def test_a_journal_that_is_no_file_is_named(tmp_path):
    path = tmp_path / "pictures.jsonl"
    path.mkdir()
    with pytest.raises(ToprovarError, match=r"pictures.jsonl cannot be read: Is a directory"):
        Journal(path, resume=True)
    path.rmdir()
    path.symlink_to(tmp_path / "nowhere" / "x")
    with pytest.raises(ToprovarError, match="symbolic link to nothing"):
        Journal(path, resume=True)


def test_an_earlier_journal_is_not_mixed_in_unasked(tmp_path):
    path = tmp_path / "pictures.jsonl"
    before = written(path, 1)
    with pytest.raises(ToprovarError, match="an earlier evaluation was begun there") as error:
        Journal(path, resume=False)
    assert "--resume" in error.value.hint
    assert path.read_bytes() == before


def test_nothing_to_resume_is_a_start(tmp_path):
    assert Journal(tmp_path / "pictures.jsonl", resume=True).done == {}
    assert not list(tmp_path.iterdir())
