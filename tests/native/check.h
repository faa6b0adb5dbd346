// What the random-operation tests share: one seeded generator, and a check that names its place and ends the program.
#pragma once

#include <cstdio>
#include <cstdlib>
#include <random>

static std::mt19937 rng;
[[maybe_unused]] static int uniform(int a, int b) { return std::uniform_int_distribution<int>(a, b)(rng); }

#define CHECK(cond, ...)                                                                                               \
    do {                                                                                                               \
        if (!(cond)) {                                                                                                 \
            fprintf(stderr, "%s:%d: %s: ", __FILE__, __LINE__, #cond);                                                 \
            fprintf(stderr, __VA_ARGS__);                                                                              \
            fprintf(stderr, "\n");                                                                                     \
            exit(1);                                                                                                   \
        }                                                                                                              \
    } while (0)
