// What keys and values are in the cache: as they are computed, or levels of 8 bits, by a scale for each token and head.
//
// A cache's type tells how its numbers become the pairs that a multiply-add takes. Levels do so exactly, in bfloat16
// too; their scales come in elsewhere: a key's multiplies its score, a value's the weight that it is summed up with.
// `kv_rounding.py` says what levels and scales are; the functions here give the same, to the bit.
#pragma once

#include <algorithm>
#include <limits>

#include "element.h"

namespace inflight {

enum CacheKind : int32_t { kAsComputed = 0, kInt8Levels = 1, kFp8Levels = 2 };

template <class E>
struct AsComputed {
  using Stored = typename E::Stored;
  static constexpr int kPair = E::kPair;
  static constexpr bool kHasScales = false;
  static __m512 load_pairs(const Stored* source) { return E::load_pairs(source); }
  static __m512 load_pairs(const Stored* source, __mmask16 mask) { return E::load_pairs(source, mask); }
};

// -127 .. 127 at equal distances.
struct Int8Levels {
  static constexpr float kLargest = 127.0f;
  static __m512 to_float(__m128i levels) { return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(levels)); }
  static __m512 to_bfloat16(__m256i levels) {
    return to_bfloat16(_mm256_castsi256_si128(levels), _mm256_extracti128_si256(levels, 1));
  }
  static __m512 to_bfloat16(const uint8_t* source) {
    return to_bfloat16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(source)),
                       _mm_loadu_si128(reinterpret_cast<const __m128i*>(source + kLanes)));
  }
  static __m512 to_bfloat16(__m128i low, __m128i high) {
    return reinterpret_cast<__m512>(_mm512_cvtne2ps_pbh(to_float(high), to_float(low)));
  }
  // Of at most `kLargest`; what is no number becomes 0.
  static __m128i round(__m512 numbers) {
    const __mmask16 is_number = _mm512_cmp_ps_mask(numbers, numbers, _CMP_ORD_Q);
    return _mm512_cvtepi32_epi8(_mm512_maskz_cvtps_epi32(is_number, numbers));
  }
};

// float8 with 4 bits of exponent, whose bias is 7, and 3 behind the leading bit (e4m3).
struct Fp8Levels {
  static constexpr float kLargest = 448.0f;
  static __m512 to_float(__m128i levels) {  // as halves, whose exponents have a bias of 15
    const __m256i wide = _mm256_cvtepu8_epi16(levels);
    const __m256i sign = _mm256_slli_epi16(_mm256_and_si256(wide, _mm256_set1_epi16(0x80)), 8);
    const __m256i rest = _mm256_slli_epi16(_mm256_and_si256(wide, _mm256_set1_epi16(0x7f)), 7);
    return _mm512_mul_ps(_mm512_cvtph_ps(_mm256_or_si256(sign, rest)), _mm512_set1_ps(256.0f));
  }
  static __m512 to_bfloat16(const uint8_t* source) {
    return to_bfloat16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(source)));
  }
  static __m512 to_bfloat16(__m256i levels) {
    const __m512i wide = _mm512_cvtepu8_epi16(levels);
    const __m512i rest = _mm512_and_si512(_mm512_slli_epi16(wide, 4), _mm512_set1_epi16(0x7f0));
    const __m512i normal = _mm512_add_epi16(rest, _mm512_set1_epi16(120 << 7));
    const __mmask32 is_small = _mm512_testn_epi16_mask(rest, _mm512_set1_epi16(0x780));
    // The multiples of 2^-9 that have no leading bit.
    const __m512i small = _mm512_broadcast_i32x4(_mm_setr_epi16(
        0, 0x3b00, 0x3b80, 0x3bc0, 0x3c00, 0x3c20, 0x3c40, 0x3c60));
    const __m512i positive = _mm512_mask_permutexvar_epi16(normal, is_small, wide, small);
    constexpr int kFirstOrBoth = 0xf8;  // positive | (sign & 0x8000)
    return _mm512_castsi512_ps(_mm512_ternarylogic_epi32(positive, _mm512_slli_epi16(wide, 8),
                                                         _mm512_set1_epi16(-0x8000), kFirstOrBoth));
  }
  static __m128i round(__m512 numbers) {
    const __mmask16 is_number = _mm512_cmp_ps_mask(numbers, numbers, _CMP_ORD_Q);
    const __m512i bits = _mm512_castps_si512(numbers);
    const __m512i positive = _mm512_and_si512(bits, _mm512_set1_epi32(0x7fffffff));
    // To nearest, ties to even: 20 of 23 bits behind the leading one go.
    const __m512i is_odd = _mm512_and_si512(_mm512_srli_epi32(positive, 20), _mm512_set1_epi32(1));
    const __m512i up = _mm512_add_epi32(_mm512_add_epi32(positive, _mm512_set1_epi32(0x7ffff)), is_odd);
    const __m512i normal = _mm512_sub_epi32(_mm512_srli_epi32(up, 20), _mm512_set1_epi32(120 << 3));
    // A sum with 2^14 has the multiples of 2^-9 as its last bits.
    const __m512 sum = _mm512_add_ps(_mm512_castsi512_ps(positive), _mm512_set1_ps(16384.0f));
    const __m512i small = _mm512_sub_epi32(_mm512_castps_si512(sum), _mm512_set1_epi32(0x46800000));
    const __mmask16 is_small = _mm512_cmplt_epu32_mask(positive, _mm512_set1_epi32(0x3c800000));  // 2^-6
    const __m512i rest = _mm512_mask_mov_epi32(normal, is_small, small);
    const __m512i sign = _mm512_and_si512(_mm512_srli_epi32(bits, 24), _mm512_set1_epi32(0x80));
    return _mm512_cvtepi32_epi8(_mm512_maskz_or_epi32(is_number, rest, sign));
  }
};

template <class E, class Levels>
struct Rounded {
  using Stored = uint8_t;
  static constexpr int kPair = E::kPair;
  static constexpr bool kHasScales = true;
  static __m512 load_pairs(const Stored* source) {
    if constexpr (kPair == 2)
      return Levels::to_bfloat16(source);
    else
      return Levels::to_float(_mm_loadu_si128(reinterpret_cast<const __m128i*>(source)));
  }
  static __m512 load_pairs(const Stored* source, __mmask16 mask) {
    if constexpr (kPair == 2)
      return Levels::to_bfloat16(_mm256_maskz_loadu_epi16(mask, source));
    else
      return Levels::to_float(_mm_maskz_loadu_epi8(mask, source));
  }
};

// The levels [count] of a head's numbers; returns their scale.
template <class E, class Levels>
float round_head(const typename E::Stored* numbers, int count, uint8_t* levels) {
  __m512 largest = _mm512_setzero_ps();
  __mmask16 no_number = 0;
  for (int i = 0; i < count; i += kLanes) {
    const __m512 x = E::load(numbers + i, first_lanes(count - i));
    no_number |= _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q);
    largest = _mm512_max_ps(largest, _mm512_abs_ps(x));
  }
  const float least = std::max(_mm512_reduce_max_ps(largest) / Levels::kLargest, 1e-30f);
  const float scale = no_number ? std::numeric_limits<float>::quiet_NaN() : least;
  for (int i = 0; i < count; i += kLanes) {
    const __mmask16 mask = first_lanes(count - i);
    const __m512 x = _mm512_div_ps(E::load(numbers + i, mask), _mm512_set1_ps(scale));
    _mm_mask_storeu_epi8(levels + i, mask, Levels::round(x));
  }
  return scale;
}

}  // namespace inflight
