// The formats of keys and values in the cache: as computed, or 8-bit levels with a scale for each token and head.
//
// A cache's type defines how its numbers become the pairs of a multiply-add. The conversion of levels is exact, in
// bfloat16 too; scales are applied elsewhere: a key's scale to its score, a value's scale to the weight of the value.
// `kv_quantization.py` defines levels and scales; the functions here give the same results, to the bit.
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

// Levels -127 .. 127 at equal distances.
struct Int8Levels : Int8ToFloats {
  static constexpr float kLargest = 127.0f;
  // Rounds numbers of at most `kLargest` to bytes; NaN becomes 0.
  static Ints round(Floats numbers) { return to_ints(is_number(numbers), numbers); }
};

// float8 with 4 exponent bits, whose bias is 7, and 3 mantissa bits (e4m3).
struct Fp8Levels : Fp8ToFloats {
  static constexpr float kLargest = 448.0f;
  static Ints round(Floats numbers) {
    const Ints bits = as_ints(numbers);
    const Ints positive = bit_and(bits, ints(0x7fffffff));
    // To nearest, ties to even: 20 of 23 mantissa bits are dropped.
    const Ints is_odd = bit_and(shift_right<20>(positive), ints(1));
    const Ints up = add(add(positive, ints(0x7ffff)), is_odd);
    const Ints normal = sub(shift_right<20>(up), ints(120 << 3));
    // The last mantissa bit of a sum with 2^14 has the value 2^-9.
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

// Computes the levels [count] of a head's numbers; returns their scale.
template <class E, class Levels>
float round_head(const typename E::Stored* numbers, int count, uint8_t* levels) {
  // In this order NaN stays NaN.
  const float scale = std::max(largest_magnitude<E>(numbers, count) / Levels::kLargest, kMinScale);
  for (int i = 0; i < count; i += kLanes) {
    const Mask mask = first_lanes(count - i);
    const Floats x = div(E::load(numbers + i, mask), floats(scale));
    store_bytes(levels + i, Levels::round(x), mask);
  }
  return scale;
}

}  // namespace inflight
