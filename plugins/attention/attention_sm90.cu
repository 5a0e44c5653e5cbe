// Attention on Hopper: two warp groups of 64 queries each on wgmma, a third one copies keys and values by tensor map.
//
// Within a group, products overlap with softmax: the values of tile j - 1 are mixed while the scores of tile j become weights.
// Between groups, turns are taken: one multiplies while the other weighs (with entropy 590 instead of 505 TFLOP/s at 4096 x
// 10521 keys, 2 x 16 heads of 128, bfloat16, H200). Sums of a row run in two chains, since one waits for itself.
//
// Tiles of 128 keys never join both segments, so that a tensor map describes each; the last tile of a segment hides the keys
// beyond its end. Keys and values have two stages each, with a barrier for "full" and one for "empty".
//
// Shared memory holds blocks of 64 columns [rows][64] with the hardware's 128-byte swizzle.
// Source of the scheme: FlashAttention-3 (arXiv 2407.08608); the entropy is ToProVAR eq. 2.
#include "../core/numbers.cuh"
#include "attention_sm90.h"
#include "online_entropy.cuh"
#include "wgmma.cuh"

namespace toprovar
{
namespace
{

constexpr int kQUERIES = 128; // of a block, 64 for each of two warp groups
constexpr int kKEYS = 128;
constexpr int kTHREADS = 384;
constexpr int kSTAGES = 2;
constexpr int kCONSUMER_WARPS = 8;

template <int D>
constexpr int kTILE_BYTES = kKEYS * D * 2;

template <int D>
constexpr int kSHARED_BYTES = (1 + 2 * kSTAGES) * kTILE_BYTES<D> + 1024 + 128; // alignment of the swizzle, barriers

static_assert(kQUERIES == kKEYS, "queries take a tile of the same size");

struct Maps
{
    CUtensorMap q, kPast, vPast, kNew, vNew;
};

template <typename T>
__device__ __forceinline__ uint32_t packTwo(float low, float high)
{
    Pack<T, 2> const both{{narrow<T>(low), narrow<T>(high)}};
    return *reinterpret_cast<uint32_t const*>(&both);
}

} // namespace

template <typename T, int D, bool ENTROPY>
__global__ void __launch_bounds__(kTHREADS, 1)
    attendSm90(AttentionProblem const p, float* perHead, __grid_constant__ Maps const maps)
{
    constexpr int kBLOCK = kKEYS * 128; // bytes of 64 columns
    extern __shared__ unsigned char memory[];
    uint32_t const base = (uint32_t(__cvta_generic_to_shared(memory)) + 1023) / 1024 * 1024;
    uint32_t const queries = base;
    auto keyTile = [&](int stage) { return base + (1 + 2 * stage) * kTILE_BYTES<D>; };
    auto valueTile = [&](int stage) { return base + (2 + 2 * stage) * kTILE_BYTES<D>; };
    uint32_t const barriers = base + (1 + 2 * kSTAGES) * kTILE_BYTES<D>;
    uint32_t const queriesFull = barriers;
    auto keysFull = [&](int stage) { return barriers + 8 + 32 * stage; };
    auto keysEmpty = [&](int stage) { return barriers + 16 + 32 * stage; };
    auto valuesFull = [&](int stage) { return barriers + 24 + 32 * stage; };
    auto valuesEmpty = [&](int stage) { return barriers + 32 + 32 * stage; };

    int const first = blockIdx.x * kQUERIES;
    int const row = blockIdx.y / p.H;
    int const head = blockIdx.y % p.H;
    int const pastTiles = int((p.S + kKEYS - 1) / kKEYS);
    int const tiles = pastTiles + int((p.N + kKEYS - 1) / kKEYS);

    if (threadIdx.x == 0)
    {
        initBarrier(queriesFull, 1);
        for (int stage = 0; stage < kSTAGES; ++stage)
        {
            initBarrier(keysFull(stage), 1);
            initBarrier(valuesFull(stage), 1);
            initBarrier(keysEmpty(stage), kCONSUMER_WARPS);
            initBarrier(valuesEmpty(stage), kCONSUMER_WARPS);
        }
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
        asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
    }
    __syncthreads();

    if (threadIdx.x < 128)
    {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 24;");
        if (threadIdx.x == 0)
        {
            int const group = head / (p.H / p.G);
            auto copyTile = [&](uint32_t shared, CUtensorMap const* map, uint32_t barrier, int who, int token) {
                arriveExpecting(barrier, kTILE_BYTES<D>);
#pragma unroll
                for (int block = 0; block < D / 64; ++block)
                {
                    copyBox(shared + block * kBLOCK, map, barrier, block * 64, who, row, token);
                }
            };
            copyTile(queries, &maps.q, queriesFull, head, first);
            for (int tile = 0; tile < tiles; ++tile)
            {
                int const stage = tile % kSTAGES;
                uint32_t const parity = (tile / kSTAGES & 1) ^ 1;
                bool const cached = tile < pastTiles;
                int const token = (cached ? tile : tile - pastTiles) * kKEYS;
                waitForPhase(keysEmpty(stage), parity);
                copyTile(keyTile(stage), cached ? &maps.kPast : &maps.kNew, keysFull(stage), group, token);
                waitForPhase(valuesEmpty(stage), parity);
                copyTile(valueTile(stage), cached ? &maps.vPast : &maps.vNew, valuesFull(stage), group, token);
            }
        }
        return;
    }

    asm volatile("setmaxnreg.inc.sync.aligned.u32 240;");
    int const consumer = threadIdx.x / 128 - 1;
    int const lane = threadIdx.x % 32;
    int const warp = threadIdx.x % 128 / 32;
    float const factor = p.scale * kLOG2E;
    uint32_t const mine = queries + consumer * 64 * 128;
    float o[D / 2] = {};
    float s[64];
    uint32_t weights[8][4];
    RowState state[2];
    float shrink[2];

    auto multiplyKeys = [&](int tile) {
        uint32_t const keys = keyTile(tile % kSTAGES);
        fenceProducts();
#pragma unroll
        for (int step = 0; step < D / 16; ++step)
        {
            uint32_t const offset = step / 4 * kBLOCK + step % 4 * 32;
            uint64_t const a = describeOperand(mine + offset, 16, 1024);
            uint64_t const b = describeOperand(keys + offset, 16, 1024);
            Wgmma<T>::scores(s, a, b, step > 0);
        }
        commitProducts();
    };
    auto mixValues = [&](int tile) {
        uint32_t const values = valueTile(tile % kSTAGES);
        fenceProducts();
#pragma unroll
        for (int step = 0; step < kKEYS / 16; ++step)
        {
            Wgmma<T>::mix(o, weights[step], describeOperand(values + step * 16 * 128, kBLOCK, 1024));
        }
        commitProducts();
    };
    auto release = [&](uint32_t barrier) {
        if (lane == 0)
        {
            arrive(barrier);
        }
    };
    // scores of a tile become weights; the states move on
    auto weigh = [&](int tile) {
        bool const cached = tile < pastTiles;
        int const left = int((cached ? p.S : p.N) - int64_t(cached ? tile : tile - pastTiles) * kKEYS);
        if (left < kKEYS)
        {
#pragma unroll
            for (int i = 0; i < 64; ++i)
            {
                int const column = i / 4 * 8 + (lane & 3) * 2 + (i & 1);
                s[i] = column < left ? s[i] : kLOWEST;
            }
        }
#pragma unroll
        for (int half = 0; half < 2; ++half)
        {
            float largest = kLOWEST;
#pragma unroll
            for (int i = 0; i < 64; i += 4)
            {
                largest = fmaxf(largest, fmaxf(s[i + 2 * half], s[i + 2 * half + 1]));
            }
            largest = fmaxf(largest, __shfl_xor_sync(0xffffffffu, largest, 1));
            largest = fmaxf(largest, __shfl_xor_sync(0xffffffffu, largest, 2));
            shrink[half] = state[half].raise(largest * factor);
        }
        float sums[4] = {};
        float products[4] = {};
#pragma unroll
        for (int i = 0; i < 64; ++i)
        {
            float const x = fmaf(s[i], factor, -state[i >> 1 & 1].m);
            float const weight = powerOfTwo(x);
            sums[i & 3] += weight;
            if constexpr (ENTROPY)
            {
                products[i & 3] = fmaf(weight, x, products[i & 3]);
            }
            s[i] = weight;
        }
        state[0].l += sums[0] + sums[1];
        state[1].l += sums[2] + sums[3];
        state[0].t += products[0] + products[1];
        state[1].t += products[2] + products[3];
    };
    auto packWeights = [&]() {
#pragma unroll
        for (int step = 0; step < 8; ++step)
        {
#pragma unroll
            for (int i = 0; i < 4; ++i)
            {
                weights[step][i] = packTwo<T>(s[step * 8 + 2 * i], s[step * 8 + 2 * i + 1]);
            }
        }
    };

    // the groups take turns in giving the tensor cores work, so that one weighs while the other multiplies
    auto waitForTurn = [&]() { asm volatile("bar.sync %0, 256;" ::"r"(1 + consumer) : "memory"); };
    auto passTurn = [&]() { asm volatile("bar.arrive %0, 256;" ::"r"(2 - consumer) : "memory"); };
    if (consumer == 1 && tiles > 1)
    {
        passTurn();
    }

    waitForPhase(queriesFull, 0);
    waitForPhase(keysFull(0), 0);
    multiplyKeys(0);
    waitForProducts<0>();
    hold(s);
    release(keysEmpty(0));
    weigh(0);
    packWeights();
    for (int tile = 1; tile < tiles; ++tile)
    {
        int const stage = tile % kSTAGES;
        int const before = (tile - 1) % kSTAGES;
        waitForPhase(keysFull(stage), tile / kSTAGES & 1);
        waitForTurn();
        multiplyKeys(tile);
        waitForPhase(valuesFull(before), (tile - 1) / kSTAGES & 1);
        mixValues(tile - 1);
        if (consumer == 0 || tile + 1 < tiles)
        {
            passTurn();
        }
        waitForProducts<1>();
        hold(s);
        release(keysEmpty(stage));
        weigh(tile);
        waitForProducts<0>();
        hold(o);
        release(valuesEmpty(before));
#pragma unroll
        for (int i = 0; i < D / 2; ++i)
        {
            o[i] *= shrink[i >> 1 & 1];
        }
        packWeights();
    }
    waitForPhase(valuesFull((tiles - 1) % kSTAGES), (tiles - 1) / kSTAGES & 1);
    mixValues(tiles - 1);
    waitForProducts<0>();
    hold(o);

#pragma unroll
    for (int half = 0; half < 2; ++half)
    {
        RowState& one = state[half];
#pragma unroll
        for (int away = 1; away < 4; away *= 2)
        {
            one.l += __shfl_xor_sync(0xffffffffu, one.l, away);
            one.t += __shfl_xor_sync(0xffffffffu, one.t, away);
        }
        int64_t const query = first + consumer * 64 + warp * 16 + (lane >> 2) + half * 8;
        if (query >= p.L)
        {
            continue;
        }
        int64_t const place = (query * p.R + row) * p.H + head;
        if (ENTROPY && (lane & 3) == 0)
        {
            perHead[place] = one.entropy();
        }
        float const share = 1.f / one.l;
        T* out = static_cast<T*>(p.o) + place * D;
#pragma unroll
        for (int n = 0; n < D / 8; ++n)
        {
            uint32_t const two = packTwo<T>(o[4 * n + 2 * half] * share, o[4 * n + 2 * half + 1] * share);
            *reinterpret_cast<uint32_t*>(out + n * 8 + (lane & 3) * 2) = two;
        }
    }
}

namespace
{

using Encode = CUresult (*)(CUtensorMap*, CUtensorMapDataType, cuuint32_t, void*, cuuint64_t const*, cuuint64_t const*,
    cuuint32_t const*, cuuint32_t const*, CUtensorMapInterleave, CUtensorMapSwizzle, CUtensorMapL2promotion,
    CUtensorMapFloatOOBfill);

//! The driver's encoder, by name: a library that linked the driver could not be loaded where there is none.
Encode findEncoder()
{
    void* function = nullptr;
    cudaDriverEntryPointQueryResult found;
    cudaError_t const status
        = cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function, 12000, cudaEnableDefault, &found);
    return status == cudaSuccess && found == cudaDriverEntryPointSuccess ? reinterpret_cast<Encode>(function) : nullptr;
}

//! data: [tokens, R, heads, D] of 16-bit numbers; boxes are [kKEYS tokens, 64 columns] of one row and head.
bool describe(CUtensorMap& map, void const* data, int64_t tokens, int R, int heads, int D, DataType type)
{
    static Encode const encode = findEncoder();
    if (encode == nullptr)
    {
        return false;
    }
    cuuint64_t const sizes[4] = {cuuint64_t(D), cuuint64_t(heads), cuuint64_t(R), cuuint64_t(tokens)};
    cuuint64_t const strides[3] = {cuuint64_t(D) * 2, cuuint64_t(D) * heads * 2, cuuint64_t(D) * heads * R * 2};
    cuuint32_t const box[4] = {64, 1, 1, kKEYS};
    cuuint32_t const steps[4] = {1, 1, 1, 1};
    CUtensorMapDataType const format
        = type == DataType::kFLOAT16 ? CU_TENSOR_MAP_DATA_TYPE_FLOAT16 : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16;
    return encode(&map, format, 4, const_cast<void*>(data), sizes, strides, box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE,
               CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE)
        == CUDA_SUCCESS;
}

template <typename T, int D, bool ENTROPY>
cudaError_t launch(AttentionProblem const& p, float* perHead, Maps const& maps, cudaStream_t stream)
{
    auto const function = attendSm90<T, D, ENTROPY>;
    cudaError_t const status
        = cudaFuncSetAttribute(function, cudaFuncAttributeMaxDynamicSharedMemorySize, kSHARED_BYTES<D>);
    if (status != cudaSuccess)
    {
        return status;
    }
    dim3 const grid(blocksFor(p.L, kQUERIES), unsigned(p.R * p.H));
    function<<<grid, kTHREADS, kSHARED_BYTES<D>, stream>>>(p, perHead, maps);
    return cudaGetLastError();
}

template <typename T>
cudaError_t launchOf(AttentionProblem const& p, float* perHead, Maps const& maps, cudaStream_t stream)
{
    if (p.D == 64)
    {
        return perHead != nullptr ? launch<T, 64, true>(p, perHead, maps, stream)
                                  : launch<T, 64, false>(p, perHead, maps, stream);
    }
    return perHead != nullptr ? launch<T, 128, true>(p, perHead, maps, stream)
                              : launch<T, 128, false>(p, perHead, maps, stream);
}

} // namespace

