// x + (y + bias) * gate on the processor.
#include "gated_residual.h"

#include "../core/half.h"
#include "../core/parallel.h"

#include <algorithm>

namespace toprovar
{

namespace
{

constexpr int64_t kGRAIN = 1 << 14; // elements that are worth a thread

template <class T>
TOPROVAR_INLINE void addRows(GatedResidualProblem const& problem, int64_t begin, int64_t end)
{
    T const* const bias = static_cast<T const*>(problem.bias);
    for (int64_t row = begin; row < end; ++row)
    {
        int64_t const at = row * problem.C;
        T const* const y = static_cast<T const*>(problem.y) + at;
        float const* const gate = problem.gate + row % problem.R % problem.P * problem.C;
        for (int32_t c = 0; c < problem.C; ++c)
        {
            problem.out[at + c] = problem.x[at + c] + roundTrip<T>(floatFrom(y[c]) + floatFrom(bias[c])) * gate[c];
        }
    }
}

TOPROVAR_CLONES void addRowsFloat(GatedResidualProblem const& problem, int64_t begin, int64_t end)
{
    addRows<float>(problem, begin, end);
}

TOPROVAR_CLONES void addRowsHalf(GatedResidualProblem const& problem, int64_t begin, int64_t end)
{
    addRows<Half>(problem, begin, end);
}

} // namespace

void gatedResidualOnCpu(GatedResidualProblem const& problem, int32_t threads)
{
    auto const rows = problem.type == DataType::kFLOAT16 ? addRowsHalf : addRowsFloat;
    parallelRanges(problem.n * problem.R, kGRAIN / std::max(problem.C, 1), threads,
        [&](int64_t begin, int64_t end) { rows(problem, begin, end); });
}

} // namespace toprovar
