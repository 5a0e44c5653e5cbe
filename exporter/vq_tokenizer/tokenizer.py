"""The tokenizer of VAR and HART without its codebook (codebook.py): picture <-> latent.

A convolution stands before the decoder and behind the encoder; both have attention at the latent's own level.
Source: FoundationVision/VAR, models/vqvae.py and basic_vae.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from toprovar.exporter.autoencoder import Decoder, Encoder, joined_attention
from toprovar.exporter.families import canonical_tokenizer_names
from toprovar.exporter.loading import loaded, shapes_of
from toprovar.exporter.vq_tokenizer.config import VqTokenizerConfig, vq_config_from_shapes
from toprovar.runtime.errors import ToprovarError


class VqTokenizer(nn.Module):
    def __init__(self, config: VqTokenizerConfig) -> None:
        super().__init__()
        self.config = config
        d, kernel = config.channels, config.kernel
        self.post_quant_conv = nn.Conv2d(d, d, kernel, padding=kernel // 2)
        self.decoder = Decoder(config.shape)
        if config.encoder:
            self.quant_conv = nn.Conv2d(d, d, kernel, padding=kernel // 2)
            self.encoder = Encoder(config.shape)

    def encode(self, image: Tensor) -> Tensor:
        """image: [B, 3, H, W] in [-1, 1] -> latent [B, d, H/stride, W/stride], not yet quantised."""
        if not self.config.encoder:
            raise ToprovarError("this tokenizer file holds no encoder", "use a file with encoder.* tensors")
        return self.quant_conv(self.encoder(image))

    def decode(self, latent: Tensor) -> Tensor:
        """latent: [B, d, h, w], the sum of all maps -> image [B, 3, h*stride, w*stride] in [-1, 1], RGB."""
        return self.decode_raw(latent).clamp(-1, 1)

    def decode_raw(self, latent: Tensor) -> Tensor:
        """`decode` before clamping."""
        return self.decoder(self.post_quant_conv(latent))


PARTS = ("encoder", "decoder", "quant_conv", "post_quant_conv")


def load_vq_tokenizer(tensors: Mapping[str, Any], what: str) -> VqTokenizer:
    """Builds the tokenizer whose sizes the tensors have, under either naming, and loads them (fp32).

    Names may begin with `vae.`; the codebook is passed over, `load_quantizer` reads it. A file whose encoder has lost
    its quant_conv is refused like any file without a needed tensor.
    Raises: ToprovarError for the first tensor that is missing, has another shape, is not finite or is not understood.
    """
    canonical = canonical_tokenizer_names(shapes_of(tensors), what)
    own = {new: tensors[old] for old, new in canonical.items() if new.split(".")[0] in PARTS}
    renamed = joined_attention(own, what)

    def refuse(unexpected: list[str]) -> None:
        for name in unexpected:
            if name.split(".")[0] in ("decoder", "post_quant_conv"):
                raise ToprovarError(
                    f"{what}: tensor {name} belongs to no part of a VQ tokenizer's decoder: found shape "
                    f"{list(renamed[name].shape)}; expected no such tensor",
                    "this variant of the tokenizer is not supported; see docs/decoders.md",
                )

    return loaded(renamed, what, lambda shapes: VqTokenizer(vq_config_from_shapes(shapes)), refuse)