bool fitsSm90(AttentionProblem const& p)
{
    bool const typed = p.type == DataType::kFLOAT16 || p.type == DataType::kBFLOAT16;
    // with fewer queries the blocks leave most of the GPU idle, and splitting the keys wins
    bool const filled = p.L > 256;
    bool const sized = p.S < 0x7fffff00 && p.N < 0x7fffff00 && p.L < 0x7fffff00;
    return typed && filled && sized && (p.D == 64 || p.D == 128) && p.mask == nullptr && p.scale > 0.f;
}

Status launchSm90(AttentionProblem const& p, float* perHead, Stream stream)
{
    Maps maps;
    bool good = describe(maps.q, p.q, p.L, p.R, p.H, p.D, p.type);
    // an empty segment has no tile; its map describes the other one and is never used
    good = good && describe(maps.kPast, p.S ? p.kPast : p.kNew, p.S ? p.S : p.N, p.R, p.G, p.D, p.type);
    good = good && describe(maps.vPast, p.S ? p.vPast : p.vNew, p.S ? p.S : p.N, p.R, p.G, p.D, p.type);
    good = good && describe(maps.kNew, p.N ? p.kNew : p.kPast, p.N ? p.N : p.S, p.R, p.G, p.D, p.type);
    good = good && describe(maps.vNew, p.N ? p.vNew : p.vPast, p.N ? p.N : p.S, p.R, p.G, p.D, p.type);
    if (!good)
    {
        return cudaErrorInvalidValue;
    }
    cudaStream_t const queue = static_cast<cudaStream_t>(stream);
    return p.type == DataType::kFLOAT16 ? launchOf<__half>(p, perHead, maps, queue)
                                        : launchOf<__nv_bfloat16>(p, perHead, maps, queue);
}

} // namespace toprovar
