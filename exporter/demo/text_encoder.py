"""Text encoder of the demo model: a learned word table and one transformer layer.

Stands where T5 stands for the published models: ids and a mask in, one row per token out. Written with plain matrix
products and softmax, so that it exports to ONNX as it is.
"""

from __future__ import annotations

import json
import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from toprovar.runtime.errors import ToprovarError

MASKED = -1e4  # additive, finite: half-precision graphs never meet inf - inf
WEIGHTS_FILE, VOCABULARY_FILE = "text_encoder.safetensors", "vocabulary.json"
SCHEMA_VERSION = 1


class WordTextEncoder(nn.Module):
    """Word table + position table + one pre-norm transformer layer.

    vocabulary_size: entries of vocabulary.json;  width: of the rows;  max_tokens: longest prompt, `<end>` included.
    """

    def __init__(self, vocabulary_size: int, width: int = 256, heads: int = 4, max_tokens: int = 32) -> None:
        super().__init__()
        if width % heads:
            raise ValueError(f"width {width} does not divide into {heads} heads")
        self.heads, self.max_tokens = heads, max_tokens
        self.word_table = nn.Embedding(vocabulary_size, width)
        self.position_table = nn.Embedding(max_tokens, width)
        self.norm1, self.norm2, self.norm_out = nn.LayerNorm(width), nn.LayerNorm(width), nn.LayerNorm(width)
        self.query_key_value = nn.Linear(width, 3 * width)
        self.project = nn.Linear(width, width)
        self.expand = nn.Linear(width, 4 * width)
        self.contract = nn.Linear(4 * width, width)

    def initialize(self, seed: int) -> None:
        """Training initialisation: words at unit-like size, positions and matrices small."""
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for name, parameter in self.named_parameters():
                if parameter.dim() < 2:
                    continue
                std = 0.5 if name.startswith("word_table") else 0.1 if name.startswith("position_table") else 0.04
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * std)

    def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
        """ids: [B, T] int64, T <= max_tokens; mask: [B, T] bool, True on tokens -> rows [B, T, width] fp32."""
        B, T = ids.shape
        x = self.word_table(ids) + self.position_table.weight[:T]  # [B, T, W]
        W = x.shape[-1]
        D = W // self.heads
        packed = self.query_key_value(self.norm1(x)).view(B, T, 3, self.heads, D).permute(2, 0, 3, 1, 4)
        q, k, v = packed[0], packed[1], packed[2]  # each [B, H, T, D]
        additive = torch.where(mask[:, None, None, :], 0.0, MASKED)  # [B, 1, 1, T]
        weights = torch.softmax((q @ k.transpose(-1, -2)) * (1.0 / math.sqrt(D)) + additive, dim=-1)
        x = x + self.project((weights.to(v.dtype) @ v).transpose(1, 2).reshape(B, T, W))
        x = x + self.contract(F.gelu(self.expand(self.norm2(x)), approximate="tanh"))
        return self.norm_out(x).float()


def text_encoder_from_weights(weights: dict[str, Tensor], heads: int = 4) -> WordTextEncoder:
    """Builds the encoder whose sizes the tensors have, and loads them.

    Raises: ToprovarError if a tensor is missing or left over.
    """
    for name in ("word_table.weight", "position_table.weight"):
        if name not in weights:
            raise ToprovarError(f"not a demo text encoder: tensor {name} is missing ({len(weights)} tensors present)")
    size, width = weights["word_table.weight"].shape
    encoder = WordTextEncoder(size, width, heads, weights["position_table.weight"].shape[0])
    missing, unexpected = encoder.load_state_dict({k: v.float() for k, v in weights.items()}, strict=False)
    if missing or unexpected:
        raise ToprovarError(
            f"demo text encoder has {len(missing)} missing and {len(unexpected)} unknown tensors, "
            f"the first: {[*missing, *unexpected][0]}"
        )
    return encoder.eval()


def vocabulary_document(vocabulary: list[str], max_tokens: int) -> str:
    """Text of vocabulary.json."""
    document = {"schema_version": SCHEMA_VERSION, "max_tokens": max_tokens, "words": vocabulary}
    return json.dumps(document, ensure_ascii=False, indent=0) + "\n"
