// What every kernel launcher shares: number formats, and the streams and errors of CUDA without its headers.
//
// Launchers take raw pointers, sizes and a stream. A header that includes this file compiles with any C++17 compiler, so
// that hosts (ONNX Runtime, TensorRT, ctypes) can be built without a CUDA toolkit beside them.
#pragma once

#include <cstddef>
#include <cstdint>

namespace toprovar
{

enum class DataType : int32_t
{
    kFLOAT32,
    kFLOAT16,
    kBFLOAT16,
    kINT32,
    kINT64,
};

//! A cudaStream_t; void* so that no CUDA header is needed.
using Stream = void*;

//! 0 for success, else a cudaError_t.
using Status = int32_t;

} // namespace toprovar
