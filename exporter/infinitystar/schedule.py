"""What InfinityStar draws and in which order: clips of frames, maps of growing size in each, passes over each map.

A video is an image clip of one latent frame and clips of up to 20 further ones. Every clip goes through the same maps,
small ones several times; the count of passes, over all clips, is a coordinate of the rotary positions.
Source: FoundationVision/InfinityStar, infinity/schedules/dynamic_resolution.py and infinity_elegant.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from fractions import Fraction

import numpy as np

from toprovar.runtime.errors import ToprovarError

Entry = tuple[int, int, int]  # frames, height, width of a map

BUDGET_SCALES = {"0.06M": 11, "0.25M": 13, "0.40M": 14, "0.90M": 15}
SEMANTIC_SCALES = {"0.06M": 11, "0.25M": 11, "0.40M": 11, "0.90M": 12}  # stated for the two largest alone
CLIP_FRAMES = 20  # latent frames of a clip behind the first
FRAME_STRIDE = 4  # video frames per latent frame
PIXEL_STRIDE = 16
FRAMES_PER_SECOND = 16
_STEPS = (1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 16, 24, 32, 40, 60)
_RATIOS = (Fraction(1), Fraction(100, 116), *map(Fraction, ("3/4", "2/3", "9/16", "1/2", "2/5", "1/3")))


def _maps(ratio: Fraction) -> tuple[tuple[int, int], ...]:
    """(h, w) of equal areas, rounded half to even; ratio is height over width."""
    pairs = []
    for k in _STEPS:
        width = np.sqrt(k**2 / float(ratio))
        pairs.append((max(round(width * float(ratio)), 1), max(round(width), 1)))
    return tuple(pairs)


def _key(pair: tuple[int, int]) -> str:
    return f"{int(1000 * pair[0] / pair[1]) / 1000:.3f}"


def _templates() -> dict[str, tuple[tuple[int, int], ...]]:
    found = {}
    for ratio in _RATIOS:
        maps = _maps(ratio)
        found[_key(maps[-1])] = maps
        turned = tuple((w, h) for h, w in maps)
        found.setdefault(_key(turned[-1]), turned)
    return found


TEMPLATES = _templates()  # height / width -> the 15 maps of the largest budget


@dataclass(frozen=True)
class Pass:
    """One run of the transformer over one map.

    index:       counted over all clips; a coordinate of the positions
    scale:       of the clip; entry: of the schedule, counted over all clips
    first_frame: of the clip, latent frames
    context:     entry whose keys are seen besides text and own ones: the last of the clip before; None for the first
    context_pass: the last pass over it
    keeps:       its keys are seen later
    opens, closes: first and last pass of its clip
    """

    index: int
    clip: int
    scale: int
    entry: int
    repetition: int
    frames: int
    height: int
    width: int
    first_frame: int
    is_semantic: bool
    context: int | None
    context_pass: int | None
    keeps: bool
    opens: bool
    closes: bool

    @property
    def size(self) -> tuple[int, int]:
        return self.height, self.width

    @property
    def flat(self) -> tuple[int, int]:
        """Height and width of the frames on top of one another: how plans and bundles see the map."""
        return self.frames * self.height, self.width

    @property
    def tokens(self) -> int:
        return self.frames * self.height * self.width


@dataclass(frozen=True)
class VideoSchedule:
    """entries:         all maps of all clips in order; a clip ends with a map of the last one's size
    image_repetitions:  passes per map of the first clip; video_repetitions: of every further clip
    semantic_scales:    maps of a clip whose tokens have few bits
    """

    entries: tuple[Entry, ...]
    image_repetitions: tuple[int, ...]
    video_repetitions: tuple[int, ...]
    semantic_scales: int

    def __post_init__(self) -> None:
        per_clip = self.scales
        clips = [self.entries[i : i + per_clip] for i in range(0, len(self.entries), per_clip)]
        maps = [entry[1:] for entry in clips[0]]
        for clip in clips:
            if [entry[1:] for entry in clip] != maps or len({entry[0] for entry in clip}) != 1:
                raise ToprovarError(
                    f"schedule {_text(self.entries)} does not repeat the maps of its first clip, {_text(clips[0])}",
                    "every clip has the same maps and one number of frames",
                )
        for name, counts in (("image", self.image_repetitions), ("video", self.video_repetitions)):
            if len(counts) != per_clip or min(counts) < 1:
                raise ToprovarError(
                    f"{name} repetitions {list(counts)} do not fit: expected one positive number for each of "
                    f"{per_clip} maps"
                )

    @property
    def scales(self) -> int:
        """Maps per clip."""
        last = self.entries[-1][1:]
        return next(i for i, entry in enumerate(self.entries) if entry[1:] == last) + 1

    @property
    def clips(self) -> tuple[int, ...]:
        """Latent frames of each."""
        return tuple(entry[0] for entry in self.entries[self.scales - 1 :: self.scales])

    @property
    def last(self) -> tuple[int, int]:
        """Height and width of the latent."""
        return self.entries[-1][1:]

    @property
    def frames(self) -> int:
        """Of the latent."""
        return sum(self.clips)

    @property
    def flat(self) -> tuple[tuple[int, int], ...]:
        """Every pass as a map; what plans and bundles call a scale is a pass."""
        return tuple(step.flat for step in self.passes())

    def per_pass(self, values: Sequence[float], what: str) -> tuple[float, ...]:
        """One value for all, one per map over all clips, or one per pass. Raises: ToprovarError for another number."""
        steps, count = self.passes(), len(self.entries)
        if len(values) == 1:
            return tuple(values) * len(steps)
        if len(values) == len(steps):
            return tuple(values)
        if len(values) != count:
            raise ToprovarError(
                f"{what} has {len(values)} values; the schedule has {count} maps and {len(steps)} passes",
                f"give one value, or {count} of them",
            )
        return tuple(values[step.entry] for step in steps)

    def passes(self) -> tuple[Pass, ...]:
        found: list[Pass] = []
        kept: list[int] = []
        clips, per_clip = self.clips, self.scales
        for entry, (frames, height, width) in enumerate(self.entries):
            clip, scale = divmod(entry, per_clip)
            count = (self.video_repetitions if clip else self.image_repetitions)[scale]
            for repetition in range(count):
                closes = scale == per_clip - 1 and repetition == count - 1
                found.append(
                    Pass(
                        index=len(found),
                        clip=clip,
                        scale=scale,
                        entry=entry,
                        repetition=repetition,
                        frames=frames,
                        height=height,
                        width=width,
                        first_frame=sum(clips[:clip]),
                        is_semantic=scale < self.semantic_scales,
                        context=clip * per_clip - 1 if clip else None,
                        context_pass=kept[-1] if clip else None,
                        keeps=closes and clip < len(clips) - 1,
                        opens=scale == 0 and repetition == 0,
                        closes=closes,
                    )
                )
                if closes:
                    kept.append(len(found) - 1)
        return tuple(found)


def _text(entries: Sequence[Entry]) -> str:
    return " ".join(f"{t}x{h}x{w}" for t, h, w in entries)


def check_detail_size(schedule: VideoSchedule, smallest: int) -> None:
    """The reference chooses the head by a map's place and the code width by its size; both must say the same.

    smallest: tokens of a frame from which on codes have detail width
    Raises:   ToprovarError for the first map where they differ.
    """
    for scale, (_, height, width) in enumerate(schedule.entries[: schedule.scales]):
        if (scale < schedule.semantic_scales) != (height * width < smallest):
            raise ToprovarError(
                f"map {scale}, {height}x{width}, is {'semantic' if scale < schedule.semantic_scales else 'detail'} by "
                f"its place (the first {schedule.semantic_scales} are semantic) and not by its {height * width} tokens "
                f"(detail from {smallest} on)",
                "settings of two models were mixed",
            )


def nearest_template(aspect: float) -> str:
    """Name of the template whose height/width is nearest to `aspect`."""
    if not 0 < aspect < float("inf"):
        raise ToprovarError(f"aspect {aspect} is not a positive number", "give height over width, such as 0.5625")
    return min(TEMPLATES, key=lambda name: abs(float(name) - aspect))


def clips_of(frames: int) -> tuple[int, ...]:
    """Latent frames of each clip of a video. Raises: ToprovarError if the tokenizer makes no such number of frames."""
    if frames < 1 or (frames - 1) % FRAME_STRIDE:
        raise ToprovarError(
            f"a video of {frames} frames cannot be made", f"give 1, or a multiple of {FRAME_STRIDE} plus 1, such as 81"
        )
    further = (frames - 1) // FRAME_STRIDE
    rest = further % CLIP_FRAMES
    return (1, *[CLIP_FRAMES] * (further // CLIP_FRAMES), *([rest] if rest else []))


def video_schedule(aspect: float = 0.5625, budget: str = "0.40M", frames: int = 81) -> VideoSchedule:
    """The published schedule of a size. frames: of the video, 1 for an image.

    Raises: ToprovarError for an unknown budget or a number of frames that cannot be made.
    """
    if budget not in BUDGET_SCALES:
        raise ToprovarError(f"unknown budget {budget}; expected one of {', '.join(BUDGET_SCALES)}")
    scales = BUDGET_SCALES[budget]
    maps = TEMPLATES[nearest_template(aspect)][:scales]
    entries = tuple((count, *pair) for count in clips_of(frames) for pair in maps)
    return VideoSchedule(entries, *_repetitions(scales), SEMANTIC_SCALES[budget])


def _repetitions(scales: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Published passes per map, of the image clip and of the others."""
    return (3,) * scales, (3,) * min(scales, 12) + (2, 1, 1)[: max(scales - 12, 0)]


