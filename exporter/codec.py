"""The VQ tokenizer as VAR and HART use it: the codebook that their loops feed on, and a decoder where there is one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from toprovar.runtime.errors import ToprovarError

if TYPE_CHECKING:
    from torch import Tensor

    from toprovar.exporter.codebook import Quantizer
    from toprovar.exporter.graph_builder import GraphBuilder
    from toprovar.exporter.vq_tokenizer.tokenizer import VqTokenizer
    from toprovar.exporter.weights_file import Thunks, WeightsLayout


@dataclass
class Codec:
    quantizer: Quantizer
    tokenizer: VqTokenizer | None

    def decode(self, codes: Tensor) -> Tensor:
        """codes: [B, d, H, W] -> pictures [B, 3, h, w] in [-1, 1]."""
        if self.tokenizer is None:
            raise ToprovarError("the tokenizer file holds no decoder", "pass the whole checkpoint of the tokenizer")
        return self.tokenizer.decode(codes)

    def weights(self) -> Thunks:
        """The decoder's tensors for the weights file."""
        if self.tokenizer is None:
            return {}
        from toprovar.exporter.vq_tokenizer.graphs import decoder_weights

        return decoder_weights(self.tokenizer)

    def graph(
        self, size: tuple[int, int], layout: WeightsLayout, resized: tuple[int, int] | None
    ) -> GraphBuilder | None:
        if self.tokenizer is None:
            return None
        from toprovar.exporter.vq_tokenizer.graphs import decoder_graph

        return decoder_graph(self.tokenizer.config, size, layout, 1, resized)


def load_codec(tensors: Mapping[str, Any], what: str) -> Codec:
    """Codebook and, where the file holds one, decoder and encoder.

    Raises: ToprovarError for the first tensor that is missing, has another shape or is not finite.
    """
    from toprovar.exporter.codebook import load_quantizer
    from toprovar.exporter.vq_tokenizer.tokenizer import load_vq_tokenizer

    has_decoder = any(name.removeprefix("vae.").startswith("decoder.") for name in tensors)
    return Codec(load_quantizer(tensors, what), load_vq_tokenizer(tensors, what) if has_decoder else None)


def published_codec(vocabulary: int) -> Codec:
    """The published tokenizer's sizes, without encoder."""
    from toprovar.exporter.codebook import Quantizer
    from toprovar.exporter.vq_tokenizer.config import PUBLISHED
    from toprovar.exporter.vq_tokenizer.tokenizer import VqTokenizer

    config = replace(PUBLISHED, encoder=False)
    return Codec(Quantizer(vocabulary, config.channels), VqTokenizer(config))
