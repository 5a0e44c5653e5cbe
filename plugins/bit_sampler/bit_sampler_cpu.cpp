// Bits from logits and noise on the processor.
#include "bit_sampler.h"

#include "../core/parallel.h"

#include <cmath>

namespace toprovar
{

namespace
{

constexpr int64_t kGRAIN = 1 << 13; // bits that are worth a thread

void drawRange(BitSamplerProblem const& problem, int64_t begin, int64_t end)
{
    float const limit = problem.limit[0];
    for (int64_t i = begin; i < end; ++i)
    {
        float const odds = problem.logits[2 * i + 1] - problem.logits[2 * i];
        float chance = 1.0f / (1.0f + std::exp(-odds));
        chance = odds <= -limit ? 0.0f : chance;
        chance = odds >= limit ? 1.0f : chance;
        problem.bits[i] = problem.noise[i] < chance ? 1 : 0;
    }
}

} // namespace

void bitSamplerOnCpu(BitSamplerProblem const& problem, int32_t threads)
{
    parallelRanges(
        problem.n, kGRAIN, threads, [&](int64_t begin, int64_t end) { drawRange(problem, begin, end); });
}

} // namespace toprovar