def square_schedule(sides: Sequence[int], frames: int) -> VideoSchedule:
    """Square maps of other sides than the published ones; all but the last are semantic, at most eleven."""
    entries = tuple((count, side, side) for count in clips_of(frames) for side in sides)
    return VideoSchedule(entries, *_repetitions(len(sides)), min(len(sides) - 1, 11))


def schedule_of(flat: Sequence[tuple[int, int]], candidates: Sequence[VideoSchedule]) -> VideoSchedule:
    """The schedule whose passes are the given maps; clips may be more or fewer than in the candidate.

    Raises: ToprovarError if none of the candidates has such passes.
    """
    for candidate in candidates:
        clips = _clips_in(flat, candidate)
        if clips:
            maps = [entry[1:] for entry in candidate.entries[: candidate.scales]]
            return replace(candidate, entries=tuple((count, *pair) for count in clips for pair in maps))
    raise ToprovarError(
        f"a schedule of {len(flat)} passes, last {flat[-1][0]}x{flat[-1][1]}, is none of InfinityStar's",
        "calibrate and export with the same model, aspect and budget",
    )


def _clips_in(flat: Sequence[tuple[int, int]], candidate: VideoSchedule) -> list[int]:
    """Latent frames of each clip if the maps are those of the candidate, else nothing."""
    maps = [entry[1:] for entry in candidate.entries[: candidate.scales]]
    clips: list[int] = []
    start = 0
    while start < len(flat):
        counts = candidate.video_repetitions if clips else candidate.image_repetitions
        frames, rest = divmod(flat[start][0], maps[0][0])
        expected = [(frames * h, w) for (h, w), count in zip(maps, counts, strict=True) for _ in range(count)]
        if rest or (not clips and frames != 1) or list(flat[start : start + len(expected)]) != expected:
            return []
        clips.append(frames)
        start += len(expected)
    return clips
