"""The VQ tokenizer's decoder as an ONNX graph, and its tensors for the weights file."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from torch import Tensor

from toprovar.exporter.autoencoder_graph import decoded, decoder_tensors
from toprovar.exporter.graph_builder import GraphBuilder
from toprovar.exporter.resize_matrices import resize_pair
from toprovar.exporter.vq_tokenizer.config import VqTokenizerConfig
from toprovar.exporter.vq_tokenizer.tokenizer import VqTokenizer
from toprovar.exporter.weights_file import WeightsLayout


def decoder_weights(tokenizer: VqTokenizer) -> dict[str, Callable[[], Tensor]]:
    """Tensors of `decoder_graph`; the convolution in front is `decoder.post_quant_conv`, so that all begin alike."""
    return {
        **decoder_tensors(tokenizer.state_dict()),
        "decoder.post_quant_conv.weight": lambda: tokenizer.post_quant_conv.weight,
        "decoder.post_quant_conv.bias": lambda: tokenizer.post_quant_conv.bias,
    }


def decoder_graph(
    config: VqTokenizerConfig,
    size: tuple[int, int],
    layout: WeightsLayout,
    images: int = 1,
    resized: tuple[int, int] | None = None,
) -> GraphBuilder:
    """Latent to picture, fp32. Input: codes [B, d, h, w]; output: image [B, 3, h*stride, w*stride] in [-1, 1].

    resized: the latent is first brought to this map, for a small picture.
    """
    g = GraphBuilder("decoder", layout)
    z = g.input("codes", (images, config.channels, *size))
    if resized is not None:
        z, size = g.resize(z, *resize_pair("bilinear", size, resized)), resized
    z = g.Conv(
        z,
        g.weight("decoder.post_quant_conv.weight"),
        g.weight("decoder.post_quant_conv.bias"),
        kernel_shape=[config.kernel] * 2,
        pads=[config.kernel // 2] * 4,
    )
    image = g.Clip(decoded(g, z, config.shape, size, images), np.float32(-1), np.float32(1))
    g.output(image, "image", (images, 3, size[0] * config.stride, size[1] * config.stride))
    return g
