// Weights of 4 or 8 bits in groups of inputs, each with a scale, and activations quantized by row and group. Weights are
// integers of 4 bits with a zero point for each group, 4-bit floats (e2m1), whose doubled values are integers, or
// integers of 8 bits.
//
// VNNI's unsigned operand is a level of a weight, its signed operand an activation round(x / scale), with scale = max
// |x| / 127 over the row's values of a group. A group's sum of products is exact; it starts with the zero points'
// contribution. Then it is scaled in float32 and added to the sums of the preceding groups.
//
// Layout of a panel's weights, group by group: a word for each of 32 columns, then [inputs / kAtOnce][32 columns][4
// bytes]. With 4 bits, each byte has the level of an input in its lower half and the level of the fourth input after it
// in its upper half. A word is the float32 scale. With 4-bit integers its 5 lowest bits are replaced by the zero point,
// 0 .. 16: scales of 16 bits have zeros there. 8-bit integers are stored plus 128, their zero point. Floats are
// converted to twice their value plus 16, so that they need no zero points; their scale is half a power of two, and its
// word, in bfloat16, is half as long.
//
// Layout of an operand's row, group by group: its scale, the negated sum of its levels, the levels.
#pragma once

#include "gemm.h"
#include "int8.h"

namespace inflight {

template <int kNumBits, bool kFloat = false>
struct InGroups {
  using Stored = uint8_t;
  using Operand = Stored;
  using Sums = Floats;
  static constexpr int kBits = kNumBits;
  static constexpr bool kIsFloat = kFloat;
  static constexpr int kPair = 4, kWords = 1;
  static constexpr int kOfGroup = 8;             // bytes of an operand's group besides its levels
  static constexpr int kLevels = 8 / kBits;      // of a byte
  static constexpr int kAtOnce = kPair * kLevels;  // inputs
  static constexpr int kZeroBits = kBits == 4 && !kIsFloat ? 31 : 0;
  static constexpr int kUsualZeroBit = kIsFloat ? 4 : kBits - 1;  // zero points in symmetric checkpoints are 8, or 128
  static constexpr int kWord = kIsFloat ? 2 : 4;                  // bytes
  // Number of steps of kAtOnce inputs whose products, two at a time, have sums of 16 bits.
  static constexpr int kMost = kBits == 8 ? 128 : kIsFloat ? 28 : 15;  // of a level, or its magnitude if signed
  static constexpr int kFolded = 32767 / (2 * kLevels * kMost * 127);

