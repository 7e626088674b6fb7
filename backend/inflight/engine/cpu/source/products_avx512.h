// The products of products.h in AVX-512, with dpbf16ps for bfloat16 and vpdpbusd (VNNI) for int8 and 4 bits.
#pragma once

#include <immintrin.h>

#include "lanes.h"

namespace inflight {

constexpr int kMaxRows = 12;  // per micro-kernel: 24 accumulators in the 32 registers
constexpr int kFewRows = 6;   // at most, one micro-kernel takes them all while it waits for memory
constexpr int kMaxRowsOfTask = 240;    // as many as stay in a core's second-level cache from panel to panel
constexpr int64_t kCache = 640 << 10;  // part of a core's second-level cache that two parts of panels may take

// For attention: query vectors scored together, groups of keys scored with them, and vectors and registers of values
// summed together.
constexpr int kScoredRows = 12;
constexpr int scored_groups(int rows) { return rows <= 4 ? 4 : 2; }
constexpr int kSummedRows = 6, kSummedParts = 4;
constexpr int kGroupsInCache = 16;        // groups of keys kept in the cache while a tile's rows are processed
constexpr bool kFetchesValues = true;  // while keys are scored

constexpr int kRowsAtOnce = 4;  // rows of one LoRA adapter at a time

struct BfloatPairs {
  using Stored = uint16_t;
  using Operand = Stored;
  using Pairs = __m512;
  using Sums = Floats;
  static constexpr int kPair = 2, kWords = 1;

  static Sums zero() { return floats(0.0f); }
  // A register of 16 consecutive pairs of a packed operand.
  static Pairs load_pairs(const Stored* source) { return _mm512_loadu_ps(source); }
  static Pairs load_pairs(const Stored* source, Mask mask) { return _mm512_maskz_loadu_ps(mask, source); }
  // One pair in every lane.
  static Pairs broadcast_pair(const Stored* source) {
    int32_t pair;
    std::memcpy(&pair, source, sizeof pair);
    return _mm512_castsi512_ps(_mm512_set1_epi32(pair));
  }
  // Operands of attention's two products: queries, and the softmax's weights of the values.
  static void load_operand(Operand* target, const Stored* source, int count) {
    std::memcpy(target, source, count * sizeof *target);
  }
  static void store_operand(Operand* target, Floats values) { store_bfloat16(target, values); }
  static Pairs broadcast_operand(const Operand* source) { return broadcast_pair(source); }
  static Sums multiply_add(Sums total, Pairs a, Pairs b) {
    return _mm512_dpbf16_ps(total, reinterpret_cast<__m512bh>(a), reinterpret_cast<__m512bh>(b));
  }
};

using FloatPairs = LoneFloats;

struct Int8 {
  using Stored = uint8_t;  // of activations; weights are int8_t in the same places
  using Operand = Stored;
  using Pairs = __m512i;
  using Sums = Ints;
  static constexpr int kPair = 4, kWords = 1;
  static constexpr int kOffset = 128;  // of activations

  static Sums zero() { return _mm512_setzero_si512(); }
  static Pairs load_pairs(const Stored* source) { return _mm512_loadu_si512(source); }
  static Pairs broadcast_pair(const Stored* source) {
    int32_t quad;
    std::memcpy(&quad, source, sizeof quad);
    return _mm512_set1_epi32(quad);
  }
  static Sums multiply_add(Sums total, Pairs a, Pairs b) {  // otherwise GCC 12 keeps the intrinsic's sums in memory
    asm("vpdpbusd %2, %1, %0" : "+v"(total) : "v"(a), "v"(b));
    return total;
  }
};

// Returns the word of a pair that packed activations have in place `index`.
template <class E>
uint32_t word_of(uint32_t pair, int) {
  return pair;
}

// sums[row][half] += a block's row * panel. The order of a sum does not depend on kRows: a row's result does not
// depend on other rows.
template <class E, int kRows>
inline __attribute__((always_inline)) void multiply_panel(const typename E::Operand* a,
                                                          const typename E::Stored* panel, int inner,
                                                          const Ahead& ahead, typename E::Sums (&sums)[kRows][2]) {
  constexpr int kStep = kPanel * E::kPair;
  const char *first = ahead.first, *second = ahead.second;
  for (int k = 0; k < inner; k += E::kPair, panel += kStep, a += kRows * E::kPair) {
    prefetch(first);
    prefetch(second);
    first += ahead.step;
    second += ahead.step;
    const typename E::Pairs b0 = E::load_pairs(panel), b1 = E::load_pairs(panel + kStep / 2);
#pragma GCC unroll 16
    for (int row = 0; row < kRows; ++row) {
      const typename E::Pairs x = E::broadcast_pair(a + row * E::kPair);
      sums[row][0] = E::multiply_add(sums[row][0], x, b0);
      sums[row][1] = E::multiply_add(sums[row][1], x, b1);
    }
  }
}

// Loads the words of 16 columns; words of floats are widened to the length of words of integers.
template <class Type>
__m512i words_of_columns(const uint8_t* words) {
  if constexpr (!Type::kIsFloat) return _mm512_loadu_si512(words);
  return _mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_epi16(words)), 16);
}

