// Products of activations and packed weights: out[rows, columns] = a[rows, inner] * w[columns, inner]^T.
//
// Weights are packed once, into panels of 32 columns: panel p is [inner / pair][32][pair], contiguous, so that a
// thread reads its panels as one stream, whatever the number of rows is. The same packed weights serve one row (memory
// bound) and many (compute bound: up to kMaxRows rows, as registers permit). Activations are packed for each product
// into blocks of up to kMaxRows rows, [inner / pair][words of a pair][rows of the block]: rows a power of two apart
// would share a few lines of the cache. products.h explains pairs and words. For tiles, blocks are larger and have
// another layout (products_amx.h).
#pragma once

#include <algorithm>
#include <type_traits>
#include <vector>

#include "element.h"
#include "products.h"
#include "team.h"

namespace inflight {

constexpr int kPrefetch = 8192;  // bytes ahead

// Type of packed activations, and the number of them in a row of `inner` values.
template <class E>
using RowOperand = std::conditional_t<kByTiles<E>, typename E::Stored, typename E::Operand>;
template <class E>
constexpr int operand_width(int inner) {
  constexpr int kTile = kByTiles<E> ? kLanes * E::kPair : 1;
  return (inner + kTile - 1) / kTile * kTile;
}
template <class E>
constexpr int kWordsOf = kByTiles<E> ? 1 : E::kWords;

template <class E>
struct Packed {
  const typename E::Stored* data;
  int columns;  // of the whole matrix
  int inner;    // padded to whole pairs
  const typename E::Stored* panel(int index) const {
    return data + static_cast<int64_t>(index) * inner * kPanel;
  }
  const typename E::Stored* part(int index, int begin) const {
    return panel(index) + static_cast<int64_t>(begin) * kPanel;
  }
  static int64_t part_bytes(int inner) { return static_cast<int64_t>(inner) * kPanel * sizeof(typename E::Stored); }
  // The granularity of parts: whole tiles, because sums are computed tile by tile.
  static int whole(int inner) { return operand_width<E>(inner); }
};

// Rows in blocks of nearly equal size: 13 rows are 7 and 6, not 12 and 1. Unless there are few rows, there are at least
// two blocks; while the second is multiplied, the next part for the first is prefetched. With tiles there are as few
// blocks as possible.
struct RowBlocks {
  RowBlocks(int64_t rows, bool by_tiles)
      : rows(rows),
        most(by_tiles ? kMaxTiledRows : kMaxRows),
        count(std::max<int64_t>((rows + most - 1) / most, rows > kFewRows && !by_tiles ? 2 : 1)) {}
  // Maximum number of blocks in a task.
  int64_t at_once() const { return kMaxRowsOfTask / most; }
  int64_t begin(int64_t block) const { return rows * block / count; }
  int64_t of(int64_t row) const { return ((row + 1) * count - 1) / rows; }

