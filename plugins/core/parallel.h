// Work of the CPU kernels over threads: a pool of our own, or the one that a host lends for the time of a call.
#pragma once

#include <cstdint>
#include <functional>

namespace toprovar
{

//! Calls body(i) once for every i in [0, count), in any order, on up to `threads` threads (0: all cores); returns when all
//! are done. What the body throws is thrown here.
void parallelFor(int64_t count, int32_t threads, std::function<void(int64_t)> const& body);

//! The same over ranges [begin, end) of about `grain` items or more.
void parallelRanges(
    int64_t count, int64_t grain, int32_t threads, std::function<void(int64_t, int64_t)> const& body);

//! How many threads 0 stands for: the number set, else TOPROVAR_THREADS, else the cores this process may use.
int32_t defaultThreads();
void setDefaultThreads(int32_t threads);

//! Runs body(i) for all i on a host's threads.
using HostParallelFor = std::function<void(int64_t count, std::function<void(int64_t)> const& body)>;

//! While it lives, parallelFor of this thread runs on the host's threads.
class HostThreads
{
public:
    explicit HostThreads(HostParallelFor const& run);
    ~HostThreads();
    HostThreads(HostThreads const&) = delete;
    HostThreads& operator=(HostThreads const&) = delete;

private:
    HostParallelFor const* mPrevious;
};

} // namespace toprovar
