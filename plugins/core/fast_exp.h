// exp in float32 as a few products and shifts, so that loops over it vectorise.
#pragma once

#include "half.h"

namespace toprovar
{

//! A number that the compiler does not know.
TOPROVAR_INLINE float hidden(float x)
{
    float volatile stored = x;
    return stored;
}

//! e^x, relative error below 2e-7 + 6e-8 |x| for x in [-most, most]; beyond, the value at the end. NaN stays NaN.
//!
//! most: up to 87. Far from float32's own ends, what is divided by 1 + e^x stays clear of subnormal numbers, which take
//! processors ten times as long. A compiler that knows it makes a path of its own for what lies beyond, and computes all
//! paths in a loop that is vectorised: hide it (`hidden`).
TOPROVAR_INLINE float fastExp(float x, float most)
{
    float const low = x < -most ? -most : x;
    float const bounded = low > most ? most : low;
    float const shifted = bounded * 1.44269504f + 12582912.0f; // 1.5 * 2^23: the integer part is in the lowest bits
    float const f = bounded * 1.44269504f - (shifted - 12582912.0f); // in [-0.5, 0.5]
    float power = f * 1.326472721e-3f + 9.671512812e-3f;             // 2^f: best fit of degree 5, relative error 1e-7
    power = power * f + 5.550733745e-2f;
    power = power * f + 2.402224208e-1f;
    power = power * f + 6.931469776e-1f;
    power = power * f + 1.0f;
    return bitsAs<float>(bitsAs<uint32_t>(power) + (bitsAs<uint32_t>(shifted) << 23));
}

} // namespace toprovar
