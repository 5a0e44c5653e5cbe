// Chooses the kernel of an attention problem and launches it.
//
//     float32                                  attention_fp32.cuh
//     sm_90, 16 bits, width 64 or 128, no mask attention_sm90.cu
//     otherwise, 16 bits                       attention_mma.cuh, with split keys where queries are few
//
// Check: tests/plugins/test_cuda_operators.py on a machine with a GPU.
#include "attention_fp32.cuh"
#include "attention_merge.cuh"
#include "attention_mma.cuh"
#include "attention_sm90.h"

#include <algorithm>
#include <atomic>

namespace toprovar
{
namespace
{

constexpr int kMAX_PARTS = 16;
constexpr int kMAX_DEVICES = 64;
constexpr int kMOST_MULTIPROCESSORS = 256; // of any GPU: an engine may be built on another one than it runs on

struct Device
{
    int major;
    int multiprocessors;
};

//! Asked once per device: the driver takes microseconds to answer, a launch has none to spare.
Device currentDevice()
{
    static std::atomic<int> known[kMAX_DEVICES];
    int device = 0;
    cudaGetDevice(&device);
    int packed = device < kMAX_DEVICES ? known[device].load(std::memory_order_relaxed) : 0;
    if (packed == 0)
    {
        int major = 0;
        int multiprocessors = 0;
        cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device);
        cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, device);
        packed = major << 16 | multiprocessors;
        if (device < kMAX_DEVICES)
        {
            known[device].store(packed, std::memory_order_relaxed);
        }
    }
    return {packed >> 16, packed & 0xffff};
}

bool takesSm90(AttentionProblem const& p)
{
#ifdef TOPROVAR_SM90
    return currentDevice().major == 9 && fitsSm90(p);
#else
    static_cast<void>(p);
    return false;
#endif
}

//! How many parts the keys are cut into, so that blocks fill the GPU once; each part keeps four tiles or more.
int partsOf(AttentionProblem const& p, int multiprocessors)
{
    constexpr int kQUERIES = MmaAttention<__half, 128, true>::kQUERIES;
    constexpr int kKEYS = MmaAttention<__half, 128, true>::kKEYS;
    int64_t const blocks = (p.L + kQUERIES - 1) / kQUERIES * p.R * p.H;
    int64_t const wanted = 2 * std::min(multiprocessors, kMOST_MULTIPROCESSORS) / blocks;
    int64_t const possible = (p.S + p.N) / (4 * kKEYS);
    return int(std::clamp<int64_t>(std::min(wanted, possible), 1, kMAX_PARTS));
}

size_t aligned(size_t bytes)
{
    return (bytes + 255) / 256 * 256;
}

bool needsPerHead(AttentionProblem const& p)
{
    return p.entropy != nullptr && !p.entropyPerHead;
}

template <typename T, int WIDTH, bool ENTROPY>
cudaError_t launchMma(AttentionProblem const& p, Parts const& parts, cudaStream_t stream)
{
    using Kernel = MmaAttention<T, WIDTH, ENTROPY>;
    auto const function = attendMma<T, WIDTH, ENTROPY>;
    cudaError_t const status
        = cudaFuncSetAttribute(function, cudaFuncAttributeMaxDynamicSharedMemorySize, Kernel::kSHARED_BYTES);
    if (status != cudaSuccess)
    {
        return status;
    }
    dim3 const grid(unsigned((p.L + Kernel::kQUERIES - 1) / Kernel::kQUERIES), unsigned(p.R * p.H), unsigned(parts.count));
    function<<<grid, Kernel::kTHREADS, Kernel::kSHARED_BYTES, stream>>>(p, parts);
    return cudaGetLastError();
}

