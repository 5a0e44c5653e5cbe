"""Videos as files: MP4 (H.264) through PyAV, or one PNG per frame."""

from __future__ import annotations

import io
from collections.abc import Mapping
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np

from toprovar.runtime.errors import EnvironmentFault, ToprovarError
from toprovar.runtime.image_files import printable, write_png
from toprovar.runtime.json_files import check_replaceable, write_bytes

CODEC = "libx264"
QUALITY = "18"  # constant rate factor: 0 loses nothing but colour resolution, 51 is worst; 18 is hard to tell apart
BT709 = 1  # the colour matrix, primaries and transfer that players assume for files of this size


def frames_from_video(video: np.ndarray, first_from_second: bool = False) -> np.ndarray:
    """The decoder's video as pictures. video: [3, T, H, W] in [-1, 1] -> [T, H, W, 3] uint8, truncated.

    first_from_second: repeat the second frame in place of the first, as InfinityStar does with every video; the first
                       comes from a clip of its own and differs visibly
    """
    frames = ((np.clip(video, -1, 1) + 1) * 127.5).astype(np.uint8).transpose(1, 2, 3, 0).copy()
    if first_from_second and len(frames) > 1:
        frames[0] = frames[1]
    return frames


def write_mp4(path: Path, frames: np.ndarray, fps: float, facts: Mapping[str, str] | None = None) -> None:
    """Writes [T, H, W, 3] uint8 as H.264 in MP4, complete or not at all.

    Colours are stored at half resolution (yuv420p), which every player takes and which needs even sides: an odd side
    gets one more row or column, a copy of the last one.
    fps:    frames per second
    facts:  text entries (prompt, seed, bundle digest ...) that the file carries
    Raises: ToprovarError if the place cannot be written, EnvironmentFault without PyAV or its H.264 encoder.
    """
    _check(frames)
    if not 0 < fps <= 1000:
        raise ToprovarError(f"a video of {fps} frames per second cannot be written", "expected 0 < fps <= 1000")
    check_replaceable(path)  # before the work
    write_bytes(path, _encoded(_even(frames), fps, facts or {}))


def write_frames(folder: Path, frames: np.ndarray, facts: Mapping[str, str] | None = None) -> list[Path]:
    """Writes [T, H, W, 3] uint8 as frame_0000.png and so on, without loss; every file is complete or absent.

    Raises: ToprovarError if the place cannot be written.
    """
    _check(frames)
    digits = max(4, len(str(len(frames) - 1)))
    paths = [folder / f"frame_{index:0{digits}d}.png" for index in range(len(frames))]
    for path, frame in zip(paths, frames, strict=True):
        write_png(path, frame, dict(facts or {}))
    return paths


def _check(frames: np.ndarray) -> None:
    if frames.dtype != np.uint8 or frames.ndim != 4 or frames.shape[3] != 3 or 0 in frames.shape:
        raise ValueError(f"frames are {frames.dtype}{list(frames.shape)}; expected uint8 [T, H, W, 3], none empty")


def _even(frames: np.ndarray) -> np.ndarray:
    """Odd sides one longer, by a copy of the last row or column."""
    height, width = frames.shape[1:3]
    return np.pad(frames, ((0, 0), (0, height % 2), (0, width % 2), (0, 0)), mode="edge")


def _require_av() -> Any:
    hint = "pip install 'toprovar[video]', or write the frames as PNG files"
    try:
        import av
    except ImportError:
        raise EnvironmentFault("writing MP4 needs PyAV, which is not installed", hint) from None
    if CODEC not in av.codecs_available:
        raise EnvironmentFault(f"PyAV {av.__version__} has no encoder {CODEC}, which MP4 files need", hint)
    return av


def _encoded(frames: np.ndarray, fps: float, facts: Mapping[str, str]) -> bytes:
    av = _require_av()
    from av.video.reformatter import ColorRange, Colorspace

    file = io.BytesIO()
    with av.open(file, "w", format="mp4", options={"movflags": "use_metadata_tags"}) as container:
        container.metadata.update({key: printable(value) for key, value in facts.items()})
        stream = container.add_stream(CODEC, rate=Fraction(fps).limit_denominator(1001), options={"crf": QUALITY})
        stream.height, stream.width = frames.shape[1:3]
        stream.pix_fmt = "yuv420p"
        context = stream.codec_context
        context.colorspace = context.color_primaries = context.color_trc = BT709
        context.color_range = ColorRange.MPEG
        for picture in frames:
            frame = av.VideoFrame.from_ndarray(np.ascontiguousarray(picture), format="rgb24")
            frame = frame.reformat(format="yuv420p", dst_colorspace=Colorspace.ITU709, dst_color_range=ColorRange.MPEG)
            for packet in stream.encode(frame):
                container.mux(packet)
        for packet in stream.encode():
            container.mux(packet)
    return file.getvalue()
