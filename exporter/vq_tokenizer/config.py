"""Sizes of a VQ tokenizer, read from the shapes of its checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from toprovar.exporter.autoencoder import AutoencoderShape, autoencoder_from_shapes
from toprovar.runtime.errors import ToprovarError


@dataclass(frozen=True)
class VqTokenizerConfig:
    """shape: of encoder and decoder; kernel: side of quant_conv and post_quant_conv; encoder: whether there is one."""

    shape: AutoencoderShape
    kernel: int = 3
    encoder: bool = True

    @property
    def channels(self) -> int:
        """Channels of a code, d."""
        return self.shape.channels

    @property
    def stride(self) -> int:
        """Pixels per latent cell along one axis."""
        return self.shape.stride


# FoundationVision/VAR vae_ch160v4096z32.pth; mit-han-lab/hart's tokenizer has the same sizes
PUBLISHED = VqTokenizerConfig(AutoencoderShape(32, (160, 160, 320, 320, 640), 2, (4,), True))


def vq_config_from_shapes(shapes: Mapping[str, tuple[int, ...]]) -> VqTokenizerConfig:
    """Reads the sizes off canonical names, q, k and v joined.

    Raises: ToprovarError naming the tensor that is missing or does not fit.
    """
    shape = autoencoder_from_shapes(shapes, "a VQ tokenizer")
    name = "post_quant_conv.weight"
    kernel = tuple(shapes.get(name, ()))
    side = kernel[-1] if len(kernel) == 4 else 0
    if kernel != (shape.channels, shape.channels, side, side) or side % 2 == 0:
        found = f"has shape {list(kernel)}" if name in shapes else "is missing"
        raise ToprovarError(
            f"not a VQ tokenizer: tensor {name} {found}; expected [{shape.channels}, {shape.channels}, n, n], n odd",
            "pass the whole checkpoint of the tokenizer",
        )
    return VqTokenizerConfig(shape, side, "encoder.conv_in.conv.weight" in shapes)
