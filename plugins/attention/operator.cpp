// EntropyAttention, CachedAttention and MaskedAttention: one kernel under three names.
#include "attention.h"

#include "../core/operators.h"

namespace toprovar
{

namespace
{

constexpr int32_t kSCALE = 0; // attribute

AttentionProblem problemFrom(Call const& call, Tensor const& kNew, Tensor const& vNew, Tensor const* kPast,
    Tensor const* vPast, Tensor const* mask)
{
    Tensor const& q = call.inputs[0];
    expect(q.shape.rank == 4, "q", textFrom(q.shape), "[L, R, H, D]");
    AttentionProblem problem{};
    problem.L = q.shape[0];
    problem.R = static_cast<int32_t>(q.shape[1]);
    problem.H = static_cast<int32_t>(q.shape[2]);
    problem.D = static_cast<int32_t>(q.shape[3]);
    expectShape("keys", kNew, {-1, problem.R, -1, problem.D});
    problem.N = kNew.shape[0];
    problem.G = static_cast<int32_t>(kNew.shape[2]);
    expect(problem.H > 0 && problem.G > 0 && problem.H % problem.G == 0, "heads", std::to_string(problem.H) + " over "
            + std::to_string(problem.G), "a multiple");
    expectShape("values", vNew, {problem.N, problem.R, problem.G, problem.D});
    if (kPast)
    {
        problem.S = kPast->shape[0];
        expectShape("k_past", *kPast, {-1, problem.R, problem.G, problem.D});
        expectShape("v_past", *vPast, {problem.S, problem.R, problem.G, problem.D});
        problem.kPast = kPast->data;
        problem.vPast = vPast->data;
    }
    expect(problem.S + problem.N >= 1, "keys", "none", "at least one");
    if (mask)
    {
        expectShape("mask", *mask, {problem.R, problem.S + problem.N});
        problem.mask = static_cast<float const*>(mask->data);
    }
    int32_t const step = q.type == DataType::kFLOAT32 ? 4 : 8; // 16 bytes
    expect(problem.D > 0 && problem.D <= 128 && problem.D % step == 0, "head width", std::to_string(problem.D),
        "a multiple of " + std::to_string(step) + " up to 128");
    expectShape("o", call.outputs[0], {problem.L, problem.R, problem.H, problem.D});
    problem.q = q.data;
    problem.kNew = kNew.data;
    problem.vNew = vNew.data;
    problem.o = call.outputs[0].data;
    problem.scale = static_cast<float>(call.attributes[kSCALE]);
    problem.type = q.type;
    if (call.outputCount > 1)
    {
        // callers of the C functions may ask for every head; graphs get the mean
        problem.entropyPerHead = call.outputs[1].shape.rank == 3;
        if (problem.entropyPerHead)
        {
            expectShape("entropy", call.outputs[1], {problem.L, problem.R, problem.H});
        }
        else
        {
            expectShape("entropy", call.outputs[1], {problem.L, problem.R});
        }
        problem.entropy = static_cast<float*>(call.outputs[1].data);
    }
    return problem;
}

AttentionProblem cachedProblem(Call const& call)
{
    return problemFrom(call, call.inputs[1], call.inputs[2], &call.inputs[3], &call.inputs[4], nullptr);
}

AttentionProblem maskedProblem(Call const& call)
{
    return problemFrom(call, call.inputs[1], call.inputs[2], nullptr, nullptr, &call.inputs[3]);
}

//! No query: nothing to write, and the kernels below divide by rows and launch at least one block.
bool isEmpty(AttentionProblem const& problem)
{
    return problem.L == 0 || problem.R == 0;
}

using Problem = AttentionProblem (*)(Call const&);

template <Problem problem>
void check(Call const& call)
{
    problem(call);
}

template <Problem problem>
void runOnCpu(Call const& call, int32_t threads)
{
    expect(call.inputs[0].type != DataType::kBFLOAT16, "q", "bfloat16", "float32 or float16 on the CPU");
    AttentionProblem const posed = problem(call);
    if (!isEmpty(posed))
    {
        attentionOnCpu(posed, threads);
    }
}

#ifdef TOPROVAR_CUDA
template <Problem problem>
size_t scratchBytes(Call const& call)
{
    AttentionProblem sized = problem(call);
    float placeholder = 0.0f; // a host that plans has no addresses yet; whether entropy is asked for is all that counts
    sized.entropy = call.outputCount > 1 ? &placeholder : nullptr;
    return isEmpty(sized) ? 0 : attentionScratchBytes(sized);
}

template <Problem problem>
Status runOnCuda(Call const& call, void* scratch, Stream stream)
{
    AttentionProblem const posed = problem(call);
    return isEmpty(posed) ? Status{} : launchAttention(posed, scratch, stream);
}
#endif

std::vector<Port> const kCACHED_INPUTS{{"q", TypeRule::kFLOATS}, {"k_new", TypeRule::kFLOATS},
    {"v_new", TypeRule::kFLOATS}, {"k_past", TypeRule::kFLOATS}, {"v_past", TypeRule::kFLOATS}};

} // namespace

Operator const kENTROPY_ATTENTION{"EntropyAttention", kCACHED_INPUTS,
    {{"o", TypeRule::kFLOATS}, {"entropy", TypeRule::kFLOAT32}}, {{0, 0, {}}, {0, 2, {}}},
    {{"scale", AttributeType::kFLOAT}}, check<cachedProblem>, TOPROVAR_ON_CUDA(scratchBytes<cachedProblem>),
    TOPROVAR_ON_CUDA(runOnCuda<cachedProblem>), runOnCpu<cachedProblem>};

Operator const kCACHED_ATTENTION{"CachedAttention", kCACHED_INPUTS, {{"o", TypeRule::kFLOATS}}, {{0, 0, {}}},
    {{"scale", AttributeType::kFLOAT}}, check<cachedProblem>, TOPROVAR_ON_CUDA(scratchBytes<cachedProblem>),
    TOPROVAR_ON_CUDA(runOnCuda<cachedProblem>), runOnCpu<cachedProblem>};

Operator const kMASKED_ATTENTION{"MaskedAttention",
    {{"q", TypeRule::kFLOATS}, {"k", TypeRule::kFLOATS}, {"v", TypeRule::kFLOATS}, {"mask", TypeRule::kFLOAT32}},
    {{"o", TypeRule::kFLOATS}}, {{0, 0, {}}}, {{"scale", AttributeType::kFLOAT}}, check<maskedProblem>,
    TOPROVAR_ON_CUDA(scratchBytes<maskedProblem>), TOPROVAR_ON_CUDA(runOnCuda<maskedProblem>),
    runOnCpu<maskedProblem>};

} // namespace toprovar
