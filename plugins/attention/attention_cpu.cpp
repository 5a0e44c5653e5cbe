// Attention with entropy on the processor: one pass over the keys, with a vector register's lanes being queries.
//
// Lanes are queries, so softmax needs no sum across lanes, and keys and values are read one number at a time, broadcast.
// A task is one head and a block of queries; it copies a block of keys and values into cache and runs all its queries
// over it. State per query, in base 2 (y = scale log2(e) q . k + log2(e) mask), with m the largest y so far:
//
//     x_j = y_j - m     l = sum 2^x     t = sum x 2^x     o = sum 2^x v
//     when m moves to m':  d = m - m',  a = 2^d:   t <- a (t + d l),  l <- a l,  o <- a o
//     at the end:  output o / l,  entropy ln 2 (log2 l - t / l)
//
// Keys that the mask puts so far below the row's others that their weight is 0 are left out before anything is
// multiplied. A row whose keys are all equally hidden attends to all of them, as the ONNX function does.
#include "attention.h"

#include "../core/half.h"
#include "../core/parallel.h"

#include <algorithm>
#include <cmath>
#include <memory>
#include <new>
#include <vector>

namespace toprovar
{

namespace
{

constexpr int32_t kMAX_WIDTH = 128;  // of a head
constexpr int32_t kKEYS = 128;       // per step: keys and values of width 128 take 128 KB, which stays in L2
constexpr int32_t kPANEL = 3;        // vectors of queries beside each other; 4 keys of them fill 12 registers
constexpr int32_t kPANELS = 8;       // at most per task: what a copy of keys and values is shared by
constexpr int32_t kGROUP = 4;        // keys, or columns of values, that are multiplied at once
constexpr int32_t kCOLUMNS = (kKEYS + 4) * kGROUP; // floats between groups of columns: no power of two, which would
                                                   // put all of them into the same few lines of the cache
constexpr float kLOG2E = 1.44269504f;
constexpr float kLN2 = 0.69314718f;
constexpr float kHIDDEN = -1e4f;     // of a mask, below the row's largest
constexpr float kLOWEST = -1e38f;    // finite, so that d * l is 0 and not infinity times zero

template <int32_t Width>
struct Vectors
{
    typedef float Float __attribute__((vector_size(Width * 4)));
    typedef int32_t Int __attribute__((vector_size(Width * 4)));
};

template <int32_t Width>
TOPROVAR_INLINE void load(typename Vectors<Width>::Float& to, float const* from)
{
    std::memcpy(&to, from, sizeof(to));
}

template <int32_t Width>
TOPROVAR_INLINE void store(float* to, typename Vectors<Width>::Float const& from)
{
    std::memcpy(to, &from, sizeof(from));
}

//! x <- 2^x for x <= 0, relative error below 2e-7; below -126 it stays 2^-126.
template <int32_t Width>
TOPROVAR_INLINE void exp2InPlace(typename Vectors<Width>::Float& x)
{
    using Float = typename Vectors<Width>::Float;
    using Int = typename Vectors<Width>::Int;
    Float const bounded = x < -126.0f ? -126.0f - Float{} : x; // NaN stays NaN
    Float const shifted = bounded + 12582912.0f;              // 1.5 * 2^23: the integer part is in the lowest bits
    Float const f = bounded - (shifted - 12582912.0f);        // in [-0.5, 0.5]
    Float power = f * 1.326472721e-3f + 9.671512812e-3f;      // best fit of degree 5, relative error 1e-7
    power = power * f + 5.550733745e-2f;
    power = power * f + 2.402224208e-1f;
    power = power * f + 6.931469776e-1f;
    power = power * f + 1.0f;
    Int const scaled = reinterpret_cast<Int>(power) + (reinterpret_cast<Int>(shifted) << 23);
    x = reinterpret_cast<Float>(scaled);
}

//! Floats from the start of a cache line on: vectors that lie across two lines take twice as long to load.
class Floats
{
public:
    float* data() { return mData.get(); }

    //! What it held before is lost.
    void resize(size_t count)
    {
        if (count > mCount)
        {
            mData.reset(static_cast<float*>(::operator new(count * sizeof(float), kLINE)));
            mCount = count;
        }
    }

private:
    static constexpr std::align_val_t kLINE{64};

    struct Free
    {
        void operator()(float* data) const { ::operator delete(data, kLINE); }
    };

