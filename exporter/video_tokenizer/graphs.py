"""The video decoder as ONNX graphs, one for a video's first chunk and one for a following chunk, and their tensors.

Inputs:  codes [1, d, t, h, w]; in a following chunk past_## [1, C, 2, h', w'], what the chunk before left behind
Outputs: video [1, 3, T, H, W] in [-1, 1]; past_next_##, the past_## of the following chunk
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import onnx_ir as ir
from torch import Tensor

from toprovar.exporter.graph_builder import GraphBuilder
from toprovar.exporter.resize_matrices import resize_pair
from toprovar.exporter.video_tokenizer.config import PAST, PATCH, SPACE, VideoStage, VideoTokenizerConfig
from toprovar.exporter.video_tokenizer.tokenizer import VideoTokenizer, condition_frames
from toprovar.exporter.weights_file import WeightsLayout


def decoder_weights(tokenizer: VideoTokenizer) -> dict[str, Callable[[], Tensor]]:
    """Tensors of `decoder_graph`: norms carry sqrt(width), the projection the learned scale of the codes."""
    weights: dict[str, Callable[[], Tensor]] = {}
    for name, tensor in tokenizer.state_dict().items():
        if name.startswith("decoder."):
            factor = len(tensor) ** 0.5 if name.endswith(".gamma") else 1.0
            weights[name] = lambda t=tensor, f=factor: t if f == 1.0 else t * f  # type: ignore[misc]

    def projection() -> Tensor:
        d = tokenizer.config.code_channels
        scale = tokenizer.scale_learnable_parameters[0]
        matrix = tokenizer.proj_up.weight if tokenizer.config.projection else scale.new_ones(d).diag()
        return (matrix / scale).view(d, d, 1, 1, 1)

    weights["decoder.proj_up.weight"] = projection
    if tokenizer.config.projection:
        weights["decoder.proj_up.bias"] = lambda: tokenizer.proj_up.bias
    return weights


def past_shapes(config: VideoTokenizerConfig, size: tuple[int, int]) -> list[tuple[int, ...]]:
    """Shapes of past_##, in order. size: map of the codes."""
    height, width = size[0] * PATCH, size[1] * PATCH

    def of(channels: int) -> tuple[int, ...]:
        return 1, channels, PAST, height, width

    shapes = [of(config.channels)] + [of(config.decoder[0].width)] * (2 * config.middle_blocks)
    for stage in config.decoder:
        shapes += [of(stage.width)] * (2 * stage.blocks)
        if stage.resized is not None:
            shapes.append(of(stage.width))
            height, width = height * SPACE, width * SPACE
    return [*shapes, of(config.decoder[-1].resized or config.decoder[-1].width)]


def decoder_graph(
    config: VideoTokenizerConfig, maps: int, size: tuple[int, int], layout: WeightsLayout, is_first: bool
) -> GraphBuilder:
    """One chunk, fp32, one video. maps: of codes in this chunk; size: (h, w) of a map; is_first: of its video."""
    return _Drawing(config, maps, size, layout, is_first).graph()


def small_decoder_graph(
    config: VideoTokenizerConfig, maps: int, size: tuple[int, int], resized: tuple[int, int], layout: WeightsLayout
) -> GraphBuilder:
    """A whole video at once, from maps that are first brought to a small size.

    Input:  codes [1, d, maps*h, w], the maps on top of one another
    Output: image [1, 3, T*H, W] in [-1, 1], the frames on top of one another; the first is a copy of the second
    """
    return _Drawing(config, maps, resized, layout, True).small_picture(size)


