// Computed tokens among resampled residuals on the processor; a line of the map per task.
#include "token_restore.h"

#include "../core/half.h"
#include "../core/parallel.h"

#include <algorithm>
#include <vector>

namespace toprovar
{

namespace
{

struct Tap
{
    int32_t at;
    float weight;
};

//! The entries of every line of a [lines, width] matrix that are not zero.
std::vector<std::vector<Tap>> tapsOf(float const* matrix, int32_t lines, int32_t width)
{
    std::vector<std::vector<Tap>> taps(lines);
    for (int32_t line = 0; line < lines; ++line)
    {
        for (int32_t i = 0; i < width; ++i)
        {
            float const weight = matrix[static_cast<int64_t>(line) * width + i];
            if (weight != 0.0f)
            {
                taps[line].push_back({i, weight});
            }
        }
    }
    return taps;
}

TOPROVAR_CLONES void addScaled(float* to, float const* from, float weight, int64_t count)
{
    for (int64_t i = 0; i < count; ++i)
    {
        to[i] += weight * from[i];
    }
}

} // namespace

void tokenRestoreOnCpu(TokenRestoreProblem const& problem, int32_t threads)
{
    int64_t const width = static_cast<int64_t>(problem.R) * problem.C;
    std::vector<std::vector<Tap>> const rows = tapsOf(problem.rows, problem.newH, problem.h);
    std::vector<std::vector<Tap>> const columns = tapsOf(problem.columns, problem.newW, problem.w);
    std::vector<int64_t> computed(static_cast<size_t>(problem.newH) * problem.newW, -1);
    for (int64_t i = 0; i < problem.n; ++i)
    {
        if (problem.kept[i] >= 0 && problem.kept[i] < static_cast<int64_t>(computed.size()))
        {
            computed[problem.kept[i]] = i;
        }
    }
    parallelFor(problem.newH, threads,
        [&](int64_t line)
        {
            for (int32_t column = 0; column < problem.newW; ++column)
            {
                int64_t const token = line * problem.newW + column;
                float* const out = problem.out + token * width;
                if (computed[token] >= 0)
                {
                    std::copy_n(problem.y + computed[token] * width, width, out);
                    continue;
                }
                std::copy_n(problem.x + token * width, width, out);
                for (Tap const& row : rows[line])
                {
                    for (Tap const& tap : columns[column])
                    {
                        int64_t const from = static_cast<int64_t>(row.at) * problem.w + tap.at;
                        addScaled(out, problem.residual + from * width, row.weight * tap.weight, width);
                    }
                }
            }
        });
}

} // namespace toprovar
