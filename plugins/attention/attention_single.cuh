// Attention over cached and new keys as one kernel, in fp16, with the mean entropy of its weights on demand: what an
// ahead-of-time plugin of TensorRT can hold, which has one kernel, int32 arguments and no workspace (aot_plugin.py).
//
//     s_j = SCALE * q . k_j    p = softmax(s)    o = sum p_j v_j    entropy = ln l - w / l, averaged over heads
//
// Online over tiles of keys, with m = max s, l = sum e^(s-m) and w = sum e^(s-m) (s-m): when m rises by d, l becomes
// e^-d l and w becomes e^-d (w - d l). A block takes 32 queries of one row: of one head, or of all in turn where their
// entropy is averaged. It is made to need nothing beside the engine, and is far from the speed of attention.cu.
//
// Compiled alone, with -DHEAD_WIDTH=64 -DSCALE=0.125f and, for the second output, -DWITH_ENTROPY; 128 threads.
// grid: (ceil(L / 32), R, H), or (ceil(L / 32), R, 1) with entropy.
#include <cuda_fp16.h>

#define QUERIES 32
#define KEYS 32
#define THREADS 128
#define LANES (THREADS / QUERIES)      // threads that share a query
#define SLICE (HEAD_WIDTH / LANES)     // of its output, per thread
#define STRIDE (HEAD_WIDTH + 2)        // halves; rows of a tile start in different banks

extern "C" __global__ void attentionSingle(__half const* q, // [L, R, H, D]
    __half const* kNew,                                     // [L, R, H, D]
    __half const* vNew,
    __half const* kPast, // [S, R, H, D]
    __half const* vPast, int L, int S, int R, int H,
    __half* o // [L, R, H, D]
#ifdef WITH_ENTROPY
    ,
    float* entropy // [L, R]
#endif
)
{
    __shared__ __half queries[QUERIES * STRIDE];
    __shared__ __half keys[KEYS * STRIDE];
    __shared__ __half values[KEYS * STRIDE];
    __shared__ float scores[QUERIES * (KEYS + 1)]; // then e^(s-m)
    __shared__ float largest[QUERIES];             // m
    __shared__ float total[QUERIES];               // l
    __shared__ float weighted[QUERIES];            // w
    __shared__ float shrink[QUERIES];              // e^-d of this tile

    int const thread = threadIdx.x;
    int const first = blockIdx.x * QUERIES;
    int const row = blockIdx.y;
    int const mine = thread / LANES;           // query of this thread's output
    int const from = (thread % LANES) * SLICE; // and where its slice begins
#ifdef WITH_ENTROPY
    int const headBegin = 0;
    int const headEnd = H;
    float mean = 0.0f;
#else
    int const headBegin = blockIdx.z;
    int const headEnd = headBegin + 1;
#endif
    for (int head = headBegin; head < headEnd; ++head)
    {
        long long const place = (static_cast<long long>(row) * H + head) * HEAD_WIDTH;
        long long const token = static_cast<long long>(R) * H * HEAD_WIDTH;
        float sum[SLICE];
        for (int d = 0; d < SLICE; ++d)
        {
            sum[d] = 0.0f;
        }
        for (int i = thread; i < QUERIES * HEAD_WIDTH; i += THREADS)
        {
            int const query = i / HEAD_WIDTH;
            int const d = i % HEAD_WIDTH;
            queries[query * STRIDE + d]
                = first + query < L ? q[(first + query) * token + place + d] : __float2half(0.0f);
        }
        if (thread < QUERIES)
        {
            largest[thread] = -1e30f;
            total[thread] = 0.0f;
            weighted[thread] = 0.0f;
        }
        for (int start = 0; start < S + L; start += KEYS)
        {
            int const count = S + L - start < KEYS ? S + L - start : KEYS;
            __syncthreads(); // the tile before is read
            for (int i = thread; i < count * HEAD_WIDTH; i += THREADS)
            {
                int const key = start + i / HEAD_WIDTH;
                int const d = i % HEAD_WIDTH;
                long long const at = (key < S ? key : key - S) * token + place + d;
                keys[(i / HEAD_WIDTH) * STRIDE + d] = key < S ? kPast[at] : kNew[at];
                values[(i / HEAD_WIDTH) * STRIDE + d] = key < S ? vPast[at] : vNew[at];
            }
            __syncthreads();
            for (int i = thread; i < QUERIES * count; i += THREADS)
            {
                int const query = i / count;
                int const key = i % count;
                float product = 0.0f;
                for (int d = 0; d < HEAD_WIDTH; ++d)
                {
                    product += __half2float(queries[query * STRIDE + d]) * __half2float(keys[key * STRIDE + d]);
                }
                scores[query * (KEYS + 1) + key] = SCALE * product;
            }
            __syncthreads();
            if (thread < QUERIES)
            {
                float* mineScores = scores + thread * (KEYS + 1);
                float const before = largest[thread];
                float m = before;
                for (int key = 0; key < count; ++key)
                {
                    m = fmaxf(m, mineScores[key]);
                }
                // nothing was summed before the first tile
                float const rise = start == 0 ? 0.0f : m - before;
                float const factor = expf(-rise);
                float l = factor * total[thread];
                float w = factor * (weighted[thread] - rise * total[thread]);
                for (int key = 0; key < count; ++key)
                {
                    float const below = mineScores[key] - m;
                    float const share = expf(below);
                    mineScores[key] = share;
                    l += share;
                    w += share * below;
                }
                largest[thread] = m;
                total[thread] = l;
                weighted[thread] = w;
                shrink[thread] = factor;
            }
            __syncthreads();
            for (int d = 0; d < SLICE; ++d)
            {
                sum[d] *= shrink[mine];
            }
            for (int key = 0; key < count; ++key)
            {
                float const share = scores[mine * (KEYS + 1) + key];
                for (int d = 0; d < SLICE; ++d)
                {
                    sum[d] += share * __half2float(values[key * STRIDE + from + d]);
                }
            }
        }
        if (first + mine < L)
        {
            for (int d = 0; d < SLICE; ++d)
            {
                o[(first + mine) * token + place + from + d] = __float2half(sum[d] / total[mine]);
            }
        }
#ifdef WITH_ENTROPY
        if (thread < QUERIES)
        {
            mean += (logf(total[thread]) - weighted[thread] / total[thread]) / H;
        }
#endif
        __syncthreads(); // before the next head's queries take this one's place
    }
#ifdef WITH_ENTROPY
    if (thread < QUERIES && first + thread < L)
    {
        entropy[(first + thread) * R + row] = fmaxf(mean, 0.0f);
    }
#endif
}
