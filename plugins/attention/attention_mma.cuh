// Attention on the tensor cores of sm_80 and later: mma.sync, cp.async, two stages of keys and values.
//
// A block takes 16 queries per warp of one (row, head) and sweeps a range of keys; both segments are one list of keys, each
// row of a tile finds its own. Tiles lie in shared memory in 16-byte chunks, chunk c of row r at c ^ (r mod 8), so that
// ldmatrix meets no bank twice. Heads of other widths than 64 and 128 are padded with zeros there.
//
// Where the blocks would not fill the GPU, blockIdx.z splits the keys; each part leaves its state (o, m, l, t) in scratch
// memory and attention_merge.cuh joins them.
#pragma once

#include "attention.h"
#include "online_entropy.cuh"

#include <cuda_bf16.h>
#include <cuda_fp16.h>

namespace toprovar
{

//! Where the parts of a split sweep leave their states.
struct Parts
{
    float* o;     // [parts, L, R, H, D], not divided by l
    float* state; // [parts, L, R, H, 3]: m, l, t
    int32_t count;
};

template <typename T>
struct Mma;

template <>
struct Mma<__half>
{
    static __device__ __forceinline__ void run(float (&c)[4], uint32_t const (&a)[4], uint32_t b0, uint32_t b1)
    {
        asm volatile(
            "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
            : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
    }
    static __device__ __forceinline__ uint32_t pack(float low, float high)
    {
        __half2 const both = __floats2half2_rn(low, high);
        return *reinterpret_cast<uint32_t const*>(&both);
    }
};

template <>
struct Mma<__nv_bfloat16>
{
    static __device__ __forceinline__ void run(float (&c)[4], uint32_t const (&a)[4], uint32_t b0, uint32_t b1)
    {
        asm volatile(
            "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
            : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
    }
    static __device__ __forceinline__ uint32_t pack(float low, float high)
    {
        __nv_bfloat162 const both = __floats2bfloat162_rn(low, high);
        return *reinterpret_cast<uint32_t const*>(&both);
    }
};

__device__ __forceinline__ uint32_t sharedAddress(void const* p)
{
    return static_cast<uint32_t>(__cvta_generic_to_shared(p));
}

__device__ __forceinline__ void loadMatrices(uint32_t (&r)[4], uint32_t address)
{
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(address)
                 : "memory");
}

__device__ __forceinline__ void loadTransposed(uint32_t (&r)[4], uint32_t address)
{
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(address)
                 : "memory");
}

//! Copies 16 bytes, or writes zeros where `real` is false.
__device__ __forceinline__ void copyChunk(uint32_t shared, void const* global, bool real)
{
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared), "l"(global), "r"(real ? 16 : 0) : "memory");
}

template <int kLEFT>
__device__ __forceinline__ void waitForCopies()
{
    asm volatile("cp.async.wait_group %0;" ::"n"(kLEFT) : "memory");
}

template <typename T, int WIDTH, bool ENTROPY>
struct MmaAttention
{
    static constexpr int kWARPS = 4;
    static constexpr int kQUERIES = 16 * kWARPS;
    static constexpr int kKEYS = 64;
    static constexpr int kTHREADS = 32 * kWARPS;
    static constexpr int kCHUNKS = WIDTH / 8; // 16 bytes each, of a row in shared memory
    static constexpr int kDEPTH = WIDTH / 16; // steps of the product over the head width
    static constexpr int kTILE_BYTES = kKEYS * WIDTH * 2;
    // two stages of keys and values; the queries lie where the second one will, until they are in registers
    static constexpr int kSHARED_BYTES = 4 * kTILE_BYTES;
    static_assert(kQUERIES * WIDTH * 2 <= 2 * kTILE_BYTES, "queries fit into one stage");

    static __device__ __forceinline__ uint32_t place(uint32_t base, int row, int chunk)
    {
        return base + (row * kCHUNKS + (chunk ^ (row & 7))) * 16;
    }

    //! One tile of keys or values, from `first` on; rows past `end` become zero.
    static __device__ __forceinline__ void loadTile(
        uint32_t base, T const* past, T const* fresh, int64_t S, int64_t first, int64_t end, int64_t stride, int D)
    {
#pragma unroll
        for (int i = threadIdx.x; i < kKEYS * kCHUNKS; i += kTHREADS)
        {
            int const row = i / kCHUNKS;
            int const chunk = i % kCHUNKS;
            int64_t const key = first + row;
            bool const real = key < end && chunk * 8 < D;
            T const* source = key < S ? past + key * stride : fresh + (key - S) * stride;
            copyChunk(place(base, row, chunk), real ? source + chunk * 8 : source, real);
        }
    }