    std::unique_ptr<float, Free> mData;
    size_t mCount{0};
};

//! What a thread works in.
struct Workspace
{
    Floats q;     // [panel][D][lanes]
    Floats o;     // [panel][D][lanes]
    Floats k;     // [kKEYS][D]
    Floats v;     // [D / 4][kKEYS + 4][4]
    Floats p;     // [kKEYS][lanes]
    Floats state; // [panel][m, l, t][lanes]

    void resize(int32_t D, int32_t lanes)
    {
        size_t const queries = static_cast<size_t>(kPANELS) * lanes;
        q.resize(queries * D);
        o.resize(queries * D);
        k.resize(static_cast<size_t>(kKEYS) * D);
        v.resize(static_cast<size_t>(kCOLUMNS) * (D / kGROUP));
        p.resize(static_cast<size_t>(kKEYS) * lanes);
        state.resize(queries * 3);
    }
};

struct Task
{
    AttentionProblem const* problem;
    int64_t const* visible;    // of the row: positions of keys to look at, or null for all
    int64_t keys;              // how many
    float* entropy;            // [L, R, H], or null
    int64_t first;             // query
    int32_t count;             // queries
    int32_t row;
    int32_t head;
};

//! s[key][query] = k[key] . q[query]. q: [D][N * Width], k: [keys rounded up to 4][D].
template <int32_t Width, int32_t N>
TOPROVAR_INLINE void multiplyKeys(float const* q, float const* k, int32_t keys, int32_t D, float* s)
{
    using Float = typename Vectors<Width>::Float;
    constexpr int32_t kLANES = Width * N;
    for (int32_t key = 0; key < keys; key += kGROUP)
    {
        Float sum[kGROUP][N] = {};
        float const* const rows = k + static_cast<size_t>(key) * D;
        for (int32_t d = 0; d < D; ++d)
        {
            Float queries[N];
#pragma GCC unroll 4
            for (int32_t n = 0; n < N; ++n)
            {
                load<Width>(queries[n], q + static_cast<size_t>(d) * kLANES + n * Width);
            }
#pragma GCC unroll 4
            for (int32_t i = 0; i < kGROUP; ++i)
            {
                Float const number = rows[static_cast<size_t>(i) * D + d] - Float{};
#pragma GCC unroll 4
                for (int32_t n = 0; n < N; ++n)
                {
                    sum[i][n] += number * queries[n];
                }
            }
        }
#pragma GCC unroll 4
        for (int32_t i = 0; i < kGROUP; ++i)
        {
#pragma GCC unroll 4
            for (int32_t n = 0; n < N; ++n)
            {
                store<Width>(s + static_cast<size_t>(key + i) * kLANES + n * Width, sum[i][n]);
            }
        }
    }
}

//! Scores to weights in place, and the state (m, l, t) of Width queries with them. factor: what o must be scaled by.
template <int32_t Width>
TOPROVAR_INLINE void weigh(float* s, int32_t stride, int32_t keys, float const* mask, float* m, float* l, float* t,
    int32_t lanes, typename Vectors<Width>::Float& factor)
{
    using Float = typename Vectors<Width>::Float;
    (void) lanes;
    Float before;
    Float sum;
    Float moment;
    load<Width>(before, m);
    load<Width>(sum, l);
    load<Width>(moment, t);
    Float largest = before;
    for (int32_t key = 0; key < keys; ++key)
    {
        Float y;
        load<Width>(y, s + static_cast<size_t>(key) * stride);
        if (mask)
        {
            y += mask[key];
            y = y < kLOWEST ? kLOWEST - Float{} : y; // NaN stays NaN
            store<Width>(s + static_cast<size_t>(key) * stride, y);
        }
        largest = y > largest ? y : largest;
    }
    Float const moved = before - largest;
    factor = moved;
    exp2InPlace<Width>(factor);
    moment = factor * (moment + moved * sum);
    sum = factor * sum;
    for (int32_t key = 0; key < keys; ++key)
    {
        Float x;
        load<Width>(x, s + static_cast<size_t>(key) * stride);
        x -= largest;
        Float weight = x;
        exp2InPlace<Width>(weight);
        sum += weight;
        moment += x * weight;
        store<Width>(s + static_cast<size_t>(key) * stride, weight);
    }
    store<Width>(m, largest);
    store<Width>(l, sum);
    store<Width>(t, moment);
}

//! o[d][query] <- factor[query] o[d][query] + sum over keys of v[key][d] p[key][query].
template <int32_t Width, int32_t N>
TOPROVAR_INLINE void addValues(
    float const* p, float const* v, int32_t keys, int32_t D, typename Vectors<Width>::Float const* factor, float* o)
{
    using Float = typename Vectors<Width>::Float;
    constexpr int32_t kLANES = Width * N;
    for (int32_t d = 0; d < D; d += kGROUP)
    {
        Float sum[kGROUP][N];
#pragma GCC unroll 4
        for (int32_t i = 0; i < kGROUP; ++i)
        {
#pragma GCC unroll 4
            for (int32_t n = 0; n < N; ++n)
            {
                load<Width>(sum[i][n], o + static_cast<size_t>(d + i) * kLANES + n * Width);
                sum[i][n] *= factor[n];
            }
        }
        float const* const columns = v + static_cast<size_t>(d / kGROUP) * kCOLUMNS;
        for (int32_t key = 0; key < keys; ++key)
        {
            Float weights[N];
#pragma GCC unroll 4
            for (int32_t n = 0; n < N; ++n)
            {
                load<Width>(weights[n], p + static_cast<size_t>(key) * kLANES + n * Width);
            }
#pragma GCC unroll 4
            for (int32_t i = 0; i < kGROUP; ++i)
            {
                Float const number = columns[key * kGROUP + i] - Float{};
#pragma GCC unroll 4
                for (int32_t n = 0; n < N; ++n)
                {
                    sum[i][n] += number * weights[n];
                }
            }
        }
#pragma GCC unroll 4
        for (int32_t i = 0; i < kGROUP; ++i)
        {
#pragma GCC unroll 4
            for (int32_t n = 0; n < N; ++n)
            {
                store<Width>(o + static_cast<size_t>(d + i) * kLANES + n * Width, sum[i][n]);
            }
        }
    }
}

template <int32_t Width, int32_t N>
TOPROVAR_INLINE void attendPanel(
    Workspace& work, int32_t panel, int32_t keys, float const* mask, int32_t D, int32_t widest)
{
    using Float = typename Vectors<Width>::Float;
    constexpr int32_t kLANES = Width * N;
    float* const q = work.q.data() + static_cast<size_t>(panel) * widest * D;
    float* const o = work.o.data() + static_cast<size_t>(panel) * widest * D;
    float* const state = work.state.data() + static_cast<size_t>(panel) * widest * 3;
    float* const p = work.p.data();
    multiplyKeys<Width, N>(q, work.k.data(), keys, D, p);
    Float factor[N];
#pragma GCC unroll 4
    for (int32_t n = 0; n < N; ++n)
    {
        float* const mine = state + n * Width;
        weigh<Width>(
            p + n * Width, kLANES, keys, mask, mine, mine + kLANES, mine + 2 * kLANES, kLANES, factor[n]);
    }
    addValues<Width, N>(p, work.v.data(), keys, D, factor, o);
}

//! Copies `keys` keys and values from position `first` of the visible ones, as float32; rows up to a multiple of 4 are 0.
template <class T>
TOPROVAR_INLINE void packKeys(Task const& task, int64_t first, int32_t keys, Workspace& work, float* mask)
{
    AttentionProblem const& problem = *task.problem;
    int32_t const D = problem.D;
    int64_t const rowStride = static_cast<int64_t>(problem.G) * D;
    int64_t const stride = rowStride * problem.R;
    int64_t const offset = task.row * rowStride + static_cast<int64_t>(task.head / (problem.H / problem.G)) * D;
    for (int32_t i = 0; i < keys; ++i)
    {
        int64_t const at = task.visible ? task.visible[first + i] : first + i;
        bool const isPast = at < problem.S;
        int64_t const from = (isPast ? at : at - problem.S) * stride + offset;
        T const* const k = static_cast<T const*>(isPast ? problem.kPast : problem.kNew) + from;
        T const* const v = static_cast<T const*>(isPast ? problem.vPast : problem.vNew) + from;
        float* const toK = work.k.data() + static_cast<size_t>(i) * D;
        for (int32_t d = 0; d < D; ++d)
        {
            toK[d] = floatFrom(k[d]);
        }
        float wide[kMAX_WIDTH];
        for (int32_t d = 0; d < D; ++d)
        {
            wide[d] = floatFrom(v[d]);
        }
        for (int32_t d = 0; d < D; d += kGROUP)
        {
            float* const to = work.v.data() + static_cast<size_t>(d / kGROUP) * kCOLUMNS + i * kGROUP;
            std::memcpy(to, wide + d, kGROUP * sizeof(float));
        }
        if (mask)
        {
            mask[i] = kLOG2E * problem.mask[task.row * (problem.S + problem.N) + at];
        }
    }
    int32_t const padded = (keys + kGROUP - 1) / kGROUP * kGROUP;
    std::fill_n(work.k.data() + static_cast<size_t>(keys) * D, static_cast<size_t>(padded - keys) * D, 0.0f);
}

template <int32_t Width, class T>
TOPROVAR_INLINE void attend(Task const& task, Workspace& work)
{
    constexpr int32_t kWIDEST = Width * kPANEL;
    AttentionProblem const& problem = *task.problem;
    int32_t const D = problem.D;
    work.resize(D, kWIDEST);
    int32_t const panels = (task.count + kWIDEST - 1) / kWIDEST;
    int64_t const stride = static_cast<int64_t>(problem.R) * problem.H * D;
    int64_t const offset = (static_cast<int64_t>(task.row) * problem.H + task.head) * D;
    float const scale = problem.scale * kLOG2E;

    // lanes of a panel: as many whole vectors as its queries need
    int32_t vectors[kPANELS];
    for (int32_t panel = 0; panel < panels; ++panel)
    {
        int32_t const queries = std::min(kWIDEST, task.count - panel * kWIDEST);
        vectors[panel] = (queries + Width - 1) / Width;
        int32_t const lanes = vectors[panel] * Width;
        float* const q = work.q.data() + static_cast<size_t>(panel) * kWIDEST * D;
        for (int32_t lane = 0; lane < lanes; ++lane)
        {
            T const* const from = static_cast<T const*>(problem.q) + (task.first + panel * kWIDEST + lane) * stride + offset;
            for (int32_t d = 0; d < D; ++d)
            {
                q[static_cast<size_t>(d) * lanes + lane] = lane < queries ? scale * floatFrom(from[d]) : 0.0f;
            }
        }
        float* const state = work.state.data() + static_cast<size_t>(panel) * kWIDEST * 3;
        std::fill(state, state + lanes, kLOWEST);
        std::fill(state + lanes, state + 3 * lanes, 0.0f);
    }
    std::fill_n(work.o.data(), static_cast<size_t>(panels) * kWIDEST * D, 0.0f);

    float mask[kKEYS];
    for (int64_t first = 0; first < task.keys; first += kKEYS)
    {
        int32_t const keys = static_cast<int32_t>(std::min<int64_t>(kKEYS, task.keys - first));
        packKeys<T>(task, first, keys, work, problem.mask ? mask : nullptr);
        float const* const added = problem.mask ? mask : nullptr;
        for (int32_t panel = 0; panel < panels; ++panel)
        {
            switch (vectors[panel])
            {
            case 1: attendPanel<Width, 1>(work, panel, keys, added, D, kWIDEST); break;
            case 2: attendPanel<Width, 2>(work, panel, keys, added, D, kWIDEST); break;
            default: attendPanel<Width, 3>(work, panel, keys, added, D, kWIDEST); break;
            }
        }
    }

    for (int32_t panel = 0; panel < panels; ++panel)
    {
        int32_t const lanes = vectors[panel] * Width;
        int32_t const queries = std::min(kWIDEST, task.count - panel * kWIDEST);
        float const* const o = work.o.data() + static_cast<size_t>(panel) * kWIDEST * D;
        float const* const state = work.state.data() + static_cast<size_t>(panel) * kWIDEST * 3;
        for (int32_t lane = 0; lane < queries; ++lane)
        {
            int64_t const query = task.first + panel * kWIDEST + lane;
            float const sum = state[lanes + lane];
            float const inverse = 1.0f / sum;
            T* const to = static_cast<T*>(problem.o) + query * stride + offset;
            for (int32_t d = 0; d < D; ++d)
            {
                to[d] = roundedFrom<T>(o[static_cast<size_t>(d) * lanes + lane] * inverse);
            }
            if (task.entropy)
            {
                float const nats = kLN2 * (std::log2(sum) - state[2 * lanes + lane] * inverse);
                bool const isBelow = nats < 0.0f; // by rounding; NaN stays NaN
                task.entropy[(query * problem.R + task.row) * problem.H + task.head]
                    = isBelow ? 0.0f : nats;
            }
        }
    }
}

using Attend = void (*)(Task const&, Workspace&);

template <class T>
void attendAnywhere(Task const& task, Workspace& work)
{
    attend<4, T>(task, work);
}

#if defined(__x86_64__)
template <class T>
__attribute__((target("avx2,fma"))) void attendWithAvx2(Task const& task, Workspace& work)
{
    attend<8, T>(task, work);
}

template <class T>
__attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma"))) void attendWithAvx512(
    Task const& task, Workspace& work)
{
    attend<16, T>(task, work);
}
#endif

//! The widest code that this processor runs, and how many queries a panel of it has.
template <class T>
Attend chosenCode(int32_t& lanes)
{
#if defined(__x86_64__)
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq")
        && __builtin_cpu_supports("avx512vl"))
    {
        lanes = 16 * kPANEL;
        return attendWithAvx512<T>;
    }
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"))
    {
        lanes = 8 * kPANEL;
        return attendWithAvx2<T>;
    }
#endif
    lanes = 4 * kPANEL;
    return attendAnywhere<T>;
}

