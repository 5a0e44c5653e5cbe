// Numbers of a kernel's type T, read and written as float32, one by one or 16 bytes at a time.
#pragma once

#include "kernel_types.h"

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

namespace toprovar
{

__device__ __forceinline__ float widen(float x)
{
    return x;
}
__device__ __forceinline__ float widen(__half x)
{
    return __half2float(x);
}
__device__ __forceinline__ float widen(__nv_bfloat16 x)
{
    return __bfloat162float(x);
}

template <typename T>
__device__ __forceinline__ T narrow(float x);
template <>
__device__ __forceinline__ float narrow<float>(float x)
{
    return x;
}
template <>
__device__ __forceinline__ __half narrow<__half>(float x)
{
    return __float2half_rn(x);
}
template <>
__device__ __forceinline__ __nv_bfloat16 narrow<__nv_bfloat16>(float x)
{
    return __float2bfloat16_rn(x);
}

//! Some numbers that are loaded and stored together.
template <typename T, int COUNT>
struct alignas(sizeof(T) * COUNT) Pack
{
    T values[COUNT];
};

template <int COUNT, typename T>
__device__ __forceinline__ Pack<T, COUNT> loadPack(T const* source)
{
    return *reinterpret_cast<Pack<T, COUNT> const*>(source);
}

template <int COUNT, typename T>
__device__ __forceinline__ void storePack(T* target, Pack<T, COUNT> const& pack)
{
    *reinterpret_cast<Pack<T, COUNT>*>(target) = pack;
}

//! Calls function(T{}) with the C++ type of a float format; anything else is an invalid value.
template <typename Function>
cudaError_t withType(DataType type, Function const& function)
{
    switch (type)
    {
    case DataType::kFLOAT32: return function(float{});
    case DataType::kFLOAT16: return function(__half{});
    case DataType::kBFLOAT16: return function(__nv_bfloat16{});
    default: return cudaErrorInvalidValue;
    }
}

inline unsigned blocksFor(int64_t items, int64_t perBlock)
{
    return unsigned((items + perBlock - 1) / perBlock);
}

} // namespace toprovar
