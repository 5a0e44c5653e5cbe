"""InfinityStar's video tokenizer: codes <-> frames, in chunks or at once.

Every convolution is causal in time: it sees two frames of what came before, or two copies of the first frame where
nothing did. A chunk therefore needs only the last two frames of every convolution's input from the chunk before, and
decoding in chunks of any length gives the frames that decoding at once gives, up to rounding. The first map of a video
becomes one frame, every further one `frames_per_code`.
The norms of the decoder are conditioned on its input. A 1x1 convolution and a repetition of cells commute, so the
convolution runs on the small map and its result is repeated; the reference does it the other way round.
Source: FoundationVision/InfinityStar, infinity/models/videovae/models/wan_bsq_vae.py, modules/conv_wan.py.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from toprovar.exporter.loading import loaded
from toprovar.exporter.video_tokenizer.config import (
    PAST,
    PATCH,
    SPACE,
    VideoStage,
    VideoTokenizerConfig,
    video_config_from_shapes,
)
from toprovar.runtime.errors import ToprovarError

PARTS = ("encoder", "decoder", "proj_up", "proj_down", "scale_learnable_parameters")


class Chunk:
    """The part of a video that runs.

    condition: the decoder's input [B, z, t, h, w]; None in the encoder
    before:    per convolution, in the order they run, the last frames of its input so far; None for the first chunk
    after:     the same for the following chunk, complete when the chunk has run
    """

    def __init__(self, condition: Tensor | None, before: Sequence[Tensor] | None) -> None:
        self.condition, self.is_first = condition, before is None
        self._before = iter(before or ())
        self.after: list[Tensor] = []

    def with_past(self, x: Tensor) -> Tensor:
        """x: [B, C, t, h, w] -> [B, C, PAST + t, h, w]."""
        past = x[:, :, :1].expand(-1, -1, PAST, -1, -1) if self.is_first else next(self._before)
        x = torch.cat([past, x], 2)
        self.after.append(x[:, :, -PAST:].clone())  # a view would keep the whole input alive
        return x


class CausalConv(nn.Module):
    def __init__(self, inputs: int, outputs: int, kernel: int = 3) -> None:
        super().__init__()
        self.kernel = kernel
        self.conv = nn.Conv3d(inputs, outputs, kernel, padding=(0, kernel // 2, kernel // 2))

    def forward(self, x: Tensor, chunk: Chunk) -> Tensor:
        return self.conv(chunk.with_past(x) if self.kernel > 1 else x)


class RmsNorm(nn.Module):
    """Over channels, at every cell of every frame."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.gamma = nn.Parameter(torch.ones(width, 1, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        return F.normalize(x, dim=1) * (x.shape[1] ** 0.5 * self.gamma)


class PlainNorm(RmsNorm):
    """The encoder's norm, called like the decoder's."""

    def forward(self, x: Tensor, chunk: Chunk | None = None) -> Tensor:
        return super().forward(x)


class ConditionedNorm(nn.Module):
    def __init__(self, width: int, channels: int) -> None:
        super().__init__()
        self.norm_layer = RmsNorm(width)
        self.conv_y, self.conv_b = CausalConv(channels, width, 1), CausalConv(channels, width, 1)

    def forward(self, x: Tensor, chunk: Chunk) -> Tensor:
        scale, shift = (self._repeated(conv, x, chunk) for conv in (self.conv_y, self.conv_b))
        return self.norm_layer(x) * scale + shift

    @staticmethod
    def _repeated(conv: CausalConv, x: Tensor, chunk: Chunk) -> Tensor:
        """The condition's convolution, every cell repeated to the size of x."""
        assert chunk.condition is not None
        y = conv(chunk.condition, chunk)
        maps, frames = y.shape[2], x.shape[2]
        y = y[:, :, condition_frames(maps, frames, chunk.is_first)]
        factor = x.shape[3] // y.shape[3]
        return y.repeat_interleave(factor, 3).repeat_interleave(factor, 4)


