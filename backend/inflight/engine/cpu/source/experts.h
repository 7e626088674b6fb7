// The choice of each row's experts and their weights, and the order of rows by expert.
//
// A row's experts depend on its own scores alone, and their results are summed in the order of their indices, so that
// other rows in a batch have no effect.
#pragma once

#include <algorithm>
#include <new>
#include <vector>

#include "gemm.h"
#include "layer.h"
#include "vector_math.h"

namespace inflight {

// Totals over all layers and batches since a decoder was created.
struct Routed {
  int64_t ns = 0;       // on one thread: until the rows of every expert were known, including norms
  int64_t experts = 0;  // number of experts whose weights were read
};

class Routing {
 public:
  // Allocates memory for a batch of `rows` rows; returns false if there is none.
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

  // Number of pairs of a row and one of its experts.
  int64_t visits() const { return rows_ * per_row_; }

  // A row's scores [experts] from the router, followed by the score of the shared MLP's gate.
  float* scores(int64_t row) { return scores_.get() + row * width(); }
  float gate(int64_t row) { return scores(row)[experts_]; }

  // Finds a row's experts, which have the highest scores (of equal scores, the lower index), and their weights:
  // probabilities over all experts or over the chosen ones. NaN scores give NaN weights.
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

  // After all rows have chosen, sorts visits by expert, in blocks for tiles or for other products.
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

  // The result of `sort`: the rows of each expert that has any.
  const std::vector<MatrixRows>& of_expert() const { return of_expert_; }

  // Number of experts that have rows.
  int64_t num_read() const { return num_read_; }

  // The row of the visit at a place in that order.
  int64_t row_at(int64_t place) const { return rows_of_.get()[place]; }

  // 16 values, from `column` on, of the weighted sum of a row's experts' results `given` [visits, width], in that
  // order.
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
  Buffer<float> chances_;   // [rows, experts of a row]: their weights
  Buffer<int64_t> places_;  // [rows, experts of a row]: places in the order by expert
  Buffer<int64_t> rows_of_;  // [visits], in the order by expert
  std::vector<int64_t> begins_;
  std::vector<MatrixRows> of_expert_;
};

}  // namespace inflight
