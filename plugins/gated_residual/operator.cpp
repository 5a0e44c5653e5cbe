#include "gated_residual.h"

#include "../core/operators.h"

namespace toprovar
{

namespace
{

GatedResidualProblem problemFrom(Call const& call)
{
    Tensor const& x = call.inputs[0];
    Tensor const& gate = call.inputs[3];
    expect(x.shape.rank == 3, "x", textFrom(x.shape), "[n, R, C]");
    GatedResidualProblem problem{};
    problem.n = x.shape[0];
    problem.R = static_cast<int32_t>(x.shape[1]);
    problem.C = static_cast<int32_t>(x.shape[2]);
    expectShape("y", call.inputs[1], {problem.n, problem.R, problem.C});
    expectShape("bias", call.inputs[2], {problem.C});
    expectShape("gate", gate, {1, gate.shape[1] == 1 ? 1 : problem.R, problem.C});
    expectShape("out", call.outputs[0], {problem.n, problem.R, problem.C});
    problem.P = static_cast<int32_t>(gate.shape[1]);
    problem.x = static_cast<float const*>(x.data);
    problem.y = call.inputs[1].data;
    problem.bias = call.inputs[2].data;
    problem.gate = static_cast<float const*>(gate.data);
    problem.out = static_cast<float*>(call.outputs[0].data);
    problem.type = call.inputs[1].type;
    return problem;
}

void check(Call const& call)
{
    problemFrom(call);
}

void runOnCpu(Call const& call, int32_t threads)
{
    expect(call.inputs[1].type != DataType::kBFLOAT16, "y", "bfloat16", "float32 or float16 on the CPU");
    gatedResidualOnCpu(problemFrom(call), threads);
}

#ifdef TOPROVAR_CUDA
Status runOnCuda(Call const& call, void*, Stream stream)
{
    return launchGatedResidual(problemFrom(call), stream);
}
#endif

} // namespace

Operator const kGATED_RESIDUAL{"GatedResidual",
    {{"x", TypeRule::kFLOAT32}, {"y", TypeRule::kFLOATS}, {"bias", TypeRule::kFLOATS}, {"gate", TypeRule::kFLOAT32}},
    {{"out", TypeRule::kFLOAT32}}, {{0, 0, {}}}, {}, check, nullptr, TOPROVAR_ON_CUDA(runOnCuda), runOnCpu};

} // namespace toprovar
