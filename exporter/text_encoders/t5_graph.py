"""T5's encoder as an ONNX graph over a weights file of its own: token ids to text rows, fp32.

Root-mean-square norms, attention without scaling and with a learned bias per distance, a gated GELU; no further biases.
Source: arXiv 1910.10683 and 2002.05202, as transformers' T5EncoderModel computes it.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from toprovar.exporter.graph_builder import GraphBuilder
from toprovar.exporter.infinity.weights import Thunks
from toprovar.exporter.output_folder import replacing
from toprovar.exporter.weights_file import WEIGHTS_FILE, WeightsLayout, WeightSpec, layout_weights, write_weights
from toprovar.runtime.errors import ToprovarError
from toprovar.runtime.version import VERSION

GRAPH_FILE, FACTS_FILE = "text_encoder.onnx", "text_encoder.json"
MASKED = -1e9  # additive on keys that are padding; finite, so that a row of padding alone is no NaN


def distance_buckets(tokens: int, buckets: int, max_distance: int) -> np.ndarray:
    """Row of the bias table for each query and key, [T, T] int64.

    Half of the rows are for keys behind the query. Of each half, the first half is one row per distance, the rest grow
    with its logarithm up to `max_distance`.
    """
    relative = np.arange(tokens)[None, :] - np.arange(tokens)[:, None]  # key minus query
    half = buckets // 2
    exact = half // 2
    distance = np.abs(relative)
    # in float32, as the reference: a distance on the edge of two rows must fall on the same side
    growth = np.log(np.maximum(distance, 1).astype(np.float32) / np.float32(exact)) / np.float32(
        np.log(max_distance / exact)
    )
    far = np.minimum(exact + (growth * np.float32(half - exact)).astype(np.int64), half - 1)
    return np.where(distance < exact, distance, far) + np.where(relative > 0, half, 0)


def t5_weights(model: Any) -> Thunks:
    """Matrices [in, out], named as in the checkpoint; model: transformers' T5EncoderModel."""
    weights: Thunks = {}
    for name, tensor in model.state_dict().items():
        if name == "encoder.embed_tokens.weight":
            continue  # the word table again
        is_table = name == "shared.weight" or "relative_attention_bias" in name
        weights[name] = lambda t=tensor, flip=tensor.dim() == 2 and not is_table: t.T if flip else t  # type: ignore[misc]
    return weights


def t5_graph(config: Any, tokens: int, layout: WeightsLayout) -> GraphBuilder:
    """Inputs: ids [1, T] int64, valid [1, T] float32 (1 on tokens); output: rows [1, T, width] float32.

    Raises: ToprovarError for the feed-forward layer of older T5s.
    """
    if not config.is_gated_act or config.dense_act_fn != "gelu_new":
        raise ToprovarError(
            f"this T5 has feed-forward layers of kind {config.feed_forward_proj}; the graph has gated-gelu",
            "take flan-t5 or T5 1.1",
        )
    g = GraphBuilder("text_encoder", layout)
    T, H, D, width = tokens, config.num_heads, config.d_kv, config.d_model

    def norm(x, name: str):  # type: ignore[no-untyped-def]
        mean_square = g.ReduceMean(g.Mul(x, x), g.constant([-1]), keepdims=1)
        scaled = g.Div(x, g.Sqrt(g.Add(mean_square, np.float32(config.layer_norm_epsilon))))
        return g.Mul(scaled, g.weight(name))

    def heads(x, name: str, perm: list[int]):  # type: ignore[no-untyped-def]
        return g.Transpose(g.reshape(g.linear(x, name), (1, T, H, D)), perm=perm)

    ids = g.input("ids", (1, T), "I64")
    valid = g.input("valid", (1, T))
    attention = "encoder.block.0.layer.0.SelfAttention"
    table = g.weight(f"{attention}.relative_attention_bias.weight")  # [buckets, H]
    buckets = distance_buckets(T, config.relative_attention_num_buckets, config.relative_attention_max_distance)
    distance = g.Transpose(g.Gather(table, g.constant(buckets), axis=0), perm=[2, 0, 1])  # [H, T, T]
    mask = g.reshape(g.Mul(g.Sub(np.float32(1), valid), np.float32(MASKED)), (1, 1, 1, T))
    bias = g.Add(g.reshape(distance, (1, H, T, T)), mask)
    x = g.Gather(g.weight("shared.weight"), ids, axis=0)
    for i in range(config.num_layers):
        attention, feed = f"encoder.block.{i}.layer.0", f"encoder.block.{i}.layer.1"
        y = norm(x, f"{attention}.layer_norm.weight")
        q = heads(y, f"{attention}.SelfAttention.q.weight", [0, 2, 1, 3])
        k = heads(y, f"{attention}.SelfAttention.k.weight", [0, 2, 3, 1])
        v = heads(y, f"{attention}.SelfAttention.v.weight", [0, 2, 1, 3])
        mixed = g.MatMul(g.Softmax(g.Add(g.MatMul(q, k), bias), axis=-1), v)  # [1, H, T, D]
        mixed = g.reshape(g.Transpose(mixed, perm=[0, 2, 1, 3]), (1, T, H * D))
        x = g.Add(x, g.linear(mixed, f"{attention}.SelfAttention.o.weight"))
        y = norm(x, f"{feed}.layer_norm.weight")
        gate = g.Gelu(g.linear(y, f"{feed}.DenseReluDense.wi_0.weight"), approximate="tanh")
        gated = g.Mul(gate, g.linear(y, f"{feed}.DenseReluDense.wi_1.weight"))
        x = g.Add(x, g.linear(gated, f"{feed}.DenseReluDense.wo.weight"))
    g.output(norm(x, "encoder.final_layer_norm.weight"), "rows", (1, T, width))
    return g


def export_t5(model: Any, tokens: int, out: Path, facts: dict[str, Any], overwrite: bool = True) -> dict[str, Any]:
    """Writes the graph, its weights and what they are; the folder is complete or as it was.

    Returns: the facts written beside the graph.
    Raises:  ToprovarError as `t5_graph`, and if the folder cannot be replaced.
    """
    thunks = t5_weights(model)
    layout = layout_weights({name: WeightSpec("F32", tuple(make().shape)) for name, make in thunks.items()})
    graph = t5_graph(model.config, tokens, layout)
    document = {
        "schema_version": 1,
        "tool_version": VERSION,
        "graphs": {GRAPH_FILE: "ids to rows", WEIGHTS_FILE: "what the graph points into"},  # all files beside this one
        "tokens": tokens,
        "width": int(model.config.d_model),
        "inputs": {"ids": [1, tokens], "valid": [1, tokens]},
        "output": "rows",
        "encoder": facts,
    }
    with replacing(out, overwrite, FACTS_FILE) as folder:
        write_weights(folder / WEIGHTS_FILE, layout, lambda name: thunks[name]().float().contiguous().numpy())
        graph.save(folder / GRAPH_FILE)
        (folder / FACTS_FILE).write_text(json.dumps(document, indent=2) + "\n")
    return document
