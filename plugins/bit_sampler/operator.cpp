#include "bit_sampler.h"

#include "../core/operators.h"

namespace toprovar
{

namespace
{

BitSamplerProblem problemFrom(Call const& call)
{
    Tensor const& logits = call.inputs[0];
    Tensor const& noise = call.inputs[1];
    expect(logits.shape.rank >= 1 && logits.shape[-1] == 2, "logits", textFrom(logits.shape), "[..., 2]");
    BitSamplerProblem problem{};
    problem.n = logits.shape.size() / 2;
    expect(noise.shape.size() == problem.n, "noise", textFrom(noise.shape), std::to_string(problem.n) + " numbers");
    expectShape("limit", call.inputs[2], {1});
    expect(call.outputs[0].shape.size() == problem.n, "bits", textFrom(call.outputs[0].shape),
        std::to_string(problem.n) + " numbers");
    problem.logits = static_cast<float const*>(logits.data);
    problem.noise = static_cast<float const*>(noise.data);
    problem.limit = static_cast<float const*>(call.inputs[2].data);
    problem.bits = static_cast<int32_t*>(call.outputs[0].data);
    return problem;
}

void check(Call const& call)
{
    problemFrom(call);
}

void runOnCpu(Call const& call, int32_t threads)
{
    bitSamplerOnCpu(problemFrom(call), threads);
}

#ifdef TOPROVAR_CUDA
Status runOnCuda(Call const& call, void*, Stream stream)
{
    return launchBitSampler(problemFrom(call), stream);
}
#endif

} // namespace

Operator const kBIT_SAMPLER{"BitSampler",
    {{"logits", TypeRule::kFLOAT32}, {"noise", TypeRule::kFLOAT32}, {"limit", TypeRule::kFLOAT32}},
    {{"bits", TypeRule::kINT32}}, {{0, 1, {}}}, {}, check, nullptr, TOPROVAR_ON_CUDA(runOnCuda), runOnCpu};

} // namespace toprovar
