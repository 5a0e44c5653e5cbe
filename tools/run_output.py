"""Where `toprovar run` writes: a PNG file, and for videos an MP4 file or a folder with one PNG per frame."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from toprovar.runtime.errors import ToprovarError
from toprovar.runtime.image_files import write_png
from toprovar.runtime.json_files import check_folder, check_replaceable
from toprovar.runtime.video_files import write_frames, write_mp4

if TYPE_CHECKING:
    from collections.abc import Mapping

    from toprovar.runtime.manifest import Manifest
    from toprovar.runtime.pipeline import Result

PICTURE, VIDEO = Path("image.png"), Path("video.mp4")


def check_kind(out: Path | None) -> None:
    """Raises: ToprovarError for what is neither a picture nor a video, whatever the bundle makes."""
    if out is None:
        return
    if out.suffix.lower() not in (".png", ".mp4", ""):
        raise ToprovarError(
            f"{out} does not end in .png; pictures are written as PNG, videos as MP4", f"pass -o {out.stem}.png"
        )
    check_folder(out.absolute().parent)
    if out.suffix:
        check_replaceable(out)


def checked_out(out: Path | None, manifest: Manifest) -> Path:
    """Where to write, or the usual name. Raises: ToprovarError if a picture would be written as a video or so."""
    makes_video = manifest.video is not None and manifest.video.maps > 1
    place = out or (VIDEO if makes_video else PICTURE)
    suffix = place.suffix.lower()
    if makes_video and suffix == ".png":
        raise ToprovarError(
            f"the bundle makes videos; {place} names one picture",
            f"pass -o {place.stem}.mp4, or a name without ending for a folder of frames",
        )
    if not makes_video and suffix != ".png":
        what = "is a folder; expected the name of a PNG file" if place.is_dir() else "does not end in .png"
        raise ToprovarError(f"{place} {what}; the bundle makes pictures", f"pass -o {place.stem}.png")
    if suffix:
        check_replaceable(place)
    else:
        check_folder(place)
    return place


def write_result(result: Result, out: Path, manifest: Manifest, facts: Mapping[str, str]) -> None:
    """The picture or video in the form that `out` names."""
    if result.frames is None:
        assert result.image is not None  # there is a decoder
        write_png(out, result.image, dict(facts))
    elif out.suffix:
        assert manifest.video is not None
        write_mp4(out, result.frames, manifest.video.fps, facts)
    else:
        write_frames(out, result.frames, facts)