    static __device__ void run(AttentionProblem const& p, Parts const& parts)
    {
        extern __shared__ __align__(128) unsigned char memory[];
        uint32_t const base = sharedAddress(memory);
        int const warp = threadIdx.x / 32;
        int const lane = threadIdx.x % 32;
        int const D = p.D;
        int64_t const first = int64_t(blockIdx.x) * kQUERIES;
        int const row = blockIdx.y / p.H;
        int const head = blockIdx.y % p.H;
        int const group = head / (p.H / p.G);
        int64_t const keys = p.S + p.N;
        int64_t const tiles = (keys + kKEYS - 1) / kKEYS;
        int64_t const share = (tiles + parts.count - 1) / parts.count;
        int64_t const begin = min(int64_t(blockIdx.z) * share, tiles);
        int64_t const finish = min(begin + share, tiles);
        int64_t const qStride = int64_t(p.R) * p.H * D;
        int64_t const kStride = int64_t(p.R) * p.G * D;
        int64_t const qHead = (int64_t(row) * p.H + head) * D;
        int64_t const kHead = (int64_t(row) * p.G + group) * D;
        T const* q = static_cast<T const*>(p.q) + qHead;
        T const* kPast = static_cast<T const*>(p.S ? p.kPast : p.kNew) + kHead;
        T const* vPast = static_cast<T const*>(p.S ? p.vPast : p.vNew) + kHead;
        T const* kNew = static_cast<T const*>(p.N ? p.kNew : p.kPast) + kHead;
        T const* vNew = static_cast<T const*>(p.N ? p.vNew : p.vPast) + kHead;

        auto keyTile = [&](int64_t tile) { return base + uint32_t((tile - begin) & 1) * 2 * kTILE_BYTES; };
        auto valueTile = [&](int64_t tile) { return keyTile(tile) + kTILE_BYTES; };
        auto load = [&](int64_t tile) {
            loadTile(keyTile(tile), kPast, kNew, p.S, tile * kKEYS, keys, kStride, D);
            loadTile(valueTile(tile), vPast, vNew, p.S, tile * kKEYS, keys, kStride, D);
        };

        uint32_t const queries = base + 2 * kTILE_BYTES;
        for (int i = threadIdx.x; i < kQUERIES * kCHUNKS; i += kTHREADS)
        {
            int const line = i / kCHUNKS;
            int const chunk = i % kCHUNKS;
            bool const real = first + line < p.L && chunk * 8 < D;
            copyChunk(place(queries, line, chunk), real ? q + (first + line) * qStride + chunk * 8 : q, real);
        }
        if (begin < finish)
        {
            load(begin);
        }
        asm volatile("cp.async.commit_group;" ::: "memory");
        waitForCopies<0>();
        __syncthreads();
        uint32_t qFragments[kDEPTH][4];
#pragma unroll
        for (int step = 0; step < kDEPTH; ++step)
        {
            loadMatrices(qFragments[step], place(queries, warp * 16 + (lane & 15), step * 2 + (lane >> 4)));
        }
        __syncthreads();

        float o[WIDTH / 8][4] = {};
        RowState state[2];
        float const factor = p.scale * kLOG2E;
        for (int64_t tile = begin; tile < finish; ++tile)
        {
            if (tile + 1 < finish)
            {
                load(tile + 1);
            }
            asm volatile("cp.async.commit_group;" ::: "memory");
            waitForCopies<1>();
            __syncthreads();

            float s[kKEYS / 8][4] = {};
            uint32_t const keyBase = keyTile(tile);
#pragma unroll
            for (int step = 0; step < kDEPTH; ++step)
            {
#pragma unroll
                for (int pair = 0; pair < kKEYS / 16; ++pair)
                {
                    uint32_t b[4];
                    int const line = pair * 16 + (lane & 7) + ((lane >> 4) << 3);
                    loadMatrices(b, place(keyBase, line, step * 2 + ((lane >> 3) & 1)));
                    Mma<T>::run(s[2 * pair], qFragments[step], b[0], b[1]);
                    Mma<T>::run(s[2 * pair + 1], qFragments[step], b[2], b[3]);
                }
            }

            int64_t const left = keys - tile * kKEYS;
#pragma unroll
            for (int n = 0; n < kKEYS / 8; ++n)
            {
#pragma unroll
                for (int i = 0; i < 4; ++i)
                {
                    int const column = n * 8 + (lane & 3) * 2 + (i & 1);
                    float y = s[n][i] * factor;
                    if (p.mask != nullptr && column < left)
                    {
                        y = fmaxf(fmaf(p.mask[row * keys + tile * kKEYS + column], kLOG2E, y), kLOWEST);
                    }
                    s[n][i] = column < left ? y : kLOWEST;
                }
            }
            float largest[2] = {kLOWEST, kLOWEST};
#pragma unroll
            for (int n = 0; n < kKEYS / 8; ++n)
            {
                largest[0] = fmaxf(largest[0], fmaxf(s[n][0], s[n][1]));
                largest[1] = fmaxf(largest[1], fmaxf(s[n][2], s[n][3]));
            }
            float shrink[2];
#pragma unroll
            for (int half = 0; half < 2; ++half)
            {
                largest[half] = fmaxf(largest[half], __shfl_xor_sync(0xffffffffu, largest[half], 1));
                largest[half] = fmaxf(largest[half], __shfl_xor_sync(0xffffffffu, largest[half], 2));
                shrink[half] = state[half].raise(largest[half]);
            }
#pragma unroll
            for (int n = 0; n < kKEYS / 8; ++n)
            {
#pragma unroll
                for (int i = 0; i < 4; ++i)
                {
                    RowState& mine = state[i >> 1];
                    float const x = s[n][i] - mine.m;
                    float const weight = powerOfTwo(x);
                    mine.l += weight;
                    if constexpr (ENTROPY)
                    {
                        mine.t = fmaf(weight, x, mine.t);
                    }
                    s[n][i] = weight;
                }
            }
#pragma unroll
            for (int n = 0; n < WIDTH / 8; ++n)
            {
                o[n][0] *= shrink[0];
                o[n][1] *= shrink[0];
                o[n][2] *= shrink[1];
                o[n][3] *= shrink[1];
            }

            uint32_t const valueBase = valueTile(tile);
#pragma unroll
            for (int step = 0; step < kKEYS / 16; ++step)
            {
                uint32_t const weights[4] = {Mma<T>::pack(s[2 * step][0], s[2 * step][1]),
                    Mma<T>::pack(s[2 * step][2], s[2 * step][3]), Mma<T>::pack(s[2 * step + 1][0], s[2 * step + 1][1]),
                    Mma<T>::pack(s[2 * step + 1][2], s[2 * step + 1][3])};
#pragma unroll
                for (int pair = 0; pair < kDEPTH; ++pair)
                {
                    uint32_t b[4];
                    loadTransposed(b, place(valueBase, step * 16 + (lane & 15), pair * 2 + (lane >> 4)));
                    Mma<T>::run(o[2 * pair], weights, b[0], b[1]);
                    Mma<T>::run(o[2 * pair + 1], weights, b[2], b[3]);
                }
            }
            __syncthreads();
        }
        finishRows(p, parts, o, state, first + warp * 16, row, head, lane);
    }

