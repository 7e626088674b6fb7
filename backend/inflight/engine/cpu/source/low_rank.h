// The deltas of LoRA adapters to products: y = magnitude * (W x + B (A x)) + bias, with each row's own adapter.
//
// h = A x is computed from a row's plain elements before these are packed for W x (`shrink`), and stored in the
// activations' type. B h is computed for a panel's 32 columns before the panel is multiplied (`expand`), and added to
// each of the panel's sums. Up to kRowsAtOnce rows of one adapter are processed together, so that its matrices are read
// once for all these rows; the order of a sum does not depend on the other rows.
#pragma once

#include <algorithm>
#include <cstring>
#include <type_traits>
#include <vector>

#include "element.h"
#include "gemm.h"
#include "layer.h"

namespace inflight {

constexpr int kRanksAtOnce = 4;  // rows of A that are multiplied together; packing.py pads them with zeros
constexpr int kAheadInA = 4096;  // bytes: the processor's own prefetching stops at the end of a page

// The rows of a batch ordered by adapter; rows without an adapter come first.
class RowsByAdapter {
 public:
  // Sorts the rows of a batch with adapters; throws bad_alloc.
  void sort(const Batch& batch) {
    const auto before = [&](int64_t a, int64_t b) {
      const auto *first = batch.adapters[a], *second = batch.adapters[b];
      return std::less<>()(first, second) || (first == second && a < b);
    };
    order_.resize(batch.num_rows);
    for (int64_t row = 0; row < batch.num_rows; ++row) order_[row] = row;
    std::sort(order_.begin(), order_.end(), before);
    runs_.clear();
    widest_ = 0;
    for (int64_t place = 0; place < batch.num_rows; ++place) {
      const Adapter* adapter = batch.adapters[order_[place]];
      if (runs_.empty() || runs_.back().adapter != adapter) runs_.push_back({adapter, place, place});
      runs_.back().end = place + 1;
      if (adapter) widest_ = std::max(widest_, adapter->ranks);
    }
  }

  // Maximum number of ranks of a product.
  int32_t widest() const { return widest_; }

  // Calls f(adapter, rows, number of rows) for a thread's share of all rows; threads get equal shares of rows with
  // adapters.
  template <class F>
  void share(int thread, int num_threads, const F& f) const {
    const auto rows = static_cast<int64_t>(order_.size());
    const int64_t without = runs_.empty() || runs_[0].adapter ? 0 : runs_[0].end;
    const Share plain(without, thread, num_threads), adapted(rows - without, thread, num_threads);
    for (const Run& run : runs_) {
      const int64_t begin = run.adapter ? without + adapted.begin : plain.begin;
      const int64_t end = run.adapter ? without + adapted.end : plain.end;
      in_groups(run.adapter, std::max(begin, run.begin), std::min(end, run.end), f);
    }
  }

  // Calls f for those of the rows `first` to `last` - 1 that have an adapter.
  template <class F>
  void within(int64_t first, int64_t last, const F& f) const {
    for (const Run& run : runs_) {
      if (!run.adapter) continue;
      const auto of_run = order_.begin() + run.begin, end = order_.begin() + run.end;
      const auto from = std::lower_bound(of_run, end, first), to = std::lower_bound(from, end, last);
      in_groups(run.adapter, from - order_.begin(), to - order_.begin(), f);
    }
  }

 private:
  struct Run {  // a range of places in the order
    const Adapter* adapter;
    int64_t begin, end;
  };

  template <class F>
  void in_groups(const Adapter* adapter, int64_t begin, int64_t end, const F& f) const {
    for (; begin < end; begin += kRowsAtOnce)
      f(adapter, &order_[begin], static_cast<int>(std::min<int64_t>(kRowsAtOnce, end - begin)));
  }

  std::vector<int64_t> order_;
  std::vector<Run> runs_;
  int32_t widest_ = 0;
};

// A product of a layer, and the batch's adapters.
struct Product {
  const Linear& linear;
  const Adapter* const* adapters = nullptr;  // [rows], as in Batch
  int layer = 0;
  LowRank LayerAdapter::*which = nullptr;

