// The products of products.h in AVX2, FMA and F16C. There are 16 registers of 8 lanes: 6 rows by 16 columns of sums.
//
// bfloat16 is widened to float32: the first of a pair by a shift, the second by a mask. The bytes of int8 are widened
// to 16 bits in the same way and multiplied in pairs, which is exact. Products of levels in groups are exact too: the sum
// of kFolded of them fits in 16 bits.
#pragma once

#include <immintrin.h>

#include "lanes.h"

namespace inflight {

constexpr int kMaxRows = 6;
constexpr int kFewRows = 6;            // at most, one micro-kernel takes them all while it waits for memory
constexpr int kMaxRowsOfTask = 72;     // as many as stay in a core's second-level cache from panel to panel
constexpr int64_t kCache = 256 << 10;  // part of a core's second-level cache that two parts of panels may take

// For attention: query vectors scored together, groups of keys scored with them, and vectors and registers of values
// summed together.
constexpr int kScoredRows = 4;
constexpr int scored_groups(int) { return 1; }
constexpr int kSummedRows = 4, kSummedParts = 1;
constexpr int kGroupsInCache = 4;        // groups of keys kept in the cache while a tile's rows are processed
constexpr bool kFetchesValues = true;

constexpr int kRowsAtOnce = 1;  // rows of one LoRA adapter at a time

inline __m256i load_register(const void* source) { return _mm256_loadu_si256(static_cast<const __m256i*>(source)); }

// Widens the first or second values of a register of pairs of bfloat16.
inline __m256 widen(__m256i pairs, int word) {
  return _mm256_castsi256_ps(word == 0 ? _mm256_slli_epi32(pairs, 16)
                                       : _mm256_and_si256(pairs, _mm256_set1_epi32(static_cast<int>(0xffff0000))));
}

struct FloatRegisters {
  using Register = __m256;
  static Register broadcast(const void* word) { return _mm256_broadcast_ss(static_cast<const float*>(word)); }
  static Register multiply_add(Register total, Register a, Register b) { return _mm256_fmadd_ps(a, b, total); }
};

struct BfloatPairs : WidenedBfloats, FloatRegisters {
  using FloatRegisters::multiply_add, WidenedBfloats::multiply_add;
  static Register load_word(const void* source, int word) { return widen(load_register(source), word); }
};

struct FloatPairs : LoneFloats, FloatRegisters {
  using FloatRegisters::multiply_add, LoneFloats::multiply_add;
  static Register load_word(const void* source, int) { return _mm256_loadu_ps(static_cast<const float*>(source)); }
};

struct Int8 {
  using Stored = uint8_t;  // of activations; weights are int8_t in the same places
  using Operand = uint16_t;
  using Register = __m256i;
  using Sums = Ints;
  static constexpr int kPair = 4, kWords = 2;  // a word has the first and third byte of four, or the second and fourth
  static constexpr int kOffset = 128;          // of activations

