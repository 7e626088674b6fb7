// The highest logit of a row and its token, in one pass.
#pragma once

#include <cstdint>
#include <limits>

#include "element.h"

namespace inflight {

struct Peak {
  float highest;  // NaN if any logit of the row is NaN
  int64_t token;  // the first token with this logit
};

// Finds the highest of all logits passed to it, 16 at a time in the order of their tokens.
class Highest {
 public:
  // Adds the `logits` in the mask; the first lane is the logit of the token `first`.
  void see(Floats logits, Mask mask, int first) {
    const Mask higher = greater(mask, logits, best_);
    best_ = select(higher, logits, best_);
    firsts_ = select(higher, ints(first), firsts_);
  }

  // The highest logit so far; -inf and token 0 if no logit was higher than -inf.
  Peak peak() const {
    const Ints lanes = lane_numbers();
    const float highest = largest_of(best_);
    const Mask is_highest = equal(best_, floats(highest));
    return {highest, smallest_of(is_highest, add(firsts_, lanes))};
  }

 private:
  Floats best_ = floats(-std::numeric_limits<float>::infinity());
  Ints firsts_ = ints(0);  // first token of the 16 from which each lane's best came
};

inline Peak find_peak(const float* logits, int columns) {
  Highest highest;
  Mask no_number = no_lanes();
  for (int i = 0; i < columns; i += kLanes) {
    const Mask mask = first_lanes(columns - i);
    const Floats x = load(logits + i, mask);
    no_number |= is_no_number(mask, x);
    highest.see(x, mask, i);
  }
  Peak peak = highest.peak();
  if (no_number) peak.highest = std::numeric_limits<float>::quiet_NaN();
  return peak;
}

}  // namespace inflight
