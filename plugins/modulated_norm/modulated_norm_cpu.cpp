// Layer norm with scale and shift on the processor: mean, then variance around it, then the result.
#include "modulated_norm.h"

#include "../core/half.h"
#include "../core/parallel.h"

#include <algorithm>
#include <cmath>

namespace toprovar
{

namespace
{

constexpr int64_t kGRAIN = 1 << 14; // elements that are worth a thread
constexpr int32_t kSUMS = 32;       // partial sums beside each other: a loop that vectorises, and smaller rounding

//! Sum of term(x[c]) over the channels.
template <class Term>
TOPROVAR_INLINE float sumOf(float const* x, int32_t C, Term const& term)
{
    float sums[kSUMS] = {};
    int32_t c = 0;
    for (; c + kSUMS <= C; c += kSUMS)
    {
        for (int32_t i = 0; i < kSUMS; ++i)
        {
            sums[i] += term(x[c + i]);
        }
    }
    float total = 0.0f;
    for (; c < C; ++c)
    {
        total += term(x[c]);
    }
    for (float const sum : sums)
    {
        total += sum;
    }
    return total;
}

template <class T>
TOPROVAR_INLINE void normRows(ModulatedNormProblem const& problem, int64_t begin, int64_t end)
{
    int32_t const C = problem.C;
    for (int64_t row = begin; row < end; ++row)
    {
        float const* const x = problem.x + row * C;
        int64_t const modulation = row % problem.R % problem.P * C;
        float const* const scale = problem.scale + modulation;
        float const* const shift = problem.shift + modulation;
        T* const y = static_cast<T*>(problem.y) + row * C;
        float const mean = sumOf(x, C, [](float value) __attribute__((always_inline)) { return value; }) / C;
        auto const squared = [mean](float value) __attribute__((always_inline)) { return (value - mean) * (value - mean); };
        float const inverse = 1.0f / std::sqrt(sumOf(x, C, squared) / C + problem.epsilon);
        for (int32_t c = 0; c < C; ++c)
        {
            y[c] = roundedFrom<T>((x[c] - mean) * inverse * scale[c] + shift[c]);
        }
    }
}

TOPROVAR_CLONES void normRowsFloat(ModulatedNormProblem const& problem, int64_t begin, int64_t end)
{
    normRows<float>(problem, begin, end);
}

TOPROVAR_CLONES void normRowsHalf(ModulatedNormProblem const& problem, int64_t begin, int64_t end)
{
    normRows<Half>(problem, begin, end);
}

} // namespace

void modulatedNormOnCpu(ModulatedNormProblem const& problem, int32_t threads)
{
    auto const rows = problem.type == DataType::kFLOAT16 ? normRowsHalf : normRowsFloat;
    parallelRanges(problem.n * problem.R, kGRAIN / std::max(problem.C, 1), threads,
        [&](int64_t begin, int64_t end) { rows(problem, begin, end); });
}

} // namespace toprovar
