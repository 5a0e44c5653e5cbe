"""Wrong options of the demo model's training: one message, no traceback, nothing written."""

from __future__ import annotations

import pytest
from command_line import listing

from toprovar.tools.train_demo import train


def refused(capsys, *arguments, code=2):
    assert train.main([str(argument) for argument in arguments]) == code
    end = capsys.readouterr()
    assert not end.out
    assert end.err.startswith("error: ")
    assert "\n  hint: " in end.err
    return end.err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--device", "tpu"), "unknown device tpu"),
        (("--minutes", "nan"), "--minutes is nan"),
        (("--minutes", "-1"), "--minutes is -1.0"),
        (("--deadline", "inf"), "--deadline is inf"),
        (("--seed", "-1"), "--seed is -1"),
        (("--seed", 2**64), "--seed is 18446744073709551616"),
        (("--pool", 0), "--pool is 0"),
        (("--concepts", 0), "--concepts is 0"),
        (("--max-steps", -1), "--max-steps is -1"),
    ],
)
def test_a_value_out_of_range_is_named(tmp_path, capsys, options, message):
    common = ("tokenizer", "--data", tmp_path / "data", "--work-dir", tmp_path / "w", "--device", "cpu", "--rehearsal")
    assert message in refused(capsys, *common, *options)
    assert not listing(tmp_path)


@pytest.mark.parametrize("option", ["--work-dir", "--out"])
def test_a_place_that_is_a_file_is_named(tmp_path, capsys, option):
    (tmp_path / "file").write_text("")
    said = refused(capsys, "tokenizer", "--data", tmp_path, "--device", "cpu", option, tmp_path / "file")
    assert "is a file" in said
    assert listing(tmp_path) == ["file"]


def test_an_interrupted_training_says_so(tmp_path, capsys, monkeypatch):
    def interrupted(options):
        raise KeyboardInterrupt

    monkeypatch.setattr(train, "train", interrupted)
    assert train.main(["tokenizer", "--data", str(tmp_path), "--device", "cpu", "--out", str(tmp_path / "o")]) == 130
    assert "interrupted" in capsys.readouterr().err
