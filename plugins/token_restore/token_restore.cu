// TokenRestore on CUDA: one block per position of the map, which either ran or takes a resampled residual.
//
// A row of a resampling matrix is mostly zeros; each block lists the few that are not, then sums over them.
#include "../core/numbers.cuh"
#include "token_restore.h"

namespace toprovar
{
namespace
{

constexpr int kTHREADS = 256;
constexpr int kMAX_TAPS = 64; // per axis; an area filter from 64 to 1 has as many

//! Lists the non-zero entries of a matrix row, in order. One warp. Returns: how many.
__device__ __forceinline__ int listTaps(float const* row, int length, int* places, float* weights)
{
    int const lane = threadIdx.x % 32;
    int taps = 0;
    for (int start = 0; start < length; start += 32)
    {
        float const weight = start + lane < length ? row[start + lane] : 0.f;
        unsigned const lanes = __ballot_sync(0xffffffffu, weight != 0.f);
        int const place = taps + __popc(lanes & ((1u << lane) - 1u));
        if (weight != 0.f)
        {
            places[place] = start + lane;
            weights[place] = weight;
        }
        taps += __popc(lanes);
    }
    return taps;
}

//! First place in the ascending list that is not below `position`.
__device__ __forceinline__ int64_t lowerBound(int64_t const* kept, int64_t n, int64_t position)
{
    int64_t low = 0;
    int64_t high = n;
    while (low < high)
    {
        int64_t const middle = (low + high) / 2;
        if (kept[middle] < position)
        {
            low = middle + 1;
        }
        else
        {
            high = middle;
        }
    }
    return low;
}

} // namespace

template <int COUNT>
__global__ void __launch_bounds__(kTHREADS) restoreTokens(TokenRestoreProblem const p)
{
    __shared__ int yPlaces[kMAX_TAPS];
    __shared__ int xPlaces[kMAX_TAPS];
    __shared__ float yWeights[kMAX_TAPS];
    __shared__ float xWeights[kMAX_TAPS];
    __shared__ int taps[2];
    __shared__ int64_t place;
    int64_t const position = blockIdx.x;
    int const y = int(position / p.newW);
    int const x = int(position % p.newW);
    int const warp = threadIdx.x / 32;
    if (warp == 0)
    {
        taps[0] = listTaps(p.rows + int64_t(y) * p.h, p.h, yPlaces, yWeights);
    }
    else if (warp == 1)
    {
        taps[1] = listTaps(p.columns + int64_t(x) * p.w, p.w, xPlaces, xWeights);
    }
    else if (threadIdx.x == 64)
    {
        place = lowerBound(p.kept, p.n, position);
    }
    __syncthreads();
    int64_t const width = int64_t(p.R) * p.C;
    float* out = p.out + position * width;
    if (place < p.n && p.kept[place] == position)
    {
        float const* source = p.y + place * width;
        for (int64_t i = threadIdx.x * COUNT; i < width; i += kTHREADS * COUNT)
        {
            storePack<COUNT>(out + i, loadPack<COUNT>(source + i));
        }
        return;
    }
    for (int64_t i = threadIdx.x * COUNT; i < width; i += kTHREADS * COUNT)
    {
        float sums[COUNT] = {};
        for (int a = 0; a < taps[0]; ++a)
        {
            float line[COUNT] = {};
            for (int b = 0; b < taps[1]; ++b)
            {
                int64_t const source = int64_t(yPlaces[a]) * p.w + xPlaces[b];
                auto const some = loadPack<COUNT>(p.residual + source * width + i);
#pragma unroll
                for (int j = 0; j < COUNT; ++j)
                {
                    line[j] = fmaf(xWeights[b], some.values[j], line[j]);
                }
            }
#pragma unroll
            for (int j = 0; j < COUNT; ++j)
            {
                sums[j] = fmaf(yWeights[a], line[j], sums[j]);
            }
        }
        auto const before = loadPack<COUNT>(p.x + position * width + i);
        Pack<float, COUNT> after;
#pragma unroll
        for (int j = 0; j < COUNT; ++j)
        {
            after.values[j] = before.values[j] + sums[j];
        }
        storePack<COUNT>(out + i, after);
    }
}

Status launchTokenRestore(TokenRestoreProblem const& p, Stream stream)
{
    if (p.h > kMAX_TAPS || p.w > kMAX_TAPS || p.h < 1 || p.w < 1)
    {
        // a longer axis could have more taps than there is room for
        return cudaErrorInvalidValue;
    }
    unsigned const blocks = unsigned(p.newH) * unsigned(p.newW);
    if (blocks == 0 || p.R * p.C == 0)
    {
        return cudaSuccess;
    }
    cudaStream_t const queue = static_cast<cudaStream_t>(stream);
    if (int64_t(p.R) * p.C % 4 == 0)
    {
        restoreTokens<4><<<blocks, kTHREADS, 0, queue>>>(p);
    }
    else
    {
        restoreTokens<1><<<blocks, kTHREADS, 0, queue>>>(p);
    }
    return cudaGetLastError();
}

} // namespace toprovar
