// Products of activations and packed weights: out[rows, columns] = a[rows, inner] * w[columns, inner]^T.
//
// Weights are packed once, into panels of 32 columns: panel p is [inner / pair][32][pair], contiguous, so that a
// thread reads its panels as one stream whatever the number of rows is. One copy serves one row (memory bound) and
// many (compute bound: 12 x 32 accumulators in registers). Activations are packed for each product, into blocks of up
// to 12 rows, [inner / pair][rows of the block][pair]: rows that lie a power of two apart would share a few lines of
// the cache. A pair has four bytes, whatever the type.
#pragma once

#include <algorithm>

#include "element.h"

namespace inflight {

constexpr int kPanel = 32;
constexpr int kMaxRows = 12;  // of one micro-kernel: 24 accumulators of the 32 registers
constexpr int kPrefetch = 4096;      // bytes ahead
constexpr int64_t kCache = 640 << 10;  // of a core's second-level cache, what two panels may take

template <class E>
struct Packed {
  const typename E::Stored* data;
  int columns;  // of the whole matrix
  int inner;    // padded to whole pairs
  const typename E::Stored* panel(int index) const {
    return data + static_cast<int64_t>(index) * inner * kPanel;
  }
  int num_panels() const { return (columns + kPanel - 1) / kPanel; }
};

// Rows in blocks of nearly equal size: 13 are 7 and 6, not 12 and 1.
struct RowBlocks {
  explicit RowBlocks(int64_t rows) : rows(rows), count((rows + kMaxRows - 1) / kMaxRows) {}
  int64_t begin(int64_t block) const { return rows * block / count; }
  int64_t of(int64_t row) const { return ((row + 1) * count - 1) / rows; }

  const int64_t rows, count;
};

// Packs a row of `num_pairs` pairs.
inline void pack_row(const void* source, int64_t num_pairs, void* packed, const RowBlocks& blocks, int64_t row) {
  const int64_t block = blocks.of(row), begin = blocks.begin(block), step = blocks.begin(block + 1) - begin;
  const auto* from = static_cast<const char*>(source);
  char* to = static_cast<char*>(packed) + 4 * (begin * num_pairs + (row - begin));
  for (int64_t i = 0; i < num_pairs; ++i) std::memcpy(to + 4 * i * step, from + 4 * i, 4);
}

// What is read next: a kernel asks for 128 bytes of it with every pair.
struct Ahead {
  const char* data;
  int step;
};

// sums[row][half] = a block's row * panel. A sum is made in the same order whatever kRows is: what a row gives depends
// on no other row.
template <class E, int kRows>
inline __attribute__((always_inline)) void multiply_panel(const typename E::Stored* a,
                                                          const typename E::Stored* panel, int inner,
                                                          const Ahead& ahead, typename E::Sums (&sums)[kRows][2]) {
  constexpr int kStep = kPanel * E::kPair;
#pragma GCC unroll 16
  for (int row = 0; row < kRows; ++row) sums[row][0] = sums[row][1] = E::zero();
  const char* next = ahead.data;
  for (int k = 0; k < inner; k += E::kPair, panel += kStep, a += kRows * E::kPair) {
    _mm_prefetch(next, _MM_HINT_T1);
    _mm_prefetch(next + 64, _MM_HINT_T1);
    next += ahead.step;
    const typename E::Pairs b0 = E::load_pairs(panel), b1 = E::load_pairs(panel + kStep / 2);
#pragma GCC unroll 16
    for (int row = 0; row < kRows; ++row) {
      const typename E::Pairs x = E::broadcast_pair(a + row * E::kPair);
      sums[row][0] = E::multiply_add(sums[row][0], x, b0);
      sums[row][1] = E::multiply_add(sums[row][1], x, b1);
    }
  }
}

// Calls done(row, panel index, low 16 sums, high 16 sums) for the rows of one block and one panel.
template <class E, int kRows, class Done>
inline void run_rows(const typename E::Stored* block, int row, const Packed<E>& w, int panel, const Ahead& ahead,
                     const Done& done) {
  typename E::Sums sums[kRows][2];
  multiply_panel<E, kRows>(block, w.panel(panel), w.inner, ahead, sums);
#pragma GCC unroll 16
  for (int i = 0; i < kRows; ++i) done(row + i, panel, sums[i][0], sums[i][1]);
}

template <class E, class Done>
void run_panel(const typename E::Stored* a, const RowBlocks& blocks, int64_t first, int64_t last, const Packed<E>& w,
               int panel, const Done& done) {
  // The first block of rows is multiplied as the panel comes from memory; while the second is, memory brings the next
  // panel, as far as the core's cache has room for it.
  const char* data = reinterpret_cast<const char*>(w.panel(panel));
  const int64_t bytes = static_cast<int64_t>(w.inner) * kPanel * sizeof(typename E::Stored);
  constexpr int kStep = kPanel * 4;
  const Ahead this_panel{data + kPrefetch, kStep}, next_panel{data + bytes, kStep}, nothing{data, 0};
  const Ahead& meanwhile = 2 * bytes <= kCache ? next_panel : nothing;
  for (int64_t block = first; block < last; ++block) {
    const Ahead& ahead = block == first ? this_panel : block == first + 1 ? meanwhile : nothing;
    const int row = static_cast<int>(blocks.begin(block));
    const typename E::Stored* rows = a + static_cast<int64_t>(row) * w.inner;
    switch (blocks.begin(block + 1) - row) {
#define INFLIGHT_ROWS(n) \
  case n:                \
    run_rows<E, n>(rows, row, w, panel, ahead, done); \
    break;
      INFLIGHT_ROWS(1) INFLIGHT_ROWS(2) INFLIGHT_ROWS(3) INFLIGHT_ROWS(4) INFLIGHT_ROWS(5) INFLIGHT_ROWS(6)
      INFLIGHT_ROWS(7) INFLIGHT_ROWS(8) INFLIGHT_ROWS(9) INFLIGHT_ROWS(10) INFLIGHT_ROWS(11) INFLIGHT_ROWS(12)
#undef INFLIGHT_ROWS
    }
  }
}

// The whole product of packed rows; called by every thread of a team, without a barrier at the end.
//
// Each thread has a run of panels. Where there are too few panels for the threads, rows are divided too. Blocks of rows
// are taken by so many that they stay in a core's cache from panel to panel.
template <class E, class Done>
void multiply(const typename E::Stored* a, const RowBlocks& blocks, const Packed<E>& w, int thread, int num_threads,
              const Done& done) {
  constexpr int64_t kBlocksAtOnce = 20;
  const int panels = w.num_panels();
  const int64_t row_parts = panels >= 2 * num_threads ? 1 : std::min<int64_t>(num_threads, blocks.count);
  const int64_t num_tasks = panels * row_parts;
  const int64_t first = num_tasks * thread / num_threads, last = num_tasks * (thread + 1) / num_threads;
  for (int64_t task = first; task < last;) {
    const int64_t part = task / panels;
    const int panel_begin = static_cast<int>(task % panels);
    const int panel_end = static_cast<int>(std::min<int64_t>(panels, panel_begin + (last - task)));
    const int64_t blocks_end = blocks.count * (part + 1) / row_parts;
    for (int64_t begin = blocks.count * part / row_parts; begin < blocks_end; begin += kBlocksAtOnce) {
      const int64_t end = std::min(begin + kBlocksAtOnce, blocks_end);
      for (int panel = panel_begin; panel < panel_end; ++panel)
        run_panel<E>(a, blocks, begin, end, w, panel, done);
    }
    task += panel_end - panel_begin;
  }
}

}  // namespace inflight