void meanOverHeads(AttentionProblem const& problem, float const* perHead)
{
    for (int64_t i = 0; i < problem.L * problem.R; ++i)
    {
        float sum = 0.0f;
        for (int32_t head = 0; head < problem.H; ++head)
        {
            sum += perHead[i * problem.H + head];
        }
        problem.entropy[i] = sum / static_cast<float>(problem.H);
    }
}

//! As many as share a copy of keys and values, fewer where threads would have nothing to do; whole panels, evenly.
int64_t queriesPerTask(int64_t L, int64_t heads, int64_t lanes, int64_t threads)
{
    auto const over = [](int64_t a, int64_t b) { return (a + b - 1) / b; };
    int64_t const panels = over(L, lanes);
    int64_t const wanted = std::min(panels, over(2 * threads, heads)); // two tasks per thread even out
    int64_t const blocks = std::max<int64_t>({1, over(panels, kPANELS), wanted});
    return std::max<int64_t>(1, over(panels, blocks)) * lanes;
}

//! Positions of the keys that a row sees; at least one.
std::vector<int64_t> visibleKeys(AttentionProblem const& problem, int32_t row)
{
    std::vector<int64_t> visible;
    int64_t const keys = problem.S + problem.N;
    float const* const mask = problem.mask + row * keys;
    float const largest = *std::max_element(mask, mask + keys);
    for (int64_t i = 0; i < keys; ++i)
    {
        bool const isHidden = mask[i] < largest && mask[i] <= largest + kHIDDEN; // false for NaN
        if (!isHidden)
        {
            visible.push_back(i);
        }
    }
    return visible;
}

} // namespace

