#include "modulated_norm.h"

#include "../core/operators.h"

namespace toprovar
{

namespace
{

constexpr int32_t kEPSILON = 0; // attributes

ModulatedNormProblem problemFrom(Call const& call)
{
    Tensor const& x = call.inputs[0];
    Tensor const& scale = call.inputs[1];
    expect(x.shape.rank == 3, "x", textFrom(x.shape), "[n, R, C]");
    ModulatedNormProblem problem{};
    problem.n = x.shape[0];
    problem.R = static_cast<int32_t>(x.shape[1]);
    problem.C = static_cast<int32_t>(x.shape[2]);
    problem.P = scale.shape[1] == 1 ? 1 : problem.R;
    expectShape("scale", scale, {1, problem.P, problem.C});
    expectShape("shift", call.inputs[2], {1, problem.P, problem.C});
    expectShape("y", call.outputs[0], {problem.n, problem.R, problem.C});
    problem.x = static_cast<float const*>(x.data);
    problem.scale = static_cast<float const*>(scale.data);
    problem.shift = static_cast<float const*>(call.inputs[2].data);
    problem.y = call.outputs[0].data;
    problem.epsilon = static_cast<float>(call.attributes[kEPSILON]);
    problem.type = call.outputs[0].type;
    return problem;
}

void check(Call const& call)
{
    problemFrom(call);
}

void runOnCpu(Call const& call, int32_t threads)
{
    expect(call.outputs[0].type != DataType::kBFLOAT16, "y", "bfloat16", "float32 or float16 on the CPU");
    modulatedNormOnCpu(problemFrom(call), threads);
}

#ifdef TOPROVAR_CUDA
Status runOnCuda(Call const& call, void*, Stream stream)
{
    return launchModulatedNorm(problemFrom(call), stream);
}
#endif

} // namespace

Operator const kMODULATED_NORM{"ModulatedNorm",
    {{"x", TypeRule::kFLOAT32}, {"scale", TypeRule::kFLOAT32}, {"shift", TypeRule::kFLOAT32}},
    {{"y", TypeRule::kATTRIBUTE}}, {{0, 0, {}}}, {{"epsilon", AttributeType::kFLOAT}, {"to", AttributeType::kINT}},
    check, nullptr, TOPROVAR_ON_CUDA(runOnCuda), runOnCpu};

} // namespace toprovar
