// Parts of one piece of work in several threads: those of the graph that is being computed (kvq_team), else OpenMP's.
#pragma once

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <thread>
#include <type_traits>
#if defined(__x86_64__) || defined(__i386__)
#include <immintrin.h>
#endif

#if defined(_OPENMP)
extern "C" int omp_get_num_procs(void); // some systems have OpenMP's runtime without its header
#endif

// CPUs on which the process may run: OpenMP may have bound this thread to one of them.
inline int kvq_n_cpus() {
#if defined(_OPENMP)
    return std::max(1, omp_get_num_procs());
#else
    return std::max(1, (int) std::thread::hardware_concurrency());
#endif
}

// Waits for short times by spinning, as ggml's own threads do. A program may have more threads than cores, and a method
// may run Python: longer waits leave the core to others.
template <typename F> void kvq_wait_until(const F & is_so) {
    for (int i = 0; !is_so(); i++) {
        if (i < 4000) {
#if defined(__x86_64__) || defined(__i386__)
            _mm_pause();
#endif
        } else if (i < 6000) {
            std::this_thread::yield();
        } else {
            std::this_thread::sleep_for(std::chrono::microseconds(50));
        }
    }
}

// The threads that compute one node of a graph. ggml calls a node's function in each of them. Thread 0 leads: it runs
// the node's code, and the others help wherever that code calls kvq_parallel.
class kvq_team {
public:
    // In thread `ith` of `nth`, once; at most `most` of them work. The team must live until all threads have returned.
    // `lead` must not throw.
    template <typename F> void enter(int ith, int nth, int most, const F & lead) {
        nth = std::min(nth, most);
        if (ith >= nth) { return; }
        if (ith) {
            serve(ith);
            return;
        }
        n = nth;
        here() = this;
        lead();
        here() = nullptr;
        work = nullptr;
        n_works.fetch_add(1, std::memory_order_release);
    }

    int size() const { return n; }

    // f(what, thread) in every thread; the leader calls
    void run(void (*f)(const void *, int), const void * of) {
        work = f;
        what = of;
        n_busy.store(n - 1, std::memory_order_relaxed);
        n_works.fetch_add(1, std::memory_order_release);
        f(of, 0);
        kvq_wait_until([&] { return !n_busy.load(std::memory_order_acquire); });
    }

    // NULL: this thread leads none
    static kvq_team *& here() {
        static thread_local kvq_team * team = nullptr;
        return team;
    }
    // inside f of kvq_parallel
    static bool & inside() {
        static thread_local bool is = false;
        return is;
    }

private:
    void serve(int ith) {
        for (uint32_t seen = 0;; seen++) {
            kvq_wait_until([&] { return n_works.load(std::memory_order_acquire) != seen; });
            if (!work) { return; }
            work(what, ith);
            n_busy.fetch_sub(1, std::memory_order_release);
        }
    }

    int n = 1;
    void (*work)(const void *, int) = nullptr; // of the newest call of run; NULL: the leader has ended
    const void * what = nullptr;
    std::atomic<uint32_t> n_works{ 0 };
    std::atomic<int> n_busy{ 0 };
};

// f(thread) in `n_threads` threads, or in all threads of the team that this thread leads; f must not throw
template <typename F> void kvq_parallel(int n_threads, const F & f) {
    if (n_threads <= 1 || kvq_team::inside()) {
        f(0);
        return;
    }
    const auto one = [](const void * what, int thread) {
        kvq_team::inside() = true;
        (*(const F *) what)(thread);
        kvq_team::inside() = false;
    };
    kvq_team * const team = kvq_team::here();
    if (team) {
        if (team->size() > 1) {
            team->run(one, &f);
        } else {
            one(&f, 0);
        }
        return;
    }
#pragma omp parallel for num_threads(n_threads) schedule(static, 1)
    for (int i = 0; i < n_threads; i++) { one(&f, i); }
}

// f(i) or f(i, thread) for all i below n; a thread takes `chunk` of them at a time
template <typename F> void kvq_parallel_for(int64_t n, int n_threads, const F & f, int64_t chunk = 1) {
    const auto call = [&](int64_t i, int thread) {
        if constexpr (std::is_invocable_v<F, int64_t, int>) {
            f(i, thread);
        } else {
            (void) thread;
            f(i);
        }
    };
    if (n <= chunk) {
        for (int64_t i = 0; i < n; i++) { call(i, 0); }
        return;
    }
    std::atomic<int64_t> next{ 0 };
    kvq_parallel(n_threads, [&](int thread) {
        for (int64_t i; (i = next.fetch_add(chunk, std::memory_order_relaxed)) < n;) {
            for (const int64_t end = std::min(n, i + chunk); i < end; i++) { call(i, thread); }
        }
    });
}
