// The n tokens with the lowest score, ascending by position; ties go to the smaller position. Any N, one launch.
#pragma once

#include "../core/kernel_types.h"

namespace toprovar
{

struct TokenGateProblem
{
    float const* score; // [B, N]; not NaN
    int64_t* indices;   // [B, count]
    int64_t B;
    int64_t N;
    int64_t count;      // 0 ... N
};

Status launchTokenGate(TokenGateProblem const& problem, Stream stream);
void tokenGateOnCpu(TokenGateProblem const& problem, int32_t threads);

} // namespace toprovar