def condition_frames(maps: int, frames: int, is_first: bool) -> list[int]:
    """For every frame, the map it is conditioned on; the first map of a video stands for one frame."""
    if is_first:
        per_map = (frames - 1) // max(maps - 1, 1)
        return [0] + [1 + i // per_map for i in range(frames - 1)]
    return [i * maps // frames for i in range(frames)]


class ResBlock(nn.Module):
    def __init__(self, width: int, channels: int | None) -> None:
        """channels: of the condition; None in the encoder."""
        super().__init__()
        self.norm1, self.norm2 = _norm(width, channels), _norm(width, channels)
        self.conv1, self.conv2 = CausalConv(width, width), CausalConv(width, width)

    def forward(self, x: Tensor, chunk: Chunk) -> Tensor:
        y = self.conv1(F.silu(self.norm1(x, chunk)), chunk)
        return x + self.conv2(F.silu(self.norm2(y, chunk)), chunk)


def _norm(width: int, channels: int | None) -> nn.Module:
    return PlainNorm(width) if channels is None else ConditionedNorm(width, channels)


class _Grow(nn.Module):
    """One cell becomes 2x2, one frame becomes `time`; the first frame of a video stays one, the mean of its copies."""

    def __init__(self, stage: VideoStage) -> None:
        super().__init__()
        assert stage.resized is not None
        self.time = stage.time
        self.norm = RmsNorm(stage.width)
        self.conv = CausalConv(stage.width, stage.resized * SPACE**2 * stage.time)

    def forward(self, x: Tensor, chunk: Chunk) -> Tensor:
        y = self.conv(F.silu(self.norm(x)), chunk)
        y = y + x.repeat(1, y.shape[1] // x.shape[1], 1, 1, 1)  # the channels again and again
        y = y.unflatten(1, (self.time, SPACE, SPACE, -1)).permute(0, 4, 5, 1, 6, 2, 7, 3)
        y = y.flatten(6, 7).flatten(4, 5).flatten(2, 3)  # [B, C', t*time, 2h, 2w]
        if chunk.is_first and self.time > 1:
            y = torch.cat([y[:, :, : self.time].mean(2, keepdim=True), y[:, :, self.time :]], 2)
        return y


class _Shrink(nn.Module):
    """2x2 cells become one, `time` frames become their mean; the first frame of a video stays."""

    def __init__(self, stage: VideoStage) -> None:
        super().__init__()
        assert stage.resized is not None
        self.time = stage.time
        self.norm = RmsNorm(stage.width)
        self.conv = CausalConv(stage.width, stage.resized // SPACE**2)

    def forward(self, x: Tensor, chunk: Chunk) -> Tensor:
        y = self._folded(self.conv(F.silu(self.norm(x)), chunk), chunk)
        return y + self._folded(x, chunk).unflatten(1, (-1, y.shape[1])).mean(1)

    def _folded(self, x: Tensor, chunk: Chunk) -> Tensor:
        x = x.unflatten(4, (-1, SPACE)).unflatten(3, (-1, SPACE)).permute(0, 4, 6, 1, 2, 3, 5).flatten(1, 3)
        first, rest = (x[:, :, :1], x[:, :, 1:]) if chunk.is_first else (x[:, :, :0], x)
        return torch.cat([first, rest.unflatten(2, (rest.shape[2] // self.time, self.time)).mean(3)], 2)


class _Resize(nn.Module):
    """The inner name `.conv` of published files."""

    def __init__(self, conv: nn.Module) -> None:
        super().__init__()
        self.conv = conv

    def forward(self, x: Tensor, chunk: Chunk) -> Tensor:
        return self.conv(x, chunk)


class _Blocks(nn.Module):
    def __init__(self, width: int, blocks: int, channels: int | None) -> None:
        super().__init__()
        self.resnets = nn.ModuleList(ResBlock(width, channels) for _ in range(blocks))

    def forward(self, x: Tensor, chunk: Chunk) -> Tensor:
        for block in self.resnets:
            x = block(x, chunk)
        return x


class VideoDecoder(nn.Module):
    def __init__(self, config: VideoTokenizerConfig) -> None:
        super().__init__()
        channels, stages = config.channels, config.decoder
        self.conv_in = CausalConv(channels, stages[0].width)
        self.mid_block = _Blocks(stages[0].width, config.middle_blocks, channels)
        self.up_blocks = nn.ModuleList()
        for stage in stages:
            block = _Blocks(stage.width, stage.blocks, channels)
            if stage.resized is not None:
                block.upsamplers = nn.ModuleList([_Resize(_Grow(stage))])
            self.up_blocks.append(block)
        width = stages[-1].resized or stages[-1].width
        self.norm_out = ConditionedNorm(width, channels)
        self.conv_out = CausalConv(width, 3)

    def forward(self, z: Tensor, chunk: Chunk) -> Tensor:
        x = self.mid_block(self.conv_in(z, chunk), chunk)
        for block in self.up_blocks:
            x = block(x, chunk)
            if hasattr(block, "upsamplers"):
                x = block.upsamplers[0](x, chunk)
        return self.conv_out(F.silu(self.norm_out(x, chunk)), chunk)


class VideoEncoder(nn.Module):
    def __init__(self, config: VideoTokenizerConfig, stages: tuple[VideoStage, ...]) -> None:
        super().__init__()
        self.conv_in = CausalConv(3, stages[0].width)
        self.down_blocks = nn.ModuleList()
        for stage in stages:
            block = _Blocks(stage.width, stage.blocks, None)
            if stage.resized is not None:
                block.downsamplers = nn.ModuleList([_Resize(_Shrink(stage))])
            self.down_blocks.append(block)
        width = stages[-1].resized or stages[-1].width
        self.mid_block = _Blocks(width, config.middle_blocks, None)
        self.norm_out = PlainNorm(width)
        self.conv_out = CausalConv(width, 2 * config.channels)

    def forward(self, x: Tensor, chunk: Chunk) -> Tensor:
        x = self.conv_in(x, chunk)
        for block in self.down_blocks:
            x = block(x, chunk)
            if hasattr(block, "downsamplers"):
                x = block.downsamplers[0](x, chunk)
        return self.conv_out(F.silu(self.norm_out(self.mid_block(x, chunk))), chunk)


def maps_per_chunk(maps: int) -> list[int]:
    """How many maps of codes to decode at a time: the published way, two, and three at first if their number is odd."""
    first = min(maps, 3 if maps % 2 else 2)
    return [first, *[2] * ((maps - first) // 2)]


class VideoTokenizer(nn.Module):
    def __init__(self, config: VideoTokenizerConfig) -> None:
        super().__init__()
        self.config = config
        d = config.code_channels
        self.scale_learnable_parameters = nn.Parameter(torch.ones(4))  # only the first is used
        self.decoder = VideoDecoder(config)
        if config.projection:
            self.proj_up = nn.Linear(d, d)
        if config.encoder is not None:
            self.encoder = VideoEncoder(config, config.encoder)
            if config.projection:
                self.proj_down = nn.Linear(d, d)

    def decode(self, codes: Tensor, chunks: Sequence[int] | None = None) -> Tensor:
        """codes: [B, d, F, h, w] -> video [B, 3, 1 + frames_per_code*(F-1), h*stride, w*stride] in [-1, 1], RGB.

        chunks: maps to decode at a time, by default `maps_per_chunk`; the result is the same, the memory is not
        """
        return self.decode_raw(codes, chunks).clamp(-1, 1)

    def decode_raw(self, codes: Tensor, chunks: Sequence[int] | None = None) -> Tensor:
        """`decode` before clamping."""
        chunks = maps_per_chunk(codes.shape[2]) if chunks is None else chunks
        if sum(chunks) != codes.shape[2] or min(chunks, default=0) < 1:
            raise ToprovarError(f"chunks of {list(chunks)} maps do not add up to the video's {codes.shape[2]} maps")
        videos, before = [], None
        for part in codes.split(list(chunks), 2):
            video, before = self.decode_chunk(part, before)
            videos.append(video)
        return torch.cat(videos, 2)

    def decode_chunk(self, codes: Tensor, before: Sequence[Tensor] | None) -> tuple[Tensor, list[Tensor]]:
        """Frames of the following maps, not clamped, and what the next chunk needs.

        before: what the chunk before left; None for the first
        """
        z = codes / self.scale_learnable_parameters[0]
        if self.config.projection:
            z = self.proj_up(z.movedim(1, -1)).movedim(-1, 1)
        z = F.pixel_shuffle(z.transpose(1, 2), PATCH).transpose(1, 2)  # [B, z, t, 2h, 2w]
        chunk = Chunk(z, before)
        return self.decoder(z, chunk), chunk.after

    def encode(self, video: Tensor, noise: Tensor | None = None, maps: int = 2) -> Tensor:
        """video: [B, 3, T, H, W] in [-1, 1], T = 1 + frames_per_code*k -> codes [B, d, k + 1, H/stride, W/stride].

        noise: [B, d, F, h, w]; the reference draws from the posterior, without noise this is its mean
        maps:  how many maps to encode at a time behind the first
        Raises: ToprovarError for a number of frames or a size that does not fit.
        """
        config = self.config
        if config.encoder is None:
            raise ToprovarError("this tokenizer file holds no encoder", "use a file with encoder.* tensors")
        frames, height, width = video.shape[2:]
        if (frames - 1) % config.frames_per_code or height % config.stride or width % config.stride:
            raise ToprovarError(
                f"a video of {frames} frames of {height}x{width} has no codes: expected 1 + a multiple of "
                f"{config.frames_per_code} frames, sides that are multiples of {config.stride}",
                "cut or pad the video",
            )
        after_first = [config.frames_per_code * maps] * ((frames - 1) // (config.frames_per_code * maps))
        encoded, before = [], None
        for part in video.split([frames - sum(after_first), *after_first], 2):
            chunk = Chunk(None, before)
            encoded.append(self.encoder(part, chunk))
            before = chunk.after
        moments = F.pixel_unshuffle(torch.cat(encoded, 2).transpose(1, 2), PATCH).transpose(1, 2)
        z, log_variance = moments.chunk(2, 1)
        if noise is not None:
            z = z + noise * (log_variance.clamp(-30, 20) / 2).exp()
        if config.projection:
            z = self.proj_down(z.movedim(1, -1)).movedim(-1, 1)
        return z * self.scale_learnable_parameters[0]


def load_video_tokenizer(tensors: Mapping[str, Any], what: str) -> VideoTokenizer:
    """Builds the tokenizer whose sizes the tensors have, and loads them (fp32); names may begin with `vae.`.

    Quantizers and the second projections, which decoding does not use, are passed over.
    Raises: ToprovarError for the first tensor that is missing, has another shape, is not finite or is not understood.
    """
    own = {name.removeprefix("vae."): name for name in tensors}
    kept = {name: tensors[source] for name, source in own.items() if name.split(".")[0] in PARTS}

    def refuse(unexpected: list[str]) -> None:
        for name in unexpected:
            if name.startswith("decoder."):
                raise ToprovarError(
                    f"{what}: tensor {name} belongs to no part of the video decoder: found shape "
                    f"{list(kept[name].shape)}; expected no such tensor",
                    "this variant of the tokenizer is not supported; see docs/decoders.md",
                )

    return loaded(kept, what, lambda shapes: VideoTokenizer(video_config_from_shapes(shapes)), refuse)
