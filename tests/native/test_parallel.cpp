// base/parallel.h: a team of threads, as ggml calls a node's function in each of them, against plain sums; loops inside
// loops; loops of no and of few parts; without a team. Usage: test_parallel [rounds]
#include "base/parallel.h"

#include <cstdio>
#include <cstdlib>
#include <vector>

static int n_bad = 0;

static void check(bool ok, const char * what, int n_threads, int round) {
    if (ok) { return; }
    n_bad++;
    fprintf(stderr, "%s: wrong with %d threads in round %d\n", what, n_threads, round);
}

// What a node's code does: some loops behind each other, the last of which has a loop inside.
static void work(int n_threads, int round) {
    std::vector<int> parts(97, 0);
    kvq_parallel_for(97, n_threads, [&](int64_t i) { parts[(size_t) i] += (int) i; });
    kvq_parallel_for(97, n_threads, [&](int64_t i) { parts[(size_t) i] += round; }, 16);
    int sum = 0;
    for (int x : parts) { sum += x; }
    check(sum == 97 * 48 + 97 * round, "two loops", n_threads, round);

    std::vector<int> by_thread((size_t) n_threads, 0);
    kvq_parallel_for(1000, n_threads, [&](int64_t, int thread) { by_thread[(size_t) thread]++; });
    sum = 0;
    for (int x : by_thread) { sum += x; }
    check(sum == 1000, "a loop by threads", n_threads, round);

    std::vector<int> inner(40, 0);
    kvq_parallel_for(4, n_threads,
        [&](int64_t i) { kvq_parallel_for(10, n_threads, [&](int64_t j) { inner[(size_t) (i * 10 + j)]++; }); });
    sum = 0;
    for (int x : inner) { sum += x == 1; }
    check(sum == 40, "a loop inside a loop", n_threads, round);

    int n = 0;
    kvq_parallel_for(0, n_threads, [&](int64_t) { n += 100; });
    kvq_parallel_for(1, n_threads, [&](int64_t) { n++; });
    check(n == 1, "loops of no part and of one", n_threads, round);
}

int main(int argc, char ** argv) {
    const int rounds = argc > 1 ? atoi(argv[1]) : 500;
    for (const int n_threads : { 1, 2, 3, 8 }) {
        const int most = n_threads == 8 ? 2 : n_threads; // of a machine with fewer cores than threads
        std::vector<kvq_team> nodes((size_t) rounds);    // one a node, which every thread enters in this order
        const auto all_nodes = [&](int ith) {
            for (int round = 0; round < rounds; round++) {
                nodes[(size_t) round].enter(ith, n_threads, most, [&] { work(most, round); });
            }
        };
        std::vector<std::thread> threads;
        for (int ith = 1; ith < n_threads; ith++) { threads.emplace_back(all_nodes, ith); }
        all_nodes(0);
        for (std::thread & t : threads) { t.join(); }
        work(n_threads, -1); // no team is left
    }
    printf("%s\n", n_bad ? "FAILED" : "OK");
    return n_bad != 0;
}
