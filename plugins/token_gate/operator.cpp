#include "token_gate.h"

#include "../core/operators.h"

namespace toprovar
{

namespace
{

constexpr int32_t kCOUNT = 0; // attribute

TokenGateProblem problemFrom(Call const& call)
{
    Shape const& score = call.inputs[0].shape;
    expect(score.rank == 1 || score.rank == 2, "score", textFrom(score), "[N] or [B, N]");
    TokenGateProblem problem{};
    problem.B = score.rank == 2 ? score[0] : 1;
    problem.N = score[-1];
    problem.count = static_cast<int64_t>(call.attributes[kCOUNT]);
    expect(problem.count >= 0 && problem.count <= problem.N, "count", std::to_string(problem.count),
        "0 to " + std::to_string(problem.N));
    expect(problem.N < (int64_t{1} << 32), "score", textFrom(score), "fewer than 2^32 tokens");
    expect(call.outputs[0].shape.size() == problem.B * problem.count, "indices", textFrom(call.outputs[0].shape),
        std::to_string(problem.B) + " times " + std::to_string(problem.count) + " numbers");
    problem.score = static_cast<float const*>(call.inputs[0].data);
    problem.indices = static_cast<int64_t*>(call.outputs[0].data);
    return problem;
}

void check(Call const& call)
{
    problemFrom(call);
}

void runOnCpu(Call const& call, int32_t threads)
{
    tokenGateOnCpu(problemFrom(call), threads);
}

#ifdef TOPROVAR_CUDA
Status runOnCuda(Call const& call, void*, Stream stream)
{
    return launchTokenGate(problemFrom(call), stream);
}
#endif

} // namespace

Operator const kTOKEN_GATE{"TokenGate", {{"score", TypeRule::kFLOAT32}}, {{"indices", TypeRule::kINT64}},
    {{0, 1, {{-1, 0, kCOUNT, 1}}}}, {{"count", AttributeType::kINTS}}, check, nullptr, TOPROVAR_ON_CUDA(runOnCuda),
    runOnCpu};

} // namespace toprovar
