// What closes a sub-layer: x + (y + bias) * gate, in float32.
#pragma once

#include "../core/kernel_types.h"

namespace toprovar
{

struct GatedResidualProblem
{
    float const* x;    // [n, R, C]
    void const* y;     // [n, R, C], of `type`
    void const* bias;  // [C], of `type`; y + bias is rounded to `type`
    float const* gate; // [1, P, C]
    float* out;        // [n, R, C]
    int64_t n;
    int32_t R;
    int32_t P;         // rows of the gate: 1 (shared) or R
    int32_t C;
    DataType type;
};

Status launchGatedResidual(GatedResidualProblem const& problem, Stream stream);
void gatedResidualOnCpu(GatedResidualProblem const& problem, int32_t threads);

} // namespace toprovar
