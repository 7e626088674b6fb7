// The products of products.h in NEON, in quads (products_quads.h), with BFDOT for bfloat16 and SDOT for int8 and 4 bits
// if the processor has them.
#pragma once

#include <arm_neon.h>

#include "lanes.h"

namespace inflight {

constexpr int kSumQuads = 24;  // of the 32 registers
#if defined(__ARM_FEATURE_DOTPROD)
constexpr int kGroupQuads = 4;  // of levels in groups
#else
constexpr int kGroupQuads = 2;  // of levels in groups; each needs two sums
#endif

template <int kLane>
inline FloatQuad multiply_add_lane(FloatQuad total, FloatQuad columns, FloatQuad words) {
  return vfmaq_laneq_f32(total, columns, words, kLane);
}

// Converts 4-bit floats to twice their value plus 16.
inline Bytes float_levels(Bytes bits) {
  const Bytes table = {16, 17, 18, 19, 20, 22, 24, 28, 16, 15, 14, 13, 12, 10, 8, 4};
  return vqtbl1q_s8(table, (uint8x16_t)bits);
}

}  // namespace inflight

#include "products_quads.h"

namespace inflight {

#if defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
struct BfloatPairs {
  using Stored = uint16_t;
  using Operand = Stored;
  using Pairs = Ints;
  using Sums = Floats;
  static constexpr int kPair = 2, kWords = 1;

  static Sums zero() { return floats(0.0f); }
  // Sixteen consecutive pairs of a packed operand.
  static Pairs load_pairs(const Stored* source) { return load_pairs(source, first_lanes(kLanes)); }
  static Pairs load_pairs(const Stored* source, Mask mask) { return load_words(source, mask); }
  // One pair in every lane.
  static Pairs broadcast_pair(const Stored* source) {
    int32_t pair;
    std::memcpy(&pair, source, sizeof pair);
    return ints(pair);
  }
  static Pairs to_pairs(Floats first, Floats second) {  // the values are levels, which need no rounding
    return bit_or(shift_right<16>(as_ints(first)), as_ints(second));
  }
  // Operands of attention's two products: queries, and the softmax's weights of the values.
  static void load_operand(Operand* target, const Stored* source, int count) {
    std::memcpy(target, source, count * sizeof *target);
  }
  static void store_operand(Operand* target, Floats values) { store_bfloat16(target, values); }
  static Pairs broadcast_operand(const Operand* source) { return broadcast_pair(source); }
  static Sums multiply_add(Sums total, Pairs a, Pairs b) {
    return in_quads<Floats>([&](int i) {
      return (FloatQuad)vbfdotq_f32(total.of[i], (bfloat16x8_t)a.of[i], (bfloat16x8_t)b.of[i]);
    });
  }

  // Quad: sums of a quad of columns; multiply_add takes four rows' words.
  using Quad = FloatQuad;
  using Columns = bfloat16x8_t;
  static Columns load_columns(const char* source) { return load_quad<bfloat16x8_t>(source); }
  template <int kLane>
  static Quad multiply_add(Quad total, const FloatQuad (&words)[kWords], Columns columns) {
    return vbfdotq_laneq_f32(total, columns, (bfloat16x8_t)words[0], kLane);
  }
};
#else
using BfloatPairs = QuadBfloats;
#endif

#if defined(__ARM_FEATURE_DOTPROD)
struct Int8 {
  using Stored = uint8_t;  // the same as int8_t, which weights have
  using Operand = Stored;
  using Sums = Ints;
  static constexpr int kPair = 4, kWords = 1;
  static constexpr int kOffset = 0;

  static Sums zero() { return ints(0); }

  using Quad = IntQuad;
  using Columns = Bytes;
  static Columns load_columns(const char* source) { return load_quad<Bytes>(source); }
  template <int kLane>
  static Quad multiply_add(Quad total, const FloatQuad (&words)[kWords], Columns columns) {
    return vdotq_laneq_s32(total, columns, (int8x16_t)words[0], kLane);
  }
};

// Products of levels in groups, with sums over a whole group.
template <class Type>
struct LevelProducts {
  using Sums = IntQuad;
  using Operand = Bytes;
  static constexpr int kFolded = 1 << 30;
  static Operand prepare(Bytes x) { return x; }
  template <int kLane>
  static Sums multiply_add(Sums total, Operand levels, Operand rows) {
    return vdotq_laneq_s32(total, levels, rows, kLane);
  }
  static IntQuad add(IntQuad total, Sums sums) { return total + sums; }
};
#else
using Int8 = WidenedInt8;
template <class Type>
struct LevelProducts : WidenedLevels<Type> {};
#endif

}  // namespace inflight
