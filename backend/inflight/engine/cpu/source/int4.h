// 4-bit weights in groups of inputs, each with a scale and a zero point, and activations quantized by row and group.
// They are whole numbers, or 4-bit floats (e2m1) of which twice the value is one.
//
// A level of 0 .. 15 is VNNI's unsigned operand as it is, an activation round(x / scale) its signed one, with scale =
// max |x| / 127 over the row's values of a group. A group's sum of products is exact; what zero points take away is
// where it begins. Then it is scaled, in float32, and added to the sums of the groups before.
//
// Weights of a panel, group by group: a word for each of 32 columns, then [inputs / 8][32 columns][4 bytes], of which
// each has the level of an input in its lower half and that of the fourth input behind it in its upper half. A word is
// the float32 scale, its 5 lowest bits being the zero point, 0 .. 16: scales of 16 bits have zeros there. Floats are
// looked up as what they are twice and 16 more, so that they need no zero points; their scale is half a power of two,
// and its word, in bfloat16, half as long.
//
// An operand's row, group by group: its scale, the sum of its levels with the sign turned, the levels.
#pragma once

#include "gemm.h"
#include "int8.h"

namespace inflight {

template <bool kIsFloat>
struct FourBits {
  using Stored = uint8_t;
  using Sums = __m512;
  static constexpr int kPair = 4;
  static constexpr int kOfGroup = 8;  // bytes of an operand's group beside its levels
  static constexpr int kAtOnce = 8;   // inputs
  static constexpr int kUsualZeroBit = kIsFloat ? 4 : 3;  // zero points of symmetric checkpoints are 8
  static constexpr int kWord = kIsFloat ? 2 : 4;          // bytes

  static Sums zero() { return _mm512_setzero_ps(); }

  // The words of 16 columns, as long as those of whole numbers.
  static __m512i load_words(const uint8_t* words) {
    if constexpr (!kIsFloat) return _mm512_loadu_si512(words);
    return _mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_epi16(words)), 16);
  }

  // Bytes of a panel's group of so many inputs.
  static constexpr int64_t panel_bytes(int size) { return kPanel * (kWord + size / 2); }

  // VNNI's unsigned operand of what is in the lower half of each byte.
  static __m512i levels(__m512i bytes) {
    bytes = _mm512_and_si512(bytes, _mm512_set1_epi8(15));
    if constexpr (!kIsFloat) return bytes;
    const __m128i table = _mm_setr_epi8(16, 17, 18, 19, 20, 22, 24, 28, 16, 15, 14, 13, 12, 10, 8, 4);
    return _mm512_shuffle_epi8(_mm512_broadcast_i32x4(table), bytes);
  }
};
using Int4 = FourBits<false>;
using Float4 = FourBits<true>;

constexpr int kZeroBits = 31;

// `inner` and `begin` count bytes of an operand's row, in whole groups.
template <bool kIsFloat>
struct Packed<FourBits<kIsFloat>> {
  const uint8_t* data;
  int columns, inner;
  int group;  // bytes of an operand's group
  const uint8_t* panel(int index) const { return data + part_bytes(inner) * index; }
  const uint8_t* part(int index, int begin) const { return panel(index) + part_bytes(begin); }
  int64_t part_bytes(int inner) const {
    using Type = FourBits<kIsFloat>;
    return inner / group * Type::panel_bytes(group - Type::kOfGroup);
  }
  int whole(int inner) const { return (inner + group - 1) / group * group; }
};

// One row, `groups` of `size` inputs, of which the last may lie behind its end; `order` says which value each is, if
// not the one in its place.
template <class E>
void quantize_groups(const typename E::Stored* source, int count, const int32_t* order, int groups, int size,
                     uint8_t* target, typename E::Stored* scratch) {
  if (order) {
    for (int i = 0; i < count; ++i) scratch[i] = source[order[i]];
    source = scratch;
  }
  for (int group = 0; group < groups; ++group, source += size, count -= size) {
    const int here = std::min(size, count);
    __m512 largest = _mm512_setzero_ps();
    __mmask16 no_number = 0;
    for (int i = 0; i < here; i += kLanes) {
      const __m512 x = E::load(source + i, first_lanes(here - i));
      no_number |= _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q);
      largest = _mm512_max_ps(largest, _mm512_abs_ps(x));
    }
    const float most = _mm512_reduce_max_ps(largest);
    const float scale = no_number ? std::numeric_limits<float>::quiet_NaN() : most / 127.0f;
    const __m512 factor = _mm512_set1_ps(most > 0 ? 127.0f / most : 0.0f);
    __m512i total = _mm512_setzero_si512();
    auto* levels = target + Int4::kOfGroup;
    for (int i = 0; i < size; i += kLanes) {
      const __m512i q = _mm512_cvtps_epi32(_mm512_mul_ps(E::load(source + i, first_lanes(here - i)), factor));
      total = _mm512_add_epi32(total, q);
      _mm_mask_storeu_epi8(levels + i, first_lanes(size - i), _mm512_cvtepi32_epi8(q));
    }
    const int32_t sum = -_mm512_reduce_add_epi32(total);
    std::memcpy(target, &scale, sizeof scale);
    std::memcpy(target + sizeof scale, &sum, sizeof sum);
    target += Int4::kOfGroup + size;
  }
}

