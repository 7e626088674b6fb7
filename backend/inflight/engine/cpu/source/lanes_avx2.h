// The lanes of lanes.h in AVX2, FMA and F16C: two registers, and for a mask two with all bits of a lane equal.
//
// Every function gives the same bits as with AVX-512, except for numbers below 2^-126 that are rounded to bfloat16, and
// for `rough_reciprocal`, which is exact here.
#pragma once

#include <immintrin.h>

namespace inflight {

struct Floats {
  __m256 low, high;
};
struct Ints {
  __m256i low, high;
};
struct Mask {
  __m256i low, high;

  bool all() const { return _mm256_movemask_epi8(_mm256_and_si256(low, high)) == -1; }
  explicit operator bool() const {
    const __m256i any = _mm256_or_si256(low, high);
    return !_mm256_testz_si256(any, any);
  }
};

inline Mask operator&(Mask a, Mask b) { return {_mm256_and_si256(a.low, b.low), _mm256_and_si256(a.high, b.high)}; }
inline Mask operator|(Mask a, Mask b) { return {_mm256_or_si256(a.low, b.low), _mm256_or_si256(a.high, b.high)}; }
inline Mask& operator&=(Mask& a, Mask b) { return a = a & b; }
inline Mask& operator|=(Mask& a, Mask b) { return a = a | b; }

// Masks.
inline Mask no_lanes() { return {_mm256_setzero_si256(), _mm256_setzero_si256()}; }
inline Mask first_lanes(int count) {
  const __m256i numbers = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
  return {_mm256_cmpgt_epi32(_mm256_set1_epi32(count), numbers),
          _mm256_cmpgt_epi32(_mm256_set1_epi32(count), _mm256_add_epi32(numbers, _mm256_set1_epi32(8)))};
}
inline Mask mask_of(uint16_t bits) {
  const __m256i all = _mm256_set1_epi32(bits), of_lanes = _mm256_setr_epi32(1, 2, 4, 8, 16, 32, 64, 128);
  const __m256i of_others = _mm256_slli_epi32(of_lanes, 8);
  return {_mm256_cmpeq_epi32(_mm256_and_si256(all, of_lanes), of_lanes),
          _mm256_cmpeq_epi32(_mm256_and_si256(all, of_others), of_others)};
}
inline uint32_t lane_bits(Mask mask) {
  return _mm256_movemask_ps(_mm256_castsi256_ps(mask.low)) | _mm256_movemask_ps(_mm256_castsi256_ps(mask.high)) << 8;
}
inline Mask other_lanes(Mask mask) {
  const __m256i all = _mm256_set1_epi32(-1);
  return {_mm256_xor_si256(mask.low, all), _mm256_xor_si256(mask.high, all)};
}

// The same value in every lane.
inline Floats floats(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
inline Ints ints(int32_t x) { return {_mm256_set1_epi32(x), _mm256_set1_epi32(x)}; }

// Keeps the lanes in a mask; the others become zero.
inline Ints keep(Mask mask, Ints x) { return {_mm256_and_si256(mask.low, x.low), _mm256_and_si256(mask.high, x.high)}; }
inline Floats keep(Mask mask, Floats x) {
  return {_mm256_and_ps(_mm256_castsi256_ps(mask.low), x.low), _mm256_and_ps(_mm256_castsi256_ps(mask.high), x.high)};
}
inline Floats select(Mask mask, Floats yes, Floats no) {
  return {_mm256_blendv_ps(no.low, yes.low, _mm256_castsi256_ps(mask.low)),
          _mm256_blendv_ps(no.high, yes.high, _mm256_castsi256_ps(mask.high))};
}
inline Ints select(Mask mask, Ints yes, Ints no) {
  return {_mm256_blendv_epi8(no.low, yes.low, mask.low), _mm256_blendv_epi8(no.high, yes.high, mask.high)};
}

// Memory. Lanes that are not in a mask are neither read nor written; they are read as zero, or as `other`.
inline Floats load(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
inline Floats load(const float* p, Mask mask) {
  return {_mm256_maskload_ps(p, mask.low), _mm256_maskload_ps(p + 8, mask.high)};
}
inline Floats load_aligned(const float* p) { return {_mm256_load_ps(p), _mm256_load_ps(p + 8)}; }
inline Floats load_or(Floats other, const float* p, Mask mask) { return select(mask, load(p, mask), other); }
inline void store(float* p, Floats x) {
  _mm256_storeu_ps(p, x.low);
  _mm256_storeu_ps(p + 8, x.high);
}
inline void store(float* p, Floats x, Mask mask) {
  if (mask.all()) return store(p, x);  // much faster on processors that mask in microcode
  _mm256_maskstore_ps(p, mask.low, x.low);
  _mm256_maskstore_ps(p + 8, mask.high, x.high);
}
inline void store_aligned(float* p, Floats x) {
  _mm256_store_ps(p, x.low);
  _mm256_store_ps(p + 8, x.high);
}
inline Ints load(const int32_t* p) {
  const auto* registers = reinterpret_cast<const __m256i*>(p);
  return {_mm256_loadu_si256(registers), _mm256_loadu_si256(registers + 1)};
}
inline Ints load_aligned(const int32_t* p) {
  const auto* registers = reinterpret_cast<const __m256i*>(p);
  return {_mm256_load_si256(registers), _mm256_load_si256(registers + 1)};
}
inline Ints load_words(const void* p, Mask mask) {
  const auto* words = static_cast<const int*>(p);
  return {_mm256_maskload_epi32(words, mask.low), _mm256_maskload_epi32(words + 8, mask.high)};
}
inline void store_words(void* p, Ints x, Mask mask) {
  auto* words = static_cast<int*>(p);
  if (mask.all()) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(words), x.low);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(words + 8), x.high);
    return;
  }
  _mm256_maskstore_epi32(words, mask.low, x.low);
  _mm256_maskstore_epi32(words + 8, mask.high, x.high);
}

