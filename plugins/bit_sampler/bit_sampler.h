// Draws bits from pairs of logits and uniform noise: 1 where noise < sigmoid(one - zero).
//
// Odds of at least `limit` are certain (top-k and top-p in closed form).
#pragma once

#include "../core/kernel_types.h"

namespace toprovar
{

struct BitSamplerProblem
{
    float const* logits; // [n, 2]: of zero and of one
    float const* noise;  // [n], in [0, 1)
    float const* limit;  // [1]
    int32_t* bits;       // [n]: 0 or 1
    int64_t n;
};

Status launchBitSampler(BitSamplerProblem const& problem, Stream stream);
void bitSamplerOnCpu(BitSamplerProblem const& problem, int32_t threads);

} // namespace toprovar