  const int64_t rows, most, count;
};

// Packs a row of `num_pairs` pairs.
template <class E>
void pack_row(const void* source, int64_t num_pairs, void* packed, const RowBlocks& blocks, int64_t row) {
  const int64_t block = blocks.of(row), begin = blocks.begin(block), step = blocks.begin(block + 1) - begin;
  const auto* from = static_cast<const char*>(source);
  if constexpr (kByTiles<E>) {
    const int64_t pairs = operand_width<E>(static_cast<int>(num_pairs * E::kPair)) / E::kPair;
    char* to = static_cast<char*>(packed) + 4 * (begin * pairs + (row - begin) * kLanes);
    for (int64_t i = 0; i < num_pairs; i += kLanes, to += 4 * kLanes * step) {
      const int64_t here = std::min<int64_t>(kLanes, num_pairs - i);
      std::memcpy(to, from + 4 * i, 4 * here);
      std::memset(to + 4 * here, 0, 4 * (kLanes - here));
    }
    return;
  }
  char* to = static_cast<char*>(packed) + 4 * (begin * num_pairs * E::kWords + (row - begin));
  for (int64_t i = 0; i < num_pairs; ++i)
    for (int word = 0; word < E::kWords; ++word, to += 4 * step) {
      uint32_t pair;
      std::memcpy(&pair, from + 4 * i, sizeof pair);
      const uint32_t own = word_of<E>(pair, word);
      std::memcpy(to, &own, sizeof own);
    }
}

// With the first block of rows, half of the data after the current part of a panel is prefetched, with the second block
// the other half. A part that does not follow another is prefetched while it is multiplied. A single block prefetches
// nothing: its speed is limited by memory, and the processor's own prefetching is better then.
inline Ahead look_ahead(const char* data, int64_t bytes, int64_t block, int64_t num_blocks, bool is_first) {
  const char* next = data + bytes;
  if (num_blocks == 1 || block > 1) return {data, data, 0};
  if (is_first && block == 0) return {data + kPrefetch, data + kPrefetch + 64, 128};
  if (is_first) return {next, next + 64, 128};
  const char* half = next + block * (bytes / 2);
  return {half, half + bytes / 4, 64};
}

// The part of a panel that is multiplied at a time: values `begin` to `end` of the inner dimension.
struct Part {
  int begin, end, inner;
};

// Sums that are kept until their panel's next part. They are restored unchanged, so that dividing a panel into parts
// does not affect results.
template <class E>
struct Waiting {
  typename E::Sums sums[kMaxRowsOfTask][2];
  Tiles tiles;
};

// Calls done(row, panel index, low 16 sums, high 16 sums) for the rows of one block, after the panel's last part.
template <int kRows, class E, class Done>
inline void run_rows(const typename E::Operand* block, int row, const Packed<E>& w, int panel, const Part& part,
                     const Ahead& ahead, typename E::Sums (*waiting)[2], const Done& done) {
  typename E::Sums sums[kRows][2];
  if (part.begin == 0) {
#pragma GCC unroll 16
    for (int i = 0; i < kRows; ++i) sums[i][0] = sums[i][1] = E::zero();
  } else {
#pragma GCC unroll 16
    for (int i = 0; i < kRows; ++i) sums[i][0] = waiting[i][0], sums[i][1] = waiting[i][1];
  }
  multiply_panel<E, kRows>(block + static_cast<int64_t>(part.begin) * kRows, w.part(panel, part.begin),
                           part.end - part.begin, ahead, sums);
  if (part.end == part.inner) {
#pragma GCC unroll 16
    for (int i = 0; i < kRows; ++i) done(row + i, panel, sums[i][0], sums[i][1]);
  } else {
#pragma GCC unroll 16
    for (int i = 0; i < kRows; ++i) waiting[i][0] = sums[i][0], waiting[i][1] = sums[i][1];
  }
}

// Like `run_rows`, but multiplies with AMX tiles.
template <class E, class TilesOfThread, class Done>
inline void run_tiles(TilesOfThread& tiles, const RowOperand<E>* block, int row, int rows, const Packed<E>& w, int panel,
                      const Part& part, const Ahead& ahead, typename E::Sums (*waiting)[2], const Done& done) {
  if (rows == 0) return;  // no row's logits are wanted
  tiles.template multiply<E>(block + static_cast<int64_t>(part.begin) * rows, rows, w.part(panel, part.begin),
                             part.end - part.begin, part.begin == 0, ahead, waiting);
  if (part.end < part.inner) return;
  for (int i = 0; i < rows; ++i) done(row + i, panel, waiting[i][0], waiting[i][1]);
}

template <class E, class Done>
void run_part(const RowOperand<E>* a, const RowBlocks& blocks, int64_t first, int64_t last, const Packed<E>& w,
              int panel, const Part& part, bool is_first, Waiting<E>& waiting, const Done& done) {
  const char* data = reinterpret_cast<const char*>(w.part(panel, part.begin));
  const int64_t bytes = w.part_bytes(part.end - part.begin);
  auto* own = waiting.sums;
  int row = static_cast<int>(blocks.begin(first));
  for (int64_t block = first; block < last; ++block) {
    const Ahead ahead = look_ahead(data, bytes, block - first, last - first, is_first);
    const RowOperand<E>* rows = a + static_cast<int64_t>(row) * operand_width<E>(w.inner);
    const int end = static_cast<int>(blocks.begin(block + 1));
    if constexpr (kByTiles<E>)
      run_tiles<E>(waiting.tiles, rows, row, end - row, w, panel, part, ahead, own, done);
    else
      switch (end - row) {
#define INFLIGHT_ROWS(n)                                                                       \
  case n:                                                                                      \
    if constexpr (n <= kMaxRows) run_rows<n>(rows, row, w, panel, part, ahead, own, done); \
    break;
        INFLIGHT_ROWS(1) INFLIGHT_ROWS(2) INFLIGHT_ROWS(3) INFLIGHT_ROWS(4) INFLIGHT_ROWS(5) INFLIGHT_ROWS(6)
        INFLIGHT_ROWS(7) INFLIGHT_ROWS(8) INFLIGHT_ROWS(9) INFLIGHT_ROWS(10) INFLIGHT_ROWS(11) INFLIGHT_ROWS(12)
#undef INFLIGHT_ROWS
      }
    own += end - row;
    row = end;
  }
}

// A unit of work of a thread: some consecutive blocks of a matrix's rows, and one of its panels.
struct Task {
  RowBlocks blocks;     // of all rows that the matrix is multiplied by
  int64_t first_row;    // index among the packed rows of the first of these rows
  int64_t first, last;  // range of blocks
  int panel;            // index among the panels of all matrices
  bool begins;          // whether the previous panel, and its rows, belong to another matrix or other blocks
};

// Some blocks of the rows of one of several matrices, as many as are multiplied at once.
struct MatrixRows {
  RowBlocks blocks;
  int64_t first_row, first, last;  // as in Task
  int matrix;
};

// The tasks of a product, which threads share: one panel for one chunk of the blocks of rows. If there are too few
// panels for the threads, rows are cut into more chunks.
class Tasks {
 public:
  Tasks(int64_t rows, int columns, int num_threads, bool by_tiles)
      : blocks_(rows, by_tiles),
        panels_((columns + kPanel - 1) / kPanel),
        chunks_(std::max((blocks_.count + blocks_.at_once() - 1) / blocks_.at_once(),
                         panels_ >= 2 * num_threads ? 1 : std::min<int64_t>(num_threads, blocks_.count))) {}

