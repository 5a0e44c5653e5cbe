"""Bits of a video are the signs of what the passes before left; given to InfinityStar's loop they make its codes."""

from __future__ import annotations

import infinitystar_reference as reference
import numpy as np
import pytest
from infinitystar_reference import area_rows, linear_rows
from video_reference import random_video_tokenizer

torch = pytest.importorskip("torch", reason="needs PyTorch: pip install 'toprovar[torch]'")

from toprovar.exporter.infinitystar.generate import BitNoise, generate  # noqa: E402
from toprovar.exporter.infinitystar.load import load_infinitystar  # noqa: E402
from toprovar.exporter.infinitystar.schedule import VideoSchedule  # noqa: E402
from toprovar.exporter.video_tokenizer.encode import quantise_residual, video_bits  # noqa: E402
from toprovar.exporter.video_tokenizer.tokenizer import load_video_tokenizer  # noqa: E402
from toprovar.runtime.errors import ToprovarError  # noqa: E402
from toprovar.runtime.guidance import Guidance, Projection  # noqa: E402

CASE = reference.Case(detail_bits=8, semantic_bits=3)
SCHEDULE = VideoSchedule(tuple(CASE.schedule), CASE.image_repetitions, CASE.video_repetitions, CASE.semantic_scales)
# fp32 sums of +-1/sqrt(n) and their means against float64; measured 1e-7
TOLERANCE = 1e-6


def residual_signs(codes):
    """Plain float64. codes: [d, F, H, W]."""
    found, clips, start = [], [], 0
    H, W = CASE.maps[-1]
    for clip, frames in enumerate(CASE.clips):
        target = codes[:, start : start + frames].astype(np.float64)
        summed = np.zeros(target.shape)
        repetitions = CASE.video_repetitions if clip else CASE.image_repetitions
        for scale, (h, w) in enumerate(CASE.maps):
            for _ in range(repetitions[scale]):
                n = CASE.semantic_bits if scale < CASE.semantic_scales else CASE.detail_bits
                d = CASE.detail_bits
                left = np.einsum(
                    "nc,ih,jw,cthw->ntij", area_rows(d, n), area_rows(H, h), area_rows(W, w), target - summed
                )
                bits = left > 0
                values = np.where(bits, 1.0, -1.0) / np.sqrt(n)
                stretch = linear_rows(n, d) if n != d else np.eye(n)
                summed += np.einsum("cn,hi,wj,ntij->cthw", stretch, linear_rows(h, H), linear_rows(w, W), values)
                found.append(bits.transpose(1, 2, 3, 0).reshape(-1, n))
        clips.append(summed)
        start += frames
    return found, np.concatenate(clips, axis=1)


@pytest.fixture(scope="module")
def tokenizer():
    return load_video_tokenizer({n: torch.from_numpy(a) for n, a in random_video_tokenizer(blocks=1).items()}, "test")


def frames_of(count):
    height, width = (16 * side for side in SCHEDULE.last)
    return np.random.default_rng(count).integers(0, 256, (count, height, width, 3), dtype=np.uint8)


def run_with(bits):
    weights = reference.random_weights(CASE)
    model = load_infinitystar({name: torch.from_numpy(array) for name, array in weights.items()}, "case")
    passes = len(SCHEDULE.passes())
    guidance = Guidance(cfg=(2.0,) * passes, tau=(1.0,) * passes, top_p=0, projection=Projection())
    text = torch.from_numpy(np.random.default_rng(5).standard_normal((4, CASE.text_width)).astype(np.float32))
    return generate(model, model.prompt([text]), SCHEDULE, guidance, BitNoise([3], CASE.detail_bits), given_bits=bits)


def test_bits_are_the_signs_of_the_residual():
    codes = np.random.default_rng(0).standard_normal((1, CASE.detail_bits, SCHEDULE.frames, *SCHEDULE.last))
    expected, total = residual_signs(codes[0])
    found = quantise_residual(torch.from_numpy(codes).float(), SCHEDULE, CASE.semantic_bits)
    assert len(found.bits) == len(expected) == len(SCHEDULE.passes())
    for bits, wanted in zip(found.bits, expected, strict=True):
        assert np.array_equal(bits[0].numpy() > 0, wanted)
    stacked = found.codes[0].unflatten(1, (SCHEDULE.frames, -1)).numpy()
    assert np.abs(stacked - total).max() <= TOLERANCE


def test_giving_the_bits_of_a_video_makes_its_codes(tokenizer):
    known = video_bits(tokenizer, frames_of(9), SCHEDULE, CASE.semantic_bits)
    run = run_with(known.bits)
    assert torch.allclose(run.codes, known.codes, atol=TOLERANCE)


def test_a_picture_begins_a_video(tokenizer):
    known = video_bits(tokenizer, frames_of(1), SCHEDULE, CASE.semantic_bits)
    assert len(known.bits) == sum(CASE.image_repetitions)
    height = SCHEDULE.last[0]
    assert (known.codes[:, :, height:] == 0).all()
    run = run_with(known.bits)
    assert torch.allclose(run.codes[:, :, :height], known.codes[:, :, :height], atol=TOLERANCE)
    assert (run.codes[:, :, height:] != 0).any()
    noise = torch.randn(1, CASE.detail_bits, 1, *SCHEDULE.last, generator=torch.Generator().manual_seed(1))
    drawn = video_bits(tokenizer, frames_of(1), SCHEDULE, CASE.semantic_bits, noise)
    assert not torch.equal(drawn.bits[-1], known.bits[-1])


@pytest.mark.parametrize("shape", [(5, 48, 64, 3), (9, 48, 48, 3), (1, 32, 64, 3)])
def test_videos_that_do_not_fit_are_refused(tokenizer, shape):
    with pytest.raises(ToprovarError, match="expected 1 or 9 frames of 48x64"):
        video_bits(tokenizer, np.zeros(shape, np.uint8), SCHEDULE, CASE.semantic_bits)
    with pytest.raises(ValueError, match="expected uint8"):
        video_bits(tokenizer, np.zeros(shape, np.float32), SCHEDULE, CASE.semantic_bits)
