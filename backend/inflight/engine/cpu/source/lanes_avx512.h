// The lanes of lanes.h in AVX-512: one register, and one mask register.
#pragma once

#include <immintrin.h>

namespace inflight {

using Floats = __m512;
using Ints = __m512i;
using Mask = __mmask16;

// Masks.
inline Mask no_lanes() { return 0; }
inline Mask first_lanes(int count) {
  return count >= kLanes ? 0xffff : static_cast<Mask>((1u << (count < 0 ? 0 : count)) - 1);
}
inline Mask mask_of(uint16_t bits) { return bits; }
inline uint32_t lane_bits(Mask mask) { return mask; }
inline Mask other_lanes(Mask mask) { return static_cast<Mask>(~mask); }

// The same value in every lane.
inline Floats floats(float x) { return _mm512_set1_ps(x); }
inline Ints ints(int32_t x) { return _mm512_set1_epi32(x); }

// Memory. Lanes that are not in a mask are neither read nor written; they are read as zero, or as `other`.
inline Floats load(const float* p) { return _mm512_loadu_ps(p); }
inline Floats load(const float* p, Mask mask) { return _mm512_maskz_loadu_ps(mask, p); }
inline Floats load_aligned(const float* p) { return _mm512_load_ps(p); }
inline Floats load_or(Floats other, const float* p, Mask mask) { return _mm512_mask_loadu_ps(other, mask, p); }
inline void store(float* p, Floats x) { _mm512_storeu_ps(p, x); }
inline void store(float* p, Floats x, Mask mask) { _mm512_mask_storeu_ps(p, mask, x); }
inline void store_aligned(float* p, Floats x) { _mm512_store_ps(p, x); }
inline Ints load(const int32_t* p) { return _mm512_loadu_si512(p); }
inline Ints load_aligned(const int32_t* p) { return _mm512_load_si512(p); }
inline Ints load_words(const void* p, Mask mask) { return _mm512_maskz_loadu_epi32(mask, p); }
inline void store_words(void* p, Ints x, Mask mask) { _mm512_mask_storeu_epi32(p, mask, x); }
inline Ints load_halves(const uint16_t* p, Mask mask) {  // the upper halves become zero
  return _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(mask, p));
}
inline Ints load_halves(const uint16_t* p) { return load_halves(p, 0xffff); }
inline void store_bytes(void* p, Ints x, Mask mask) {  // the lowest byte of each
  _mm_mask_storeu_epi8(p, mask, _mm512_cvtepi32_epi8(x));
}
inline void store_bfloat16(uint16_t* p, Floats x, Mask mask) {
  _mm256_mask_storeu_epi16(p, mask, reinterpret_cast<__m256i>(_mm512_cvtneps_pbh(x)));
}
inline void store_bfloat16(uint16_t* p, Floats x) { store_bfloat16(p, x, 0xffff); }
// Bypasses the cache, to an address aligned to 64 bytes; callers call `end_streams` afterwards.
inline void stream(float* p, Floats x) { _mm512_stream_ps(p, x); }
inline void end_streams() { _mm_sfence(); }
inline void spin_pause() { _mm_pause(); }

// Floats. `min` and `max` return the second operand if either is NaN.
inline Floats add(Floats a, Floats b) { return _mm512_add_ps(a, b); }
inline Floats sub(Floats a, Floats b) { return _mm512_sub_ps(a, b); }
inline Floats mul(Floats a, Floats b) { return _mm512_mul_ps(a, b); }
inline Floats div(Floats a, Floats b) { return _mm512_div_ps(a, b); }
inline Floats min(Floats a, Floats b) { return _mm512_min_ps(a, b); }
inline Floats max(Floats a, Floats b) { return _mm512_max_ps(a, b); }
inline Floats abs(Floats x) { return _mm512_abs_ps(x); }
inline Floats fmadd(Floats a, Floats b, Floats c) { return _mm512_fmadd_ps(a, b, c); }
inline Floats fnmadd(Floats a, Floats b, Floats c) { return _mm512_fnmadd_ps(a, b, c); }
inline Floats rounded(Floats x) {
  return _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
}
inline Floats scaled(Floats x, Floats exponent) { return _mm512_scalef_ps(x, exponent); }  // x 2^exponent
inline Floats rough_reciprocal(Floats x) { return _mm512_rcp14_ps(x); }                    // within 2^-14
inline float sum_of(Floats x) { return _mm512_reduce_add_ps(x); }
inline float largest_of(Floats x) { return _mm512_reduce_max_ps(x); }

