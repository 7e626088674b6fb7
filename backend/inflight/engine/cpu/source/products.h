// The parts of products that each target implements: the number of rows in its registers, the pairs that it
// multiplies, the innermost loops, and the conversion of a cache's 8-bit levels to pairs.
//
// A "pair" has four bytes: two bfloat16 along the inner dimension, one float32, or four int8. Packed operands consist
// of pairs in the same layout on all targets, so that all types share every loop. Packed activations depend on the
// target: each pair becomes kWords words of four bytes, which one lane of a multiply-add processes one after the other.
#pragma once

#include <cstdint>
#include <cstring>

#include "lanes.h"

namespace inflight {

constexpr int kPanel = 32;  // columns

// What a check of a target's products on this machine found.
enum ProductCheck : int32_t { kProductsAreRight = 0, kTilesNotPermitted = 1, kProductsAreOff = 2, kProductsCrash = 3 };

// The memory to prefetch: a kernel prefetches the line at `first` and the line at `second` with every pair.
struct Ahead {
  const char *first, *second;
  int step;
};

// Pairs of float32, which are single numbers, for every target.
struct LoneFloats {
  using Stored = float;
  using Operand = Stored;
  using Pairs = Floats;
  using Sums = Floats;
  static constexpr int kPair = 1, kWords = 1;

  static Sums zero() { return floats(0.0f); }
  static Pairs load_pairs(const Stored* source) { return load(source); }
  static Pairs load_pairs(const Stored* source, Mask mask) { return load(source, mask); }
  static Pairs broadcast_pair(const Stored* source) { return floats(*source); }
  static void load_operand(Operand* target, const Stored* source, int count) {
    std::memcpy(target, source, count * sizeof *target);
  }
  static void store_operand(Operand* target, Floats values) { store(target, values); }
  static Pairs broadcast_operand(const Operand* source) { return broadcast_pair(source); }
  static Sums multiply_add(Sums total, Pairs a, Pairs b) { return fmadd(a, b, total); }
};

// Pairs of bfloat16 for targets without instructions for them: widened to float32, first and second values separately.
struct WidenedBfloats {
  using Stored = uint16_t;
  using Operand = float;
  using Sums = Floats;
  static constexpr int kPair = 2, kWords = 2;

  struct Pairs {
    Floats first, second;
  };
  static Sums zero() { return floats(0.0f); }
  // Sixteen consecutive pairs of a packed operand.
  static Pairs load_pairs(const Stored* source) { return widened(load(reinterpret_cast<const int32_t*>(source))); }
  static Pairs load_pairs(const Stored* source, Mask mask) { return widened(load_words(source, mask)); }
  // One pair in every lane.
  static Pairs broadcast_pair(const Stored* source) {
    int32_t pair;
    std::memcpy(&pair, source, sizeof pair);
    return widened(ints(pair));
  }
  // Operands of attention's two products: queries, and the softmax's weights of the values; not rounded here.
  static void load_operand(Operand* target, const Stored* source, int count) {
    for (int i = 0; i < count; ++i) {
      const uint32_t wide = static_cast<uint32_t>(source[i]) << 16;
      std::memcpy(target + i, &wide, sizeof wide);
    }
  }
  static void store_operand(Operand* target, Floats values) { store(target, values); }
  static Pairs broadcast_operand(const Operand* source) { return {floats(source[0]), floats(source[1])}; }
  static Sums multiply_add(Sums total, Pairs a, Pairs b) {
    return fmadd(a.second, b.second, fmadd(a.first, b.first, total));
  }

 private:
  static Pairs widened(Ints pairs) {
    return {as_floats(shift_left<16>(pairs)), as_floats(bit_and(pairs, ints(static_cast<int32_t>(0xffff0000))))};
  }
};

}  // namespace inflight

#if defined(INFLIGHT_GENERIC)
#include "products_generic.h"
#elif defined(__AVX512F__)
#include "products_avx512.h"
#elif defined(__AVX2__)
#include "products_avx2.h"
#else
#include "products_neon.h"
#endif

#ifdef INFLIGHT_AMX
#include "products_amx.h"
#else
namespace inflight {

// Whether tiles multiply this type, in larger blocks of rows.
template <class E>
constexpr bool kByTiles = false;
constexpr int kMaxTiledRows = kMaxRows;
struct Tiles {};

}  // namespace inflight
#endif
