// BiasGelu on CUDA: one sweep, eight numbers per thread where the width allows.
#include "../core/numbers.cuh"
#include "bias_gelu.h"

namespace toprovar
{
namespace
{

__device__ __forceinline__ float gelu(float x)
{
    float const inner = 0.7978845608028654f * fmaf(0.044715f * x * x, x, x);
    return 0.5f * x * (1.f + tanhf(inner));
}

} // namespace

template <typename T, int COUNT>
__global__ void __launch_bounds__(256) addBiasGelu(BiasGeluProblem const p)
{
    int64_t const i = (int64_t(blockIdx.x) * 256 + threadIdx.x) * COUNT;
    if (i >= p.n * p.C)
    {
        return;
    }
    auto const x = loadPack<COUNT>(static_cast<T const*>(p.x) + i);
    auto const bias = loadPack<COUNT>(static_cast<T const*>(p.bias) + i % p.C);
    Pack<T, COUNT> out;
#pragma unroll
    for (int j = 0; j < COUNT; ++j)
    {
        out.values[j] = narrow<T>(gelu(widen(narrow<T>(widen(x.values[j]) + widen(bias.values[j])))));
    }
    storePack<COUNT>(static_cast<T*>(p.y) + i, out);
}

Status launchBiasGelu(BiasGeluProblem const& p, Stream stream)
{
    if (p.n * p.C == 0)
    {
        return cudaSuccess;
    }
    return withType(p.type, [&](auto type) {
        using T = decltype(type);
        constexpr int kCOUNT = 16 / sizeof(T);
        int64_t const size = p.n * p.C;
        cudaStream_t const queue = static_cast<cudaStream_t>(stream);
        if (p.C % kCOUNT == 0)
        {
            addBiasGelu<T, kCOUNT><<<blocksFor(size / kCOUNT, 256), 256, 0, queue>>>(p);
        }
        else
        {
            addBiasGelu<T, 1><<<blocksFor(size, 256), 256, 0, queue>>>(p);
        }
        return cudaGetLastError();
    });
}

} // namespace toprovar
