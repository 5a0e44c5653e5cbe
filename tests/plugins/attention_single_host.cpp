// Runs attention_single.cuh on the processor: a block's threads are threads, __syncthreads is a barrier, and shared memory
// is static, so that blocks run one after another.
#include <barrier>
#include <cmath>
#include <cuda_fp16.h>
#include <thread>
#include <vector>

struct Index
{
    int x, y, z;
};

static thread_local Index threadIdx;
static Index blockIdx;
static std::barrier<>* gBarrier;

#define __global__
#define __shared__ static
#define __syncthreads() gBarrier->arrive_and_wait()

#include "attention_single.cuh"

extern "C" void run(void const* q, void const* kNew, void const* vNew, void const* kPast, void const* vPast, int L, int S,
    int R, int H, void* o, void* entropy, int gridX, int gridY, int gridZ, int threads)
{
    auto half = [](void const* pointer) { return static_cast<__half const*>(pointer); };
    std::barrier<> barrier(threads);
    gBarrier = &barrier;
    for (int block = 0; block < gridX * gridY * gridZ; ++block)
    {
        blockIdx = {block % gridX, block / gridX % gridY, block / gridX / gridY};
        std::vector<std::thread> team;
        for (int t = 0; t < threads; ++t)
        {
            team.emplace_back(
                [&, t]
                {
                    threadIdx = {t, 0, 0};
                    attentionSingle(half(q), half(kNew), half(vNew), half(kPast), half(vPast), L, S, R, H,
                        static_cast<__half*>(o)
#ifdef WITH_ENTROPY
                            ,
                        static_cast<float*>(entropy)
#endif
                    );
                });
        }
        for (auto& thread : team)
        {
            thread.join();
        }
    }
}
