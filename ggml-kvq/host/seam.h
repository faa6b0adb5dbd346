// ggml's backend interface changes between versions under one API number, and the headers are those of the
// llama.cpp that will load the library. Here: how a member is found that not every supported version has, and
// how a fact is stated that this source needs (seam.cpp). Both look at the headers at compile time, never at a
// version number.
#pragma once

#include <cstddef>
#include <type_traits>

template <typename T> struct kvq_of {
    using type = T;
};
template <typename T, typename F> constexpr auto kvq_offset_if(F f, int) -> decltype(f(kvq_of<T>())) {
    return f(kvq_of<T>());
}
template <typename T, typename F> constexpr size_t kvq_offset_if(F, long) { return (size_t) -1; }

// Offset of a member; (size_t) -1: the structure has none of that name.
#define KVQ_OFFSET(name, member)                                                                                       \
    kvq_offset_if<name>([](auto t) -> decltype((void) & decltype(t)::type::member,                                     \
                                       size_t()) { return offsetof(typename decltype(t)::type, member); },             \
        0)

#define KVQ_JOIN_(a, b) a##b
#define KVQ_JOIN(a, b) KVQ_JOIN_(a, b)

// The structure has that member, of that type; else the build stops with one line that says so.
#define KVQ_FACT(name, member, ...)                                                                                    \
    namespace {                                                                                                        \
    struct KVQ_JOIN(fact_, __LINE__) {                                                                                 \
        template <typename T> static auto find(int) -> kvq_of<decltype(T::member)>;                                    \
        template <typename T> static kvq_of<void> find(long);                                                          \
    };                                                                                                                 \
    }                                                                                                                  \
    static_assert(std::is_same<decltype(KVQ_JOIN(fact_, __LINE__)::find<name>(0)), kvq_of<__VA_ARGS__>>::value,        \
        #name "::" #member " is not there or no longer " #__VA_ARGS__)
