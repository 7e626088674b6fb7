// Products of activations and packed weights: out[rows, columns] = a[rows, inner] * w[columns, inner]^T.
//
// Weights are packed once, into panels of 32 columns: panel p is [inner / pair][32][pair], contiguous, so that a
// thread reads its panels as one stream whatever the number of rows is. One copy serves one row (memory bound) and
// many (compute bound: 12 x 32 accumulators in registers).
#pragma once

#include <algorithm>

#include "element.h"

namespace inflight {

constexpr int kPanel = 32;
constexpr int kMaxRows = 12;  // of one micro-kernel: 24 accumulators of the 32 registers

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

// sums[row][half] = a[row] * panel; a's rows are `stride` elements apart.
template <class E, int kRows>
inline __attribute__((always_inline)) void multiply_panel(const typename E::Stored* a, int64_t stride,
                                                          const typename E::Stored* panel, int inner,
                                                          __m512 (&sums)[kRows][2]) {
  constexpr int kStep = kPanel * E::kPair;
  for (int row = 0; row < kRows; ++row) sums[row][0] = sums[row][1] = _mm512_setzero_ps();
  if constexpr (kRows <= 2) {  // too few chains of additions to hide their latency: two sets of sums
    __m512 others[kRows][2];
    for (int row = 0; row < kRows; ++row) others[row][0] = others[row][1] = _mm512_setzero_ps();
    int k = 0;
    for (; k + 2 * E::kPair <= inner; k += 2 * E::kPair, panel += 2 * kStep) {
      _mm_prefetch(reinterpret_cast<const char*>(panel) + 4096, _MM_HINT_T0);
      _mm_prefetch(reinterpret_cast<const char*>(panel) + 4096 + 64, _MM_HINT_T0);
      _mm_prefetch(reinterpret_cast<const char*>(panel) + 4096 + 128, _MM_HINT_T0);
      _mm_prefetch(reinterpret_cast<const char*>(panel) + 4096 + 192, _MM_HINT_T0);
      const __m512 b0 = E::load_pairs(panel), b1 = E::load_pairs(panel + kStep / 2);
      const __m512 b2 = E::load_pairs(panel + kStep), b3 = E::load_pairs(panel + kStep + kStep / 2);
      for (int row = 0; row < kRows; ++row) {
        const __m512 x = E::broadcast_pair(a + row * stride + k);
        const __m512 y = E::broadcast_pair(a + row * stride + k + E::kPair);
        sums[row][0] = E::multiply_add(sums[row][0], x, b0);
        sums[row][1] = E::multiply_add(sums[row][1], x, b1);
        others[row][0] = E::multiply_add(others[row][0], y, b2);
        others[row][1] = E::multiply_add(others[row][1], y, b3);
      }
    }
    for (; k < inner; k += E::kPair, panel += kStep) {
      const __m512 b0 = E::load_pairs(panel), b1 = E::load_pairs(panel + kStep / 2);
      for (int row = 0; row < kRows; ++row) {
        const __m512 x = E::broadcast_pair(a + row * stride + k);
        sums[row][0] = E::multiply_add(sums[row][0], x, b0);
        sums[row][1] = E::multiply_add(sums[row][1], x, b1);
      }
    }
    for (int row = 0; row < kRows; ++row) {
      sums[row][0] = E::add(sums[row][0], others[row][0]);
      sums[row][1] = E::add(sums[row][1], others[row][1]);
    }
  } else {
    for (int k = 0; k < inner; k += E::kPair, panel += kStep) {
      const __m512 b0 = E::load_pairs(panel), b1 = E::load_pairs(panel + kStep / 2);
      for (int row = 0; row < kRows; ++row) {
        const __m512 x = E::broadcast_pair(a + row * stride + k);
        sums[row][0] = E::multiply_add(sums[row][0], x, b0);
        sums[row][1] = E::multiply_add(sums[row][1], x, b1);
      }
    }
  }
}

// Calls done(row, panel index, low 16 sums, high 16 sums) for the rows begin .. end - 1 of one panel.
template <class E, int kRows, class Done>
inline void run_rows(const typename E::Stored* a, int64_t stride, const Packed<E>& w, int panel, int row,
                     const Done& done) {
  __m512 sums[kRows][2];
  multiply_panel<E, kRows>(a + row * stride, stride, w.panel(panel), w.inner, sums);
  for (int i = 0; i < kRows; ++i) done(row + i, panel, sums[i][0], sums[i][1]);
}

template <class E, class Done>
void run_panel(const typename E::Stored* a, int64_t stride, const Packed<E>& w, int panel, int begin, int end,
               const Done& done) {
  // Blocks of equal size: 13 rows are 7 and 6, not 12 and 1.
  const int rows = end - begin;
  const int num_blocks = (rows + kMaxRows - 1) / kMaxRows;
  int row = begin;
  for (int block = 0; block < num_blocks; ++block) {
    const int stop = begin + static_cast<int>(static_cast<int64_t>(rows) * (block + 1) / num_blocks);
    switch (stop - row) {
#define INFLIGHT_ROWS(n) \
  case n:                \
    run_rows<E, n>(a, stride, w, panel, row, done); \
    break;
      INFLIGHT_ROWS(1) INFLIGHT_ROWS(2) INFLIGHT_ROWS(3) INFLIGHT_ROWS(4) INFLIGHT_ROWS(5) INFLIGHT_ROWS(6)
      INFLIGHT_ROWS(7) INFLIGHT_ROWS(8) INFLIGHT_ROWS(9) INFLIGHT_ROWS(10) INFLIGHT_ROWS(11) INFLIGHT_ROWS(12)
#undef INFLIGHT_ROWS
    }
    row = stop;
  }
}

// The whole product; called by every thread of a parallel region, without a barrier at the end.
//
// Each thread has a run of panels. Where there are too few panels for the threads, rows are divided too. Rows are
// taken in blocks that fit a core's cache beside a panel.
template <class E, class Done>
void multiply(const typename E::Stored* a, int64_t stride, int rows, const Packed<E>& w, int thread, int num_threads,
              const Done& done) {
  constexpr int kRowBlock = 240;
  const int panels = w.num_panels();
  const int row_parts = panels >= 2 * num_threads ? 1 : std::min(num_threads, (rows + kMaxRows - 1) / kMaxRows);
  const int64_t num_tasks = static_cast<int64_t>(panels) * row_parts;
  const int64_t first = num_tasks * thread / num_threads, last = num_tasks * (thread + 1) / num_threads;
  for (int64_t task = first; task < last;) {
    const int part = static_cast<int>(task / panels);
    const int panel_begin = static_cast<int>(task % panels);
    const int panel_end = static_cast<int>(std::min<int64_t>(panels, panel_begin + (last - task)));
    const int row_begin = static_cast<int>(static_cast<int64_t>(rows) * part / row_parts);
    const int row_end = static_cast<int>(static_cast<int64_t>(rows) * (part + 1) / row_parts);
    for (int begin = row_begin; begin < row_end; begin += kRowBlock) {
      const int end = std::min(begin + kRowBlock, row_end);
      for (int panel = panel_begin; panel < panel_end; ++panel) run_panel<E>(a, stride, w, panel, begin, end, done);
    }
    task += panel_end - panel_begin;
  }
}

}  // namespace inflight
