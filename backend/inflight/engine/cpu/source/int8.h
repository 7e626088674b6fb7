// int8 weights, one scale a column, and activations quantized row by row as they come.
//
// A row's values become round(x / scale) + 128 in 0 .. 255 with scale = max |x| / 127: of the row alone, so that what
// a row gives does not depend on the others. VNNI multiplies unsigned by signed bytes; what the 128 adds is known
// beforehand, 128 times the column's sum.
#pragma once

#include <algorithm>
#include <limits>

#include "element.h"

namespace inflight {

struct Int8 {
  using Stored = uint8_t;  // of activations; weights are int8_t in the same places
  static constexpr int kPair = 4;
  using Pairs = __m512i;
  using Sums = __m512i;
  static Pairs load_pairs(const Stored* source) { return _mm512_loadu_si512(source); }
  static Pairs broadcast_pair(const Stored* source) {
    int32_t quad;
    std::memcpy(&quad, source, sizeof quad);
    return _mm512_set1_epi32(quad);
  }
  static Sums multiply_add(Sums total, Pairs a, Pairs b) {  // GCC 12 keeps the intrinsic's sums in memory
    asm("vpdpbusd %2, %1, %0" : "+v"(total) : "v"(a), "v"(b));
    return total;
  }
  static Sums zero() { return _mm512_setzero_si512(); }
};

// One row; returns its scale. `padded` is a multiple of 4 and at least `count`.
template <class E>
float quantize_row(const typename E::Stored* source, int count, int padded, uint8_t* target) {
  __m512 largest = _mm512_setzero_ps();
  __mmask16 no_number = 0;
  for (int i = 0; i < count; i += kLanes) {
    const __m512 x = E::load(source + i, first_lanes(count - i));
    no_number |= _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q);
    largest = _mm512_max_ps(largest, _mm512_abs_ps(x));
  }
  const float most = _mm512_reduce_max_ps(largest);
  const float scale = no_number ? std::numeric_limits<float>::quiet_NaN() : most / 127.0f;
  const __m512 factor = _mm512_set1_ps(most > 0 ? 127.0f / most : 0.0f);
  for (int i = 0; i < padded; i += kLanes) {
    const __m512 x = E::load(source + i, first_lanes(count - i));
    __m512i q = _mm512_cvtps_epi32(_mm512_mul_ps(x, factor));
    q = _mm512_add_epi32(q, _mm512_set1_epi32(128));
    _mm_mask_storeu_epi8(target + i, first_lanes(padded - i), _mm512_cvtepi32_epi8(q));
  }
  return scale;
}

// A row of a weight matrix to -127 .. 127; what `quantize` of packing.py does, to the bit.
template <class E>
void quantize_weights(const typename E::Stored* source, int count, int8_t* target, float* scale, int32_t* sum) {
  __m512 largest = _mm512_setzero_ps();
  for (int i = 0; i < count; i += kLanes)
    largest = _mm512_max_ps(largest, _mm512_abs_ps(E::load(source + i, first_lanes(count - i))));
  *scale = _mm512_reduce_max_ps(largest) / 127.0f;
  const __m512 divisor = _mm512_set1_ps(std::max(*scale, 1e-30f));
  __m512i total = _mm512_setzero_si512();
  for (int i = 0; i < count; i += kLanes) {
    const __mmask16 mask = first_lanes(count - i);
    const __m512i q = _mm512_maskz_cvtps_epi32(mask, _mm512_div_ps(E::load(source + i, mask), divisor));
    total = _mm512_add_epi32(total, q);
    _mm_mask_storeu_epi8(target + i, mask, _mm512_cvtepi32_epi8(q));
  }
  *sum = _mm512_reduce_add_epi32(total);
}

}  // namespace inflight