// Converts one of the levels of each byte to VNNI's unsigned operand.
template <class Type>
__m512i levels_of(__m512i bytes, int index) {
  if constexpr (Type::kBits == 8) return bytes;
  bytes = _mm512_and_si512(index == 0 ? bytes : _mm512_srli_epi16(bytes, 4), _mm512_set1_epi8(15));
  if constexpr (!Type::kIsFloat) return bytes;
  const __m128i table = _mm_setr_epi8(16, 17, 18, 19, 20, 22, 24, 28, 16, 15, 14, 13, 12, 10, 8, 4);
  return _mm512_shuffle_epi8(_mm512_broadcast_i32x4(table), bytes);
}

// Like `multiply_panel`, for the layout of groups.h; `totals` keeps sums until their panel's next part.
template <class Type, int kRows>
inline __attribute__((always_inline)) void multiply_groups(const uint8_t* a, const uint8_t* panel, int inner, int group,
                                                           const Ahead& ahead, __m512 (*totals)[2]) {
  constexpr int kColumns = 4 * kLanes;  // bytes of 16 columns
  const __m512i zero_bits = _mm512_set1_epi32(Type::kZeroBits);
  const char *first = ahead.first, *second = ahead.second;
  for (int begin = 0; begin < inner; begin += group) {
    const __m512i words0 = words_of_columns<Type>(panel);
    const __m512i words1 = words_of_columns<Type>(panel + kLanes * Type::kWord);
    const uint8_t* scales = a;
    __m512i sums[kRows][2];
    const __m512i zeros0 = _mm512_and_si512(words0, zero_bits), zeros1 = _mm512_and_si512(words1, zero_bits);
    const __m512i usual = _mm512_set1_epi32(1 << Type::kUsualZeroBit);
    if (!Type::kZeroBits || (_mm512_cmpneq_epi32_mask(zeros0, usual) | _mm512_cmpneq_epi32_mask(zeros1, usual)) == 0) {
#pragma GCC unroll 16
      for (int row = 0; row < kRows; ++row)
        sums[row][0] = sums[row][1] =
            _mm512_slli_epi32(Int8::broadcast_pair(a + 4 * (kRows + row)), Type::kUsualZeroBit);
    } else {
#pragma GCC unroll 16
      for (int row = 0; row < kRows; ++row) {
        const __m512i taken = Int8::broadcast_pair(a + 4 * (kRows + row));
        sums[row][0] = _mm512_mullo_epi32(zeros0, taken);
        sums[row][1] = _mm512_mullo_epi32(zeros1, taken);
      }
    }
    panel += kPanel * Type::kWord;
    a += 4 * 2 * kRows;
    for (int k = Type::kOfGroup; k < group; k += Type::kAtOnce, panel += 2 * kColumns) {
      prefetch(first);
      prefetch(second);
      first += ahead.step;
      second += ahead.step;
      const __m512i both0 = _mm512_loadu_si512(panel), both1 = _mm512_loadu_si512(panel + kColumns);
#pragma GCC unroll 2
      for (int index = 0; index < Type::kLevels; ++index, a += 4 * kRows) {
        const __m512i b0 = levels_of<Type>(both0, index), b1 = levels_of<Type>(both1, index);
#pragma GCC unroll 16
        for (int row = 0; row < kRows; ++row) {
          const __m512i x = Int8::broadcast_pair(a + 4 * row);
          sums[row][0] = Int8::multiply_add(sums[row][0], b0, x);
          sums[row][1] = Int8::multiply_add(sums[row][1], b1, x);
        }
      }
    }
    asm volatile("" : "+r"(totals) : : "memory");  // otherwise GCC 12 stores them twice
    const __m512 factors0 = _mm512_castsi512_ps(_mm512_andnot_si512(zero_bits, words0));
    const __m512 factors1 = _mm512_castsi512_ps(_mm512_andnot_si512(zero_bits, words1));
#pragma GCC unroll 16
    for (int row = 0; row < kRows; ++row) {
      float scale;
      std::memcpy(&scale, scales + 4 * row, sizeof scale);
      const __m512 of_row = _mm512_set1_ps(scale);
      totals[row][0] =
          _mm512_fmadd_ps(_mm512_cvtepi32_ps(sums[row][0]), _mm512_mul_ps(factors0, of_row), totals[row][0]);
      totals[row][1] =
          _mm512_fmadd_ps(_mm512_cvtepi32_ps(sums[row][1]), _mm512_mul_ps(factors1, of_row), totals[row][1]);
    }
  }
}

