#include "bias_gelu.h"

#include "../core/operators.h"

namespace toprovar
{

namespace
{

BiasGeluProblem problemFrom(Call const& call)
{
    Tensor const& x = call.inputs[0];
    expect(x.shape.rank >= 1, "x", textFrom(x.shape), "[..., C]");
    BiasGeluProblem problem{};
    problem.C = static_cast<int32_t>(x.shape[-1]);
    problem.n = problem.C ? x.shape.size() / problem.C : 0;
    expectShape("bias", call.inputs[1], {problem.C});
    expect(call.outputs[0].shape.size() == x.shape.size(), "y", textFrom(call.outputs[0].shape), textFrom(x.shape));
    problem.x = x.data;
    problem.bias = call.inputs[1].data;
    problem.y = call.outputs[0].data;
    problem.type = x.type;
    return problem;
}

void check(Call const& call)
{
    problemFrom(call);
}

void runOnCpu(Call const& call, int32_t threads)
{
    expect(call.inputs[0].type != DataType::kBFLOAT16, "x", "bfloat16", "float32 or float16 on the CPU");
    biasGeluOnCpu(problemFrom(call), threads);
}

#ifdef TOPROVAR_CUDA
Status runOnCuda(Call const& call, void*, Stream stream)
{
    return launchBiasGelu(problemFrom(call), stream);
}
#endif

} // namespace

Operator const kBIAS_GELU{"BiasGelu", {{"x", TypeRule::kFLOATS}, {"bias", TypeRule::kFLOATS}},
    {{"y", TypeRule::kFLOATS}}, {{0, 0, {}}}, {}, check, nullptr, TOPROVAR_ON_CUDA(runOnCuda), runOnCpu};

} // namespace toprovar
