// RotaryHeads on CUDA: one warp per token, row and head of q, k or v; a lane holds two neighbours of each half.
#include "../core/numbers.cuh"
#include "rotary_heads.h"

namespace toprovar
{
namespace
{

constexpr int kWARPS = 8;
constexpr int kMAX_PAIRS = 4; // two numbers of each half per lane and step: head widths up to 512

} // namespace

template <typename T>
__global__ void __launch_bounds__(32 * kWARPS) rotateHeads(RotaryHeadsProblem const p)
{
    int64_t const unit = int64_t(blockIdx.x) * kWARPS + threadIdx.x / 32;
    int const lane = threadIdx.x % 32;
    if (unit >= p.n * p.R * 3 * p.H)
    {
        return;
    }
    int64_t const token = unit / (3 * p.H); // token * R + row
    int const packed = int(unit % (3 * p.H));
    int const part = packed / p.H; // 0 q, 1 k, 2 v
    int const head = packed % p.H;
    int const half = p.D / 2;
    T const* source = static_cast<T const*>(p.qkv) + unit * p.D;
    T const* bias = static_cast<T const*>(p.bias) + int64_t(packed) * p.D;
    T* const target = static_cast<T*>(part == 0 ? p.q : part == 1 ? p.k : p.v) + (token * p.H + head) * p.D;

    float a[kMAX_PAIRS][2] = {};
    float b[kMAX_PAIRS][2] = {};
    float squares = 0.f;
#pragma unroll
    for (int step = 0; step < kMAX_PAIRS; ++step)
    {
        int const i = 2 * lane + 64 * step;
        if (i < half)
        {
            auto const first = loadPack<2>(source + i);
            auto const second = loadPack<2>(source + half + i);
            auto const firstBias = loadPack<2>(bias + i);
            auto const secondBias = loadPack<2>(bias + half + i);
#pragma unroll
            for (int j = 0; j < 2; ++j)
            {
                // rounded to T, as the sum of the function body is
                a[step][j] = widen(narrow<T>(widen(first.values[j]) + widen(firstBias.values[j])));
                b[step][j] = widen(narrow<T>(widen(second.values[j]) + widen(secondBias.values[j])));
                squares = fmaf(a[step][j], a[step][j], fmaf(b[step][j], b[step][j], squares));
            }
        }
    }
#pragma unroll
    for (int away = 16; away > 0; away /= 2)
    {
        squares += __shfl_xor_sync(0xffffffffu, squares, away);
    }
    float const length = fmaxf(sqrtf(squares), 1e-12f);
    float const gain = part == 0 ? p.gain[head] : 1.f;
    int64_t const angles = (p.P == 1 ? token / p.R : token) * half;
#pragma unroll
    for (int step = 0; step < kMAX_PAIRS; ++step)
    {
        int const i = 2 * lane + 64 * step;
        if (i < half)
        {
            Pack<T, 2> first;
            Pack<T, 2> second;
#pragma unroll
            for (int j = 0; j < 2; ++j)
            {
                float x = a[step][j];
                float y = b[step][j];
                if (part < 2)
                {
                    float const cosine = p.cos[angles + i + j];
                    float const sine = p.sin[angles + i + j];
                    float const unitX = x / length * gain;
                    float const unitY = y / length * gain;
                    x = unitX * cosine - unitY * sine;
                    y = unitX * sine + unitY * cosine;
                }
                first.values[j] = narrow<T>(x);
                second.values[j] = narrow<T>(y);
            }
            storePack<2>(target + i, first);
            storePack<2>(target + half + i, second);
        }
    }
}

Status launchRotaryHeads(RotaryHeadsProblem const& p, Stream stream)
{
    if (p.D % 4 != 0 || p.D > 128 * kMAX_PAIRS)
    {
        return cudaErrorInvalidValue;
    }
    if (p.n * p.R * p.H == 0)
    {
        return cudaSuccess;
    }
    return withType(p.type, [&](auto type) {
        unsigned const blocks = blocksFor(p.n * p.R * 3 * p.H, kWARPS);
        rotateHeads<decltype(type)><<<blocks, 32 * kWARPS, 0, static_cast<cudaStream_t>(stream)>>>(p);
        return cudaGetLastError();
    });
}

} // namespace toprovar
