// The highest logit of a row and its token, in one pass.
#pragma once

#include <immintrin.h>

#include <cstdint>
#include <limits>

#include "element.h"

namespace inflight {

struct Peak {
  float highest;  // no number where any of the row is none
  int64_t token;  // of equal ones, the first
};

inline Peak find_peak(const float* logits, int columns) {
  __m512 best = _mm512_set1_ps(-std::numeric_limits<float>::infinity());
  __m512i places = _mm512_setzero_si512();
  __m512i place = _mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
  const __m512i step = _mm512_set1_epi32(kLanes);
  __mmask16 no_number = 0;
  for (int i = 0; i < columns; i += kLanes) {
    const __mmask16 mask = first_lanes(columns - i);
    const __m512 x = _mm512_maskz_loadu_ps(mask, logits + i);
    no_number |= _mm512_mask_cmp_ps_mask(mask, x, x, _CMP_UNORD_Q);
    const __mmask16 higher = _mm512_mask_cmp_ps_mask(mask, x, best, _CMP_GT_OQ);
    best = _mm512_mask_mov_ps(best, higher, x);
    places = _mm512_mask_mov_epi32(places, higher, place);
    place = _mm512_add_epi32(place, step);
  }
  const float highest = _mm512_reduce_max_ps(best);
  const __mmask16 is_highest = _mm512_cmp_ps_mask(best, _mm512_set1_ps(highest), _CMP_EQ_OQ);
  return {no_number ? std::numeric_limits<float>::quiet_NaN() : highest,
          static_cast<int64_t>(_mm512_mask_reduce_min_epi32(is_highest, places))};
}

}  // namespace inflight