// Copies the values whose bit in `bits` is set; AVX2 has no instruction for this with values of fewer than 32 bits.
template <class T>
__attribute__((noinline)) void copy_where(T* to, const T* from, uint32_t bits) {
  for (; bits; bits &= bits - 1) to[__builtin_ctz(bits)] = from[__builtin_ctz(bits)];
}

inline Ints load_halves(const uint16_t* p) {  // the upper halves become zero
  const auto* registers = reinterpret_cast<const __m128i*>(p);
  return {_mm256_cvtepu16_epi32(_mm_loadu_si128(registers)), _mm256_cvtepu16_epi32(_mm_loadu_si128(registers + 1))};
}
inline Ints load_halves(const uint16_t* p, Mask mask) {
  if (mask.all()) return load_halves(p);
  uint16_t own[kLanes] = {};
  copy_where(own, p, lane_bits(mask));
  return load_halves(own);
}
inline __m256i pack_halves(Ints x) {  // of numbers below 2^16
  return _mm256_permute4x64_epi64(_mm256_packus_epi32(x.low, x.high), _MM_SHUFFLE(3, 1, 2, 0));
}
inline void store_bytes(void* p, Ints x, Mask mask) {  // the lowest byte of each
  const __m256i lowest = _mm256_set1_epi32(255);
  const __m256i halves = pack_halves({_mm256_and_si256(x.low, lowest), _mm256_and_si256(x.high, lowest)});
  const __m128i bytes = _mm_packus_epi16(_mm256_castsi256_si128(halves), _mm256_extracti128_si256(halves, 1));
  if (mask.all()) return _mm_storeu_si128(static_cast<__m128i*>(p), bytes);
  uint8_t own[kLanes];
  _mm_storeu_si128(reinterpret_cast<__m128i*>(own), bytes);
  copy_where(static_cast<uint8_t*>(p), own, lane_bits(mask));
}
inline __m256i round_to_bfloat16(__m256 x) {  // to nearest, ties to even
  const __m256i bits = _mm256_castps_si256(x);
  const __m256i is_odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
  const __m256i up = _mm256_add_epi32(bits, _mm256_add_epi32(is_odd, _mm256_set1_epi32(0x7fff)));
  const __m256i quiet = _mm256_or_si256(bits, _mm256_set1_epi32(0x400000));
  const __m256i is_none = _mm256_castps_si256(_mm256_cmp_ps(x, x, _CMP_UNORD_Q));
  return _mm256_srli_epi32(_mm256_blendv_epi8(up, quiet, is_none), 16);
}
inline void store_bfloat16(uint16_t* p, Floats x) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), pack_halves({round_to_bfloat16(x.low), round_to_bfloat16(x.high)}));
}
inline void store_bfloat16(uint16_t* p, Floats x, Mask mask) {
  if (mask.all()) return store_bfloat16(p, x);
  uint16_t own[kLanes];
  store_bfloat16(own, x);
  copy_where(p, own, lane_bits(mask));
}
// Bypasses the cache, to an address aligned to 64 bytes; callers call `end_streams` afterwards.
inline void stream(float* p, Floats x) {
  _mm256_stream_ps(p, x.low);
  _mm256_stream_ps(p + 8, x.high);
}
inline void end_streams() { _mm_sfence(); }
inline void spin_pause() { _mm_pause(); }

