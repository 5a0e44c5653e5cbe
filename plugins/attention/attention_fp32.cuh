// Attention in float32 on the ordinary cores: exact products, for parity runs; any head width up to 128.
//
// A block of 16 x 16 threads takes 64 queries of one (row, head), 32 keys at a time. Thread (y, x) holds queries 4y ... 4y+3,
// their scores of keys x and x + 16, and output columns 4x ... 4x+3 and 64 + 4x ... 64 + 4x+3.
#pragma once

#include "attention.h"
#include "online_entropy.cuh"

namespace toprovar
{

constexpr int kFP32_QUERIES = 64;
constexpr int kFP32_KEYS = 32;
constexpr int kFP32_WIDTH = 128 + 4; // a row in shared memory; 4 floats of padding keep the banks apart
constexpr int kFP32_SHARED_BYTES
    = ((kFP32_QUERIES + 2 * kFP32_KEYS) * kFP32_WIDTH + kFP32_QUERIES * (kFP32_KEYS + 1)) * 4;

//! perHead: [L, R, H] entropies, or null.
static __global__ void __launch_bounds__(256) attendFp32(AttentionProblem const p, float* perHead)
{
    extern __shared__ __align__(16) float memory32[];
    float* const q = memory32;
    float* const k = q + kFP32_QUERIES * kFP32_WIDTH;
    float* const v = k + kFP32_KEYS * kFP32_WIDTH;
    float* const weights = v + kFP32_KEYS * kFP32_WIDTH; // [queries][keys + 1]
    int const x = threadIdx.x % 16;
    int const y = threadIdx.x / 16;
    int64_t const first = int64_t(blockIdx.x) * kFP32_QUERIES;
    int const row = blockIdx.y / p.H;
    int const head = blockIdx.y % p.H;
    int const group = head / (p.H / p.G);
    int const D = p.D;
    int const fours = D / 4;
    int64_t const keys = p.S + p.N;
    for (int i = threadIdx.x; i < kFP32_QUERIES * fours; i += 256)
    {
        int const line = i / fours;
        int const column = i % fours * 4;
        float4 value = make_float4(0.f, 0.f, 0.f, 0.f);
        if (first + line < p.L)
        {
            int64_t const place = ((first + line) * p.R + row) * p.H + head;
            value = *reinterpret_cast<float4 const*>(static_cast<float const*>(p.q) + place * D + column);
        }
        *reinterpret_cast<float4*>(q + line * kFP32_WIDTH + column) = value;
    }

    float o[4][8] = {};
    RowState state[4];
    for (int64_t start = 0; start < keys; start += kFP32_KEYS)
    {
        __syncthreads();
        for (int i = threadIdx.x; i < kFP32_KEYS * fours; i += 256)
        {
            int const line = i / fours;
            int const column = i % fours * 4;
            int64_t const key = start + line;
            float4 oneKey = make_float4(0.f, 0.f, 0.f, 0.f);
            float4 oneValue = oneKey;
            if (key < keys)
            {
                bool const cached = key < p.S;
                int64_t const place = (((cached ? key : key - p.S) * p.R + row) * p.G + group) * D + column;
                oneKey = *reinterpret_cast<float4 const*>(static_cast<float const*>(cached ? p.kPast : p.kNew) + place);
                oneValue = *reinterpret_cast<float4 const*>(static_cast<float const*>(cached ? p.vPast : p.vNew) + place);
            }
            *reinterpret_cast<float4*>(k + line * kFP32_WIDTH + column) = oneKey;
            *reinterpret_cast<float4*>(v + line * kFP32_WIDTH + column) = oneValue;
        }
        __syncthreads();
        float s[4][2] = {};
        for (int d = 0; d < D; d += 4)
        {
            float4 const k0 = *reinterpret_cast<float4 const*>(k + x * kFP32_WIDTH + d);
            float4 const k1 = *reinterpret_cast<float4 const*>(k + (x + 16) * kFP32_WIDTH + d);
#pragma unroll
            for (int i = 0; i < 4; ++i)
            {
                float4 const one = *reinterpret_cast<float4 const*>(q + (4 * y + i) * kFP32_WIDTH + d);
                s[i][0] = fmaf(one.x, k0.x, fmaf(one.y, k0.y, fmaf(one.z, k0.z, fmaf(one.w, k0.w, s[i][0]))));
                s[i][1] = fmaf(one.x, k1.x, fmaf(one.y, k1.y, fmaf(one.z, k1.z, fmaf(one.w, k1.w, s[i][1]))));
            }
        }
#pragma unroll
        for (int i = 0; i < 4; ++i)
        {
            float largest = kLOWEST;
#pragma unroll
            for (int j = 0; j < 2; ++j)
            {
                int64_t const key = start + x + 16 * j;
                float score = s[i][j] * p.scale * kLOG2E;
                if (p.mask != nullptr && key < keys)
                {
                    score = fmaxf(fmaf(p.mask[row * keys + key], kLOG2E, score), kLOWEST);
                }
                s[i][j] = key < keys ? score : kLOWEST;
                largest = fmaxf(largest, s[i][j]);
            }
#pragma unroll
            for (int away = 1; away < 16; away *= 2)
            {
                largest = fmaxf(largest, __shfl_xor_sync(0xffffffffu, largest, away));
            }
            float const shrink = state[i].raise(largest);
#pragma unroll
            for (int j = 0; j < 2; ++j)
            {
                float const below = s[i][j] - state[i].m;
                float const weight = exp2f(below);
                state[i].l += weight;
                state[i].t = fmaf(weight, below, state[i].t);
                weights[(4 * y + i) * (kFP32_KEYS + 1) + x + 16 * j] = weight;
            }
#pragma unroll
            for (int c = 0; c < 8; ++c)
            {
                o[i][c] *= shrink;
            }
        }
        __syncwarp(); // a row's weights are written and read by the same half warp
        for (int key = 0; key < kFP32_KEYS; ++key)
        {
            float4 const low = *reinterpret_cast<float4 const*>(v + key * kFP32_WIDTH + 4 * x);
            float4 const high = *reinterpret_cast<float4 const*>(v + key * kFP32_WIDTH + 64 + 4 * x);
#pragma unroll
            for (int i = 0; i < 4; ++i)
            {
                float const weight = weights[(4 * y + i) * (kFP32_KEYS + 1) + key];
                o[i][0] = fmaf(weight, low.x, o[i][0]);
                o[i][1] = fmaf(weight, low.y, o[i][1]);
                o[i][2] = fmaf(weight, low.z, o[i][2]);
                o[i][3] = fmaf(weight, low.w, o[i][3]);
                o[i][4] = fmaf(weight, high.x, o[i][4]);
                o[i][5] = fmaf(weight, high.y, o[i][5]);
                o[i][6] = fmaf(weight, high.z, o[i][6]);
                o[i][7] = fmaf(weight, high.w, o[i][7]);
            }
        }
    }
#pragma unroll
    for (int i = 0; i < 4; ++i)
    {
#pragma unroll
        for (int away = 1; away < 16; away *= 2)
        {
            state[i].l += __shfl_xor_sync(0xffffffffu, state[i].l, away);
            state[i].t += __shfl_xor_sync(0xffffffffu, state[i].t, away);
        }
        int64_t const query = first + 4 * y + i;
        if (query >= p.L)
        {
            continue;
        }
        int64_t const place = (query * p.R + row) * p.H + head;
        if (perHead != nullptr && x == 0)
        {
            perHead[place] = state[i].entropy();
        }
#pragma unroll
        for (int c = 0; c < 8; ++c)
        {
            int const column = (c / 4) * 64 + 4 * x + c % 4;
            if (column < D)
            {
                static_cast<float*>(p.o)[place * D + column] = o[i][c] / state[i].l;
            }
        }
    }
}

} // namespace toprovar
