"""The demo's text encoder as an ONNX graph: word ids to text rows."""

from __future__ import annotations

import numpy as np

from toprovar.exporter.demo.text_encoder import WordTextEncoder
from toprovar.exporter.graph_builder import GraphBuilder
from toprovar.exporter.infinity.weights import Thunks
from toprovar.exporter.weights_file import WeightsLayout


def text_encoder_weights(encoder: WordTextEncoder) -> Thunks:
    """Matrices [in, out], under `text_encoder.`; fp32 whatever the compute type."""
    weights: Thunks = {}
    for name, tensor in encoder.state_dict().items():
        transposed = name.endswith(".weight") and tensor.dim() == 2 and not name.endswith("table.weight")
        weights[f"text_encoder.{name}"] = lambda t=tensor, flip=transposed: t.T if flip else t  # type: ignore[misc]
    return weights


def text_encoder_graph(encoder: WordTextEncoder, tokens: int, layout: WeightsLayout) -> GraphBuilder:
    """Inputs: ids [1, T] int64, valid [1, T] float32 (1 on tokens); output: rows [1, T, width] float32."""
    g = GraphBuilder("text_encoder", layout)
    T, width, heads = tokens, encoder.word_table.embedding_dim, encoder.heads
    D = width // heads

    def w(name: str):  # type: ignore[no-untyped-def]
        return g.weight(f"text_encoder.{name}")

    def norm(x, name: str):  # type: ignore[no-untyped-def]
        return g.LayerNormalization(x, w(f"{name}.weight"), w(f"{name}.bias"), axis=-1, epsilon=1e-5)

    def linear(x, name: str):  # type: ignore[no-untyped-def]
        return g.Add(g.MatMul(x, w(f"{name}.weight")), w(f"{name}.bias"))

    ids = g.input("ids", (1, T), "I64")
    valid = g.input("valid", (1, T))
    x = g.Add(g.Gather(w("word_table.weight"), ids, axis=0), g.weight("text_encoder.position_table.weight", (0, T)))
    qkv = g.reshape(linear(norm(x, "norm1"), "query_key_value"), (1, T, 3, heads, D))
    q, k, v = g.split(g.Transpose(qkv, perm=[2, 0, 3, 1, 4]), 0, [1, 1, 1])  # each [1, 1, H, T, D]
    mask = g.reshape(g.Mul(g.Sub(np.float32(1), valid), np.float32(-1e4)), (1, 1, 1, 1, T))
    scores = g.Mul(g.MatMul(q, g.Transpose(k, perm=[0, 1, 2, 4, 3])), np.float32(D**-0.5))
    mixed = g.MatMul(g.Softmax(g.Add(scores, mask), axis=-1), v)  # [1, 1, H, T, D]
    mixed = g.reshape(g.Transpose(mixed, perm=[0, 1, 3, 2, 4]), (1, T, width))
    x = g.Add(x, linear(mixed, "project"))
    x = g.Add(x, linear(g.Gelu(linear(norm(x, "norm2"), "expand"), approximate="tanh"), "contract"))
    g.output(norm(x, "norm_out"), "rows", (1, T, width))
    return g