    static __device__ __forceinline__ void finishRows(AttentionProblem const& p, Parts const& parts,
        float (&o)[WIDTH / 8][4], RowState (&state)[2], int64_t first, int row, int head, int lane)
    {
        int const D = p.D;
#pragma unroll
        for (int half = 0; half < 2; ++half)
        {
            RowState& mine = state[half];
#pragma unroll
            for (int away = 1; away < 4; away *= 2)
            {
                mine.l += __shfl_xor_sync(0xffffffffu, mine.l, away);
                mine.t += __shfl_xor_sync(0xffffffffu, mine.t, away);
            }
            int64_t const query = first + (lane >> 2) + half * 8;
            if (query >= p.L)
            {
                continue;
            }
            int64_t const place = (query * p.R + row) * p.H + head;
            if (parts.count > 1)
            {
                int64_t const part = int64_t(blockIdx.z) * p.L * p.R * p.H + place;
                if ((lane & 3) == 0)
                {
                    parts.state[part * 3] = mine.m;
                    parts.state[part * 3 + 1] = mine.l;
                    parts.state[part * 3 + 2] = mine.t;
                }
#pragma unroll
                for (int n = 0; n < WIDTH / 8; ++n)
                {
                    if (n * 8 < D)
                    {
                        float2 const two = make_float2(o[n][2 * half], o[n][2 * half + 1]);
                        *reinterpret_cast<float2*>(parts.o + part * D + n * 8 + (lane & 3) * 2) = two;
                    }
                }
                continue;
            }
            if (ENTROPY && (lane & 3) == 0)
            {
                parts.state[place] = mine.entropy();
            }
            float const share = 1.f / mine.l;
            T* out = static_cast<T*>(p.o) + place * D;
#pragma unroll
            for (int n = 0; n < WIDTH / 8; ++n)
            {
                if (n * 8 < D)
                {
                    uint32_t const two = Mma<T>::pack(o[n][2 * half] * share, o[n][2 * half + 1] * share);
                    *reinterpret_cast<uint32_t*>(out + n * 8 + (lane & 3) * 2) = two;
                }
            }
        }
    }
};

template <typename T, int WIDTH, bool ENTROPY>
__global__ void __launch_bounds__(MmaAttention<T, WIDTH, ENTROPY>::kTHREADS, 2)
    attendMma(AttentionProblem const problem, Parts const parts)
{
    MmaAttention<T, WIDTH, ENTROPY>::run(problem, parts);
}

} // namespace toprovar
