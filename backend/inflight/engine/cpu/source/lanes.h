// Sixteen float32 values at a time, `Floats`, sixteen integers, `Ints`, and a selection of lanes, a `Mask`.
//
// Kernels are written with these types and their functions; each target implements them with its registers: AVX-512
// one, AVX2 two, NEON four, and any other processor as many as the compiler chooses. Besides these types, only the
// innermost loops of products differ between targets (products.h).
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

namespace inflight {

constexpr int kLanes = 16;

}  // namespace inflight

#if defined(INFLIGHT_GENERIC)
#include "lanes_generic.h"
#elif defined(__AVX512F__)
#include "lanes_avx512.h"
#elif defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)
#include "lanes_avx2.h"
#elif defined(__aarch64__)
#include "lanes_neon.h"
#else
#error "no lanes for this processor but with -DINFLIGHT_GENERIC"
#endif

namespace inflight {

inline Ints lane_numbers() {
  alignas(64) static constexpr int32_t kNumbers[kLanes] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  return load_aligned(kNumbers);
}

// Prefetches a line into the second-level cache, or into the first. Always inlined: GCC considers a function that does
// nothing else to have no effect, and drops calls of it.
inline __attribute__((always_inline)) void prefetch(const void* line) { __builtin_prefetch(line, 0, 2); }
inline __attribute__((always_inline)) void prefetch_near(const void* line) { __builtin_prefetch(line, 0, 3); }

}  // namespace inflight