  static Sums zero() { return ints(0); }
  static Register load_word(const void* source, int word) {
    const __m256i quads = load_register(source);
    return _mm256_srai_epi16(word == 0 ? _mm256_slli_epi16(quads, 8) : quads, 8);
  }
  static Register broadcast(const void* word) { return _mm256_castps_si256(FloatRegisters::broadcast(word)); }
  static Register multiply_add(Register total, Register a, Register b) {
    const __m256i products = _mm256_madd_epi16(a, b);
    asm("vpaddd %1, %0, %0" : "+x"(total) : "x"(products));  // otherwise GCC sums the products first, in memory
    return total;
  }
};

// Returns the word of a pair that packed activations have in place `index`.
template <class E>
uint32_t word_of(uint32_t pair, int index) {
  if constexpr (E::kWords == 1) return pair;
  if constexpr (E::kPair == 2) return index == 0 ? pair << 16 : pair & 0xffff0000;
  return pair >> 8 * index & 0x00ff00ff;
}

// sums[row][i] += a block's row * kCount registers of 8 of a panel's columns. With two registers it
// prefetches only the line at `ahead.first`. Not inlined: GCC would keep sums in memory.
template <class E, int kRows, int kCount>
__attribute__((noinline)) void multiply_columns(const char* a, const char* columns, int num_pairs, Ahead ahead,
                                                typename E::Sums (*sums)[2], int half) {
  using Register = typename E::Register;
  Register own[kRows][kCount];
#pragma GCC unroll 8
  for (int row = 0; row < kRows; ++row) {
#pragma GCC unroll 2
    for (int i = 0; i < kCount / 2; ++i) {
      own[row][2 * i] = sums[row][half + i].low;
      own[row][2 * i + 1] = sums[row][half + i].high;
    }
  }
  for (int pair = 0; pair < num_pairs; ++pair, columns += 4 * kPanel) {
    prefetch(ahead.first);
    ahead.first += ahead.step;
    if constexpr (kCount == 4) {
      prefetch(ahead.second);
      ahead.second += ahead.step;
    }
#pragma GCC unroll 2
    for (int word = 0; word < E::kWords; ++word, a += 4 * kRows) {
      Register b[kCount];
#pragma GCC unroll 4
      for (int i = 0; i < kCount; ++i) b[i] = E::load_word(columns + 32 * i, word);
#pragma GCC unroll 8
      for (int row = 0; row < kRows; ++row) {
        const Register x = E::broadcast(a + 4 * row);
#pragma GCC unroll 4
        for (int i = 0; i < kCount; ++i) own[row][i] = E::multiply_add(own[row][i], x, b[i]);
      }
      if (E::kWords > 1) asm volatile("" : : : "memory");  // otherwise GCC runs out of registers for both words
    }
  }
#pragma GCC unroll 8
  for (int row = 0; row < kRows; ++row) {
#pragma GCC unroll 2
    for (int i = 0; i < kCount / 2; ++i) sums[row][half + i] = {own[row][2 * i], own[row][2 * i + 1]};
  }
}

// sums[row][half] += a block's row * panel. The order of a sum does not depend on kRows: a row's result does not
// depend on other rows.
template <class E, int kRows>
inline __attribute__((always_inline)) void multiply_panel(const typename E::Operand* a,
                                                          const typename E::Stored* panel, int inner,
                                                          const Ahead& ahead, typename E::Sums (&sums)[kRows][2]) {
  const auto* operand = reinterpret_cast<const char*>(a);
  const auto* columns = reinterpret_cast<const char*>(panel);
  const int num_pairs = inner / E::kPair;
  if constexpr (kRows <= 2) {
    multiply_columns<E, kRows, 4>(operand, columns, num_pairs, ahead, sums, 0);
  } else {
    multiply_columns<E, kRows, 2>(operand, columns, num_pairs, {ahead.first, nullptr, ahead.step}, sums, 0);
    multiply_columns<E, kRows, 2>(operand, columns + 4 * kLanes, num_pairs, {ahead.second, nullptr, ahead.step}, sums,
                                  1);
  }
}

// Loads the words of 8 columns; words of floats are widened to the length of words of integers.
template <class Type>
__m256i words_of_columns(const uint8_t* words) {
  if constexpr (!Type::kIsFloat) return load_register(words);
  return _mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(words))), 16);
}

// Converts the lower half of each byte to the unsigned operand of a product of 4-bit levels.
template <class Type>
__m256i levels_of(__m256i bytes) {
  bytes = _mm256_and_si256(bytes, _mm256_set1_epi8(15));
  if constexpr (!Type::kIsFloat) return bytes;
  const __m128i table = _mm_setr_epi8(16, 17, 18, 19, 20, 22, 24, 28, 16, 15, 14, 13, 12, 10, 8, 4);
  return _mm256_shuffle_epi8(_mm256_broadcastsi128_si256(table), bytes);
}

// sums[row] += a group's inputs of each row, from `x` on, * 8 columns, whose levels begin at `levels`.
template <class Type, int kRows>
inline __attribute__((always_inline)) void multiply_group(const uint8_t* x, const uint8_t* levels, int num_steps,
                                                          __m256i (&sums)[kRows]) {
  constexpr int kStep = 4 * kPanel;  // bytes of a panel
  const __m256i ones = _mm256_set1_epi16(1);
  if constexpr (Type::kBits == 8) {
    for (int step = 0; step < num_steps; ++step, levels += kStep, x += 4 * kRows) {
      const __m256i own = _mm256_xor_si256(load_register(levels), _mm256_set1_epi8(-128));  // signed
      const __m256i magnitudes = _mm256_abs_epi8(own);
#pragma GCC unroll 8
      for (int row = 0; row < kRows; ++row) {
        const __m256i signed_row = _mm256_sign_epi8(Int8::broadcast(x + 4 * row), own);
        sums[row] = Int8::multiply_add(sums[row], _mm256_maddubs_epi16(magnitudes, signed_row), ones);
      }
    }
    return;
  }
  for (int step = 0; step < num_steps; step += Type::kFolded) {
    const int stop = step + Type::kFolded < num_steps ? step + Type::kFolded : num_steps;
    __m256i halves[kRows];
#pragma GCC unroll 8
    for (int row = 0; row < kRows; ++row) halves[row] = _mm256_setzero_si256();
    for (int each = step; each < stop; ++each, levels += kStep, x += 4 * 2 * kRows) {
      const __m256i both = load_register(levels);
      const __m256i lower = levels_of<Type>(both), upper = levels_of<Type>(_mm256_srli_epi16(both, 4));
#pragma GCC unroll 8
      for (int row = 0; row < kRows; ++row) {
        const __m256i of_lower = _mm256_maddubs_epi16(lower, Int8::broadcast(x + 4 * row));
        const __m256i of_upper = _mm256_maddubs_epi16(upper, Int8::broadcast(x + 4 * (kRows + row)));
        halves[row] = _mm256_add_epi16(halves[row], _mm256_add_epi16(of_lower, of_upper));
      }
    }
#pragma GCC unroll 8
    for (int row = 0; row < kRows; ++row)
      sums[row] = _mm256_add_epi32(sums[row], _mm256_madd_epi16(halves[row], ones));
  }
}

