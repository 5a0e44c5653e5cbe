// Puts computed tokens back among those that did not run, which take a cached residual, resampled to this map.
//
//     out[t] = y[i] where kept[i] == t, else x[t] + sum_ab rows[ty, a] columns[tx, b] residual[a * w + b]
//
// Every position of the map (h', w') is written exactly once. The resampling matrices are those of resize_matrices.py: zeros
// are skipped, so a bilinear one costs four reads.
#pragma once

#include "../core/kernel_types.h"

namespace toprovar
{

struct TokenRestoreProblem
{
    float const* x;        // [h' * w', R, C]
    float const* residual; // [h * w, R, C]
    float const* rows;     // [h', h]
    float const* columns;  // [w', w]
    int64_t const* kept;   // [n], ascending
    float const* y;        // [n, R, C]
    float* out;            // [h' * w', R, C]
    int64_t n;
    int32_t h;
    int32_t w;
    int32_t newH;
    int32_t newW;
    int32_t R;
    int32_t C;
};

Status launchTokenRestore(TokenRestoreProblem const& problem, Stream stream);
void tokenRestoreOnCpu(TokenRestoreProblem const& problem, int32_t threads);

} // namespace toprovar
