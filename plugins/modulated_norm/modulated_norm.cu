// ModulatedNorm on CUDA: one warp per token and row, three sweeps over it; the second and third find it in L1.
#include "../core/numbers.cuh"
#include "modulated_norm.h"

namespace toprovar
{
namespace
{

constexpr int kWARPS = 4;

__device__ __forceinline__ float sumOverWarp(float x)
{
#pragma unroll
    for (int away = 16; away > 0; away /= 2)
    {
        x += __shfl_xor_sync(0xffffffffu, x, away);
    }
    return x;
}

} // namespace

//! COUNT: numbers per load; divides C.
template <typename T, int COUNT>
__global__ void __launch_bounds__(32 * kWARPS) modulateNorm(ModulatedNormProblem const p)
{
    int64_t const token = int64_t(blockIdx.x) * kWARPS + threadIdx.x / 32;
    int const lane = threadIdx.x % 32;
    if (token >= p.n * p.R)
    {
        return;
    }
    float const* x = p.x + token * p.C;
    float sum = 0.f;
    for (int c = lane * COUNT; c < p.C; c += 32 * COUNT)
    {
        auto const some = loadPack<COUNT>(x + c);
#pragma unroll
        for (int i = 0; i < COUNT; ++i)
        {
            sum += some.values[i];
        }
    }
    float const mean = sumOverWarp(sum) / float(p.C);
    float squares = 0.f;
    for (int c = lane * COUNT; c < p.C; c += 32 * COUNT)
    {
        auto const some = loadPack<COUNT>(x + c);
#pragma unroll
        for (int i = 0; i < COUNT; ++i)
        {
            float const away = some.values[i] - mean;
            squares = fmaf(away, away, squares);
        }
    }
    float const factor = rsqrtf(sumOverWarp(squares) / float(p.C) + p.epsilon);
    int64_t const row = p.P == 1 ? 0 : token % p.R;
    float const* scale = p.scale + row * p.C;
    float const* shift = p.shift + row * p.C;
    T* y = static_cast<T*>(p.y) + token * p.C;
    for (int c = lane * COUNT; c < p.C; c += 32 * COUNT)
    {
        auto const some = loadPack<COUNT>(x + c);
        auto const scales = loadPack<COUNT>(scale + c);
        auto const shifts = loadPack<COUNT>(shift + c);
        Pack<T, COUNT> out;
#pragma unroll
        for (int i = 0; i < COUNT; ++i)
        {
            out.values[i] = narrow<T>(fmaf((some.values[i] - mean) * factor, scales.values[i], shifts.values[i]));
        }
        storePack<COUNT>(y + c, out);
    }
}

Status launchModulatedNorm(ModulatedNormProblem const& p, Stream stream)
{
    if (p.n * p.R == 0)
    {
        return cudaSuccess;
    }
    return withType(p.type, [&](auto type) {
        using T = decltype(type);
        unsigned const blocks = blocksFor(p.n * p.R, kWARPS);
        cudaStream_t const queue = static_cast<cudaStream_t>(stream);
        if (p.C % 4 == 0)
        {
            modulateNorm<T, 4><<<blocks, 32 * kWARPS, 0, queue>>>(p);
        }
        else
        {
            modulateNorm<T, 1><<<blocks, 32 * kWARPS, 0, queue>>>(p);
        }
        return cudaGetLastError();
    });
}

} // namespace toprovar
