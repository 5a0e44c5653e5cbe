"""EntropyAttention, CachedAttention and MaskedAttention as ONNX functions.

Attention of this scale's tokens over cached and new keys; EntropyAttention also gives the entropy of its weights.
They are two names and not one operator with an optional output, because ONNX Runtime refuses a call of a model-local
function that leaves out an output, and computes an output that nobody reads. Everything is time-major, so that a
runtime can bind slices of one cache buffer without copies.

    q      [L, R, H, D]   queries, already scaled where the model says so
    k_new  [L, R, H, D]   keys of this scale;    v_new likewise
    k_past [S, R, H, D]   keys of earlier scales; S may be 0
    o      [L, R, H, D]   softmax(scale * q k^T) v, in v's type
    entropy [L, R]        float32 nats, mean over heads: logsumexp(s) - sum(p * s), which never meets p log p

MaskedAttention is that over the prompt: k, v [T, R, H, D] and mask [R, T] float32, added to the scores.
Source: ToProVAR eq. 2.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from toprovar.plugins.functions import function_of

if TYPE_CHECKING:
    import onnx

_JOIN = """
    k = Concat <axis = 0> (k_past, k_new)
    v = Concat <axis = 0> (v_past, v_new)
"""

_SCORES = """
    queries = Transpose <perm = [1, 2, 0, 3]> (q)
    keys = Transpose <perm = [1, 2, 3, 0]> (k)
    values = Transpose <perm = [1, 2, 0, 3]> (v)
    products = MatMul (queries, keys)
    wide = Cast <to = 1> (products)
    factor = Constant <value_float: float = @scale> ()
    scores = Mul (wide, factor)
"""

_MASK = """
    middle = Constant <value_ints = [1, 2]> ()
    hidden = Unsqueeze (mask, middle)
    seen = Add (scores, hidden)
"""

_MIX = """
    weights = Softmax <axis = -1> (scores)
    narrow = CastLike (weights, v)
    mixed = MatMul (narrow, values)
    o = Transpose <perm = [2, 0, 1, 3]> (mixed)
"""

# With w = s - max(s): ln sum e^w - sum p w. Both terms are >= 0, and exp never overflows.
_ENTROPY = """
    last = Constant <value_ints = [-1]> ()
    heads = Constant <value_ints = [1]> ()
    largest = ReduceMax <keepdims = 1> (scores, last)
    below = Sub (scores, largest)
    weighted = Mul (weights, below)
    expected = ReduceSum <keepdims = 0> (weighted, last)
    peak = ReduceMax <keepdims = 0> (weights, last)
    log_peak = Log (peak)
    log_total = Neg (log_peak)
    per_head = Sub (log_total, expected)
    mean = ReduceMean <keepdims = 0> (per_head, heads)
    entropy = Transpose <perm = [1, 0]> (mean)
"""


def entropy_attention_function() -> onnx.FunctionProto:
    body = _JOIN + _SCORES + _MIX + _ENTROPY
    return function_of("EntropyAttention", "scale", "q, k_new, v_new, k_past, v_past", "o, entropy", body)


def cached_attention_function() -> onnx.FunctionProto:
    return function_of("CachedAttention", "scale", "q, k_new, v_new, k_past, v_past", "o", _JOIN + _SCORES + _MIX)


def masked_attention_function() -> onnx.FunctionProto:
    body = _SCORES + _MASK + _MIX.replace("(scores)", "(seen)")
    return function_of("MaskedAttention", "scale", "q, k, v, mask", "o", body)