  // For several consecutive matrices of `panels` panels each, whose rows are in the order of `of`, matrix by matrix.
  Tasks(const std::vector<MatrixRows>& of, int panels)
      : blocks_(0, false), panels_(panels), chunks_(static_cast<int64_t>(of.size())), of_(&of) {}

  int64_t count() const { return panels_ * chunks_; }

  Task operator[](int64_t number) const {
    const int64_t chunk = number / panels_;
    const auto panel = static_cast<int>(number % panels_);
    if (!of_)
      return {blocks_, 0, blocks_.count * chunk / chunks_, blocks_.count * (chunk + 1) / chunks_, panel, panel == 0};
    const MatrixRows& rows = (*of_)[chunk];
    return {rows.blocks, rows.first_row, rows.first, rows.last, rows.matrix * panels_ + panel, panel == 0};
  }

  // Packs a row of `num_pairs` pairs to the place where it is multiplied.
  template <class E>
  void pack(const void* source, int64_t num_pairs, uint32_t* packed, int64_t row) const {
    if (!of_) return pack_row<E>(source, num_pairs, packed, blocks_, row);
    const auto behind = std::upper_bound(of_->begin(), of_->end(), row, [](int64_t one, const MatrixRows& other) {
      return one < other.first_row;
    });
    const MatrixRows& rows = *(behind - 1);
    const int64_t words = operand_width<E>(static_cast<int>(num_pairs * E::kPair)) / E::kPair * kWordsOf<E>;
    pack_row<E>(source, num_pairs, packed + rows.first_row * words, rows.blocks, row - rows.first_row);
  }

  // Index of a panel within its own matrix.
  int within_matrix(int panel) const { return of_ ? panel % panels_ : panel; }

 private:
  const RowBlocks blocks_;
  const int panels_;  // of one matrix
  const int64_t chunks_;
  const std::vector<MatrixRows>* of_ = nullptr;
};

// Computes the product of packed rows; called by every thread of a team after tasks were assigned. Calls
// begin(panel index, first row, row after the last) before the rows' sums for a panel are computed.
template <class E, class Begin, class Done>
void multiply(const RowOperand<E>* a, const Tasks& tasks, const Packed<E>& w, Team& team, int thread,
              const Begin& begin_task, const Done& done) {
  const int64_t num_parts = (2 * w.part_bytes(w.inner) + kCache - 1) / kCache;
  const int part_size = w.whole(static_cast<int>((w.inner / E::kPair + num_parts - 1) / num_parts * E::kPair));
  Waiting<E> waiting;
  int64_t last = -1;
  team.share(thread, [&](int64_t number) {
    const Task task = tasks[number];
    const auto* rows = a + task.first_row * operand_width<E>(w.inner);
    const auto of_all = [&](int row, int panel, auto low, auto high) {
      done(static_cast<int>(task.first_row) + row, panel, low, high);
    };
    begin_task(task.panel, task.first_row + task.blocks.begin(task.first),
               task.first_row + task.blocks.begin(task.last));
    const bool follows = number == last + 1 && !task.begins;
    const int at_once = task.last - task.first == 1 ? w.inner : part_size;
    for (int from = 0; from < w.inner; from += at_once) {
      const Part part{from, std::min(w.inner, from + at_once), w.inner};
      const bool is_first = !follows && from == 0;
      run_part<E>(rows, task.blocks, task.first, task.last, w, task.panel, part, is_first, waiting, of_all);
    }
    last = number;
  });
}

}  // namespace inflight
