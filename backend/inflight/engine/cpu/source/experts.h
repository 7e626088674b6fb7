// The choice of each row's experts and their weights, and the order of rows by expert.
//
// A row's experts depend on its own scores alone, and their results are summed in the order of their indices, so that
// other rows in a batch have no effect.
#pragma once

#include <algorithm>
#include <limits>
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
    by_sigmoid_ = shape.scores_by_sigmoid;
    scale_ = shape.chances_scale;
    groups_ = shape.groups;
    groups_per_row_ = shape.groups_per_row;
    scores_per_group_ = shape.scores_per_group;
    begin(rows);
    const int64_t visits = rows * per_row_;
    begins_.resize(experts_ + 1);
    of_expert_.reserve(experts_ + visits / (kMaxRowsOfTask - kMaxTiledRows));
    return scores_.reserve(rows * width()) && probabilities_.reserve(rows * width()) &&
           (!limits_groups() || of_groups_.reserve(rows * groups_)) &&
           best_.reserve(rows * (groups_per_row_ + scores_per_group_)) && chosen_.reserve(visits) &&
           chances_.reserve(visits) && places_.reserve(visits) && rows_of_.reserve(visits);
  } catch (const std::bad_alloc&) {
    return false;
  }

  // Sets the number of a layer's rows, at most that of `reserve`.
  void begin(int64_t rows) { rows_ = rows; }

  // Number of pairs of a row and one of its experts.
  int64_t visits() const { return rows_ * per_row_; }

  // A row's scores [experts] from the router, followed by the score of the shared MLP's gate.
  float* scores(int64_t row) { return scores_.get() + row * width(); }
  float gate(int64_t row) { return scores(row)[experts_]; }

  // Finds a row's experts and their weights, by probabilities from its scores. The experts have the highest
  // probabilities plus `bias` [experts], if there is one, in the best groups; among equal values the lower index wins.
  // NaN scores give NaN weights.
  void choose(int64_t row, const float* bias) {
    float* wanted = scores(row);
    float* probabilities = probabilities_.get() + row * width();
    find_probabilities(wanted, probabilities);
    // A softmax keeps the order of scores, so experts are chosen by scores, which differ even where probabilities
    // vanish.
    for (int i = 0; (by_sigmoid_ || bias || limits_groups()) && i < experts_; ++i)
      wanted[i] = probabilities[i] + (bias ? bias[i] : 0.0f);
    int32_t* chosen = chosen_.get() + row * per_row_;
    if (limits_groups()) {
      const int32_t* groups = choose_groups(row, wanted);
      const int size = experts_ / groups_;
      const auto expert_at = [&](int i) { return groups[i / size] * size + i % size; };
      find_highest(groups_per_row_ * size, per_row_, [&](int i) { return wanted[expert_at(i)]; }, chosen);
      for (int i = 0; i < per_row_; ++i) chosen[i] = expert_at(chosen[i]);
    } else {
      find_highest(experts_, per_row_, [&](int i) { return wanted[i]; }, chosen);
    }
    std::sort(chosen, chosen + per_row_);
    float* chances = chances_.get() + row * per_row_;
    float total = 0.0f;
    for (int i = 0; i < per_row_; ++i) {
      chances[i] = probabilities[chosen[i]];
      total += chances[i];
    }
    // In this order a NaN stays NaN.
    for (int i = 0; normalizes_ && i < per_row_; ++i) chances[i] /= total < kMinSum ? kMinSum : total;
    for (int i = 0; i < per_row_; ++i) chances[i] *= scale_;
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

  // The row of the visit at a place in the order by expert.
  int64_t row_at(int64_t place) const { return rows_of_.get()[place]; }

  // 16 values, from `column` on, of the weighted sum of a row's experts' results `given` [visits, width], which are in
  // the order by expert.
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
  static constexpr float kMinSum = 1e-20f;  // by which probabilities are divided

  int64_t width() const { return experts_ + 1; }
  bool limits_groups() const { return groups_per_row_ < groups_; }

  // probabilities [experts] = the sigmoids or the softmax of `scores`.
  void find_probabilities(const float* scores, float* probabilities) const {
    const Floats least = floats(-std::numeric_limits<float>::infinity());
    Floats highest = least, sums = floats(0.0f);
    for (int i = 0; !by_sigmoid_ && i < experts_; i += kLanes)
      highest = max(highest, load_or(least, scores + i, first_lanes(experts_ - i)));
    const Floats shift = floats(largest_of(highest));
    for (int i = 0; i < experts_; i += kLanes) {
      const Mask mask = first_lanes(experts_ - i);
      const Floats score = load(scores + i, mask);
      const Floats power = by_sigmoid_ ? sigmoid_ps(score) : exp_ps(sub(score, shift));
      sums = add_where(mask, sums, power);
      store(probabilities + i, power, mask);
    }
    const Floats total = floats(by_sigmoid_ ? 1.0f : sum_of(sums));
    for (int i = 0; i < experts_; i += kLanes) {
      const Mask mask = first_lanes(experts_ - i);
      store(probabilities + i, div(load(probabilities + i, mask), total), mask);
    }
  }

  // Returns a row's groups, ascending: the groups whose best experts have the highest sums of `wanted`.
  const int32_t* choose_groups(int64_t row, const float* wanted) {
    const int size = experts_ / groups_;
    float* of_groups = of_groups_.get() + row * groups_;
    int32_t* best = best_.get() + row * (groups_per_row_ + scores_per_group_);
    int32_t* of_group = best + groups_per_row_;
    for (int group = 0; group < groups_; ++group) {
      const float* own = wanted + group * size;
      find_highest(size, scores_per_group_, [&](int i) { return own[i]; }, of_group);
      of_groups[group] = 0.0f;
      for (int i = 0; i < scores_per_group_; ++i) of_groups[group] += own[of_group[i]];
    }
    find_highest(groups_, groups_per_row_, [&](int i) { return of_groups[i]; }, best);
    std::sort(best, best + groups_per_row_);
    return best;
  }

  // found [count] = the indices of the highest of `total` values, descending; of equal values the lower index first.
  template <class ValueAt>
  static void find_highest(int total, int count, const ValueAt& value_at, int32_t* found) {
    int num_found = 0;
    for (int i = 0; i < total; ++i) {
      if (num_found == count && !(value_at(i) > value_at(found[count - 1]))) continue;
      int at = num_found < count ? num_found++ : count - 1;
      for (; at > 0 && value_at(i) > value_at(found[at - 1]); --at) found[at] = found[at - 1];
      found[at] = i;
    }
  }

  int experts_ = 0, per_row_ = 0, normalizes_ = 0, by_sigmoid_ = 0;
  int groups_ = 1, groups_per_row_ = 1, scores_per_group_ = 1;
  float scale_ = 1.0f;
  int64_t rows_ = 0, num_read_ = 0;
  Buffer<float> scores_;    // [rows, experts and the gate]; then what experts are chosen by
  Buffer<float> probabilities_;  // [rows, experts and the gate]
  Buffer<float> of_groups_;      // [rows, groups]: what groups are chosen by
  Buffer<int32_t> best_;         // [rows, groups of a row, and the highest experts of one group]
  Buffer<int32_t> chosen_;  // [rows, experts of a row], ascending
  Buffer<float> chances_;   // [rows, experts of a row]: their weights
  Buffer<int64_t> places_;  // [rows, experts of a row]: places in the order by expert
  Buffer<int64_t> rows_of_;  // [visits], in the order by expert
  std::vector<int64_t> begins_;
  std::vector<MatrixRows> of_expert_;
};

}  // namespace inflight
