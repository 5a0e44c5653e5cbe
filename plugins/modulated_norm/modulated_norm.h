// Layer norm without affine over the channels, then scale and shift of adaptive modulation, rounded to `type`.
//
//     y = (x - mean(x)) / sqrt(var(x) + epsilon) * scale + shift
#pragma once

#include "../core/kernel_types.h"

namespace toprovar
{

struct ModulatedNormProblem
{
    float const* x;     // [n, R, C]
    float const* scale; // [1, P, C]
    float const* shift; // [1, P, C]
    void* y;            // [n, R, C]
    int64_t n;
    int32_t R;
    int32_t P;          // rows of scale and shift: 1 (shared) or R
    int32_t C;
    float epsilon;
    DataType type;      // of y
};

Status launchModulatedNorm(ModulatedNormProblem const& problem, Stream stream);
void modulatedNormOnCpu(ModulatedNormProblem const& problem, int32_t threads);

} // namespace toprovar
