from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from toprovar.runtime.errors import ToprovarError
from toprovar.tools.run_output import PICTURE, VIDEO, check_kind, checked_out


def manifest(maps: int) -> Any:
    return SimpleNamespace(video=SimpleNamespace(maps=maps) if maps else None)


def test_the_usual_name_says_what_the_bundle_makes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert checked_out(None, manifest(0)) == PICTURE
    assert checked_out(None, manifest(1)) == PICTURE  # one frame is a picture
    assert checked_out(None, manifest(6)) == VIDEO
    assert checked_out(Path("frames"), manifest(6)) == Path("frames")
    assert checked_out(Path("x.PNG"), manifest(0)) == Path("x.PNG")


@pytest.mark.parametrize(
    ("name", "maps", "words"),
    [
        ("x.png", 6, "the bundle makes videos; {} names one picture"),
        ("x.mp4", 0, "does not end in .png; the bundle makes pictures"),
        ("x.mp4", 1, "does not end in .png; the bundle makes pictures"),
        ("frames", 0, "does not end in .png; the bundle makes pictures"),
    ],
)
def test_a_name_that_says_otherwise_is_refused(tmp_path: Path, name: str, maps: int, words: str) -> None:
    with pytest.raises(ToprovarError) as caught:
        checked_out(tmp_path / name, manifest(maps))
    assert words.format(tmp_path / name) in caught.value.message
    assert "pass -o" in str(caught.value.hint)


def test_what_is_neither_is_refused_before_the_bundle_is_opened(tmp_path: Path) -> None:
    check_kind(None)
    check_kind(tmp_path / "x.mp4")
    with pytest.raises(ToprovarError, match="pictures are written as PNG, videos as MP4"):
        check_kind(tmp_path / "x.gif")
    with pytest.raises(ToprovarError, match="is a folder"):
        check_kind(tmp_path)
