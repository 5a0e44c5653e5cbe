// What follows a sweep: parts of a split sweep become one output, and per-head entropies their mean.
//
// Both add in a fixed order, so that the same problem gives the same bits on every run.
#pragma once

#include "../core/numbers.cuh"
#include "attention_mma.cuh"

namespace toprovar
{

//! One warp per (query, row, head). entropy: [L, R, H], or null.
template <typename T>
__global__ void mergeParts(AttentionProblem const p, Parts const parts, float* entropy)
{
    int64_t const rows = p.L * p.R * p.H;
    int64_t const place = (int64_t(blockIdx.x) * blockDim.x + threadIdx.x) / 32;
    int const lane = threadIdx.x % 32;
    if (place >= rows)
    {
        return;
    }
    RowState all;
    float o[4] = {};
    for (int part = 0; part < parts.count; ++part)
    {
        float const* found = parts.state + (part * rows + place) * 3;
        RowState one;
        one.m = found[0];
        one.l = found[1];
        one.t = found[2];
        float2 const factors = all.join(one);
        float const* source = parts.o + (part * rows + place) * p.D;
#pragma unroll
        for (int i = 0; i < 4; ++i)
        {
            int const column = lane + 32 * i;
            o[i] = o[i] * factors.x + (column < p.D ? source[column] * factors.y : 0.f);
        }
    }
    float const share = 1.f / all.l;
#pragma unroll
    for (int i = 0; i < 4; ++i)
    {
        int const column = lane + 32 * i;
        if (column < p.D)
        {
            static_cast<T*>(p.o)[place * p.D + column] = narrow<T>(o[i] * share);
        }
    }
    if (entropy != nullptr && lane == 0)
    {
        entropy[place] = all.entropy();
    }
}

//! perHead: [L * R, H] -> mean: [L * R].
static __global__ void meanOverHeads(float const* perHead, float* mean, int64_t rows, int32_t H)
{
    int64_t const row = int64_t(blockIdx.x) * blockDim.x + threadIdx.x;
    if (row < rows)
    {
        float sum = 0.f;
        for (int head = 0; head < H; ++head)
        {
            sum += perHead[row * H + head];
        }
        mean[row] = sum / float(H);
    }
}

} // namespace toprovar