  const LowRank& of(const Adapter* adapter) const { return adapter->layers[layer].*which; }
};

// Loads a register with `count` elements, fewer than it can hold, followed by zeros.
template <class E>
inline typename E::Pairs load_last(const typename E::Stored* source, int count) {
  alignas(64) typename E::Stored padded[kLanes * E::kPair] = {};
  std::memcpy(padded, source, count * sizeof *padded);
  return E::load_pairs(padded);
}

// h[row][0 .. 3] = x[row] * the next four rows of A, whose registers are interleaved.
template <class E, int kRows>
inline void multiply_ranks(const typename E::Stored* const* x, int width, const typename E::Stored* a,
                           typename E::Stored* const* h, int first_rank) {
  constexpr int kStep = kLanes * E::kPair;
  Floats sums[kRows][kRanksAtOnce];
#pragma GCC unroll 16
  for (int row = 0; row < kRows; ++row)
#pragma GCC unroll 16
    for (int i = 0; i < kRanksAtOnce; ++i) sums[row][i] = floats(0.0f);
  const auto add = [&](const auto& load_row) {
    typename E::Pairs ranks[kRanksAtOnce];
#pragma GCC unroll 16
    for (int i = 0; i < kRanksAtOnce; ++i) {
      ranks[i] = E::load_pairs(a + i * kStep);
      prefetch_near(reinterpret_cast<const char*>(a + i * kStep) + kAheadInA);
    }
#pragma GCC unroll 16
    for (int row = 0; row < kRows; ++row) {
      const typename E::Pairs own = load_row(x[row]);
#pragma GCC unroll 16
      for (int i = 0; i < kRanksAtOnce; ++i) sums[row][i] = E::multiply_add(sums[row][i], own, ranks[i]);
    }
    a += kRanksAtOnce * kStep;
  };
  int k = 0;
  for (; k + kStep <= width; k += kStep) add([k](const auto* row) { return E::load_pairs(row + k); });
  if (k < width) add([k, width](const auto* row) { return load_last<E>(row + k, width - k); });
#pragma GCC unroll 16
  for (int row = 0; row < kRows; ++row) {
    alignas(64) float totals[kLanes];
#pragma GCC unroll 16
    for (int i = 0; i < kRanksAtOnce; ++i) totals[i] = sum_of(sums[row][i]);
    E::store(h[row] + first_rank, load(totals, first_lanes(kRanksAtOnce)), first_lanes(kRanksAtOnce));
  }
}

// sums[row][0 .. 31] = B * h[row] for a panel's columns.
template <class E, int kRows>
inline void multiply_columns(const LowRank& low_rank, int panel, const typename E::Stored* const* h,
                             float* const* sums) {
  constexpr int kStep = kLanes * E::kPair;
  for (int half = 0; half < 2; ++half) {
    const RankRange& range = low_rank.ranges[2 * panel + half];
    const auto* b = static_cast<const typename E::Stored*>(low_rank.b) + range.at * kStep;
    Floats own[kRows];
#pragma GCC unroll 16
    for (int row = 0; row < kRows; ++row) own[row] = floats(0.0f);
    for (int pair = range.first; pair < range.first + range.count; ++pair, b += kStep) {
      const typename E::Pairs columns = E::load_pairs(b);
#pragma GCC unroll 16
      for (int row = 0; row < kRows; ++row)
        own[row] = E::multiply_add(own[row], E::broadcast_pair(h[row] + pair * E::kPair), columns);
    }
#pragma GCC unroll 16
    for (int row = 0; row < kRows; ++row) store_aligned(sums[row] + half * kLanes, own[row]);
  }
}

// Calls f with a compile-time number of rows.
template <class F>
inline void with_rows(int count, const F& f) {
  const auto call = [&](auto rows) {
    if constexpr (rows() <= kRowsAtOnce) f(rows);
  };
  switch (count) {
    case 1: call(std::integral_constant<int, 1>{}); break;
    case 2: call(std::integral_constant<int, 2>{}); break;
    case 3: call(std::integral_constant<int, 3>{}); break;
    default: call(std::integral_constant<int, 4>{}); break;
  }
}

// h = A x of up to kRowsAtOnce rows of one adapter, `width` elements each.
template <class E>
__attribute__((noinline)) void shrink(const LowRank& low_rank, int count, const typename E::Stored* const* x,
                                      int width, typename E::Stored* const* h) {
  constexpr int kStep = kLanes * E::kPair;
  const int64_t padded = (width + kStep - 1) / kStep * kStep;
  const auto* a = static_cast<const typename E::Stored*>(low_rank.a);
  with_rows(count, [&](auto rows) {
    for (int rank = 0; rank < low_rank.ranks; rank += kRanksAtOnce)
      multiply_ranks<E, rows()>(x, width, a + rank * padded, h, rank);
  });
}

// B h of up to kRowsAtOnce rows of one adapter, for the columns of a panel. Meanwhile prefetches the part of B for the
// next panel.
template <class E>
__attribute__((noinline)) void expand(const LowRank& low_rank, int panel, int count,
                                      const typename E::Stored* const* h, float* const* sums) {
  const RankRange &first = low_rank.ranges[2 * panel], &last = low_rank.ranges[2 * panel + 1];
  const char* next = static_cast<const char*>(low_rank.b) + static_cast<int64_t>(last.at + last.count) * kLine;
  for (int i = 0; i < last.at + last.count - first.at; ++i) prefetch(next + i * kLine);
  with_rows(count, [&](auto rows) { multiply_columns<E, rows()>(low_rank, panel, h, sums); });
}

}  // namespace inflight
