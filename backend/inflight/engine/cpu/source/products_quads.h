// The products of products.h in quads (lanes_quads.h): up to 6 rows by as many quads of columns as there are
// registers for the sums. products_generic.h and products_neon.h define the number of registers, and include this file.
//
// Packed activations are loaded for up to four rows together, a word each. This file has the pairs for processors
// without special instructions: bfloat16 is widened to float32, the first of a pair by a shift and the second by a
// mask; bytes are widened to 16 bits, in which a product of two is exact, and so are the folded sums.
#pragma once

#include <utility>

#include "lanes.h"

namespace inflight {

constexpr int kMaxRows = 6;
constexpr int kFewRows = 6;            // at most, one micro-kernel takes them all while it waits for memory
constexpr int kMaxRowsOfTask = 72;     // as many as stay in a core's second-level cache from panel to panel
constexpr int64_t kCache = 256 << 10;  // part of a core's second-level cache that two parts of panels may take

// For attention: query vectors scored together, groups of keys scored with them, and vectors and registers of values
// summed together.
constexpr int kScoredRows = kSumQuads / 6;
constexpr int scored_groups(int) { return 1; }
constexpr int kSummedRows = kSumQuads / 6, kSummedParts = 1;
constexpr int kGroupsInCache = 4;       // groups of keys kept in the cache while a tile's rows are processed
constexpr bool kFetchesValues = false;  // while keys are scored

constexpr int kRowsAtOnce = 1;  // rows of one LoRA adapter at a time

// Calls f(i) for i = 0, 1, 2 and so on, each a compile-time constant.
template <class F, int... i>
inline __attribute__((always_inline)) void each_of(std::integer_sequence<int, i...>, const F& f) {
  (f(std::integral_constant<int, i>{}), ...);
}
template <int kCount, class F>
inline __attribute__((always_inline)) void unrolled(const F& f) {
  each_of(std::make_integer_sequence<int, kCount>{}, f);
}

// Returns one lane's word in every lane.
template <int kLane>
inline FloatQuad same_word(FloatQuad words) {
  return same(words[kLane]);
}

// Widens the first or second values of a quad of pairs of bfloat16.
inline FloatQuad widen(IntQuad pairs, int word) {
  return (FloatQuad)(word == 0 ? (IntQuad)((BitQuad)pairs << 16) : pairs & same(static_cast<int32_t>(0xffff0000)));
}

struct QuadBfloats : WidenedBfloats {
  static Pairs to_pairs(Floats first, Floats second) { return {first, second}; }

  // `Quad` has sums for four columns. `multiply_add` multiplies the columns with one word (kPair inputs) of each of four
  // rows.
  using Quad = FloatQuad;
  struct Columns {
    FloatQuad first, second;
  };
  static Columns load_columns(const char* source) {
    const auto pairs = load_quad<IntQuad>(source);
    return {widen(pairs, 0), widen(pairs, 1)};
  }
  using WidenedBfloats::multiply_add;
  template <int kLane>
  static Quad multiply_add(Quad total, const FloatQuad (&words)[kWords], Columns columns) {
    return multiply_add_lane<kLane>(multiply_add_lane<kLane>(total, columns.first, words[0]), columns.second, words[1]);
  }
};

struct FloatPairs : LoneFloats {
  using Quad = FloatQuad;
  using Columns = FloatQuad;
  static Columns load_columns(const char* source) { return load_quad<FloatQuad>(source); }
  using LoneFloats::multiply_add;
  template <int kLane>
  static Quad multiply_add(Quad total, const FloatQuad (&words)[kWords], Columns columns) {
    return multiply_add_lane<kLane>(total, columns, words[0]);
  }
};

// Bytes widened to 16 bits: those in even places, and those in odd places.
struct WidenedBytes {
  Shorts even, odd;
};
inline WidenedBytes widen(Bytes x) { return {(Shorts)x << 8 >> 8, (Shorts)x >> 8}; }

struct WidenedInt8 {
  using Stored = uint8_t;  // the same as int8_t, which weights have
  using Operand = uint16_t;
  using Sums = Ints;
  static constexpr int kPair = 4, kWords = 2;  // a word has the first and third byte of four, or the others
  static constexpr int kOffset = 0;