// As the other types' in gemm.h; `totals` are where they wait for their panel's next part.
template <int kRows, bool kIsFloat>
inline __attribute__((always_inline)) void multiply_groups(const uint8_t* a, const uint8_t* panel, int inner, int group,
                                                           const Ahead& ahead, __m512 (*totals)[2]) {
  using Type = FourBits<kIsFloat>;
  constexpr int kColumns = 4 * kLanes;  // bytes of 16 columns
  const __m512i zero_bits = _mm512_set1_epi32(kZeroBits);
  const char *first = ahead.first, *second = ahead.second;
  for (int begin = 0; begin < inner; begin += group) {
    const __m512i words0 = Type::load_words(panel), words1 = Type::load_words(panel + kLanes * Type::kWord);
    const uint8_t* scales = a;
    __m512i sums[kRows][2];
    const __m512i zeros0 = _mm512_and_si512(words0, zero_bits), zeros1 = _mm512_and_si512(words1, zero_bits);
    const __m512i usual = _mm512_set1_epi32(1 << Type::kUsualZeroBit);
    if (kIsFloat || (_mm512_cmpneq_epi32_mask(zeros0, usual) | _mm512_cmpneq_epi32_mask(zeros1, usual)) == 0) {
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
    for (int k = Type::kOfGroup; k < group; k += Type::kAtOnce, panel += 2 * kColumns, a += 4 * 2 * kRows) {
      _mm_prefetch(first, _MM_HINT_T1);
      _mm_prefetch(second, _MM_HINT_T1);
      first += ahead.step;
      second += ahead.step;
      const __m512i both0 = _mm512_loadu_si512(panel), both1 = _mm512_loadu_si512(panel + kColumns);
      __m512i b0 = Type::levels(both0), b1 = Type::levels(both1);
#pragma GCC unroll 16
      for (int row = 0; row < kRows; ++row) {
        const __m512i x = Int8::broadcast_pair(a + 4 * row);
        sums[row][0] = Int8::multiply_add(sums[row][0], b0, x);
        sums[row][1] = Int8::multiply_add(sums[row][1], b1, x);
      }
      b0 = Type::levels(_mm512_srli_epi16(both0, 4));
      b1 = Type::levels(_mm512_srli_epi16(both1, 4));
#pragma GCC unroll 16
      for (int row = 0; row < kRows; ++row) {
        const __m512i x = Int8::broadcast_pair(a + 4 * (kRows + row));
        sums[row][0] = Int8::multiply_add(sums[row][0], b0, x);
        sums[row][1] = Int8::multiply_add(sums[row][1], b1, x);
      }
    }
    asm volatile("" : "+r"(totals) : : "memory");  // else GCC 12 stores them twice
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

template <int kRows, bool kIsFloat, class Done>
inline void run_rows(const uint8_t* block, int row, const Packed<FourBits<kIsFloat>>& w, int panel, const Part& part,
                     const Ahead& ahead, __m512 (*waiting)[2], const Done& done) {
  if (part.begin == 0)
    for (int i = 0; i < kRows; ++i) waiting[i][0] = waiting[i][1] = _mm512_setzero_ps();
  multiply_groups<kRows, kIsFloat>(block + static_cast<int64_t>(part.begin) * kRows, w.part(panel, part.begin),
                                   part.end - part.begin, w.group, ahead, waiting);
  if (part.end == part.inner)
    for (int i = 0; i < kRows; ++i) done(row + i, panel, waiting[i][0], waiting[i][1]);
}

// Levels 0 .. 15, of floats their bits, [rows, inner], and words of 4 bytes [rows, groups] to panels as above; order[i]
// is the source row of column i, negative for zeros. What lies behind the last input is zero, as are the activations
// that it is multiplied by.
template <bool kIsFloat>
void pack_four_bits(const uint8_t* levels, const uint32_t* words, const int64_t* order, int columns, int inner,
                    int groups, int size, uint8_t* target, int num_threads) {
  using Type = FourBits<kIsFloat>;
  const int panels = (columns + kPanel - 1) / kPanel;
  const int64_t panel_bytes = groups * Type::panel_bytes(size);
  in_parallel(num_threads, [&](int thread, int num) {
    const Share share(panels, thread, num);
    for (auto panel = static_cast<int>(share.begin); panel < share.end; ++panel)
      for (int lane = 0; lane < kPanel; ++lane) {
        const int column = panel * kPanel + lane;
        const int64_t from = column < columns ? order[column] : -1;
        uint8_t* out = target + panel * panel_bytes;
        for (int group = 0; group < groups; ++group) {
          const uint32_t word = from < 0 ? 0 : words[from * groups + group];
          // Of bfloat16 the bytes that float32 has at the end of its own.
          std::memcpy(out + Type::kWord * lane, reinterpret_cast<const char*>(&word + 1) - Type::kWord, Type::kWord);
          out += Type::kWord * kPanel;
          for (int k = group * size; k < (group + 1) * size; k += Type::kAtOnce, out += 4 * kPanel)
            for (int i = 0; i < 4; ++i) {
              const auto level = [&](int at) { return from < 0 || at >= inner ? 0 : levels[from * inner + at]; };
              out[4 * lane + i] = static_cast<uint8_t>(level(k + i) | level(k + 4 + i) << 4);
            }
        }
      }
  });
}

}  // namespace inflight
