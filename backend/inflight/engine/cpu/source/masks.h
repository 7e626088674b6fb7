// Bans the tokens in a row of logits that a mask does not allow, and finds the most likely other token, in one pass.
#pragma once

#include <cstdint>
#include <limits>

#include "element.h"
#include "peaks.h"

namespace inflight {

struct MaskedRows {
  int64_t count;
  const int64_t* rows;    // [count]
  const uint16_t* masks;  // [count, pieces]: bit i of piece p is 1 if token 16 * p + i is allowed
  int64_t pieces;         // at least one for every 16 columns, or for fewer at the end
};

// Masks logits in place; returns the first token with the highest logit, 0 if no token is allowed.
inline int64_t apply_mask(float* logits, int columns, const uint16_t* pieces) {
  const Floats banned = floats(-std::numeric_limits<float>::infinity());
  const bool is_aligned = reinterpret_cast<uintptr_t>(logits) % sizeof banned == 0;
  const int whole = columns / kLanes * kLanes;
  Highest highest;
  for (int i = 0; i < whole; i += kLanes) {
    const uint16_t allowed = pieces[i / kLanes];
    if (!allowed && is_aligned) {  // bypasses the cache and reads nothing, as there are many such tokens
      stream(logits + i, banned);
      continue;
    }
    const Mask mask = mask_of(allowed);
    const Floats left = load_or(banned, logits + i, mask);
    if (allowed != 0xffff) store(logits + i, left);
    highest.see(left, mask, i);
  }
  if (const Mask rest = first_lanes(columns - whole)) {
    const Mask allowed = mask_of(pieces[whole / kLanes]) & rest;
    const Floats left = load_or(banned, logits + whole, allowed);
    store(logits + whole, left, rest);
    highest.see(left, allowed, whole);
  }
  end_streams();
  return highest.peak().token;
}

}  // namespace inflight
