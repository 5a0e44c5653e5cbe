// gelu(x + bias) on the processor, as y / (1 + exp(-2 z)) with z the tanh form's argument.
#include "bias_gelu.h"

#include "../core/fast_exp.h"
#include "../core/parallel.h"

#include <algorithm>

namespace toprovar
{

namespace
{

constexpr int64_t kGRAIN = 1 << 14; // elements that are worth a thread

template <class T>
TOPROVAR_INLINE void geluRows(BiasGeluProblem const& problem, int64_t begin, int64_t end)
{
    constexpr float kTWICE_SQRT_2_OVER_PI = 1.59576912f;
    float const most = hidden(40.0f); // e^-40 is nothing beside 1
    T const* const bias = static_cast<T const*>(problem.bias);
    int32_t const C = problem.C; // a member could change with what is written: a local makes the loop countable
    for (int64_t row = begin; row < end; ++row)
    {
        T const* const x = static_cast<T const*>(problem.x) + row * C;
        T* const to = static_cast<T*>(problem.y) + row * C;
        for (int32_t c = 0; c < C; ++c)
        {
            float const y = roundTrip<T>(floatFrom(x[c]) + floatFrom(bias[c]));
            float const twiceZ = kTWICE_SQRT_2_OVER_PI * (y + 0.044715f * y * y * y);
            to[c] = roundedFrom<T>(y / (1.0f + fastExp(-twiceZ, most)));
        }
    }
}

TOPROVAR_CLONES void geluRowsFloat(BiasGeluProblem const& problem, int64_t begin, int64_t end)
{
    geluRows<float>(problem, begin, end);
}

TOPROVAR_CLONES void geluRowsHalf(BiasGeluProblem const& problem, int64_t begin, int64_t end)
{
    geluRows<Half>(problem, begin, end);
}

} // namespace

void biasGeluOnCpu(BiasGeluProblem const& problem, int32_t threads)
{
    auto const rows = problem.type == DataType::kFLOAT16 ? geluRowsHalf : geluRowsFloat;
    parallelRanges(problem.n, kGRAIN / std::max(problem.C, 1), threads,
        [&](int64_t begin, int64_t end) { rows(problem, begin, end); });
}

} // namespace toprovar
