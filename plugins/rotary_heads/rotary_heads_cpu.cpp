// Bias, unit length, gain and rotation on the processor; a token's heads one after another.
#include "rotary_heads.h"

#include "../core/half.h"
#include "../core/parallel.h"

#include <algorithm>
#include <cmath>

namespace toprovar
{

namespace
{

constexpr int64_t kGRAIN = 1 << 13; // elements of one operand that are worth a thread
constexpr int32_t kSUMS = 8;        // partial sums beside each other: a loop that vectorises

template <class T>
TOPROVAR_INLINE float lengthOf(T const* x, T const* bias, int32_t D)
{
    float sums[kSUMS] = {};
    int32_t d = 0;
    for (; d + kSUMS <= D; d += kSUMS)
    {
        for (int32_t i = 0; i < kSUMS; ++i)
        {
            float const value = floatFrom(x[d + i]) + floatFrom(bias[d + i]);
            sums[i] += value * value;
        }
    }
    float total = 0.0f;
    for (; d < D; ++d)
    {
        float const value = floatFrom(x[d]) + floatFrom(bias[d]);
        total += value * value;
    }
    for (float const sum : sums)
    {
        total += sum;
    }
    return std::sqrt(total);
}

template <class T>
TOPROVAR_INLINE void turnHead(
    T const* x, T const* bias, float gain, float const* cos, float const* sin, int32_t D, T* to)
{
    float const length = lengthOf(x, bias, D);
    float const factor = gain / (length < 1e-12f ? 1e-12f : length);
    int32_t const half = D / 2;
    for (int32_t d = 0; d < half; ++d)
    {
        float const a = (floatFrom(x[d]) + floatFrom(bias[d])) * factor;
        float const b = (floatFrom(x[d + half]) + floatFrom(bias[d + half])) * factor;
        to[d] = roundedFrom<T>(a * cos[d] - b * sin[d]);
        to[d + half] = roundedFrom<T>(a * sin[d] + b * cos[d]);
    }
}

template <class T>
TOPROVAR_INLINE void turnTokens(RotaryHeadsProblem const& problem, int64_t begin, int64_t end)
{
    int32_t const D = problem.D;
    int64_t const width = static_cast<int64_t>(problem.H) * D;
    T const* const bias = static_cast<T const*>(problem.bias);
    for (int64_t token = begin; token < end; ++token)
    {
        T const* const from = static_cast<T const*>(problem.qkv) + token * 3 * width;
        int64_t const position = (token / problem.R * problem.P + token % problem.R % problem.P) * (D / 2);
        float const* const cos = problem.cos + position;
        float const* const sin = problem.sin + position;
        for (int32_t head = 0; head < problem.H; ++head)
        {
            int64_t const at = static_cast<int64_t>(head) * D;
            int64_t const out = token * width + at;
            turnHead(from + at, bias + at, problem.gain[head], cos, sin, D, static_cast<T*>(problem.q) + out);
            turnHead(from + width + at, bias + width + at, 1.0f, cos, sin, D, static_cast<T*>(problem.k) + out);
        }
        T* const v = static_cast<T*>(problem.v) + token * width;
        for (int64_t c = 0; c < width; ++c)
        {
            v[c] = roundedFrom<T>(floatFrom(from[2 * width + c]) + floatFrom(bias[2 * width + c]));
        }
    }
}

TOPROVAR_CLONES void turnTokensFloat(RotaryHeadsProblem const& problem, int64_t begin, int64_t end)
{
    turnTokens<float>(problem, begin, end);
}

TOPROVAR_CLONES void turnTokensHalf(RotaryHeadsProblem const& problem, int64_t begin, int64_t end)
{
    turnTokens<Half>(problem, begin, end);
}

} // namespace

void rotaryHeadsOnCpu(RotaryHeadsProblem const& problem, int32_t threads)
{
    auto const tokens = problem.type == DataType::kFLOAT16 ? turnTokensHalf : turnTokensFloat;
    parallelRanges(problem.n * problem.R, kGRAIN / std::max(problem.H * problem.D, 1), threads,
        [&](int64_t begin, int64_t end) { tokens(problem, begin, end); });
}

} // namespace toprovar
