// Which of a layer's experts every row goes to, with what weight, and the rows in the order of their experts.
//
// A row's experts are chosen from its own scores alone, and what they give is added up in the order of their numbers:
// who else is in a batch changes nothing.
#pragma once

#include <algorithm>
#include <new>
#include <vector>

#include "gemm.h"
#include "layer.h"
#include "vector_math.h"

namespace inflight {

// Sums over all layers and batches since a decoder was made.
struct Routed {
  int64_t ns = 0;       // of one thread: until it was known which rows go where, norms included
  int64_t experts = 0;  // whose weights were read
};

class Routing {
 public:
  // Room for a batch of `rows` rows; false where there is no memory.
  bool reserve(const Shape& shape, int64_t rows) try {
    experts_ = shape.experts;
    per_row_ = shape.experts_per_row;
    normalizes_ = shape.normalizes_chances;
    rows_ = rows;
    const int64_t visits = rows * per_row_;
    begins_.resize(experts_ + 1);
    of_expert_.reserve(experts_ + visits / (kMostRowsOfTask - kMostTiledRows));
    return scores_.reserve(rows * width()) && chosen_.reserve(visits) && chances_.reserve(visits) &&
           places_.reserve(visits) && rows_of_.reserve(visits);
  } catch (const std::bad_alloc&) {
    return false;
  }

  // How many times a row goes to an expert.
  int64_t visits() const { return rows_ * per_row_; }

  // A row's scores [experts], as the router gives them, and behind them the score of the gate.
  float* scores(int64_t row) { return scores_.get() + row * width(); }
  float gate(int64_t row) { return scores(row)[experts_]; }

  // Finds a row's experts, those with the highest scores, of equal ones the first, and what they weigh: their
  // probabilities, of all experts or of these. NaN scores give NaN weights.
  void choose(int64_t row) {
    float* scores = this->scores(row);
    int32_t* chosen = chosen_.get() + row * per_row_;
    int count = 0;
    for (int expert = 0; expert < experts_; ++expert) {
      if (count == per_row_ && !(scores[expert] > scores[chosen[count - 1]])) continue;
      int at = count < per_row_ ? count++ : count - 1;
      for (; at > 0 && scores[expert] > scores[chosen[at - 1]]; --at) chosen[at] = chosen[at - 1];
      chosen[at] = expert;
    }
    const Floats highest = floats(scores[chosen[0]]);
    Floats sums = floats(0.0f);
    for (int i = 0; i < experts_; i += kLanes) {
      const Mask mask = first_lanes(experts_ - i);
      const Floats power = exp_ps(sub(load(scores + i, mask), highest));
      sums = add_where(mask, sums, power);
      store(scores + i, power, mask);
    }
    std::sort(chosen, chosen + per_row_);
    float* chances = chances_.get() + row * per_row_;
    float total = 0.0f;
    for (int i = 0; i < per_row_; ++i) {
      chances[i] = scores[chosen[i]] / sum_of(sums);
      total += chances[i];
    }
    for (int i = 0; normalizes_ && i < per_row_; ++i) chances[i] /= total;
  }

  // After all rows have chosen: every expert's rows beside each other, in blocks for tiles or for other products.
  void sort(bool by_tiles) {
    std::fill(begins_.begin(), begins_.end(), 0);
    for (int64_t visit = 0; visit < visits(); ++visit) ++begins_[chosen_.get()[visit] + 1];
    of_expert_.clear();
    num_read_ = 0;
    for (int expert = 0; expert < experts_; ++expert) {
      const RowBlocks blocks(begins_[expert + 1], by_tiles);
      begins_[expert + 1] += begins_[expert];
      const int64_t chunks = blocks.rows ? (blocks.count + blocks.at_once() - 1) / blocks.at_once() : 0;
      num_read_ += chunks > 0;
      for (int64_t chunk = 0; chunk < chunks; ++chunk)
        of_expert_.push_back({blocks, begins_[expert], blocks.count * chunk / chunks,
                              blocks.count * (chunk + 1) / chunks, expert});
    }
    for (int64_t visit = 0; visit < visits(); ++visit) {
      const int64_t place = begins_[chosen_.get()[visit]]++;
      places_.get()[visit] = place;
      rows_of_.get()[place] = visit / per_row_;
    }
  }

  // What `sort` has found: for each expert that has rows, which.
  const std::vector<MatrixRows>& of_expert() const { return of_expert_; }

  // How many experts have rows.
  int64_t num_read() const { return num_read_; }

  // Whose visit is at a place of that order.
  int64_t row_at(int64_t place) const { return rows_of_.get()[place]; }

  // 16 values from `column` on of what a row's experts give together; `given` [visits, width] in that order of places.
  template <class E>
  Floats mix(int64_t row, const typename E::Stored* given, int width, int column) const {
    Floats sum = floats(0.0f);
    for (int64_t visit = row * per_row_; visit < (row + 1) * per_row_; ++visit) {
      const Floats own = E::load(given + places_.get()[visit] * width + column, first_lanes(width - column));
      sum = fmadd(floats(chances_.get()[visit]), own, sum);
    }
    return sum;
  }

 private:
  int64_t width() const { return experts_ + 1; }

  int experts_ = 0, per_row_ = 0, normalizes_ = 0;
  int64_t rows_ = 0, num_read_ = 0;
  Buffer<float> scores_;    // [rows, experts and the gate]
  Buffer<int32_t> chosen_;  // [rows, experts of a row], ascending
  Buffer<float> chances_;   // likewise
  Buffer<int64_t> places_;  // likewise: where in the order of experts
  Buffer<int64_t> rows_of_;  // [visits], in that order
  std::vector<int64_t> begins_;
  std::vector<MatrixRows> of_expert_;
};

}  // namespace inflight
