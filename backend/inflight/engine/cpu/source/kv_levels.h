// What keys and values are in the cache: as they are computed, or levels of 8 bits, by a scale for each token and head.
//
// A cache's type tells how its numbers become the pairs that a multiply-add takes. Levels do so exactly, in bfloat16
// too; their scales come in elsewhere: a key's multiplies its score, a value's the weight that it is summed up with.
// `kv_rounding.py` says what levels and scales are; the functions here give the same, to the bit.
#pragma once

#include <algorithm>

#include "element.h"
#include "products.h"

namespace inflight {

enum CacheKind : int32_t { kAsComputed = 0, kInt8Levels = 1, kFp8Levels = 2 };

template <class E>
struct AsComputed {
  using Stored = typename E::Stored;
  static constexpr int kPair = E::kPair;
  static constexpr bool kHasScales = false;
  static typename E::Pairs load_pairs(const Stored* source) { return E::load_pairs(source); }
  static typename E::Pairs load_pairs(const Stored* source, Mask mask) { return E::load_pairs(source, mask); }
};

// -127 .. 127 at equal distances.
struct Int8Levels : Int8ToFloats {
  static constexpr float kLargest = 127.0f;
  // The bytes of numbers of at most `kLargest`; NaN becomes 0.
  static Ints round(Floats numbers) { return to_ints(is_number(numbers), numbers); }
};

// float8 with 4 bits of exponent, whose bias is 7, and 3 behind the leading bit (e4m3).
struct Fp8Levels : Fp8ToFloats {
  static constexpr float kLargest = 448.0f;
  static Ints round(Floats numbers) {
    const Ints bits = as_ints(numbers);
    const Ints positive = bit_and(bits, ints(0x7fffffff));
    // To nearest, ties to even: 20 of 23 bits behind the leading one go.
    const Ints is_odd = bit_and(shift_right<20>(positive), ints(1));
    const Ints up = add(add(positive, ints(0x7ffff)), is_odd);
    const Ints normal = sub(shift_right<20>(up), ints(120 << 3));
    // A sum with 2^14 has the multiples of 2^-9 as its last bits.
    const Floats sum = add(as_floats(positive), floats(16384.0f));
    const Ints small = sub(as_ints(sum), ints(0x46800000));
    const Mask is_small = less(positive, ints(0x3c800000));  // 2^-6
    const Ints rest = select(is_small, small, normal);
    const Ints sign = bit_and(shift_right<24>(bits), ints(0x80));
    return bit_or(is_number(numbers), rest, sign);
  }
};

template <class E, class Levels>
struct Rounded {
  using Stored = uint8_t;
  static constexpr int kPair = E::kPair;
  static constexpr bool kHasScales = true;
  static typename E::Pairs load_pairs(const Stored* source) { return load_level_pairs<E, Levels>(source); }
  static typename E::Pairs load_pairs(const Stored* source, Mask mask) {
    return load_level_pairs<E, Levels>(source, mask);
  }
};

// The levels [count] of a head's numbers; returns their scale.
template <class E, class Levels>
float round_head(const typename E::Stored* numbers, int count, uint8_t* levels) {
  // In this order NaN stays NaN.
  const float scale = std::max(largest_magnitude<E>(numbers, count) / Levels::kLargest, 1e-30f);
  for (int i = 0; i < count; i += kLanes) {
    const Mask mask = first_lanes(count - i);
    const Floats x = div(E::load(numbers + i, mask), floats(scale));
    store_bytes(levels + i, Levels::round(x), mask);
  }
  return scale;
}

}  // namespace inflight
