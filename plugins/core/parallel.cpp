#include "parallel.h"

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <cstdlib>
#include <exception>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#ifdef __linux__
#include <sched.h>
#endif

namespace toprovar
{

namespace
{

constexpr int32_t kMOST_THREADS = 256;

thread_local HostParallelFor const* tHost = nullptr;
std::atomic<int32_t> gThreads{0};

int32_t usableCores()
{
#ifdef __linux__
    cpu_set_t set;
    if (sched_getaffinity(0, sizeof(set), &set) == 0)
    {
        return std::max(1, CPU_COUNT(&set));
    }
#endif
    return std::max(1u, std::thread::hardware_concurrency());
}

//! One call of parallelFor: items are taken one by one, so that a slow thread takes fewer.
struct Job
{
    Job(int64_t count, std::function<void(int64_t)> const& body)
        : mCount(count)
        , mBody(body)
    {
    }

    void work()
    {
        for (int64_t i = mNext.fetch_add(1); i < mCount; i = mNext.fetch_add(1))
        {
            try
            {
                mBody(i);
            }
            catch (...)
            {
                std::lock_guard<std::mutex> const lock(mMutex);
                mError = mError ? mError : std::current_exception();
            }
            if (mDone.fetch_add(1) + 1 == mCount)
            {
                std::lock_guard<std::mutex> const lock(mMutex);
                mAllDone.notify_all();
            }
        }
    }

    void finish()
    {
        work();
        std::unique_lock<std::mutex> lock(mMutex);
        mAllDone.wait(lock, [this] { return mDone.load() == mCount; });
        if (mError)
        {
            std::rethrow_exception(mError);
        }
    }

    int64_t mCount;
    std::function<void(int64_t)> mBody; // a copy: a late thread may look at a job that is over
    std::atomic<int64_t> mNext{0};
    std::atomic<int64_t> mDone{0};
    std::mutex mMutex;
    std::condition_variable mAllDone;
    std::exception_ptr mError;
};

//! Threads that sleep between jobs. It is never destroyed: threads of a library that is unloaded at exit must not be joined.
class Pool
{
public:
    static Pool& instance()
    {
        static Pool* const pool = new Pool;
        return *pool;
    }

    void run(std::shared_ptr<Job> const& job, int32_t helpers)
    {
        {
            std::lock_guard<std::mutex> const lock(mMutex);
            while (static_cast<int32_t>(mThreads.size()) < helpers)
            {
                mThreads.emplace_back([this] { sleepAndWork(); });
                mThreads.back().detach();
            }
            for (int32_t i = 0; i < helpers; ++i)
            {
                mWaiting.push_back(job);
            }
        }
        mWake.notify_all();
        job->finish();
    }

private:
    void sleepAndWork()
    {
        for (;;)
        {
            std::shared_ptr<Job> job;
            {
                std::unique_lock<std::mutex> lock(mMutex);
                mWake.wait(lock, [this] { return !mWaiting.empty(); });
                job = std::move(mWaiting.back());
                mWaiting.pop_back();
            }
            job->work();
        }
    }

    std::mutex mMutex;
    std::condition_variable mWake;
    std::vector<std::thread> mThreads;
    std::vector<std::shared_ptr<Job>> mWaiting;
};

} // namespace

int32_t defaultThreads()
{
    if (int32_t const set = gThreads.load(); set > 0)
    {
        return set;
    }
    static int32_t const fallback = []
    {
        char const* const text = std::getenv("TOPROVAR_THREADS");
        int32_t const named = text ? std::atoi(text) : 0;
        return named > 0 ? std::min(named, kMOST_THREADS) : usableCores();
    }();
    return fallback;
}

void setDefaultThreads(int32_t threads)
{
    gThreads.store(std::clamp(threads, 0, kMOST_THREADS));
}

void parallelFor(int64_t count, int32_t threads, std::function<void(int64_t)> const& body)
{
    if (count > 1 && tHost)
    {
        (*tHost)(count, body);
        return;
    }
    int64_t const wanted = threads > 0 ? std::min(threads, kMOST_THREADS) : defaultThreads();
    int64_t const used = std::min(wanted, count);
    if (used <= 1)
    {
        for (int64_t i = 0; i < count; ++i)
        {
            body(i);
        }
        return;
    }
    Pool::instance().run(std::make_shared<Job>(count, body), static_cast<int32_t>(used - 1));
}

void parallelRanges(int64_t count, int64_t grain, int32_t threads, std::function<void(int64_t, int64_t)> const& body)
{
    int64_t const size = std::max<int64_t>(grain, 1);
    parallelFor((count + size - 1) / size, threads,
        [&](int64_t i) { body(i * size, std::min(count, (i + 1) * size)); });
}

HostThreads::HostThreads(HostParallelFor const& run)
    : mPrevious(tHost)
{
    tHost = &run;
}

HostThreads::~HostThreads()
{
    tHost = mPrevious;
}

} // namespace toprovar
