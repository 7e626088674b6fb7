// Checks that tiles compute correct results on this machine, before anything relies on them.
//
// The check runs in its own process, which an unsupported instruction kills. Products of integers must be exact;
// those of other numbers may differ by the possible rounding errors of all additions.
#pragma once

#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <cmath>
#include <cstdlib>
#include <memory>
#include <vector>

#include "gemm.h"
#include "weights.h"

namespace inflight {

// Checks rows * columns^T, converted by float_of: within `inner` roundings of the exact sums.
template <class E, class Value, class FloatOf, class Draw>
bool multiplies_right(int inner, bool is_exact, const FloatOf& float_of, const Draw& draw) {
  constexpr int kRows = kMaxTiledRows + 5, kColumns = 2 * kPanel;  // two blocks without whole tiles
  const int padded = (inner + E::kPair - 1) / E::kPair * E::kPair;
  std::vector<typename E::Stored> rows(kRows * padded), columns(kColumns * inner), packed(kColumns * padded);
  std::vector<RowOperand<E>> operand(kRows * operand_width<E>(padded));
  for (auto& value : columns) value = static_cast<typename E::Stored>(draw(true));
  for (int row = 0; row < kRows; ++row)
    for (int i = 0; i < inner; ++i) rows[row * padded + i] = static_cast<typename E::Stored>(draw(false));
  int64_t order[kColumns];
  for (int column = 0; column < kColumns; ++column) order[column] = column;
  pack<E>(columns.data(), inner, order, kColumns, inner, packed.data(), 1);
  const Tasks tasks(kRows, kColumns, 1, true);
  for (int row = 0; row < kRows; ++row)
    tasks.pack<E>(rows.data() + row * padded, padded / E::kPair, reinterpret_cast<uint32_t*>(operand.data()), row);
  bool is_right = true;
  Team team(1);
  team.deal(tasks.count(), 0);
  multiply<E>(operand.data(), tasks, Packed<E>{packed.data(), kColumns, padded}, team, 0, [](int, int64_t, int64_t) {},
              [&](int row, int panel, const auto& low, const auto& high) {
                Value sums[kPanel];
                std::memcpy(sums, &low, sizeof low);
                std::memcpy(sums + kLanes, &high, sizeof high);
                for (int i = 0; i < kPanel; ++i) {
                  double exact = 0.0, size = 0.0;
                  for (int k = 0; k < inner; ++k) {
                    const double product = float_of(rows[row * padded + k], false) *
                                           float_of(columns[(panel * kPanel + i) * inner + k], true);
                    exact += product;
                    size += std::fabs(product);
                  }
                  const double bound = is_exact ? 0.0 : inner * std::ldexp(size, -23);
                  is_right &= std::fabs(sums[i] - exact) <= bound;
                }
              });
  return is_right;
}

template <class E>
bool tiles_are_right() {
  uint32_t state = 1;
  const auto random = [&] { return (state = state * 1664525u + 1013904223u) >> 8; };
  const auto bfloat16 = [](uint16_t stored, bool) {
    const uint32_t word = static_cast<uint32_t>(stored) << 16;
    float x;
    std::memcpy(&x, &word, sizeof x);
    return static_cast<double>(x);
  };
  const auto whole = [&](bool) {  // -8 .. 8
    const float x = static_cast<float>(random() % 17) - 8.0f;
    uint32_t word;
    std::memcpy(&word, &x, sizeof word);
    return word >> 16;
  };
  const auto any = [&](bool) { return (random() % 2 ? 0x8000u : 0u) | (110 + random() % 30) << 7 | random() % 128; };
  const auto byte = [](uint8_t stored, bool is_signed) {
    return is_signed ? static_cast<double>(static_cast<int8_t>(stored)) : static_cast<double>(stored);
  };
  // If a product has more inputs than one part of a panel, sums are kept from part to part.
  for (int inner : {6, 100, static_cast<int>(kCache / 100)})
    if (!multiplies_right<E, float>(inner, true, bfloat16, whole) ||
        !multiplies_right<Int8, int32_t>(2 * inner, true, byte, [&](bool) { return random() % 256; }))
      return false;
  return multiplies_right<E, float>(100, false, bfloat16, any);
}

template <class E>
ProductCheck check_tiles() {
  if (TileInstructions::permit() != 0) return kTilesNotPermitted;
  const pid_t child = fork();
  if (child == 0) _exit(tiles_are_right<E>() ? kProductsAreRight : kProductsAreOff);
  int status = 0;
  pid_t ended = child;
  while (child > 0 && (ended = waitpid(child, &status, 0)) < 0 && errno == EINTR) continue;  // a signal interrupted it
  if (ended < 0 || !WIFEXITED(status)) return kProductsCrash;
  return WEXITSTATUS(status) == 0 ? kProductsAreRight : kProductsAreOff;
}

}  // namespace inflight
