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

// The highest of the logits that it has seen, 16 at a time in the order of their tokens.
class Highest {
 public:
  // Those of `logits` that the mask has; the first lane is the logit of the token `first`.
  void see(__m512 logits, __mmask16 mask, int first) {
    const __mmask16 higher = _mm512_mask_cmp_ps_mask(mask, logits, best_, _CMP_GT_OQ);
    best_ = _mm512_mask_mov_ps(best_, higher, logits);
    firsts_ = _mm512_mask_mov_epi32(firsts_, higher, _mm512_set1_epi32(first));
  }

  // -inf and the token 0 where it has seen nothing higher.
  Peak peak() const {
    const __m512i lanes = _mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
    const float highest = _mm512_reduce_max_ps(best_);
    const __mmask16 is_highest = _mm512_cmp_ps_mask(best_, _mm512_set1_ps(highest), _CMP_EQ_OQ);
    return {highest, _mm512_mask_reduce_min_epi32(is_highest, _mm512_add_epi32(firsts_, lanes))};
  }

 private:
  __m512 best_ = _mm512_set1_ps(-std::numeric_limits<float>::infinity());
  __m512i firsts_ = _mm512_setzero_si512();  // of the 16 that each lane of the best came with
};

inline Peak find_peak(const float* logits, int columns) {
  Highest highest;
  __mmask16 no_number = 0;
  for (int i = 0; i < columns; i += kLanes) {
    const __mmask16 mask = first_lanes(columns - i);
    const __m512 x = _mm512_maskz_loadu_ps(mask, logits + i);
    no_number |= _mm512_mask_cmp_ps_mask(mask, x, x, _CMP_UNORD_Q);
    highest.see(x, mask, i);
  }
  Peak peak = highest.peak();
  if (no_number) peak.highest = std::numeric_limits<float>::quiet_NaN();
  return peak;
}

}  // namespace inflight
