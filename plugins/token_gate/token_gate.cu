// TokenGate on CUDA: one block per row finds the count-th smallest score digit by digit, then writes positions in order.
//
// Scores become integers of the same order. Four passes over 8 bits each, from the top, count how often each digit occurs
// among the scores that agree with the digits found so far; the digit that reaches `count` is kept. What is below the score
// so found is chosen, and of its equals the first ones: a running count in order of position decides both, so that ties and
// order are the same on every run.
#include "../core/numbers.cuh"
#include "token_gate.h"

namespace toprovar
{
namespace
{

constexpr int kTHREADS = 1024;

//! Unsigned integers that sort as the floats do; -0 and 0 are equal.
__device__ __forceinline__ uint32_t sortable(float score)
{
    uint32_t const bits = __float_as_uint(score == 0.f ? 0.f : score);
    return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

//! Exclusive sum over the block, and the total. sums: [32] in shared memory.
__device__ __forceinline__ int64_t scanBlock(int value, int& before, int* sums)
{
    int const lane = threadIdx.x % 32;
    int const warp = threadIdx.x / 32;
    int inclusive = value;
#pragma unroll
    for (int away = 1; away < 32; away *= 2)
    {
        int const other = __shfl_up_sync(0xffffffffu, inclusive, away);
        inclusive += lane >= away ? other : 0;
    }
    if (lane == 31)
    {
        sums[warp] = inclusive;
    }
    __syncthreads();
    if (warp == 0)
    {
        int total = sums[lane];
#pragma unroll
        for (int away = 1; away < 32; away *= 2)
        {
            int const other = __shfl_up_sync(0xffffffffu, total, away);
            total += lane >= away ? other : 0;
        }
        sums[lane] = total;
    }
    __syncthreads();
    before = inclusive - value + (warp > 0 ? sums[warp - 1] : 0);
    int const all = sums[31];
    __syncthreads();
    return all;
}

} // namespace

static __global__ void __launch_bounds__(kTHREADS) chooseLowest(TokenGateProblem const p)
{
    __shared__ int counts[256];
    __shared__ int sums[32];
    __shared__ uint32_t found;
    __shared__ int64_t needed;
    float const* score = p.score + blockIdx.x * p.N;
    int64_t* indices = p.indices + blockIdx.x * p.count;
    if (threadIdx.x == 0)
    {
        found = 0;
        needed = p.count;
    }
    uint32_t mask = 0;
    for (int shift = 24; shift >= 0; shift -= 8)
    {
        for (int i = threadIdx.x; i < 256; i += kTHREADS)
        {
            counts[i] = 0;
        }
        __syncthreads();
        uint32_t const prefix = found;
        for (int64_t i = threadIdx.x; i < p.N; i += kTHREADS)
        {
            uint32_t const key = sortable(score[i]);
            if ((key & mask) == prefix)
            {
                atomicAdd(&counts[key >> shift & 255], 1);
            }
        }
        __syncthreads();
        if (threadIdx.x == 0)
        {
            int digit = 0;
            while (digit < 255 && counts[digit] < needed)
            {
                needed -= counts[digit];
                ++digit;
            }
            found = prefix | uint32_t(digit) << shift;
        }
        mask |= 255u << shift;
        __syncthreads();
    }
    uint32_t const threshold = found;
    int64_t const ties = needed; // of the scores equal to the threshold, so many
    int64_t chosen = 0;
    int64_t equals = 0;
    for (int64_t start = 0; start < p.N; start += kTHREADS)
    {
        int64_t const i = start + threadIdx.x;
        uint32_t const key = i < p.N ? sortable(score[i]) : 0xffffffffu;
        bool const isEqual = i < p.N && key == threshold;
        int equalsBefore;
        int64_t const equalsHere = scanBlock(isEqual, equalsBefore, sums);
        bool const isChosen = i < p.N && (key < threshold || (isEqual && equals + equalsBefore < ties));
        int chosenBefore;
        int64_t const chosenHere = scanBlock(isChosen, chosenBefore, sums);
        if (isChosen)
        {
            indices[chosen + chosenBefore] = i;
        }
        chosen += chosenHere;
        equals += equalsHere;
    }
}

Status launchTokenGate(TokenGateProblem const& p, Stream stream)
{
    if (p.count < 0 || p.count > p.N || p.N > 0x7fffffff)
    {
        return cudaErrorInvalidValue;
    }
    if (p.count > 0 && p.B > 0)
    {
        chooseLowest<<<unsigned(p.B), kTHREADS, 0, static_cast<cudaStream_t>(stream)>>>(p);
    }
    return cudaGetLastError();
}

} // namespace toprovar