void attentionOnCpu(AttentionProblem const& problem, int32_t threads)
{
    int32_t lanes = 0;
    Attend const code = problem.type == DataType::kFLOAT16 ? chosenCode<Half>(lanes) : chosenCode<float>(lanes);
    std::vector<std::vector<int64_t>> visible;
    for (int32_t row = 0; problem.mask && row < problem.R; ++row)
    {
        visible.push_back(visibleKeys(problem, row));
    }
    std::vector<float> perHead;
    if (problem.entropy && !problem.entropyPerHead)
    {
        perHead.resize(static_cast<size_t>(problem.L) * problem.R * problem.H);
    }
    float* const entropy = perHead.empty() ? problem.entropy : perHead.data();
    int64_t const heads = static_cast<int64_t>(problem.R) * problem.H;
    int64_t const queries = queriesPerTask(problem.L, heads, lanes, threads > 0 ? threads : defaultThreads());
    int64_t const blocks = (problem.L + queries - 1) / queries;
    parallelFor(blocks * heads, threads,
        [&](int64_t i)
        {
            static thread_local Workspace work;
            int64_t const first = i / heads * queries;
            Task task{};
            task.problem = &problem;
            task.row = static_cast<int32_t>(i % heads) / problem.H;
            task.head = static_cast<int32_t>(i % heads) % problem.H;
            task.visible = problem.mask ? visible[task.row].data() : nullptr;
            task.keys = problem.mask ? static_cast<int64_t>(visible[task.row].size()) : problem.S + problem.N;
            task.entropy = entropy;
            task.first = first;
            task.count = static_cast<int32_t>(std::min(queries, problem.L - first));
            code(task, work);
        });
    if (!perHead.empty())
    {
        meanOverHeads(problem, perHead.data());
    }
}

} // namespace toprovar
