// BitSampler on CUDA: one thread per bit.
#include "../core/numbers.cuh"
#include "bit_sampler.h"

namespace toprovar
{

static __global__ void __launch_bounds__(256) drawBits(BitSamplerProblem const p)
{
    int64_t const i = int64_t(blockIdx.x) * 256 + threadIdx.x;
    if (i >= p.n)
    {
        return;
    }
    auto const pair = loadPack<2>(p.logits + 2 * i);
    float const odds = pair.values[1] - pair.values[0];
    float const limit = p.limit[0];
    float const likely = 1.f / (1.f + expf(-odds));
    float const chance = odds >= limit ? 1.f : odds <= -limit ? 0.f : likely;
    p.bits[i] = p.noise[i] < chance ? 1 : 0;
}

Status launchBitSampler(BitSamplerProblem const& p, Stream stream)
{
    if (p.n == 0)
    {
        return cudaSuccess;
    }
    drawBits<<<blocksFor(p.n, 256), 256, 0, static_cast<cudaStream_t>(stream)>>>(p);
    return cudaGetLastError();
}

} // namespace toprovar
