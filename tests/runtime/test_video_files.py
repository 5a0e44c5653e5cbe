"""Videos written as MP4 or PNG files come back: number of frames, size, pictures, facts; nothing half-written stays."""

from __future__ import annotations

import builtins
import sys

import numpy as np
import pytest
from PIL import Image

from toprovar.runtime.errors import EnvironmentFault, ToprovarError
from toprovar.runtime.video_files import frames_from_video, write_frames, write_mp4

# H.264 at the written quality, smooth moving pictures; measured 36.9 dB
LEAST_PSNR_DB = 34.0
# one solid colour: rounding to 8-bit YUV and back; measured 2
COLOUR_TOLERANCE = 4


def moving_picture(frames: int = 9, height: int = 64, width: int = 80) -> np.ndarray:
    y, x = np.mgrid[:height, :width]
    pictures = [
        [128 + 100 * np.sin((x + 3 * t) / 9), 128 + 100 * np.cos((y - 2 * t) / 11), np.full(x.shape, 40 + 20 * t)]
        for t in range(frames)
    ]
    return np.array(pictures).transpose(0, 2, 3, 1).astype(np.uint8)


def read_mp4(path):
    av = pytest.importorskip("av", reason="needs PyAV: pip install 'toprovar[video]'")
    with av.open(str(path)) as container:
        stream = container.streams.video[0]
        rate, facts = stream.average_rate, dict(container.metadata)
        return np.stack([frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)]), rate, facts


def psnr_db(a: np.ndarray, b: np.ndarray) -> float:
    return float(10 * np.log10(255**2 / np.mean((a.astype(float) - b.astype(float)) ** 2)))


@pytest.mark.parametrize(("height", "width"), [(64, 80), (63, 81), (17, 32)])
def test_mp4_comes_back(tmp_path, height, width):
    pytest.importorskip("av", reason="needs PyAV: pip install 'toprovar[video]'")
    frames = moving_picture(9, height, width)
    write_mp4(tmp_path / "deep" / "video.mp4", frames, 16, {"prompt": "ein Hündchen", "seed": "3"})
    found, rate, facts = read_mp4(tmp_path / "deep" / "video.mp4")
    assert found.shape == (9, height + height % 2, width + width % 2, 3)
    assert rate == 16
    assert facts["prompt"] == "ein Hündchen"
    assert facts["seed"] == "3"
    padded = np.pad(frames, ((0, 0), (0, height % 2), (0, width % 2), (0, 0)), mode="edge")
    assert psnr_db(found, padded) >= LEAST_PSNR_DB
    for index in range(9):  # no frame twice, none out of order
        assert np.argmin([np.abs(padded[index] - other.astype(float)).mean() for other in found]) == index
    assert [path.name for path in (tmp_path / "deep").iterdir()] == ["video.mp4"]


@pytest.mark.parametrize("colour", [(255, 0, 0), (30, 128, 200), (0, 0, 0), (255, 255, 255)])
def test_colours_stay(tmp_path, colour):
    pytest.importorskip("av", reason="needs PyAV: pip install 'toprovar[video]'")
    write_mp4(tmp_path / "v.mp4", np.full((3, 32, 32, 3), colour, np.uint8), 24)
    found = read_mp4(tmp_path / "v.mp4")[0]
    assert np.abs(found.astype(int) - colour).max() <= COLOUR_TOLERANCE


def test_one_frame_is_a_video(tmp_path):
    pytest.importorskip("av", reason="needs PyAV: pip install 'toprovar[video]'")
    write_mp4(tmp_path / "v.mp4", moving_picture(1), 8)
    assert read_mp4(tmp_path / "v.mp4")[0].shape == (1, 64, 80, 3)


def test_a_failure_leaves_the_old_file_and_nothing_else(tmp_path, monkeypatch):
    av = pytest.importorskip("av", reason="needs PyAV: pip install 'toprovar[video]'")
    (tmp_path / "v.mp4").write_bytes(b"old")

    def fail(*args, **kwargs):
        raise MemoryError

    monkeypatch.setattr(av.VideoFrame, "from_ndarray", fail, raising=True)
    with pytest.raises(MemoryError):
        write_mp4(tmp_path / "v.mp4", moving_picture(2), 16)
    assert [(path.name, path.read_bytes()) for path in tmp_path.iterdir()] == [("v.mp4", b"old")]


def test_without_pyav_the_message_says_what_to_install(tmp_path, monkeypatch):
    real = builtins.__import__

    def without(name, *args, **kwargs):
        if name.split(".")[0] == "av":
            raise ImportError(name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(EnvironmentFault, match="needs PyAV, which is not installed") as caught:
        write_mp4(tmp_path / "v.mp4", moving_picture(1), 16)
    assert "pip install 'toprovar[video]'" in caught.value.hint
    assert not list(tmp_path.iterdir())


def test_a_pyav_without_the_encoder_is_named(tmp_path, monkeypatch):
    class Fake:
        __version__, codecs_available = "99", frozenset({"mpeg4"})

    monkeypatch.setitem(sys.modules, "av", Fake)
    with pytest.raises(EnvironmentFault, match="PyAV 99 has no encoder libx264"):
        write_mp4(tmp_path / "v.mp4", moving_picture(1), 16)


@pytest.mark.parametrize("fps", [0, -1, float("nan"), 1e6])
def test_impossible_rates_are_refused(tmp_path, fps):
    with pytest.raises(ToprovarError, match="expected 0 < fps <= 1000"):
        write_mp4(tmp_path / "v.mp4", moving_picture(1), fps)


def test_a_folder_in_the_way_is_refused(tmp_path):
    (tmp_path / "v.mp4").mkdir()
    with pytest.raises(ToprovarError, match=r"v\.mp4"):
        write_mp4(tmp_path / "v.mp4", moving_picture(1), 16)


@pytest.mark.parametrize("shape", [(0, 4, 4, 3), (4, 4, 3), (1, 4, 4, 4)])
def test_what_are_no_frames_is_a_fault_of_ours(tmp_path, shape):
    frames = np.zeros(shape, np.uint8)
    with pytest.raises(ValueError, match="expected uint8"):
        write_mp4(tmp_path / "v.mp4", frames, 8)
    with pytest.raises(ValueError, match="expected uint8"):
        write_frames(tmp_path, frames)


def test_frames_as_png_files_come_back_exactly(tmp_path):
    frames = moving_picture(3, 7, 5)
    paths = write_frames(tmp_path / "frames", frames, {"seed": "3"})
    assert [path.name for path in paths] == ["frame_0000.png", "frame_0001.png", "frame_0002.png"]
    for path, frame in zip(paths, frames, strict=True):
        with Image.open(path) as picture:
            assert picture.text == {"seed": "3"}
            assert np.array_equal(np.asarray(picture), frame)


def test_decoder_output_becomes_pictures():
    video = np.linspace(-1.5, 1.5, 3 * 2 * 4 * 5).astype(np.float32).reshape(3, 2, 4, 5)
    frames = frames_from_video(video)
    assert frames.shape == (2, 4, 5, 3)
    assert frames[1, 2, 3, 0] == int((np.clip(video[0, 1, 2, 3], -1, 1) + 1) * 127.5)
    assert (frames.min(), frames.max()) == (0, 255)
    repeated = frames_from_video(video, first_from_second=True)
    assert np.array_equal(repeated[0], frames[1])
    assert np.array_equal(repeated[1], frames[1])
    assert len(frames_from_video(video[:, :1], first_from_second=True)) == 1