  static Sums zero() { return ints(0); }

  using Quad = IntQuad;
  using Columns = WidenedBytes;
  static Columns load_columns(const char* source) { return widen(load_quad<Bytes>(source)); }
  template <int kLane>
  static Quad multiply_add(Quad total, const FloatQuad (&words)[kWords], Columns columns) {
    const auto even = (Shorts)same_word<kLane>(words[0]), odd = (Shorts)same_word<kLane>(words[1]);
    return add_pairs(total, columns.even * even + columns.odd * odd);  // terms of at most 2 * 127 * 128
  }
};

// Products of levels in groups, of which `kFolded` steps are summed in `Sums`, in 16 bits.
template <class Type>
struct WidenedLevels {
  using Sums = Shorts;
  using Operand = WidenedBytes;
  static constexpr int kFolded = Type::kFolded;
  static Operand prepare(Bytes x) { return widen(x); }
  template <int kLane>
  static Sums multiply_add(Sums total, Operand levels, const Operand& rows) {
    return total + levels.even * (Shorts)same_word<kLane>((FloatQuad)rows.even) +
           levels.odd * (Shorts)same_word<kLane>((FloatQuad)rows.odd);
  }
  static IntQuad add(IntQuad total, Sums sums) { return add_pairs(total, sums); }
};

// Targets specialize LevelProducts for the types of groups.h, as below.
template <class Type>
struct LevelProducts;

// Returns the word of a pair that packed activations have in place `index`.
template <class E>
uint32_t word_of(uint32_t pair, int index) {
  if constexpr (E::kWords == 1) return pair;
  if constexpr (E::kPair == 2) return index == 0 ? pair << 16 : pair & 0xffff0000;
  const auto widened = [&](int byte) { return static_cast<uint16_t>(static_cast<int8_t>(pair >> 8 * byte)); };
  return widened(index) | static_cast<uint32_t>(widened(index + 2)) << 16;
}

// Loads kCount words followed by zeros. Not via the stack, where a load after shorter stores would stall.
template <int kCount>
inline FloatQuad load_row_words(const char* source) {
  if constexpr (kCount >= 4) return load_quad<FloatQuad>(source);
  uint64_t low = 0, high = 0;
  std::memcpy(&low, source, kCount == 1 ? 4 : 8);
  if (kCount == 3) std::memcpy(&high, source + 8, 4);
  return (FloatQuad)LongQuad{static_cast<int64_t>(low), static_cast<int64_t>(high)};
}

// The words of a block's rows, four rows in each register.
template <int kRows, int kWords>
struct RowWords {
  FloatQuad of[(kRows + 3) / 4][kWords];

