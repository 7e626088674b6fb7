// The operations of a kernel's number type, bfloat16 or float32. products.h defines pairs of them.
#pragma once

#include <cstdint>
#include <cstring>
#include <limits>

#include "lanes.h"
#include "products.h"

namespace inflight {

// Stores the values of one token, or of two, in pairs along tokens. The place after a sequence's last token becomes
// zero, because another sequence may have left NaN there. If `is_second`, the token is stored as the second of its
// pair, whose first token stays.
inline void store_pairs(uint16_t* target, const uint16_t* first, const uint16_t* second, bool is_second, int count) {
  for (int i = 0; i < count; i += kLanes) {
    const Mask mask = first_lanes(count - i);
    const Ints own = load_halves(first + i, mask);
    Ints pairs = own;
    if (second) {
      const Ints other = load_halves(second + i, mask);
      pairs = bit_or(own, shift_left<16>(other));
    } else if (is_second) {
      const Ints before = load_words(target + 2 * i, mask);
      pairs = bit_or(bit_and(before, ints(0xffff)), shift_left<16>(own));
    }
    store_words(target + 2 * i, pairs, mask);
  }
}

struct Bf16 : BfloatPairs {
  static Floats load(const Stored* source) { return as_floats(shift_left<16>(load_halves(source))); }
  static Floats load(const Stored* source, Mask mask) { return as_floats(shift_left<16>(load_halves(source, mask))); }
  static void store(Stored* target, Floats values) { store_bfloat16(target, values); }
  static void store(Stored* target, Floats values, Mask mask) { store_bfloat16(target, values, mask); }
  static void store_values(Stored* target, const Stored* first, const Stored* second, bool is_second, int count) {
    store_pairs(target, first, second, is_second, count);
  }
};

struct F32 : FloatPairs {
  static Floats load(const Stored* source) { return inflight::load(source); }
  static Floats load(const Stored* source, Mask mask) { return inflight::load(source, mask); }
  static void store(Stored* target, Floats values) { inflight::store(target, values); }
  static void store(Stored* target, Floats values, Mask mask) { inflight::store(target, values, mask); }
  static void store_values(Stored* target, const Stored* first, const Stored*, bool, int count) {
    std::memcpy(target, first, count * sizeof(Stored));
  }
};

// The least scale by which values are divided when they are rounded to 8 bits, as all of them may be 0.
constexpr float kMinScale = 1e-30f;

inline int32_t bits_of(float value) {
  int32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  return bits;
}

// max |value|, NaN if any value is NaN.
template <class E>
inline float largest_magnitude(const typename E::Stored* values, int count) {
  Floats largest = floats(0.0f);
  Mask no_number = no_lanes();
  for (int i = 0; i < count; i += kLanes) {
    const Floats x = E::load(values + i, first_lanes(count - i));
    no_number |= is_no_number(x);
    largest = max(largest, abs(x));
  }
  return no_number ? std::numeric_limits<float>::quiet_NaN() : largest_of(largest);
}

}  // namespace inflight