  // Size of a group of `size` inputs in a panel, in bytes.
  static constexpr int64_t panel_bytes(int size) { return kPanel * (kWord + size / kLevels); }
};
using Int4 = InGroups<4>;
using Float4 = InGroups<4, true>;
using GroupedInt8 = InGroups<8>;

// `inner` and `begin` count bytes of an operand's row, in whole groups.
template <int kBits, bool kIsFloat>
struct Packed<InGroups<kBits, kIsFloat>> {
  const uint8_t* data;
  int columns, inner;
  int group;  // bytes of an operand's group
  const uint8_t* panel(int index) const { return data + part_bytes(inner) * index; }
  const uint8_t* part(int index, int begin) const { return panel(index) + part_bytes(begin); }
  int64_t part_bytes(int inner) const {
    using Type = InGroups<kBits, kIsFloat>;
    return inner / group * Type::panel_bytes(group - Type::kOfGroup);
  }
  int whole(int inner) const { return (inner + group - 1) / group * group; }
};

// Quantizes one row, `groups` of `size` inputs, of which the last may extend beyond the row; `order` gives the source
// index of each value if they are permuted.
template <class E>
void quantize_groups(const typename E::Stored* source, int count, const int32_t* order, int groups, int size,
                     uint8_t* target, typename E::Stored* scratch) {
  if (order) {
    for (int i = 0; i < count; ++i) scratch[i] = source[order[i]];
    source = scratch;
  }
  for (int group = 0; group < groups; ++group, source += size, count -= size) {
    const int here = std::min(size, count);
    const float most = largest_magnitude<E>(source, here), scale = most / 127.0f;
    const Floats factor = floats(most > 0 ? 127.0f / most : 0.0f);
    Ints total = ints(0);
    auto* levels = target + Int4::kOfGroup;
    for (int i = 0; i < size; i += kLanes) {
      const Ints q = to_ints(mul(E::load(source + i, first_lanes(here - i)), factor));
      total = add(total, q);
      store_bytes(levels + i, q, first_lanes(size - i));
    }
    const int32_t sum = -sum_of(total);
    std::memcpy(target, &scale, sizeof scale);
    std::memcpy(target + sizeof scale, &sum, sizeof sum);
    target += Int4::kOfGroup + size;
  }
}

template <int kRows, int kBits, bool kIsFloat, class Done>
inline void run_rows(const uint8_t* block, int row, const Packed<InGroups<kBits, kIsFloat>>& w, int panel,
                     const Part& part, const Ahead& ahead, Floats (*waiting)[2], const Done& done) {
  if (part.begin == 0)
    for (int i = 0; i < kRows; ++i) waiting[i][0] = waiting[i][1] = floats(0.0f);
  multiply_groups<InGroups<kBits, kIsFloat>, kRows>(block + static_cast<int64_t>(part.begin) * kRows,
                                                    w.part(panel, part.begin), part.end - part.begin, w.group, ahead,
                                                    waiting);
  if (part.end == part.inner)
    for (int i = 0; i < kRows; ++i) done(row + i, panel, waiting[i][0], waiting[i][1]);
}

// Unpacks one column as a row of `width` numbers.
template <class E>
void unpack_column(const Packed<GroupedInt8>& w, int64_t column, int width, typename E::Stored* out) {
  const int size = w.group - GroupedInt8::kOfGroup;
  const int64_t lane = column % kPanel;
  const uint8_t* group = w.panel(static_cast<int>(column / kPanel));
  for (int begin = 0; begin < width; begin += size, group += GroupedInt8::panel_bytes(size)) {
    float scale;
    std::memcpy(&scale, group + GroupedInt8::kWord * lane, sizeof scale);
    const uint8_t* levels = group + kPanel * GroupedInt8::kWord + 4 * lane;
    for (int i = 0; i < size; i += kLanes) {
      float numbers[kLanes] = {};
      for (int k = i; k < std::min(size, i + kLanes); ++k)
        numbers[k - i] = scale * static_cast<float>(levels[k / 4 * 4 * kPanel + k % 4] - 128);
      E::store(out + begin + i, inflight::load(numbers), first_lanes(std::min(size, width - begin) - i));
    }
  }
}

// Packs levels 0 .. 15, the bits of floats, or int8, [rows, inner], and words of 4 bytes [rows, groups] to panels as
// above; order[i] is the source row of column i, negative for zeros. Values after the last input have no effect, because
// the corresponding activations are zero.
template <class Type>
void pack_groups(const uint8_t* levels, const uint32_t* words, const int64_t* order, int columns, int inner, int groups,
                 int size, uint8_t* target, int num_threads) {
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
          // bfloat16 has the last bytes of float32.
          std::memcpy(out + Type::kWord * lane, reinterpret_cast<const char*>(&word + 1) - Type::kWord, Type::kWord);
          out += Type::kWord * kPanel;
          for (int k = group * size; k < (group + 1) * size; k += Type::kAtOnce, out += 4 * kPanel)
            for (int i = 0; i < 4; ++i) {
              const auto level = [&](int at) { return from < 0 || at >= inner ? 0 : levels[from * inner + at]; };
              out[4 * lane + i] = static_cast<uint8_t>(Type::kBits == 8 ? level(k + i) ^ 128
                                                                        : level(k + i) | level(k + 4 + i) << 4);
            }
        }
      }
  });
}

}  // namespace inflight