// Converts 8-bit levels to floats, or to pairs of bfloat16.
struct Int8ToFloats {
  static __m512 to_float(__m128i levels) { return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(levels)); }
  static __m512 to_bfloat16(__m256i levels) {
    return to_bfloat16(_mm256_castsi256_si128(levels), _mm256_extracti128_si256(levels, 1));
  }
  static __m512 to_bfloat16(const uint8_t* source) {
    return to_bfloat16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(source)),
                       _mm_loadu_si128(reinterpret_cast<const __m128i*>(source + kLanes)));
  }
  static __m512 to_bfloat16(__m128i low, __m128i high) {
    return reinterpret_cast<__m512>(_mm512_cvtne2ps_pbh(to_float(high), to_float(low)));
  }
};

struct Fp8ToFloats {
  static __m512 to_float(__m128i levels) {  // via half precision, whose exponents have a bias of 15
    const __m256i wide = _mm256_cvtepu8_epi16(levels);
    const __m256i sign = _mm256_slli_epi16(_mm256_and_si256(wide, _mm256_set1_epi16(0x80)), 8);
    const __m256i rest = _mm256_slli_epi16(_mm256_and_si256(wide, _mm256_set1_epi16(0x7f)), 7);
    return _mm512_mul_ps(_mm512_cvtph_ps(_mm256_or_si256(sign, rest)), _mm512_set1_ps(256.0f));
  }
  static __m512 to_bfloat16(const uint8_t* source) {
    return to_bfloat16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(source)));
  }
  static __m512 to_bfloat16(__m256i levels) {
    const __m512i wide = _mm512_cvtepu8_epi16(levels);
    const __m512i rest = _mm512_and_si512(_mm512_slli_epi16(wide, 4), _mm512_set1_epi16(0x7f0));
    const __m512i normal = _mm512_add_epi16(rest, _mm512_set1_epi16(120 << 7));
    const __mmask32 is_small = _mm512_testn_epi16_mask(rest, _mm512_set1_epi16(0x780));
    // The subnormal values, multiples of 2^-9.
    const __m512i small = _mm512_broadcast_i32x4(_mm_setr_epi16(
        0, 0x3b00, 0x3b80, 0x3bc0, 0x3c00, 0x3c20, 0x3c40, 0x3c60));
    const __m512i positive = _mm512_mask_permutexvar_epi16(normal, is_small, wide, small);
    constexpr int kFirstOrBoth = 0xf8;  // positive | (sign & 0x8000)
    return _mm512_castsi512_ps(_mm512_ternarylogic_epi32(positive, _mm512_slli_epi16(wide, 8),
                                                         _mm512_set1_epi16(-0x8000), kFirstOrBoth));
  }
};

// 16 pairs of E's values, converted from levels by ToFloats.
template <class E, class ToFloats>
typename E::Pairs load_level_pairs(const uint8_t* source) {
  if constexpr (E::kPair == 2)
    return ToFloats::to_bfloat16(source);
  else
    return ToFloats::to_float(_mm_loadu_si128(reinterpret_cast<const __m128i*>(source)));
}
template <class E, class ToFloats>
typename E::Pairs load_level_pairs(const uint8_t* source, Mask mask) {
  if constexpr (E::kPair == 2)
    return ToFloats::to_bfloat16(_mm256_maskz_loadu_epi16(mask, source));
  else
    return ToFloats::to_float(_mm_maskz_loadu_epi8(mask, source));
}

}  // namespace inflight
