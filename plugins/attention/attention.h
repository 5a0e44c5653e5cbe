// Attention of this scale's tokens over cached and new keys, with the entropy of its weights on demand.
//
//     s_j = scale * q . k_j (+ mask_j)    p = softmax(s)    o = sum p_j v_j    entropy = logsumexp(s) - sum p_j s_j
//
// Keys come in two segments, the cached ones and the new ones, both time-major; no copy joins them.
// Source: ToProVAR eq. 2.
#pragma once

#include "../core/kernel_types.h"

namespace toprovar
{

struct AttentionProblem
{
    void const* q;      // [L, R, H, D]
    void const* kPast;  // [S, R, G, D]; unread where S is 0
    void const* vPast;  // [S, R, G, D]
    void const* kNew;   // [N, R, G, D]; unread where N is 0
    void const* vNew;   // [N, R, G, D]
    float const* mask;  // [R, S + N] added to the scores, or null; a key 1e4 below its row's largest is hidden
    void* o;            // [L, R, H, D]
    float* entropy;     // nats: [L, R], mean over heads, or [L, R, H] with entropyPerHead; null where none is asked for
    int64_t L;          // queries; at least 1, as R and H
    int64_t S;          // cached keys
    int64_t N;          // new keys; S + N >= 1
    int32_t R;          // rows
    int32_t H;          // query heads
    int32_t G;          // key heads; divides H
    int32_t D;          // head width: a multiple of 16 bytes, up to 128 elements
    float scale;
    DataType type;      // of q, k, v and o
    bool entropyPerHead;
};

//! Bytes of scratch memory that launchAttention needs for this problem at most, on any device. Of the pointers, only
//! whether `entropy` is null is read.
size_t attentionScratchBytes(AttentionProblem const& problem);

//! Runs on a CUDA stream. scratch: 256-byte aligned.
Status launchAttention(AttentionProblem const& problem, void* scratch, Stream stream);

//! Runs on the processor with so many threads; float32 and float16 (arithmetic in float32).
void attentionOnCpu(AttentionProblem const& problem, int32_t threads);

} // namespace toprovar
