#include "scratch_arena.h"

#include <cuda_runtime_api.h>

#include <algorithm>
#include <map>
#include <mutex>
#include <stdexcept>
#include <string>
#include <utility>

namespace toprovar
{

namespace
{

constexpr size_t kLEAST_BYTES = size_t{1} << 22;

struct Chunk
{
    void* data{nullptr};
    size_t bytes{0};
};

void expectSuccess(cudaError_t error, char const* what)
{
    if (error != cudaSuccess)
    {
        throw std::runtime_error(std::string(what) + ": " + cudaGetErrorString(error));
    }
}

} // namespace

void* scratchOnStream(Stream stream, size_t bytes)
{
    if (bytes == 0)
    {
        return nullptr;
    }
    static std::mutex mutex;
    static auto* const chunks = new std::map<std::pair<int, Stream>, Chunk>;
    std::lock_guard<std::mutex> const lock(mutex);
    int device = 0;
    expectSuccess(cudaGetDevice(&device), "no CUDA device");
    Chunk& chunk = (*chunks)[{device, stream}];
    if (chunk.bytes < bytes)
    {
        cudaStreamCaptureStatus status{};
        expectSuccess(cudaStreamIsCapturing(static_cast<cudaStream_t>(stream), &status), "the stream cannot be asked");
        if (status != cudaStreamCaptureStatusNone)
        {
            throw std::runtime_error("scratch memory of " + std::to_string(bytes)
                + " bytes is needed while a CUDA graph is captured; run once before the capture");
        }
        // the older chunk stays: a graph captured before may still point to it
        size_t const wanted = std::max({bytes, 2 * chunk.bytes, kLEAST_BYTES});
        void* data = nullptr;
        expectSuccess(cudaMalloc(&data, wanted), "scratch memory");
        chunk = {data, wanted};
    }
    return chunk.data;
}

} // namespace toprovar
