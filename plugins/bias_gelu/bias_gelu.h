// Bias and GELU (tanh form): gelu(x + bias), in the type of x.
#pragma once

#include "../core/kernel_types.h"

namespace toprovar
{

struct BiasGeluProblem
{
    void const* x;    // [n, C]
    void const* bias; // [C]
    void* y;          // [n, C]
    int64_t n;
    int32_t C;
    DataType type;    // of x, bias and y; x + bias is rounded to it, the rest is float32
};

Status launchBiasGelu(BiasGeluProblem const& problem, Stream stream);
void biasGeluOnCpu(BiasGeluProblem const& problem, int32_t threads);

} // namespace toprovar
