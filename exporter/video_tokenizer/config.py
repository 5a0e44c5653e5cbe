"""Sizes of InfinityStar's video tokenizer, read from the shapes of its checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod

from toprovar.exporter.checkpoint_shapes import CheckpointShapes
from toprovar.runtime.errors import ToprovarError

PATCH = 2  # cells of a token's side: the decoder works on a map twice as fine as the codes
SPACE = 2  # every change of size halves or doubles both sides
PAST = 2  # frames that a 3x3x3 convolution sees of what came before


@dataclass(frozen=True)
class VideoStage:
    """Residual blocks of one width, then a change of size.

    resized: width behind the change of size, or None where there is none
    time:    how many frames one becomes (decoder), or how many become one (encoder)
    """

    width: int
    blocks: int
    resized: int | None = None
    time: int = 1


@dataclass(frozen=True)
class VideoTokenizerConfig:
    """channels: of the decoder's input; decoder, encoder: stages in the order they run; encoder may be missing.

    projection: whether a linear layer stands between codes and decoder
    """

    channels: int
    decoder: tuple[VideoStage, ...]
    encoder: tuple[VideoStage, ...] | None = None
    middle_blocks: int = 2
    projection: bool = True

    @property
    def code_channels(self) -> int:
        """Channels of the codes, d: the four cells of a token side by side."""
        return self.channels * PATCH**2

    @property
    def stride(self) -> int:
        """Pixels per cell of the codes along one axis."""
        return int(PATCH * SPACE ** sum(stage.resized is not None for stage in self.decoder))

    @property
    def frames_per_code(self) -> int:
        """Frames that a map of codes becomes; the first becomes one."""
        return prod(stage.time for stage in self.decoder)

    def frames(self, maps: int) -> int:
        """Frames of a whole video of so many maps."""
        return 1 + self.frames_per_code * (maps - 1)


# FoundationVision/InfinityStar infinitystar_videovae.pth
PUBLISHED = VideoTokenizerConfig(
    16,
    (VideoStage(384, 3), VideoStage(384, 3, 384), VideoStage(384, 3, 192, 2), VideoStage(192, 3, 96, 2)),
    (VideoStage(96, 2, 192, 2), VideoStage(192, 2, 384, 2), VideoStage(384, 2, 384), VideoStage(384, 2)),
)


def video_config_from_shapes(shapes: Mapping[str, tuple[int, ...]]) -> VideoTokenizerConfig:
    """Reads the sizes off the checkpoint's names, without a leading `vae.`.

    Raises: ToprovarError naming the first tensor that is missing or contradicts another one.
    """
    found = CheckpointShapes(shapes, "video tokenizer", "the video tokenizer", "the transformer")
    channels = found.of("decoder.conv_in.conv.weight", 5)[1]
    encoder = None
    if "encoder.conv_in.conv.weight" in found:
        encoder = _encoder_stages(found)
        encoded = found.of("encoder.conv_out.conv.weight", 5)[0]
        if encoded != 2 * channels:
            raise ToprovarError(
                f"video tokenizer: encoder.conv_out.conv.weight makes {encoded} channels; expected {2 * channels}, "
                "mean and variance of what the decoder reads",
                "the checkpoint belongs to another model, or was changed",
            )
    return VideoTokenizerConfig(
        channels=channels,
        decoder=_decoder_stages(found),
        encoder=encoder,
        middle_blocks=found.layers("decoder.mid_block.resnets"),
        projection="proj_up.weight" in found,
    )


def _decoder_stages(found: CheckpointShapes) -> tuple[VideoStage, ...]:
    count = found.layers("decoder.up_blocks")
    prefixes = [f"decoder.up_blocks.{i}" for i in range(count)]
    widths = [found.of(f"{prefix}.resnets.0.conv1.conv.weight", 5)[0] for prefix in prefixes]
    widths.append(found.of("decoder.conv_out.conv.weight", 5)[1])
    stages = []
    for prefix, width, following in zip(prefixes, widths, widths[1:], strict=False):
        blocks, name = found.layers(f"{prefix}.resnets"), f"{prefix}.upsamplers.0.conv.conv.conv.weight"
        if name not in found:
            stages.append(_unresized(prefix, width, following, blocks))
            continue
        rows, cells = found.of(name, 5)[0], SPACE**2 * following
        if rows not in (cells, 2 * cells) or rows % width:
            raise ToprovarError(
                f"video tokenizer: tensor {name} has {rows} rows; expected {cells} or {2 * cells}, "
                f"a multiple of {width}",
                "the checkpoint belongs to another model, or was changed",
            )
        stages.append(VideoStage(width, blocks, following, rows // cells))
    return tuple(stages)


def _encoder_stages(found: CheckpointShapes) -> tuple[VideoStage, ...]:
    """The encoder's shapes do not tell where time shrinks: where the decoder, run backwards, makes it grow."""
    times = [stage.time for stage in reversed(_decoder_stages(found)) if stage.resized is not None]
    count = found.layers("encoder.down_blocks")
    prefixes = [f"encoder.down_blocks.{i}" for i in range(count)]
    widths = [found.of(f"{prefix}.resnets.0.conv1.conv.weight", 5)[0] for prefix in prefixes]
    widths.append(found.of("encoder.conv_out.conv.weight", 5)[1])
    stages = []
    for prefix, width, following in zip(prefixes, widths, widths[1:], strict=False):
        blocks, name = found.layers(f"{prefix}.resnets"), f"{prefix}.downsamplers.0.conv.conv.conv.weight"
        if name not in found:
            stages.append(_unresized(prefix, width, following, blocks))
            continue
        rows = found.of(name, 5)[0]
        if SPACE**2 * rows != following or (SPACE**2 * width) % following or not times:
            raise ToprovarError(
                f"video tokenizer: tensor {name} has {rows} rows behind width {width}; expected a quarter of the next "
                f"width {following}, and as many changes of size as in the decoder",
                "the checkpoint belongs to another model, or was changed",
            )
        stages.append(VideoStage(width, blocks, following, times.pop(0)))
    if times:
        raise ToprovarError(
            f"video tokenizer: its decoder changes the size {len(times)} times more than its encoder; "
            "expected as often",
            "the checkpoint belongs to another model, or was changed",
        )
    return tuple(stages)


def _unresized(prefix: str, width: int, following: int, blocks: int) -> VideoStage:
    if width != following:
        raise ToprovarError(
            f"video tokenizer: {prefix} is {width} wide and has no change of size; what follows is {following} wide; "
            "expected the same width",
            "pass the whole checkpoint of the tokenizer",
        )
    return VideoStage(width, blocks)
