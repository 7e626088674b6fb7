// The lanes of lanes.h for any processor, in quads (lanes_quads.h), compiled from operators.
#pragma once

#include "quads.h"

#if defined(__SSE2__)
#include <emmintrin.h>
#endif

namespace inflight {

inline FloatQuad multiply_add(FloatQuad total, FloatQuad a, FloatQuad b) { return a * b + total; }
inline FloatQuad rounded(FloatQuad x) {  // to nearest, ties to even: from 2^23 on all floats are integers
  const auto sign = (IntQuad)x & IntQuad{INT32_MIN, INT32_MIN, INT32_MIN, INT32_MIN};
  const FloatQuad large = (FloatQuad)(sign | (IntQuad)FloatQuad{8388608.0f, 8388608.0f, 8388608.0f, 8388608.0f});
  const auto is_small = ((IntQuad)x & ~sign) < IntQuad{0x4b000000, 0x4b000000, 0x4b000000, 0x4b000000};
  return is_small ? (FloatQuad)((IntQuad)((x + large) - large) | sign) : x;
}
inline IntQuad to_ints(FloatQuad x) { return __builtin_convertvector(rounded(x), IntQuad); }

// Adds the sum of each pair of neighbours to `total`.
inline IntQuad add_pairs(IntQuad total, Shorts x) {
#if defined(__SSE2__)
  return total + (IntQuad)_mm_madd_epi16((__m128i)x, _mm_set1_epi16(1));
#else
  const auto pairs = (IntQuad)x;
  return total + (pairs >> 16) + (pairs << 16 >> 16);
#endif
}

inline void spin_pause() {
#if defined(__SSE2__)
  _mm_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

}  // namespace inflight

#include "lanes_quads.h"
