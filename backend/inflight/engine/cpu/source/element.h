// What a kernel needs to know of its number type: bfloat16 or float32.
//
// A "pair" is what one lane of a multiply-add takes at a time: two bfloat16 along the inner dimension (AVX512-BF16's
// dpbf16ps), one float32. Packed operands are laid out in pairs, so that both types share every loop.
#pragma once

#include <immintrin.h>

#include <cstdint>
#include <cstring>

namespace inflight {

constexpr int kLanes = 16;  // float32 values in a register

inline __mmask16 first_lanes(int count) {
  return count >= kLanes ? 0xffff : static_cast<__mmask16>((1u << (count < 0 ? 0 : count)) - 1);
}

// Values of one token, or of two, in pairs along tokens. Beside a sequence's last token comes zero: another sequence may
// have left there what is no number. A token that is the second of its pair joins the first, which is there.
inline void store_pairs(uint16_t* target, const uint16_t* first, const uint16_t* second, bool is_second, int count) {
  for (int i = 0; i < count; i += kLanes) {
    const __mmask16 mask = first_lanes(count - i);
    const __m512i own = _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(mask, first + i));
    __m512i pairs = own;
    if (second) {
      const __m512i other = _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(mask, second + i));
      pairs = _mm512_or_si512(own, _mm512_slli_epi32(other, 16));
    } else if (is_second) {
      const __m512i before = _mm512_maskz_loadu_epi32(mask, target + 2 * i);
      pairs = _mm512_or_si512(_mm512_and_si512(before, _mm512_set1_epi32(0xffff)), _mm512_slli_epi32(own, 16));
    }
    _mm512_mask_storeu_epi32(target + 2 * i, mask, pairs);
  }
}

struct Bf16 {
  using Stored = uint16_t;
  static constexpr int kPair = 2;

  static __m512 load(const Stored* source, __mmask16 mask = 0xffff) {
    const __m512i wide = _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(mask, source));
    return _mm512_castsi512_ps(_mm512_slli_epi32(wide, 16));
  }
  static void store(Stored* target, __m512 values, __mmask16 mask = 0xffff) {
    _mm256_mask_storeu_epi16(target, mask, reinterpret_cast<__m256i>(_mm512_cvtneps_pbh(values)));
  }
  using Pairs = __m512;
  using Sums = __m512;
  static Sums zero() { return _mm512_setzero_ps(); }
  // A register of 16 pairs, as they lie in a packed operand.
  static __m512 load_pairs(const Stored* source) { return _mm512_loadu_ps(source); }
  static __m512 load_pairs(const Stored* source, __mmask16 mask) {
    return _mm512_maskz_loadu_ps(mask, source);
  }
  // One pair in every lane.
  static __m512 broadcast_pair(const Stored* source) {
    int32_t pair;
    std::memcpy(&pair, source, sizeof pair);
    return _mm512_castsi512_ps(_mm512_set1_epi32(pair));
  }
  static void store_values(Stored* target, const Stored* first, const Stored* second, bool is_second, int count) {
    store_pairs(target, first, second, is_second, count);
  }
  static __m512 multiply_add(__m512 total, __m512 a, __m512 b) {
    return _mm512_dpbf16_ps(total, reinterpret_cast<__m512bh>(a), reinterpret_cast<__m512bh>(b));
  }
};

struct F32 {
  using Stored = float;
  static constexpr int kPair = 1;

  static __m512 load(const Stored* source, __mmask16 mask = 0xffff) { return _mm512_maskz_loadu_ps(mask, source); }
  static void store(Stored* target, __m512 values, __mmask16 mask = 0xffff) {
    _mm512_mask_storeu_ps(target, mask, values);
  }
  using Pairs = __m512;
  using Sums = __m512;
  static Sums zero() { return _mm512_setzero_ps(); }
  static __m512 load_pairs(const Stored* source) { return _mm512_loadu_ps(source); }
  static __m512 load_pairs(const Stored* source, __mmask16 mask) { return _mm512_maskz_loadu_ps(mask, source); }
  static __m512 broadcast_pair(const Stored* source) { return _mm512_set1_ps(*source); }
  static void store_values(Stored* target, const Stored* first, const Stored*, bool, int count) {
    std::memcpy(target, first, count * sizeof(Stored));
  }
  static __m512 multiply_add(__m512 total, __m512 a, __m512 b) { return _mm512_fmadd_ps(a, b, total); }
};

}  // namespace inflight