// Floats. `min` and `max` return the second operand if either is NaN.
inline Floats add(Floats a, Floats b) { return {_mm256_add_ps(a.low, b.low), _mm256_add_ps(a.high, b.high)}; }
inline Floats sub(Floats a, Floats b) { return {_mm256_sub_ps(a.low, b.low), _mm256_sub_ps(a.high, b.high)}; }
inline Floats mul(Floats a, Floats b) { return {_mm256_mul_ps(a.low, b.low), _mm256_mul_ps(a.high, b.high)}; }
inline Floats div(Floats a, Floats b) { return {_mm256_div_ps(a.low, b.low), _mm256_div_ps(a.high, b.high)}; }
inline Floats min(Floats a, Floats b) { return {_mm256_min_ps(a.low, b.low), _mm256_min_ps(a.high, b.high)}; }
inline Floats max(Floats a, Floats b) { return {_mm256_max_ps(a.low, b.low), _mm256_max_ps(a.high, b.high)}; }
inline Floats abs(Floats x) {
  const __m256 sign = _mm256_set1_ps(-0.0f);
  return {_mm256_andnot_ps(sign, x.low), _mm256_andnot_ps(sign, x.high)};
}
inline Floats fmadd(Floats a, Floats b, Floats c) {
  return {_mm256_fmadd_ps(a.low, b.low, c.low), _mm256_fmadd_ps(a.high, b.high, c.high)};
}
inline Floats fnmadd(Floats a, Floats b, Floats c) {
  return {_mm256_fnmadd_ps(a.low, b.low, c.low), _mm256_fnmadd_ps(a.high, b.high, c.high)};
}
inline __m256 rounded(__m256 x) { return _mm256_round_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
inline Floats rounded(Floats x) { return {rounded(x.low), rounded(x.high)}; }
// x 2^exponent, for x between 2^-2 and 2^2. In two steps, because no single power of two covers the range from the
// smallest to the largest numbers; the first step is exact.
inline __m256 scaled(__m256 x, __m256 exponent) {
  exponent = _mm256_max_ps(_mm256_min_ps(exponent, _mm256_set1_ps(256.0f)), _mm256_set1_ps(-252.0f));
  const __m256i whole = _mm256_cvtps_epi32(exponent), half = _mm256_srai_epi32(whole, 1);
  const auto power = [](__m256i of_two) {
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(of_two, _mm256_set1_epi32(127)), 23));
  };
  return _mm256_mul_ps(_mm256_mul_ps(x, power(half)), power(_mm256_sub_epi32(whole, half)));
}
inline Floats scaled(Floats x, Floats exponent) {
  return {scaled(x.low, exponent.low), scaled(x.high, exponent.high)};
}
inline Floats rough_reciprocal(Floats x) { return div(floats(1.0f), x); }
inline float sum_of(__m128 x) {
  x = _mm_add_ps(x, _mm_movehl_ps(x, x));
  return _mm_cvtss_f32(_mm_add_ss(x, _mm_movehdup_ps(x)));
}
inline float sum_of(Floats x) {
  const __m256 both = _mm256_add_ps(x.high, x.low);
  return sum_of(_mm_add_ps(_mm256_extractf128_ps(both, 1), _mm256_castps256_ps128(both)));
}
inline float largest_of(Floats x) {
  const __m256 both = _mm256_max_ps(x.high, x.low);
  __m128 most = _mm_max_ps(_mm256_extractf128_ps(both, 1), _mm256_castps256_ps128(both));
  most = _mm_max_ps(most, _mm_movehl_ps(most, most));
  return _mm_cvtss_f32(_mm_max_ss(most, _mm_movehdup_ps(most)));
}

// Operations on the lanes in a mask; the others become zero, false or `x`.
inline Floats sub(Mask mask, Floats a, Floats b) { return keep(mask, sub(a, b)); }
inline Floats mul(Mask mask, Floats a, Floats b) { return keep(mask, mul(a, b)); }
inline Floats scaled(Mask mask, Floats x, Floats exponent) { return keep(mask, scaled(x, exponent)); }
inline Floats add_where(Mask mask, Floats x, Floats y) { return select(mask, add(x, y), x); }
inline Floats negated_where(Mask mask, Floats x) { return select(mask, sub(floats(0.0f), x), x); }