class _Drawing:
    """The state of a graph being written: size of the maps so far and number of convolutions that kept a past."""

    def __init__(
        self, config: VideoTokenizerConfig, maps: int, size: tuple[int, int], layout: WeightsLayout, is_first: bool
    ) -> None:
        self.g = GraphBuilder("video_decoder_first" if is_first else "video_decoder_next", layout)
        self.config, self.maps, self.is_first = config, maps, is_first
        self.frames, self.height, self.width = maps, size[0] * PATCH, size[1] * PATCH
        self.size, self.pasts = size, past_shapes(config, size)
        self.kept: list[ir.Value] = []

    def graph(self) -> GraphBuilder:
        g, config = self.g, self.config
        codes = g.input("codes", (1, config.code_channels, self.maps, *self.size))
        self.past = [] if self.is_first else [g.input(f"past_{i:02d}", shape) for i, shape in enumerate(self.pasts)]
        g.output(self.video(codes), "video", (1, 3, self.frames, self.height, self.width))
        for i, (kept, shape) in enumerate(zip(self.kept, self.pasts, strict=True)):
            g.output(kept, f"past_next_{i:02d}", shape)
        return g

    def small_picture(self, size: tuple[int, int]) -> GraphBuilder:
        g, d, (height, width) = self.g, self.config.code_channels, size
        self.past = []
        codes = g.reshape(g.input("codes", (1, d, self.maps * height, width)), (1, d, self.maps, height, width))
        video = self.video(g.resize(codes, *resize_pair("bilinear", size, self.size)))
        if self.frames > 1:
            shown = g.Slice(video, [1], [2], [2]), g.Slice(video, [1], [self.frames], [2])
            video = g.Concat(*shown, axis=2)
        shape = (1, 3, self.frames * self.height, self.width)
        g.output(g.reshape(video, shape), "image", shape)
        return g

    def video(self, codes: ir.Value) -> ir.Value:
        """[1, d, t, h, w] -> [1, 3, T, H, W] in [-1, 1]."""
        g, config = self.g, self.config
        self.z = self.decoder_input(codes)
        stages = config.decoder
        x = self.conv(self.z, "decoder.conv_in")
        for j in range(config.middle_blocks):
            x = self.res_block(x, f"decoder.mid_block.resnets.{j}")
        for i, stage in enumerate(stages):
            for j in range(stage.blocks):
                x = self.res_block(x, f"decoder.up_blocks.{i}.resnets.{j}")
            if stage.resized is not None:
                x = self.grow(x, f"decoder.up_blocks.{i}.upsamplers.0.conv", stage)
        x = self.conv(self.swish(self.conditioned(x, "decoder.norm_out")), "decoder.conv_out")
        return g.Clip(x, np.float32(-1), np.float32(1))

    def decoder_input(self, codes: ir.Value) -> ir.Value:
        """[1, d, t, h, w] -> [1, z, t, 2h, 2w]."""
        g, (h, w) = self.g, self.size
        names = [name for name in ("decoder.proj_up.weight", "decoder.proj_up.bias") if name in g.layout.specs]
        z = g.Conv(codes, *[g.weight(name) for name in names], kernel_shape=[1, 1, 1])
        z = g.reshape(z, (self.config.channels, PATCH, PATCH, self.maps, h, w))
        z = g.Transpose(z, perm=[0, 3, 4, 1, 5, 2])  # [z, t, h, 2, w, 2]
        return g.reshape(z, (1, self.config.channels, self.maps, self.height, self.width))

    def conv(self, x: ir.Value, name: str) -> ir.Value:
        g = self.g
        if self.is_first:
            first = g.Slice(x, [0], [1], [2])
            x = g.Concat(*[first] * PAST, x, axis=2)
        else:
            x = g.Concat(self.past[len(self.kept)], x, axis=2)
        self.kept.append(g.Slice(x, [self.frames], [self.frames + PAST], [2]))
        weight, bias = g.weight(f"{name}.conv.weight"), g.weight(f"{name}.conv.bias")
        return g.Conv(x, weight, bias, kernel_shape=[3, 3, 3], pads=[0, 1, 1, 0, 1, 1])

    def norm(self, x: ir.Value, name: str) -> ir.Value:
        g = self.g
        length = g.Max(g.ReduceL2(x, [1], keepdims=1), np.float32(1e-12))
        return g.Mul(g.Div(x, length), g.weight(f"{name}.gamma"))

    def conditioned(self, x: ir.Value, name: str) -> ir.Value:
        g = self.g
        scale, shift = (self.repeated(f"{name}.{letter}") for letter in ("conv_y", "conv_b"))
        return g.Add(g.Mul(self.norm(x, f"{name}.norm_layer"), scale), shift)

    def repeated(self, name: str) -> ir.Value:
        """The condition's convolution, every cell repeated to the present size."""
        g, channels = self.g, self.g.layout.specs[f"{name}.conv.weight"].shape[0]
        weight, bias = g.weight(f"{name}.conv.weight"), g.weight(f"{name}.conv.bias")
        y = g.Conv(self.z, weight, bias, kernel_shape=[1, 1, 1])
        if self.frames != self.maps:
            frames = condition_frames(self.maps, self.frames, self.is_first)
            y = g.Gather(y, np.array(frames, np.int64), axis=2)
        h, w = self.size[0] * PATCH, self.size[1] * PATCH
        factor = self.height // h
        if factor == 1:
            return y
        y = g.Expand(g.reshape(y, (channels, self.frames, h, 1, w, 1)), [channels, self.frames, h, factor, w, factor])
        return g.reshape(y, (1, channels, self.frames, self.height, self.width))

    def swish(self, x: ir.Value) -> ir.Value:
        return self.g.Mul(x, self.g.Sigmoid(x))

    def res_block(self, x: ir.Value, name: str) -> ir.Value:
        y = self.conv(self.swish(self.conditioned(x, f"{name}.norm1")), f"{name}.conv1")
        y = self.conv(self.swish(self.conditioned(y, f"{name}.norm2")), f"{name}.conv2")
        return self.g.Add(x, y)

    def grow(self, x: ir.Value, name: str, stage: VideoStage) -> ir.Value:
        g, time, channels = self.g, stage.time, stage.resized
        assert channels is not None
        y = self.conv(self.swish(self.norm(x, f"{name}.norm")), f"{name}.conv")
        repeats = channels * SPACE**2 * time // stage.width
        y = g.Add(y, g.Concat(*[x] * repeats, axis=1))
        y = g.reshape(y, (time, SPACE, SPACE, channels, self.frames, self.height, self.width))
        y = g.Transpose(y, perm=[3, 4, 0, 5, 1, 6, 2])  # [C', t, time, h, 2, w, 2]
        self.frames, self.height, self.width = self.frames * time, self.height * SPACE, self.width * SPACE
        y = g.reshape(y, (1, channels, self.frames, self.height, self.width))
        if self.is_first and time > 1:
            mean = g.ReduceMean(g.Slice(y, [0], [time], [2]), [2], keepdims=1)
            y = g.Concat(mean, g.Slice(y, [time], [self.frames], [2]), axis=2) if self.frames > time else mean
            self.frames -= time - 1
        return y
