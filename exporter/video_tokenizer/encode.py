"""A picture or video as the bits that InfinityStar would have to draw to make it: to go on from, for teacher forcing.

    known = video_bits(tokenizer, picture[None], schedule, model.config.semantic_bits)  # of the schedule's image clip
    generate(model, prompt, schedule, guidance, noise, given_bits=known.bits)           # a video that begins with it

Source: FoundationVision/InfinityStar, infinity/schedules/infinity_elegant.py, video_encode_global_bsc (inference).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from toprovar.exporter.infinitystar.codes import contribution, map_of
from toprovar.exporter.infinitystar.schedule import VideoSchedule
from toprovar.exporter.video_tokenizer.tokenizer import VideoTokenizer
from toprovar.runtime.errors import ToprovarError


@dataclass(frozen=True)
class VideoBits:
    """bits:  per pass of the clips that were given [1, t*h*w, n] uint8, what `generate` takes as `given_bits`
    codes: [1, d, F*H, W] their sum, frames on top of one another; zero in the frames of clips that were not given
    """

    bits: list[Tensor]
    codes: Tensor


def video_bits(
    tokenizer: VideoTokenizer,
    frames: np.ndarray,
    schedule: VideoSchedule,
    semantic_bits: int,
    noise: Tensor | None = None,
) -> VideoBits:
    """The residual bits of the first clips of a schedule.

    frames:        uint8 [T, H, W, 3], RGB, of the schedule's size; T of whole clips, 1 for the first one
    semantic_bits: per token of small maps
    noise:         [1, d, F, h, w]; the reference draws the codes from the encoder's posterior; None takes its mean
    Raises:        ToprovarError if size or number of frames do not fit the schedule, or there is no encoder.
    """
    if frames.dtype != np.uint8 or frames.ndim != 4 or frames.shape[3] != 3:
        raise ValueError(f"frames are {frames.dtype}{list(frames.shape)}; expected uint8 [T, H, W, 3]")
    height, width = (side * tokenizer.config.stride for side in schedule.last)
    counts = [tokenizer.config.frames(sum(schedule.clips[: i + 1])) for i in range(len(schedule.clips))]
    if frames.shape[1:3] != (height, width) or len(frames) not in counts:
        raise ToprovarError(
            f"{len(frames)} frames of {frames.shape[1]}x{frames.shape[2]} pixels do not fit the schedule: expected "
            f"{' or '.join(map(str, counts))} frames of {height}x{width}",
            "resize them as fitted_picture does, and cut the video",
        )
    video = torch.from_numpy(frames.copy()).permute(3, 0, 1, 2)[None].float() / 127.5 - 1
    with torch.inference_mode():
        codes = tokenizer.encode(video.to(tokenizer.scale_learnable_parameters.device), noise)
        return quantise_residual(codes, schedule, semantic_bits)


def quantise_residual(codes: Tensor, schedule: VideoSchedule, semantic_bits: int) -> VideoBits:
    """At every pass the signs of what the passes before left. codes: [B, d, F, H, W], F of whole clips."""
    target, (height, width) = codes.flatten(2, 3), schedule.last
    summed = codes.new_zeros(len(codes), codes.shape[1], schedule.frames * height, width)
    bits = []
    for step in schedule.passes():
        if step.first_frame >= codes.shape[2]:
            break
        left = map_of(target - summed[:, :, : target.shape[2]], step, schedule)  # [B, d, t*h, w]
        if step.is_semantic:
            # mean over neighbouring channels; areas over channels and cells separate
            grouped = left.movedim(1, -1).flatten(1, 2)
            left = F.interpolate(grouped, size=semantic_bits, mode="area").unflatten(1, step.flat).movedim(-1, 1)
        drawn = left > 0
        bits.append(drawn.flatten(2).transpose(1, 2).to(torch.uint8))  # [B, t*h*w, n]
        values = (drawn.float() * 2 - 1) * left.shape[1] ** -0.5
        summed = summed + contribution(values, step, codes.shape[1], schedule)
    return VideoBits(bits, summed)