template <int kRelation>
inline Mask compare(Floats a, Floats b) {
  return {_mm256_castps_si256(_mm256_cmp_ps(a.low, b.low, kRelation)),
          _mm256_castps_si256(_mm256_cmp_ps(a.high, b.high, kRelation))};
}
inline Mask less(Floats a, Floats b) { return compare<_CMP_LT_OQ>(a, b); }
inline Mask at_least(Floats a, Floats b) { return compare<_CMP_GE_OQ>(a, b); }
inline Mask equal(Floats a, Floats b) { return compare<_CMP_EQ_OQ>(a, b); }
inline Mask differ(Floats a, Floats b) { return compare<_CMP_NEQ_UQ>(a, b); }  // also if either is NaN
inline Mask is_number(Floats x) { return compare<_CMP_ORD_Q>(x, x); }
inline Mask is_no_number(Floats x) { return compare<_CMP_UNORD_Q>(x, x); }
inline Mask is_no_number(Mask mask, Floats x) { return mask & is_no_number(x); }
inline Mask at_least(Mask mask, Floats a, Floats b) { return mask & at_least(a, b); }
inline Mask greater(Mask mask, Floats a, Floats b) { return mask & compare<_CMP_GT_OQ>(a, b); }

// Ints.
inline Ints add(Ints a, Ints b) { return {_mm256_add_epi32(a.low, b.low), _mm256_add_epi32(a.high, b.high)}; }
inline Ints sub(Ints a, Ints b) { return {_mm256_sub_epi32(a.low, b.low), _mm256_sub_epi32(a.high, b.high)}; }
inline Ints bit_and(Ints a, Ints b) { return {_mm256_and_si256(a.low, b.low), _mm256_and_si256(a.high, b.high)}; }
inline Ints bit_or(Ints a, Ints b) { return {_mm256_or_si256(a.low, b.low), _mm256_or_si256(a.high, b.high)}; }
inline Ints bit_or(Mask mask, Ints a, Ints b) { return keep(mask, bit_or(a, b)); }
template <int kBits>
inline Ints shift_left(Ints x) {
  return {_mm256_slli_epi32(x.low, kBits), _mm256_slli_epi32(x.high, kBits)};
}
template <int kBits>
inline Ints shift_right(Ints x) {  // shifts in zeros
  return {_mm256_srli_epi32(x.low, kBits), _mm256_srli_epi32(x.high, kBits)};
}
inline Mask greater(Ints a, Ints b) { return {_mm256_cmpgt_epi32(a.low, b.low), _mm256_cmpgt_epi32(a.high, b.high)}; }
inline Mask less(Ints a, Ints b) { return greater(b, a); }
inline Mask at_most(Ints a, Ints b) { return other_lanes(greater(a, b)); }
inline int32_t sum_of(Ints x) {
  const __m256i both = _mm256_add_epi32(x.high, x.low);
  __m128i sum = _mm_add_epi32(_mm256_extracti128_si256(both, 1), _mm256_castsi256_si128(both));
  sum = _mm_add_epi32(sum, _mm_shuffle_epi32(sum, _MM_SHUFFLE(1, 0, 3, 2)));
  return _mm_cvtsi128_si32(_mm_add_epi32(sum, _mm_shuffle_epi32(sum, _MM_SHUFFLE(2, 3, 0, 1))));
}
inline int32_t smallest_of(Mask mask, Ints x) {
  const Ints own = select(mask, x, ints(INT32_MAX));
  const __m256i both = _mm256_min_epi32(own.high, own.low);
  __m128i least = _mm_min_epi32(_mm256_extracti128_si256(both, 1), _mm256_castsi256_si128(both));
  least = _mm_min_epi32(least, _mm_shuffle_epi32(least, _MM_SHUFFLE(1, 0, 3, 2)));
  return _mm_cvtsi128_si32(_mm_min_epi32(least, _mm_shuffle_epi32(least, _MM_SHUFFLE(2, 3, 0, 1))));
}

// Conversions, to nearest, ties to even; or reinterpretation of the bits.
inline Floats to_floats(Ints x) { return {_mm256_cvtepi32_ps(x.low), _mm256_cvtepi32_ps(x.high)}; }
inline Ints to_ints(Floats x) { return {_mm256_cvtps_epi32(x.low), _mm256_cvtps_epi32(x.high)}; }
inline Ints to_ints(Mask mask, Floats x) { return keep(mask, to_ints(x)); }
inline Floats as_floats(Ints x) { return {_mm256_castsi256_ps(x.low), _mm256_castsi256_ps(x.high)}; }
inline Ints as_ints(Floats x) { return {_mm256_castps_si256(x.low), _mm256_castps_si256(x.high)}; }

}  // namespace inflight
