// The lowest scores on the processor: scores become integers of the same order, with the position below them.
#include "token_gate.h"

#include "../core/half.h"
#include "../core/parallel.h"

#include <algorithm>
#include <vector>

namespace toprovar
{

namespace
{

//! Ordered like the floats, -0 equal to 0, NaN at an end: a comparison that holds for any bits.
TOPROVAR_INLINE uint32_t orderOf(float score)
{
    uint32_t const bits = bitsAs<uint32_t>(score + 0.0f);
    return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

void gateRow(float const* score, int64_t N, int64_t count, int64_t* indices)
{
    std::vector<uint64_t> ranked(N);
    for (int64_t i = 0; i < N; ++i)
    {
        ranked[i] = static_cast<uint64_t>(orderOf(score[i])) << 32 | static_cast<uint64_t>(i);
    }
    if (count < N)
    {
        std::nth_element(ranked.begin(), ranked.begin() + count, ranked.end());
    }
    for (int64_t i = 0; i < count; ++i)
    {
        indices[i] = static_cast<int64_t>(ranked[i] & 0xffffffffu);
    }
    std::sort(indices, indices + count);
}

} // namespace

void tokenGateOnCpu(TokenGateProblem const& problem, int32_t threads)
{
    parallelFor(problem.B, threads,
        [&](int64_t row)
        { gateRow(problem.score + row * problem.N, problem.N, problem.count, problem.indices + row * problem.count); });
}

} // namespace toprovar
