from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from toprovar.exporter.infinitystar.rope import map_angles, text_angles
from toprovar.exporter.infinitystar.schedule import (
    TEMPLATES,
    VideoSchedule,
    check_detail_size,
    clips_of,
    frames_from,
    nearest_template,
    schedule_of,
    square_schedule,
    video_schedule,
)
from toprovar.runtime.errors import ToprovarError

FIXTURE = Path(__file__).parents[3].parent / "shared" / "fixtures" / "infinitystar_tiny.npz"


@pytest.mark.parametrize(
    ("budget", "frames", "passes", "tokens"),
    [("0.40M", 81, 81, 161_397), ("0.90M", 81, 85, 244_197)],
)
def test_published_sizes_take_the_published_passes(budget: str, frames: int, passes: int, tokens: int) -> None:
    schedule = video_schedule(0.5625, budget, frames)
    steps = schedule.passes()
    assert len(steps) == passes
    assert sum(step.tokens for step in steps) == tokens
    assert [step.index for step in steps] == list(range(passes))


def test_recorded_schedules_come_out() -> None:
    if not FIXTURE.exists():
        pytest.skip(f"needs the shipped parity file {FIXTURE.name} in shared/fixtures beside the repository")
    with np.load(FIXTURE) as archive:
        recorded = json.loads(str(archive["meta"]))["full_schedules"]
    assert recorded
    for name, facts in recorded.items():
        budget, frames = name.split("/")
        found = video_schedule(facts["template"], budget, int(frames))
        assert [list(entry) for entry in found.entries] == facts["schedule"], name


def test_maps_are_of_equal_area_and_turn_with_the_ratio() -> None:
    assert TEMPLATES["0.562"][-2:] == ((30, 53), (45, 80))
    assert TEMPLATES["1.777"][-1] == (80, 45)
    assert len(TEMPLATES) == 15
    assert nearest_template(0.57) == "0.562"
    assert nearest_template(1.0) == "1.000"


def test_a_pass_sees_the_last_map_of_the_clip_before() -> None:
    schedule = VideoSchedule(((1, 1, 1), (1, 2, 3), (4, 1, 1), (4, 2, 3), (2, 1, 1), (2, 2, 3)), (2, 1), (1, 2), 1)
    steps = schedule.passes()
    assert [step.clip for step in steps] == [0, 0, 0, 1, 1, 1, 2, 2, 2]
    assert [step.context for step in steps] == [None] * 3 + [1] * 3 + [3] * 3
    assert [step.index for step in steps if step.keeps] == [2, 5]
    assert [step.index for step in steps if step.opens] == [0, 3, 6]
    assert [step.first_frame for step in steps] == [0] * 3 + [1] * 3 + [5] * 3
    assert [step.is_semantic for step in steps] == [True, True, False, True, False, False, True, False, False]
    assert schedule.clips == (1, 4, 2)


def test_frames_make_clips() -> None:
    assert clips_of(1) == (1,)
    assert clips_of(81) == (1, 20)
    assert clips_of(161) == (1, 20, 20)
    assert clips_of(97) == (1, 20, 4)
    for frames in (0, 80):
        with pytest.raises(ToprovarError, match=f"a video of {frames} frames") as error:
            clips_of(frames)
        assert "81" in str(error.value.hint)


def test_bad_schedules_are_refused() -> None:
    with pytest.raises(ToprovarError, match="does not repeat the maps of its first clip"):
        VideoSchedule(((1, 1, 1), (1, 2, 2), (4, 1, 2), (4, 2, 2)), (1, 1), (1, 1), 1)
    with pytest.raises(ToprovarError, match=r"video repetitions \[1\] do not fit"):
        VideoSchedule(((1, 1, 1), (1, 2, 2)), (1, 1), (1,), 1)
    with pytest.raises(ToprovarError, match=r"unknown budget 1M; expected one of 0\.06M"):
        video_schedule(budget="1M")
    with pytest.raises(ToprovarError, match="aspect 0 is not"):
        nearest_template(0)
    schedule = VideoSchedule(((1, 1, 1), (1, 2, 3)), (1, 1), (1, 1), 1)
    check_detail_size(schedule, 6)
    with pytest.raises(ToprovarError, match="map 1, 2x3, is detail by its place"):
        check_detail_size(schedule, 7)


def test_published_maps_agree_about_detail() -> None:
    check_detail_size(video_schedule(0.5625, "0.40M"), 350)
    check_detail_size(video_schedule(0.5625, "0.90M"), 750)


def test_frames_of_another_clip_are_lent_in_proportion() -> None:
    steps = VideoSchedule(((1, 1, 1), (4, 1, 1), (2, 1, 1)), (1,), (1,), 0).passes()
    assert frames_from(steps[0], steps[1]) == [0, 0, 0, 0]
    assert frames_from(steps[2], steps[1]) == [0, 0, 1, 1]
    assert frames_from(steps[1], steps[2]) == [0, 2]
    assert frames_from(steps[1], steps[1]) == [0, 1, 2, 3]


def test_a_schedule_is_found_by_its_passes() -> None:
    long, own = video_schedule(0.75, "0.25M", 97), square_schedule((1, 3), 5)
    assert schedule_of(long.flat, [own, video_schedule(0.75, "0.25M")]) == long
    assert schedule_of(own.flat, [own]) == own
    assert own.semantic_scales == 1
    for flat in (own.flat[:-1], ((2, 2), *own.flat[1:]), (*own.flat, (1, 1))):
        with pytest.raises(ToprovarError, match="is none of InfinityStar's"):
            schedule_of(flat, [own])


def test_positions_count_passes_from_512() -> None:
    step = VideoSchedule(((1, 1, 1), (1, 3, 4), (2, 1, 1), (2, 3, 4)), (1, 2), (1, 1), 1).passes()[4]
    angles = map_angles(step, (6, 4), 16)  # per axis the frequencies 1 and 0.01
    assert angles.shape == (24, 8)
    assert np.array_equal(angles[:, 0], np.full(24, 516, np.float32))
    assert np.array_equal(angles[:, 2], np.repeat(np.float32([1, 2]), 12))
    assert np.array_equal(angles[:12, 4], np.repeat(np.float32([0, 2, 4]), 4))
    assert np.array_equal(angles[:4, 6], np.float32([0, 1, 2, 3]))
    assert np.allclose(angles[:, 1::2], angles[:, ::2] * 0.01, rtol=1e-6)
    assert np.array_equal(text_angles(3, 16)[:, 0], np.float32([0, 1, 2]))
    assert not text_angles(3, 16)[:, 2:].any()
