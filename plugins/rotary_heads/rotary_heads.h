// From the packed projection to attention's operands: bias, unit length of q and k, gain of q, rotary positions.
//
//     q = rotate(unit(qkv_q + bias_q) * gain)    k = rotate(unit(qkv_k + bias_k))    v = qkv_v + bias_v
//     unit(x) = x / max(|x|, 1e-12) over the head; rotate turns the pairs (x_i, x_(i + D/2)) by the angle of (position, i)
//
// k and v leave in cache layout, so that a runtime binds them to the next slice of its buffers.
#pragma once

#include "../core/kernel_types.h"

namespace toprovar
{

struct RotaryHeadsProblem
{
    void const* qkv;   // [n, R, 3 * H * D]
    void const* bias;  // [3 * H * D]
    float const* gain; // [H]
    float const* cos;  // [n, P, 1, D / 2]
    float const* sin;  // [n, P, 1, D / 2]
    void* q;           // [n, R, H, D]
    void* k;           // [n, R, H, D]
    void* v;           // [n, R, H, D]
    int64_t n;
    int32_t R;
    int32_t P;         // rows of the position tables: 1 (shared) or R
    int32_t H;
    int32_t D;
    DataType type;     // of qkv, bias, q, k and v; arithmetic in float32
};

Status launchRotaryHeads(RotaryHeadsProblem const& problem, Stream stream);
void rotaryHeadsOnCpu(RotaryHeadsProblem const& problem, int32_t threads);

} // namespace toprovar