// Operations on the lanes in a mask; the others become zero, false or `x`.
inline Floats keep(Mask mask, Floats x) { return _mm512_maskz_mov_ps(mask, x); }
inline Floats sub(Mask mask, Floats a, Floats b) { return _mm512_maskz_sub_ps(mask, a, b); }
inline Floats mul(Mask mask, Floats a, Floats b) { return _mm512_maskz_mul_ps(mask, a, b); }
inline Floats scaled(Mask mask, Floats x, Floats exponent) { return _mm512_maskz_scalef_ps(mask, x, exponent); }
inline Floats add_where(Mask mask, Floats x, Floats y) { return _mm512_mask_add_ps(x, mask, x, y); }
inline Floats negated_where(Mask mask, Floats x) { return _mm512_mask_sub_ps(x, mask, _mm512_setzero_ps(), x); }
inline Floats select(Mask mask, Floats yes, Floats no) { return _mm512_mask_mov_ps(no, mask, yes); }

inline Mask less(Floats a, Floats b) { return _mm512_cmp_ps_mask(a, b, _CMP_LT_OQ); }
inline Mask at_least(Floats a, Floats b) { return _mm512_cmp_ps_mask(a, b, _CMP_GE_OQ); }
inline Mask equal(Floats a, Floats b) { return _mm512_cmp_ps_mask(a, b, _CMP_EQ_OQ); }
inline Mask differ(Floats a, Floats b) { return _mm512_cmp_ps_mask(a, b, _CMP_NEQ_UQ); }  // also if either is NaN
inline Mask is_number(Floats x) { return _mm512_cmp_ps_mask(x, x, _CMP_ORD_Q); }
inline Mask is_no_number(Floats x) { return _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q); }
inline Mask is_no_number(Mask mask, Floats x) { return _mm512_mask_cmp_ps_mask(mask, x, x, _CMP_UNORD_Q); }
inline Mask at_least(Mask mask, Floats a, Floats b) { return _mm512_mask_cmp_ps_mask(mask, a, b, _CMP_GE_OQ); }
inline Mask greater(Mask mask, Floats a, Floats b) { return _mm512_mask_cmp_ps_mask(mask, a, b, _CMP_GT_OQ); }

// Ints.
inline Ints add(Ints a, Ints b) { return _mm512_add_epi32(a, b); }
inline Ints sub(Ints a, Ints b) { return _mm512_sub_epi32(a, b); }
inline Ints bit_and(Ints a, Ints b) { return _mm512_and_si512(a, b); }
inline Ints bit_or(Ints a, Ints b) { return _mm512_or_si512(a, b); }
inline Ints bit_or(Mask mask, Ints a, Ints b) { return _mm512_maskz_or_epi32(mask, a, b); }
template <int kBits>
inline Ints shift_left(Ints x) { return _mm512_slli_epi32(x, kBits); }
template <int kBits>
inline Ints shift_right(Ints x) { return _mm512_srli_epi32(x, kBits); }  // shifts in zeros
inline Ints select(Mask mask, Ints yes, Ints no) { return _mm512_mask_mov_epi32(no, mask, yes); }
inline Mask less(Ints a, Ints b) { return _mm512_cmplt_epi32_mask(a, b); }
inline Mask at_most(Ints a, Ints b) { return _mm512_cmple_epi32_mask(a, b); }
inline Mask greater(Ints a, Ints b) { return _mm512_cmpgt_epi32_mask(a, b); }
inline int32_t sum_of(Ints x) { return _mm512_reduce_add_epi32(x); }
inline int32_t smallest_of(Mask mask, Ints x) { return _mm512_mask_reduce_min_epi32(mask, x); }

// Conversions, to nearest, ties to even; or reinterpretation of the bits.
inline Floats to_floats(Ints x) { return _mm512_cvtepi32_ps(x); }
inline Ints to_ints(Floats x) { return _mm512_cvtps_epi32(x); }
inline Ints to_ints(Mask mask, Floats x) { return _mm512_maskz_cvtps_epi32(mask, x); }
inline Floats as_floats(Ints x) { return _mm512_castsi512_ps(x); }
inline Ints as_ints(Floats x) { return _mm512_castps_si512(x); }

}  // namespace inflight
