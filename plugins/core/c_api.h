// Plain C functions of the library, for ctypes and any other language.
//
// Strings are owned by the library. Functions that return int32_t give 0 for success.
#pragma once

#include <stddef.h>
#include <stdint.h>

#define TOPROVAR_API __attribute__((visibility("default")))

#ifdef __cplusplus
extern "C"
{
#endif

//! A dense row-major tensor; type as ONNX numbers it: 1 float32, 6 int32, 7 int64, 10 float16, 16 bfloat16.
struct ToprovarTensor
{
    void* data;
    int64_t const* shape;
    int32_t rank;
    int32_t type;
};

//! An attribute by name; integers are exact in a double up to 2^53.
struct ToprovarAttribute
{
    char const* name;
    double value;
};

//! One use of an operator.
struct ToprovarCall
{
    char const* name; // such as "TokenGate"
    struct ToprovarTensor const* inputs;
    int32_t inputCount;
    struct ToprovarTensor const* outputs;
    int32_t outputCount;
    struct ToprovarAttribute const* attributes;
    int32_t attributeCount;
};

TOPROVAR_API char const* toprovarVersion(void);
TOPROVAR_API char const* toprovarSourceDigest(void);      // sha256 of the sources compiled in, hex
TOPROVAR_API char const* toprovarCudaArchitectures(void); // "80;86;90a", empty without CUDA
TOPROVAR_API char const* toprovarHosts(void);             // "ctypes;onnxruntime;tensorrt"
TOPROVAR_API int32_t toprovarOperatorCount(void);
TOPROVAR_API char const* toprovarOperatorName(int32_t index); // null beyond the last

//! Threads of the CPU kernels outside of ONNX Runtime; 0 returns to TOPROVAR_THREADS or all cores.
TOPROVAR_API void toprovarSetThreads(int32_t threads);
TOPROVAR_API int32_t toprovarThreads(void);

//! Shape of one output: extents holds 8, *rank is set.
TOPROVAR_API int32_t toprovarOutputShape(
    struct ToprovarCall const* call, int32_t output, int64_t* extents, int32_t* rank, char* error, size_t errorBytes);

//! Bytes of scratch memory that a CUDA run of the call needs.
TOPROVAR_API int32_t toprovarScratchBytes(
    struct ToprovarCall const* call, size_t* bytes, char* error, size_t errorBytes);

//! Runs the call. device: "cpu" or "cuda" (tensors, scratch and stream then belong to CUDA's current device).
TOPROVAR_API int32_t toprovarRun(
    struct ToprovarCall const* call, char const* device, void* scratch, void* stream, char* error, size_t errorBytes);

#ifdef __cplusplus
}
#endif
