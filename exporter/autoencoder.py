"""The convolutional encoder and decoder that image tokenizers share: residual blocks, group norm, swish, attention.

Parameter names are those of the published tokenizers, with `.conv` inside convolutions and `.norm` inside norms.
Sources: FoundationVision/Infinity, infinity/models/bsq_vae; FoundationVision/VAR, models/basic_vae.py.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from toprovar.runtime.errors import ToprovarError

NORM_GROUPS = 32
NORM_EPSILON = 1e-6


@dataclass(frozen=True)
class AutoencoderShape:
    """Sizes of encoder and decoder.

    channels:         latent channels
    widths:           per level from the picture to the latent; each level but the first halves
    res_blocks:       per level of the encoder; the decoder has one more
    attention_levels: levels with attention behind each residual block
    middle_attention: attention between the two middle blocks
    """

    channels: int
    widths: tuple[int, ...]
    res_blocks: int = 2
    attention_levels: tuple[int, ...] = ()
    middle_attention: bool = False

    @property
    def stride(self) -> int:
        """Pixels per latent cell along one axis."""
        return 2 ** (len(self.widths) - 1)


def autoencoder_from_shapes(shapes: Mapping[str, tuple[int, ...]], kind: str) -> AutoencoderShape:
    """Reads the sizes off the decoder's canonical names (`decoder.conv_in.conv.weight` and so on).

    kind:   as messages name it, "a bit tokenizer"
    Raises: ToprovarError naming the tensor that is missing or has a shape that fits no convolution.
    """
    if "decoder.conv_in.conv.weight" not in shapes:
        raise ToprovarError(
            f"not {kind}: tensor decoder.conv_in.conv.weight is missing ({len(shapes)} tensors present)"
        )

    def count(start: str) -> int:
        return len({n[len(start) :].split(".")[0] for n in shapes if n.startswith(start)})

    def kernel(name: str) -> tuple[int, ...]:
        shape = tuple(shapes.get(name, ()))
        if len(shape) != 4 or 0 in shape:
            raise ToprovarError(
                f"not {kind}: tensor {name} {f'has shape {list(shape)}' if name in shapes else 'is missing'}; "
                "expected the 4 axes of a convolution",
                "pass the whole checkpoint of the tokenizer",
            )
        return shape

    def attends(site: str) -> bool:
        return any(f"decoder.{site}.{part}.conv.weight" in shapes for part in ("qkv", "q"))

    channels = kernel("decoder.conv_in.conv.weight")[1]
    levels = count("decoder.up.")
    blocks = count("decoder.up.0.block.")
    widths = tuple(kernel(f"decoder.up.{i}.block.0.conv1.conv.weight")[0] for i in range(levels))
    if not widths or any(width % NORM_GROUPS for width in widths):
        raise ToprovarError(
            f"not {kind}: its levels are {list(widths)} wide; expected multiples of {NORM_GROUPS}",
            "the checkpoint belongs to another model, or was changed",
        )
    return AutoencoderShape(
        channels=channels,
        widths=widths,
        res_blocks=blocks - 1,
        attention_levels=tuple(i for i in range(levels) if attends(f"up.{i}.attn.0")),
        middle_attention=attends("mid.attn_1"),
    )


class Conv(nn.Module):
    """A convolution under the inner name `.conv` of published files."""

    def __init__(self, inputs: int, outputs: int, kernel: int, stride: int = 1) -> None:
        super().__init__()
        self.conv = nn.Conv2d(inputs, outputs, kernel, stride, padding=kernel // 2 if stride == 1 else 0)

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(x)


class Norm(nn.Module):
    """Group norm under the inner name `.norm`; statistics in fp32."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.GroupNorm(NORM_GROUPS, width, eps=NORM_EPSILON)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x)


class ResBlock(nn.Module):
    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.norm1, self.conv1 = Norm(inputs), Conv(inputs, outputs, 3)
        self.norm2, self.conv2 = Norm(outputs), Conv(outputs, outputs, 3)
        if inputs != outputs:
            self.nin_shortcut = Conv(inputs, outputs, 1)

    def forward(self, x: Tensor) -> Tensor:
        h = self.conv1(F.silu(self.norm1(x)))
        h = self.conv2(F.silu(self.norm2(h)))
        return h + (self.nin_shortcut(x) if hasattr(self, "nin_shortcut") else x)


