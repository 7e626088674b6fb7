// Products of bfloat16 and int8 with AMX's tiles. Weights have the layout of other targets: 16 pairs of 16 columns
// are a tile. Rows have another layout: in a block of rows, the 16 pairs of a tile are side by side, row by row, and
// rows are padded with zeros to whole tiles.
//
// Tiles multiply any number of rows, even one: they sum bfloat16 in another order than dpbf16ps does. A tile's
// instruction sums up the first of each of its 16 pairs, and the second of each, both from zero, and then adds both
// to the previous sum. It does so for each row separately, so that a row's result does not depend on other rows.
#pragma once

#include <algorithm>
#include <type_traits>

#include "amx.h"

namespace inflight {

template <class E>
constexpr bool kByTiles = std::is_base_of_v<BfloatPairs, E> || std::is_same_v<E, Int8>;

constexpr int kMaxTiledRows = 2 * kTileRows;  // of a block: two tiles of rows and two of columns, four of sums

// The tiles of a thread, released when this object is destroyed.
class Tiles {
 public:
  Tiles() = default;
  Tiles(const Tiles&) = delete;
  Tiles& operator=(const Tiles&) = delete;
  ~Tiles() {
    if (rows_) TileInstructions::release();
  }

  // Computes sums [rows][2 of 16 columns] = rows * a panel, or adds to them, over `inner` values, in whole tiles unless
  // they are the last values.
  template <class E>
  void multiply(const typename E::Stored* a, int rows, const typename E::Stored* panel, int inner, bool is_first,
                Ahead ahead, typename E::Sums (*sums)[2]) {
    using T = TileInstructions;
    constexpr int kStep = kTileRows * E::kPair;  // values
    constexpr int64_t kStride = 2 * kTileBytes;  // of a panel's pairs, and of sums
    static_assert(sizeof *sums == kStride);
    const int own = std::min(rows, kTileRows), more = rows - own;
    set_rows(rows);
    if (is_first) {
      T::zero<0>(), T::zero<1>();
      if (more) T::zero<2>(), T::zero<3>();
    } else {
      T::load<0>(&sums[0][0], kStride), T::load<1>(&sums[0][1], kStride);
      if (more) T::load<2>(&sums[own][0], kStride), T::load<3>(&sums[own][1], kStride);
    }
    for (int k = 0; k < inner; k += kStep, a += rows * kStep, panel += kPanel * kStep) {
      fetch(ahead);
      alignas(64) typename E::Stored filled[kPanel * kStep];
      const typename E::Stored* columns = panel;
      if (inner - k < kStep) {
        std::memcpy(filled, panel, kPanel * (inner - k) * sizeof *panel);
        std::memset(filled + kPanel * (inner - k), 0, kPanel * (k + kStep - inner) * sizeof *panel);
        columns = filled;
      }
      T::load<6>(columns, kStride);
      T::load<7>(columns + kStep, kStride);
      T::load<4>(a, kTileBytes);
      add<E, 0, 4, 6>();
      add<E, 1, 4, 7>();
      if (!more) continue;
      T::load<5>(a + own * kStep, kTileBytes);
      add<E, 2, 5, 6>();
      add<E, 3, 5, 7>();
    }
    T::store<0>(&sums[0][0], kStride), T::store<1>(&sums[0][1], kStride);
    if (more) T::store<2>(&sums[own][0], kStride), T::store<3>(&sums[own][1], kStride);
  }

 private:
  template <class E, int kSums, int kRows, int kColumns>
  static void add() {
    if constexpr (std::is_same_v<E, Int8>)
      TileInstructions::multiply_bytes<kSums, kRows, kColumns>();
    else
      TileInstructions::multiply_bfloat16<kSums, kRows, kColumns>();
  }

  void set_rows(int rows) {
    if (rows == rows_) return;
    TileConfig config;
    const int own = std::min(rows, kTileRows), more = rows - own;
    for (int tile : {0, 1, 4}) config.set(tile, own);
    for (int tile : {2, 3, 5}) config.set(tile, more);
    for (int tile : {6, 7}) config.set(tile, kTileRows);
    TileInstructions::configure(config);
    rows_ = rows;
  }

  static void fetch(Ahead& ahead) {
    for (int pair = 0; ahead.step && pair < kTileRows; ++pair, ahead.first += ahead.step, ahead.second += ahead.step) {
      prefetch(ahead.first);
      prefetch(ahead.second);
    }
  }

  int rows_ = 0;  // for which tiles are configured; 0: not configured
};

}  // namespace inflight
