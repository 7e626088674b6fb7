// What a mask lacks is banned in a row of logits, and the likeliest of the rest found, in one pass.
#pragma once

#include <immintrin.h>

#include <cstdint>
#include <limits>

#include "element.h"
#include "peaks.h"

namespace inflight {

struct MaskedRows {
  int64_t count;
  const int64_t* rows;    // [count]
  const uint16_t* masks;  // [count, pieces]: bit i of piece p is 1 if the token 16 * p + i may come
  int64_t pieces;         // at least one for every 16 columns, or for fewer at the end
};

// In place; the first token of those with the highest logit, 0 where none may come.
inline int64_t apply_mask(float* logits, int columns, const uint16_t* pieces) {
  const __m512 banned = _mm512_set1_ps(-std::numeric_limits<float>::infinity());
  const bool is_aligned = reinterpret_cast<uintptr_t>(logits) % sizeof banned == 0;
  const int whole = columns / kLanes * kLanes;
  Highest highest;
  for (int i = 0; i < whole; i += kLanes) {
    const __mmask16 allowed = pieces[i / kLanes];
    if (!allowed && is_aligned) {  // past the cache, and not read before: they are many
      _mm512_stream_ps(logits + i, banned);
      continue;
    }
    const __m512 left = _mm512_mask_loadu_ps(banned, allowed, logits + i);
    if (allowed != 0xffff) _mm512_storeu_ps(logits + i, left);
    highest.see(left, allowed, i);
  }
  if (const __mmask16 rest = first_lanes(columns - whole)) {
    const __mmask16 allowed = pieces[whole / kLanes] & rest;
    const __m512 left = _mm512_mask_loadu_ps(banned, allowed, logits + whole);
    _mm512_mask_storeu_ps(logits + whole, rest, left);
    highest.see(left, allowed, whole);
  }
  _mm_sfence();
  return highest.peak().token;
}

}  // namespace inflight
