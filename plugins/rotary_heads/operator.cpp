#include "rotary_heads.h"

#include "../core/operators.h"

namespace toprovar
{

namespace
{

constexpr int32_t kHEADS = 0; // attribute

RotaryHeadsProblem problemFrom(Call const& call)
{
    Tensor const& qkv = call.inputs[0];
    Tensor const& gain = call.inputs[2];
    Tensor const& cos = call.inputs[3];
    expect(qkv.shape.rank == 3, "qkv", textFrom(qkv.shape), "[n, R, 3 * H * D]");
    RotaryHeadsProblem problem{};
    problem.n = qkv.shape[0];
    problem.R = static_cast<int32_t>(qkv.shape[1]);
    problem.H = static_cast<int32_t>(call.attributes[kHEADS]);
    int64_t const width = qkv.shape[2];
    expect(problem.H > 0 && width % (6 * problem.H) == 0, "qkv", textFrom(qkv.shape),
        "3 times " + std::to_string(problem.H) + " heads of an even width");
    problem.D = static_cast<int32_t>(width / 3 / problem.H);
    problem.P = cos.shape.rank == 4 && cos.shape[1] == 1 ? 1 : problem.R;
    expectShape("bias", call.inputs[1], {width});
    expect(gain.shape.size() == problem.H, "gain", textFrom(gain.shape), std::to_string(problem.H) + " numbers");
    expectShape("cos", cos, {problem.n, problem.P, 1, problem.D / 2});
    expectShape("sin", call.inputs[4], {problem.n, problem.P, 1, problem.D / 2});
    for (int32_t i = 0; i < 3; ++i)
    {
        expectShape("q, k and v", call.outputs[i], {problem.n, problem.R, problem.H, problem.D});
    }
    problem.qkv = qkv.data;
    problem.bias = call.inputs[1].data;
    problem.gain = static_cast<float const*>(gain.data);
    problem.cos = static_cast<float const*>(cos.data);
    problem.sin = static_cast<float const*>(call.inputs[4].data);
    problem.q = call.outputs[0].data;
    problem.k = call.outputs[1].data;
    problem.v = call.outputs[2].data;
    problem.type = qkv.type;
    return problem;
}

void check(Call const& call)
{
    problemFrom(call);
}

void runOnCpu(Call const& call, int32_t threads)
{
    expect(call.inputs[0].type != DataType::kBFLOAT16, "qkv", "bfloat16", "float32 or float16 on the CPU");
    rotaryHeadsOnCpu(problemFrom(call), threads);
}

#ifdef TOPROVAR_CUDA
Status runOnCuda(Call const& call, void*, Stream stream)
{
    return launchRotaryHeads(problemFrom(call), stream);
}
#endif

ShapeRule headsOfQkv()
{
    return {0, 1, {{-1, 0, kHEADS, 1}, {0, -1, kHEADS, 3}}};
}

} // namespace

Operator const kROTARY_HEADS{"RotaryHeads",
    {{"qkv", TypeRule::kFLOATS}, {"bias", TypeRule::kFLOATS}, {"gain", TypeRule::kFLOAT32},
        {"cos", TypeRule::kFLOAT32}, {"sin", TypeRule::kFLOAT32}},
    {{"q", TypeRule::kFLOATS}, {"k", TypeRule::kFLOATS}, {"v", TypeRule::kFLOATS}},
    {headsOfQkv(), headsOfQkv(), headsOfQkv()}, {{"heads", AttributeType::kINTS}}, check, nullptr,
    TOPROVAR_ON_CUDA(runOnCuda), runOnCpu};

} // namespace toprovar
