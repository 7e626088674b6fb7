// The products of products.h for any processor, in quads (products_quads.h), compiled from operators.
#pragma once

#include "lanes.h"

namespace inflight {

constexpr int kSumQuads = 12;   // of x86's 16 registers
constexpr int kGroupQuads = 1;  // of levels in groups

template <int kLane>
inline FloatQuad multiply_add_lane(FloatQuad total, FloatQuad columns, FloatQuad words) {
  return multiply_add(total, columns, same(words[kLane]));
}

// Converts 4-bit floats to twice their value plus 16; twice the values are 0, 1, 2, 3, 4, 6, 8, 12, and their
// negatives.
inline Bytes float_levels(Bytes bits) {
  const auto above = [&](Bytes x, int8_t least) {
    const Bytes more = x - least;
    return more & (more > 0);
  };
  const Bytes magnitude = bits & 7, sign = (bits & 8) != 0;
  const Bytes twice = magnitude + above(magnitude, 4) + 2 * above(magnitude, 6);
  return (twice ^ sign) - sign + 16;
}

}  // namespace inflight

#include "products_quads.h"

namespace inflight {

using BfloatPairs = QuadBfloats;
using Int8 = WidenedInt8;
template <class Type>
struct LevelProducts : WidenedLevels<Type> {};

}  // namespace inflight
