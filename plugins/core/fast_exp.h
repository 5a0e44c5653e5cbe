// exp in float32 as a few products and shifts, so that loops over it vectorise.
#pragma once

#include "half.h"

namespace toprovar
{

//! e^x, relative error below 3e-7 for x in [-40, 40]; beyond, the value at the end. NaN stays NaN.
//!
//! Ends that are far from float32's own keep what is divided by 1 + e^x from becoming subnormal, which takes processors
//! ten times as long.
TOPROVAR_INLINE float fastExp(float x)
{
    float const low = x < -40.0f ? -40.0f : x;
    float const bounded = low > 40.0f ? 40.0f : low;
    float const y = bounded * 1.44269504f;
    float const shifted = y + 12582912.0f; // 1.5 * 2^23: the integer part is in the lowest bits
    float const whole = shifted - 12582912.0f;
    // ln 2 in two parts: the difference keeps its last bits
    float const f = (bounded - whole * 0.693145752f) - whole * 1.42860677e-6f; // in [-0.35, 0.35]
    float power = f * 1.98412698e-4f + 1.38888889e-3f;
    power = power * f + 8.33333333e-3f;
    power = power * f + 4.16666667e-2f;
    power = power * f + 1.66666667e-1f;
    power = power * f + 0.5f;
    power = power * f + 1.0f;
    power = power * f + 1.0f;
    return bitsAs<float>(bitsAs<uint32_t>(power) + (bitsAs<uint32_t>(shifted) << 23));
}

} // namespace toprovar