class Attention(nn.Module):
    """Every cell looks at every cell: one head as wide as the map, scores scaled by width^-1/2."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.qkv, self.proj_out = Norm(width), Conv(width, 3 * width, 1), Conv(width, width, 1)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm(x)).flatten(2).transpose(1, 2).chunk(3, dim=-1)  # [B, h*w, C] each
        seen = F.scaled_dot_product_attention(q, k, v)
        return x + self.proj_out(seen.transpose(1, 2).unflatten(2, x.shape[2:]))


class Middle(nn.Module):
    def __init__(self, width: int, attention: bool) -> None:
        super().__init__()
        self.block_1, self.block_2 = ResBlock(width, width), ResBlock(width, width)
        if attention:
            self.attn_1 = Attention(width)

    def forward(self, x: Tensor) -> Tensor:
        x = self.block_1(x)
        return self.block_2(self.attn_1(x) if hasattr(self, "attn_1") else x)


class Resample(nn.Module):
    def __init__(self, width: int, stride: int) -> None:
        super().__init__()
        self.conv = Conv(width, width, 3, stride)


class Level(nn.Module):
    def __init__(self, inputs: int, outputs: int, blocks: int, attention: bool) -> None:
        super().__init__()
        self.block = nn.ModuleList(ResBlock(inputs if j == 0 else outputs, outputs) for j in range(blocks))
        self.attn = nn.ModuleList(Attention(outputs) for _ in range(blocks if attention else 0))

    def forward(self, x: Tensor) -> Tensor:
        for j, block in enumerate(self.block):
            x = block(x)
            if self.attn:
                x = self.attn[j](x)
        return x


class Encoder(nn.Module):
    """Picture [B, 3, H, W] to latent [B, d, H/stride, W/stride]."""

    def __init__(self, shape: AutoencoderShape) -> None:
        super().__init__()
        widths = shape.widths
        self.conv_in = Conv(3, widths[0], 3)
        self.down = nn.ModuleList()
        for i, width in enumerate(widths):
            level = Level(widths[max(i - 1, 0)], width, shape.res_blocks, i in shape.attention_levels)
            if i < len(widths) - 1:
                level.downsample = Resample(width, 2)
            self.down.append(level)
        self.mid = Middle(widths[-1], shape.middle_attention)
        self.norm_out = Norm(widths[-1])
        self.conv_out = Conv(widths[-1], shape.channels, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv_in(x)
        for level in self.down:
            x = level(x)
            if hasattr(level, "downsample"):
                x = level.downsample.conv(F.pad(x, (0, 1, 0, 1)))
        return self.conv_out(F.silu(self.norm_out(self.mid(x))))


class Decoder(nn.Module):
    """Latent [B, d, h, w] to picture [B, 3, h*stride, w*stride], not clamped."""

    def __init__(self, shape: AutoencoderShape) -> None:
        super().__init__()
        widths = shape.widths
        self.conv_in = Conv(shape.channels, widths[-1], 3)
        self.mid = Middle(widths[-1], shape.middle_attention)
        self.up = nn.ModuleList()
        for i, width in enumerate(widths):
            inputs = widths[min(i + 1, len(widths) - 1)]
            level = Level(inputs, width, shape.res_blocks + 1, i in shape.attention_levels)
            if i > 0:
                level.upsample = Resample(width, 1)
            self.up.append(level)
        self.norm_out = Norm(widths[0])
        self.conv_out = Conv(widths[0], 3, 3)

    def forward(self, z: Tensor) -> Tensor:
        x = self.mid(self.conv_in(z))
        for level in reversed(self.up):
            x = level(x)
            if hasattr(level, "upsample"):
                x = level.upsample.conv(F.interpolate(x, scale_factor=2.0, mode="nearest"))
        return self.conv_out(F.silu(self.norm_out(x)))


_SPLIT_QUERY = re.compile(r"((?:encoder|decoder)\..*\.?attn[._]\d+)\.q\.conv\.(weight|bias)")


def joined_attention(tensors: Mapping[str, Tensor], what: str) -> dict[str, Tensor]:
    """Tensors under canonical names with the convolutions q, k, v, which some files keep apart, joined to `qkv`.

    Raises: ToprovarError if one of the three is missing or has another shape than the first.
    """
    joined = dict(tensors)
    for name in tensors:
        if match := _SPLIT_QUERY.fullmatch(name):
            parts = [f"{match[1]}.{letter}.conv.{match[2]}" for letter in "qkv"]
            for part in parts:
                found = list(tensors[part].shape) if part in tensors else "no such tensor"
                if found != list(tensors[name].shape):
                    raise ToprovarError(
                        f"{what}: tensor {part} does not fit beside {name}: found {found}; expected shape "
                        f"{list(tensors[name].shape)}",
                        "pass the whole checkpoint of the tokenizer",
                    )
            joined[f"{match[1]}.qkv.conv.{match[2]}"] = torch.cat([joined.pop(part) for part in parts])
    return joined