template <typename T>
cudaError_t launch16(AttentionProblem const& p, float* perHead, unsigned char* scratch, cudaStream_t stream)
{
    if (takesSm90(p))
    {
#ifdef TOPROVAR_SM90
        return cudaError_t(launchSm90(p, perHead, stream));
#endif
    }
    Parts parts{nullptr, perHead, partsOf(p, currentDevice().multiprocessors)};
    if (parts.count > 1)
    {
        parts.o = reinterpret_cast<float*>(scratch);
        parts.state = parts.o + int64_t(parts.count) * p.L * p.R * p.H * p.D;
    }
    cudaError_t const status = p.D <= 64
        ? p.entropy != nullptr ? launchMma<T, 64, true>(p, parts, stream) : launchMma<T, 64, false>(p, parts, stream)
        : p.entropy != nullptr ? launchMma<T, 128, true>(p, parts, stream)
                               : launchMma<T, 128, false>(p, parts, stream);
    if (status != cudaSuccess || parts.count == 1)
    {
        return status;
    }
    int64_t const warps = p.L * p.R * p.H;
    mergeParts<T><<<unsigned((warps + 3) / 4), 128, 0, stream>>>(p, parts, perHead);
    return cudaGetLastError();
}

cudaError_t launch32(AttentionProblem const& p, float* perHead, cudaStream_t stream)
{
    cudaError_t const status
        = cudaFuncSetAttribute(attendFp32, cudaFuncAttributeMaxDynamicSharedMemorySize, kFP32_SHARED_BYTES);
    if (status != cudaSuccess)
    {
        return status;
    }
    dim3 const grid(unsigned((p.L + kFP32_QUERIES - 1) / kFP32_QUERIES), unsigned(p.R * p.H));
    attendFp32<<<grid, 256, kFP32_SHARED_BYTES, stream>>>(p, perHead);
    return cudaGetLastError();
}

bool isSound(AttentionProblem const& p)
{
    bool const sized = p.L >= 1 && p.S >= 0 && p.N >= 0 && p.S + p.N >= 1 && p.R >= 1 && p.G >= 1 && p.H >= 1;
    int32_t const step = p.type == DataType::kFLOAT32 ? 4 : 8; // 16 bytes
    return sized && p.H % p.G == 0 && p.D >= step && p.D <= 128 && p.D % step == 0 && int64_t(p.R) * p.H <= 65535;
}

} // namespace

size_t attentionScratchBytes(AttentionProblem const& p)
{
    size_t const heads = size_t(p.L) * p.R * p.H;
    size_t bytes = needsPerHead(p) ? aligned(heads * 4) : 0;
    if (p.type != DataType::kFLOAT32)
    {
        int const parts = partsOf(p, kMOST_MULTIPROCESSORS);
        bytes += parts > 1 ? heads * parts * (p.D + 3) * 4 : 0;
    }
    return bytes;
}

Status launchAttention(AttentionProblem const& p, void* scratch, Stream stream)
{
    if (!isSound(p))
    {
        return cudaErrorInvalidValue;
    }
    cudaStream_t const queue = static_cast<cudaStream_t>(stream);
    unsigned char* free = static_cast<unsigned char*>(scratch);
    float* perHead = p.entropy;
    if (needsPerHead(p))
    {
        perHead = reinterpret_cast<float*>(free);
        free += aligned(size_t(p.L) * p.R * p.H * 4);
    }
    cudaError_t status = cudaErrorInvalidValue;
    switch (p.type)
    {
    case DataType::kFLOAT32: status = launch32(p, perHead, queue); break;
    case DataType::kFLOAT16: status = launch16<__half>(p, perHead, free, queue); break;
    case DataType::kBFLOAT16: status = launch16<__nv_bfloat16>(p, perHead, free, queue); break;
    default: break;
    }
    if (status == cudaSuccess && needsPerHead(p))
    {
        int64_t const rows = p.L * p.R;
        meanOverHeads<<<unsigned((rows + 127) / 128), 128, 0, queue>>>(perHead, p.entropy, rows, p.H);
        status = cudaGetLastError();
    }
    return status;
}

} // namespace toprovar
