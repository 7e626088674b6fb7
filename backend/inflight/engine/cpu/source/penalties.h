// Penalties for earlier tokens, applied to a row of logits; inflight/sampling/pipeline.py defines their order.
#pragma once

#include <algorithm>
#include <cstdint>
#include <limits>
#include <vector>

namespace inflight {

struct Penalties {
  double repetition, presence, frequency;  // the latter two multiplied by the temperature
};

struct PenalizedRows {
  int64_t count;
  const int64_t* rows;         // [count]
  const Penalties* penalties;  // [count]
  const int32_t* history;      // [slots, history_width]: each slot's tokens
  int64_t history_width;
  const int64_t *slots, *lengths;  // [count]: slot of each row, and number of its tokens before the row
};

enum PenaltyStatus : int32_t { kPenalized = 0, kNoMemory = 1, kWrongTokens = 2 };

constexpr float kLargestLogit = 1e30f;  // limit of the magnitude of penalized logits

// One per thread, with memory for rows of the reserved number of columns.
class Penalizer {
 public:
  void reserve(int columns) {
    counts_.resize(std::max<size_t>(counts_.size(), columns));
    distinct_.reserve(columns);
  }

  // Applies penalties in place; does nothing and returns false if a token is negative. Tokens beyond the columns,
  // which are rows of prompt tables, have no logit.
  bool penalize(float* logits, int columns, const int32_t* tokens, int64_t num_tokens, const Penalties& penalties) {
    if (std::any_of(tokens, tokens + num_tokens, [](int32_t token) { return token < 0; })) return false;
    distinct_.clear();
    for (int64_t i = 0; i < num_tokens; ++i)
      if (tokens[i] < columns && counts_[tokens[i]]++ == 0) distinct_.push_back(tokens[i]);
    const auto repetition = static_cast<float>(penalties.repetition);
    const auto presence = static_cast<float>(penalties.presence);
    const auto frequency = static_cast<float>(penalties.frequency);
    for (const int32_t token : distinct_) {
      logits[token] = penalized(logits[token], repetition, presence, times(frequency, counts_[token]));
      counts_[token] = 0;
    }
    return true;
  }

 private:
  static float penalized(float logit, float repetition, float presence, float frequency) {
    if (logit == -std::numeric_limits<float>::infinity()) return logit;
    float value = logit < 0 ? times(logit, repetition) : logit / repetition;
    value -= presence;
    return std::clamp(value - frequency, -kLargestLogit, kLargestLogit);
  }

  // The product is rounded before it is added, not fused into a multiply-add, as with torch's operators.
  static float times(float a, double b) { return static_cast<float>(a * b); }

  std::vector<int32_t> counts_;  // per token; zeros between rows
  std::vector<int32_t> distinct_;
};

}  // namespace inflight