// Like `multiply_panel`, for the layout of groups.h; `totals` keeps sums until their panel's next part.
template <class Type, int kRows>
inline __attribute__((always_inline)) void multiply_groups(const uint8_t* a, const uint8_t* panel, int inner, int group,
                                                           const Ahead& ahead, Floats (*totals)[2]) {
  const __m256i zero_bits = _mm256_set1_epi32(Type::kZeroBits);
  const int num_steps = (group - Type::kOfGroup) / Type::kAtOnce;
  const char *first = ahead.first, *second = ahead.second;
  for (int begin = 0; begin < inner; begin += group) {
    const uint8_t* levels = panel + kPanel * Type::kWord;
    for (int step = 0; step < num_steps; ++step, first += ahead.step, second += ahead.step) {
      prefetch(first);
      prefetch(second);
    }
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) {  // 8 columns each
      const __m256i words = words_of_columns<Type>(panel + 8 * i * Type::kWord);
      const __m256i zeros = _mm256_and_si256(words, zero_bits);
      __m256i sums[kRows];
#pragma GCC unroll 8
      for (int row = 0; row < kRows; ++row) {
        const __m256i taken = Int8::broadcast(a + 4 * (kRows + row));
        sums[row] = Type::kBits == 8   ? _mm256_setzero_si256()
                    : Type::kZeroBits ? _mm256_mullo_epi32(zeros, taken)
                                      : _mm256_slli_epi32(taken, Type::kUsualZeroBit);
      }
      multiply_group<Type, kRows>(a + 4 * 2 * kRows, levels + 32 * i, num_steps, sums);
      const __m256 factors = _mm256_castsi256_ps(_mm256_andnot_si256(zero_bits, words));
#pragma GCC unroll 8
      for (int row = 0; row < kRows; ++row) {
        __m256& total = i % 2 == 0 ? totals[row][i / 2].low : totals[row][i / 2].high;
        const __m256 scale = FloatRegisters::broadcast(a + 4 * row);
        total = _mm256_fmadd_ps(_mm256_cvtepi32_ps(sums[row]), _mm256_mul_ps(factors, scale), total);
      }
    }
    panel = levels + num_steps * 4 * kPanel;
    a += group * kRows;
  }
}

// Converts 8-bit levels to floats: 16 bytes, or the lower bytes of 16 halves.
struct Int8ToFloats {
  static Floats of_bytes(__m128i levels) { return of_halves(_mm256_cvtepu8_epi16(levels)); }
  static Floats of_halves(__m256i levels) {
    const __m256i wide = _mm256_srai_epi16(_mm256_slli_epi16(levels, 8), 8);
    return to_floats({_mm256_cvtepi16_epi32(_mm256_castsi256_si128(wide)),
                      _mm256_cvtepi16_epi32(_mm256_extracti128_si256(wide, 1))});
  }
};

struct Fp8ToFloats {
  static Floats of_bytes(__m128i levels) { return of_halves(_mm256_cvtepu8_epi16(levels)); }
  static Floats of_halves(__m256i levels) {  // via half precision, whose exponents have a bias of 15
    const __m256i sign = _mm256_slli_epi16(_mm256_and_si256(levels, _mm256_set1_epi16(0x80)), 8);
    const __m256i rest = _mm256_slli_epi16(_mm256_and_si256(levels, _mm256_set1_epi16(0x7f)), 7);
    const __m256i halves = _mm256_or_si256(sign, rest);
    return mul({_mm256_cvtph_ps(_mm256_castsi256_si128(halves)), _mm256_cvtph_ps(_mm256_extracti128_si256(halves, 1))},
               floats(256.0f));
  }
};

// 16 pairs of E's values, converted from levels by ToFloats.
template <class E, class ToFloats>
typename E::Pairs load_level_pairs(const uint8_t* source) {
  if constexpr (E::kPair == 2) {
    const __m256i pairs = load_register(source);
    return {ToFloats::of_halves(_mm256_and_si256(pairs, _mm256_set1_epi16(255))),
            ToFloats::of_halves(_mm256_srli_epi16(pairs, 8))};
  } else {
    return ToFloats::of_bytes(_mm_loadu_si128(reinterpret_cast<const __m128i*>(source)));
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