  explicit RowWords(const void* source) {
    unrolled<(kRows + 3) / 4>([&](auto i) {
      unrolled<kWords>([&](auto word) {
        of[i][word] = load_row_words<kRows - 4 * i>(static_cast<const char*>(source) + 4 * (kRows * word + 4 * i));
      });
    });
  }
};

// sums[row][i] += a block's row * kCount quads of a panel's columns. Prefetches the lines at `ahead` if requested.
template <class E, int kRows, int kCount>
inline __attribute__((always_inline)) void multiply_columns(const char* a, const char* columns, int num_pairs,
                                                            bool asks_first, bool asks_second, Ahead ahead,
                                                            typename E::Quad (&sums)[kRows][kCount]) {
  for (int pair = 0; pair < num_pairs; ++pair, a += 4 * kRows * E::kWords, columns += 4 * kPanel) {
    if (asks_first) prefetch(ahead.first);
    if (asks_second) prefetch(ahead.second);
    ahead.first += ahead.step;
    ahead.second += ahead.step;
    const RowWords<kRows, E::kWords> words(a);
    unrolled<kCount>([&](auto i) __attribute__((always_inline)) {
      const typename E::Columns b = E::load_columns(columns + 16 * i);
      unrolled<kRows>([&](auto row) __attribute__((always_inline)) {
        sums[row][i] = E::template multiply_add<row % 4>(sums[row][i], words.of[row / 4], b);
      });
    });
  }
}

// sums[row][half] += a block's row * panel. The order of a sum does not depend on kRows: a row's result does not
// depend on other rows.
template <class E, int kRows>
inline __attribute__((always_inline)) void multiply_panel(const typename E::Operand* a,
                                                          const typename E::Stored* panel, int inner,
                                                          const Ahead& ahead, typename E::Sums (&sums)[kRows][2]) {
  constexpr int kQuads = kPanel / 4;
  constexpr int kCount = kRows * 8 <= kSumQuads ? 8 : kRows * 4 <= kSumQuads ? 4 : 2;
  unrolled<kQuads / kCount>([&](auto pass) __attribute__((always_inline)) {
    constexpr int kFirst = pass * kCount;
    typename E::Quad own[kRows][kCount];
    unrolled<kRows * kCount>([&](auto at) {
      constexpr int row = at / kCount, i = at % kCount;
      own[row][i] = sums[row][(kFirst + i) / 4].of[(kFirst + i) % 4];
    });
    multiply_columns<E, kRows, kCount>(reinterpret_cast<const char*>(a),
                                       reinterpret_cast<const char*>(panel) + 16 * kFirst, inner / E::kPair, pass == 0,
                                       pass == (kCount == kQuads ? 0 : 1), ahead, own);
    unrolled<kRows * kCount>([&](auto at) {
      constexpr int row = at / kCount, i = at % kCount;
      sums[row][(kFirst + i) / 4].of[(kFirst + i) % 4] = own[row][i];
    });
  });
}

// Loads the words of a quad of columns; words of floats are widened to the length of words of integers.
template <class Type>
IntQuad words_of_columns(const uint8_t* words) {
  if constexpr (!Type::kIsFloat) return load_quad<IntQuad>(words);
  FourShorts halves;
  std::memcpy(&halves, words, sizeof halves);
  return (IntQuad)(__builtin_convertvector(halves, BitQuad) << 16);
}

// Converts one of the levels of each byte to an operand: signed with 8 bits, and otherwise as groups.h describes.
template <class Type, int kIndex>
Bytes levels_of(Bytes bytes) {
  if constexpr (Type::kBits == 8) return bytes ^ -128;
  if constexpr (kIndex == 1) bytes = (Bytes)((BitQuad)bytes >> 4);
  bytes &= 15;
  if constexpr (Type::kIsFloat) return float_levels(bytes);
  return bytes;
}

// Multiplies a group for kGroupQuads quads of columns, the first of which is `quad`; for `multiply_groups`.
template <class Type, int kRows>
inline __attribute__((always_inline)) void multiply_group(const uint8_t* a, const uint8_t* panel, const uint8_t* levels,
                                                          int num_steps, int quad, Floats (*totals)[2]) {
  using Products = LevelProducts<Type>;
  IntQuad words[kGroupQuads], sums[kRows][kGroupQuads];
  unrolled<kGroupQuads>([&](auto i) {
    words[i] = words_of_columns<Type>(panel + 4 * (quad + i) * Type::kWord);
    unrolled<kRows>([&](auto row) {
      int32_t taken;
      std::memcpy(&taken, a + 4 * (kRows + row), sizeof taken);
      sums[row][i] = Type::kBits == 8   ? same(0)
                     : Type::kZeroBits ? (words[i] & same(Type::kZeroBits)) * same(taken)
                                       : same(taken * (1 << Type::kUsualZeroBit));
    });
  });
  const uint8_t* x = a + 4 * 2 * kRows;
  for (int left = num_steps; left > 0; left -= Products::kFolded) {
    typename Products::Sums folded[kRows][kGroupQuads] = {};
    for (int step = left < Products::kFolded ? left : Products::kFolded; step > 0; --step) {
      const RowWords<kRows, Type::kLevels> of_rows(x);
      typename Products::Operand rows[Type::kLevels][(kRows + 3) / 4];
      unrolled<Type::kLevels*((kRows + 3) / 4)>([&](auto at) {
        constexpr int index = at % Type::kLevels, i = at / Type::kLevels;
        rows[index][i] = Products::prepare((Bytes)of_rows.of[i][index]);
      });
      unrolled<kGroupQuads>([&](auto i) __attribute__((always_inline)) {
        const auto bytes = load_quad<Bytes>(levels + 16 * (quad + i));
        unrolled<Type::kLevels>([&](auto index) __attribute__((always_inline)) {
          const auto own = Products::prepare(levels_of<Type, index>(bytes));
          unrolled<kRows>([&](auto row) __attribute__((always_inline)) {
            folded[row][i] = Products::template multiply_add<row % 4>(folded[row][i], own, rows[index][row / 4]);
          });
        });
      });
      levels += 4 * kPanel;
      x += Type::kAtOnce * kRows;
    }
    unrolled<kRows * kGroupQuads>([&](auto at) {
      constexpr int row = at / kGroupQuads, i = at % kGroupQuads;
      sums[row][i] = Products::add(sums[row][i], folded[row][i]);
    });
  }
  unrolled<kRows>([&](auto row) {
    float scale;
    std::memcpy(&scale, a + 4 * row, sizeof scale);
    unrolled<kGroupQuads>([&](auto i) {
      FloatQuad& total = totals[row][(quad + i) / 4].of[(quad + i) % 4];
      const auto factors = (FloatQuad)(words[i] & ~same(Type::kZeroBits));
      total = multiply_add(total, __builtin_convertvector(sums[row][i], FloatQuad), factors * same(scale));
    });
  });
}

// Like `multiply_panel`, for the layout of groups.h; `totals` keeps sums until their panel's next part.
template <class Type, int kRows>
inline __attribute__((always_inline)) void multiply_groups(const uint8_t* a, const uint8_t* panel, int inner, int group,
                                                           const Ahead& ahead, Floats (*totals)[2]) {
  const int num_steps = (group - Type::kOfGroup) / Type::kAtOnce;
  const char *first = ahead.first, *second = ahead.second;
  for (int begin = 0; begin < inner; begin += group, a += group * kRows) {
    for (int step = 0; step < num_steps; ++step, first += ahead.step, second += ahead.step) {
      prefetch(first);
      prefetch(second);
    }
    const uint8_t* levels = panel + kPanel * Type::kWord;
    for (int quad = 0; quad < kPanel / 4; quad += kGroupQuads)
      multiply_group<Type, kRows>(a, panel, levels, num_steps, quad, totals);
    panel = levels + num_steps * 4 * kPanel;
  }
}

// Converts 8-bit levels, in each lane's lowest byte, to floats.
struct Int8ToFloats {
  static Floats to_float(Ints levels) {
    return in_quads<Floats>([&](int i) {
      return __builtin_convertvector((IntQuad)((BitQuad)levels.of[i] << 24) >> 24, FloatQuad);
    });
  }
};

struct Fp8ToFloats {
  static Floats to_float(Ints levels) {
    const Ints rest = bit_and(levels, ints(0x7f)), sign = shift_left<24>(bit_and(levels, ints(0x80)));
    const Floats normal = as_floats(add(shift_left<20>(rest), ints(120 << 23)));
    const Floats small = mul(to_floats(rest), floats(1.0f / 512));  // subnormal values
    return as_floats(bit_or(as_ints(select(less(rest, ints(8)), small, normal)), sign));
  }
};

// 16 pairs of E's values, converted from levels by ToFloats.
template <class E, class ToFloats>
typename E::Pairs load_level_pairs(const uint8_t* source) {
  if constexpr (E::kPair == 2) {
    uint16_t pairs[kLanes];
    std::memcpy(pairs, source, sizeof pairs);
    const Ints both = load_halves(pairs);
    return E::to_pairs(ToFloats::to_float(both), ToFloats::to_float(shift_right<8>(both)));
  } else {
    return ToFloats::to_float(in_quads<Ints>([&](int i) {
      FourBytes levels;
      std::memcpy(&levels, source + 4 * i, sizeof levels);
      return __builtin_convertvector(levels, IntQuad);
    }));
  }
}
template <class E, class ToFloats>
typename E::Pairs load_level_pairs(const uint8_t* source, Mask mask) {
  if (mask.all()) return load_level_pairs<E, ToFloats>(source);
  uint8_t own[kLanes * E::kPair] = {};
  for (uint32_t bits = lane_bits(mask); bits; bits &= bits - 1) {
    const int lane = __builtin_ctz(bits);
    std::memcpy(own + lane * E::kPair, source + lane * E::kPair, E::kPair);
  }
  return load_level_pairs<E, ToFloats>(own);
}

}  // namespace inflight
