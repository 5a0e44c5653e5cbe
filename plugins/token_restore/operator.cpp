#include "token_restore.h"

#include "../core/operators.h"

namespace toprovar
{

namespace
{

TokenRestoreProblem problemFrom(Call const& call)
{
    Tensor const& x = call.inputs[0];
    Tensor const& rows = call.inputs[2];
    Tensor const& columns = call.inputs[3];
    expect(x.shape.rank == 3, "x", textFrom(x.shape), "[h' * w', R, C]");
    expect(rows.shape.rank == 2, "rows", textFrom(rows.shape), "[h', h]");
    expect(columns.shape.rank == 2, "columns", textFrom(columns.shape), "[w', w]");
    TokenRestoreProblem problem{};
    problem.newH = static_cast<int32_t>(rows.shape[0]);
    problem.h = static_cast<int32_t>(rows.shape[1]);
    problem.newW = static_cast<int32_t>(columns.shape[0]);
    problem.w = static_cast<int32_t>(columns.shape[1]);
    problem.R = static_cast<int32_t>(x.shape[1]);
    problem.C = static_cast<int32_t>(x.shape[2]);
    int64_t const tokens = static_cast<int64_t>(problem.newH) * problem.newW;
    expectShape("x", x, {tokens, problem.R, problem.C});
    expectShape("residual", call.inputs[1], {static_cast<int64_t>(problem.h) * problem.w, problem.R, problem.C});
    expectShape("kept", call.inputs[4], {-1});
    problem.n = call.inputs[4].shape[0];
    expectShape("y", call.inputs[5], {problem.n, problem.R, problem.C});
    expectShape("out", call.outputs[0], {tokens, problem.R, problem.C});
    problem.x = static_cast<float const*>(x.data);
    problem.residual = static_cast<float const*>(call.inputs[1].data);
    problem.rows = static_cast<float const*>(rows.data);
    problem.columns = static_cast<float const*>(columns.data);
    problem.kept = static_cast<int64_t const*>(call.inputs[4].data);
    problem.y = static_cast<float const*>(call.inputs[5].data);
    problem.out = static_cast<float*>(call.outputs[0].data);
    return problem;
}

void check(Call const& call)
{
    problemFrom(call);
}

void runOnCpu(Call const& call, int32_t threads)
{
    tokenRestoreOnCpu(problemFrom(call), threads);
}

#ifdef TOPROVAR_CUDA
Status runOnCuda(Call const& call, void*, Stream stream)
{
    return launchTokenRestore(problemFrom(call), stream);
}
#endif

} // namespace

Operator const kTOKEN_RESTORE{"TokenRestore",
    {{"x", TypeRule::kFLOAT32}, {"residual", TypeRule::kFLOAT32}, {"rows", TypeRule::kFLOAT32},
        {"columns", TypeRule::kFLOAT32}, {"kept", TypeRule::kINT64}, {"y", TypeRule::kFLOAT32}},
    {{"out", TypeRule::kFLOAT32}}, {{0, 0, {}}}, {}, check, nullptr, TOPROVAR_ON_CUDA(runOnCuda), runOnCpu};

} // namespace toprovar
