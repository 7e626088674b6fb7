// Draws a token from a row of logits: keeps the top_k most likely tokens, of these the smallest set that reaches
// top_p, of these the tokens that min_p permits, and draws by inverse CDF in the order of tokens.
// inflight/sampling/pipeline.py has the details.
//
// Sums are computed in an order that depends on the row alone. The weights of a few candidates are float64; those of a
// whole vocabulary are float32, summed in float32 within blocks and in float64 across blocks.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <functional>
#include <limits>
#include <vector>

#include "element.h"
#include "vector_math.h"

namespace inflight {

struct Chance {
  double temperature;
  double top_k;  // 0: no limit
  double top_p;  // 1: no limit
  double min_p;
  double uniform;  // the random number, in [0, 1)
};

// One per thread, with memory for rows of the reserved number of columns.
class Drawer {
 public:
  static constexpr int kFew = 128;          // candidates to try before top_p is applied to the whole vocabulary
  static constexpr int kBlock = 64;         // weights summed in float32
  static constexpr int kLowDigitBits = 10;  // of the lower two of three digits that a float's bits are divided into

  void reserve(int columns) {
    const int blocks = (columns + kBlock - 1) / kBlock;
    maxima_.reserve(blocks);
    ordered_.reserve(blocks);
    keys_.reserve(columns);
    candidates_.reserve(std::max(columns, kBlock));
    sums_.reserve(blocks);
    weights_.resize(std::max<size_t>(weights_.size(), blocks * kBlock));
    tokens_.reserve(columns);
    by_digit_.resize(kDigits);
  }

  // Returns the token, 0 if none is possible.
  int64_t draw(const float* logits, int columns, const Chance& chance) {
    const bool is_nucleus = chance.top_k == 0 && chance.top_p < 1;
    if (chance.top_k == 0 && !is_nucleus) {
      weigh_all(logits, columns, highest_of(logits, columns), chance);
      return draw_from_all(columns, static_cast<float>(chance.min_p), chance.uniform);
    }
    const double found = weigh_likeliest(logits, columns, is_nucleus ? kFew : static_cast<int>(chance.top_k), chance);
    double total = found;
    if (is_nucleus && kFew < columns && !candidates_.empty()) {
      weigh_all(logits, columns, logits[candidates_[0].token], chance);
      total = sum_blocks(columns, 0.0f);
      if (found < chance.top_p * total) {
        const float least = cut_large_nucleus(columns, chance.top_p * total);
        return draw_from_all(columns, std::max(least, static_cast<float>(chance.min_p)), chance.uniform);
      }
    }
    cut_nucleus(chance.top_p * total);
    for (Candidate& each : candidates_)
      if (each.weight < chance.min_p) each.weight = 0;
    const double kept = weight_of_candidates();
    return first_beyond(chance.uniform * kept, kept);
  }

 private:
  static constexpr int kDigits = 1 << (32 - 2 * kLowDigitBits);  // number of values of the highest digit
  static constexpr int kLowDigitMask = (1 << kLowDigitBits) - 1;
  static constexpr int64_t kLowerHalf = 0xffffffff;

  struct Candidate {
    int32_t token;
    double weight;  // the most likely token has 1
  };

  // Fills the candidates, most likely first; returns the sum of their weights.
  double weigh_likeliest(const float* logits, int columns, int count, const Chance& chance) {
    find_likeliest(logits, columns, count);
    candidates_.clear();
    double sum = 0;
    for (const int64_t key : keys_) {
      const double below = static_cast<double>(logits[token_of(key)]) - logits[token_of(keys_[0])];
      candidates_.push_back({token_of(key), std::exp(below / chance.temperature)});
      sum += candidates_.back().weight;
    }
    return sum;
  }

  // Keeps the candidates that are needed to reach a weight, in the order of tokens.
  void cut_nucleus(double needed) {
    double before = 0;
    size_t size = 0;
    while (size < candidates_.size() && before < needed) before += candidates_[size++].weight;
    candidates_.resize(size);
    std::sort(candidates_.begin(), candidates_.end(),
              [](const Candidate& a, const Candidate& b) { return a.token < b.token; });
  }

  double weight_of_candidates() const {
    double total = 0;
    for (const Candidate& each : candidates_) total += each.weight;
    return total;
  }

  // Returns the first candidate at which the cumulative weight exceeds `target`, of `total`; 0 if none has any weight.
  int64_t first_beyond(double target, double total) const {
    if (!(total > 0)) return 0;
    target = within(target, total);
    double sum = 0;
    for (const Candidate& each : candidates_)
      if ((sum += each.weight) > target) return each.token;
    return candidates_.back().token;  // only reached with NaN weights
  }

  // Clamps the target below the total: by rounding it might otherwise select a token without weight.
  static double within(double target, double total) {
    return std::max(0.0, std::min(target, std::nextafter(total, 0)));
  }

  // Finds the keys of the `count` highest logits in descending order. The `count` highest maxima of blocks are logits
  // themselves, so a logit below the least of these maxima is not among the results.
  void find_likeliest(const float* logits, int columns, int count) {
    maxima_.clear();
    for (int begin = 0; begin < columns; begin += kBlock)
      maxima_.push_back(highest_of(logits + begin, std::min(kBlock, columns - begin)));
    float least = -std::numeric_limits<float>::infinity();
    if (static_cast<size_t>(count) < maxima_.size()) {
      ordered_ = maxima_;
      std::nth_element(ordered_.begin(), ordered_.begin() + (count - 1), ordered_.end(), std::greater<float>());
      least = ordered_[count - 1];
    }
    keys_.clear();
    for (size_t block = 0; block < maxima_.size(); ++block) {
      const int begin = static_cast<int>(block) * kBlock;
      if (maxima_[block] >= least) collect(logits, begin, std::min(columns, begin + kBlock), least);
    }
    const auto size = std::min<size_t>(count, keys_.size());
    const auto end = keys_.begin() + size;
    if (end != keys_.end()) std::nth_element(keys_.begin(), end, keys_.end(), std::greater<int64_t>());
    keys_.resize(size);
    std::sort(keys_.begin(), keys_.end(), std::greater<int64_t>());
  }

  static float highest_of(const float* values, int count) {
    const Floats nothing = floats(-std::numeric_limits<float>::infinity());
    Floats highest = nothing;
    for (int i = 0; i < count; i += kLanes)  // in this order NaN is ignored
      highest = max(load_or(nothing, values + i, first_lanes(count - i)), highest);
    return largest_of(highest);
  }

  void collect(const float* logits, int begin, int end, float least) {
    for (int i = begin; i < end; i += kLanes) {
      const Mask mask = first_lanes(end - i);
      const Floats values = load(logits + i, mask);
      uint32_t found = lane_bits(at_least(mask, values, floats(least)));
      for (; found; found &= found - 1) keys_.push_back(key_of(logits, i + __builtin_ctz(found)));
    }
  }

  // Keys have the order of the values; among equal values, the first token has the highest key.
  static int64_t key_of(const float* logits, int token) {
    const float value = logits[token] + 0.0f;  // turns -0 into 0
    const int32_t bits = bits_of(value);
    return static_cast<int64_t>(bits ^ ((bits >> 31) & 0x7fffffff)) * (kLowerHalf + 1) + (kLowerHalf - token);
  }
  static int32_t token_of(int64_t key) { return static_cast<int32_t>(kLowerHalf - (key & kLowerHalf)); }

  // Computes every token's weight, 1 for the most likely one, and zeros up to the end of the last block.
  void weigh_all(const float* logits, int columns, float highest, const Chance& chance) {
    const Floats most = floats(highest);
    const Floats temperature = floats(static_cast<float>(chance.temperature));
    for (int begin = 0; begin < columns; begin += kBlock)
      for (int i = begin; i < begin + kBlock; i += kLanes) {
        const Mask mask = first_lanes(columns - i);
        const Floats below = sub(load(logits + i, mask), most);
        const Floats weights = exp_ps(div(below, temperature));
        store(&weights_[i], keep(mask, weights));
      }
  }

  // Sums the weights that are at least `least`: returns the total, and stores the sum of each block.
  double sum_blocks(int columns, float least) {
    sums_.clear();
    double total = 0;
    for (int begin = 0; begin < columns; begin += kBlock) {
      Floats sum = floats(0.0f);
      for (int i = begin; i < begin + kBlock; i += kLanes) {
        const Floats weights = load(&weights_[i]);
        const Mask counts = at_least(weights, floats(least));
        sum = add_where(counts, sum, weights);
      }
      sums_.push_back(sum_of(sum));
      total += sums_.back();
    }
    return total;
  }

  // Draws from the tokens whose weight is at least `least`: first the block, then the token in it.
  int64_t draw_from_all(int columns, float least, double uniform) {
    const double total = sum_blocks(columns, least);
    if (!(total > 0)) return 0;
    const double target = within(uniform * total, total);
    size_t block = 0;
    double before = 0;
    while (block + 1 < sums_.size() && before + sums_[block] <= target) before += sums_[block++];
    candidates_.clear();
    const int begin = static_cast<int>(block) * kBlock;
    for (int token = begin; token < std::min(columns, begin + kBlock); ++token)
      candidates_.push_back({token, weights_[token] >= least ? weights_[token] : 0.0});
    return first_beyond(target - before, weight_of_candidates());
  }

  // Finds the least weight that is needed to reach `needed`, digit by digit, since bit patterns of floats from 0 to 1
  // have the order of the floats. Tokens of exactly this weight that are not needed, the last ones, get weight 0.
  float cut_large_nucleus(int columns, double needed) {
    tokens_.resize(columns);
    for (int token = 0; token < columns; ++token) tokens_[token] = token;
    double above = keep_digit(2 * kLowDigitBits, kDigits - 1, needed, 0);
    above = keep_digit(kLowDigitBits, kLowDigitMask, needed, above);
    above = keep_digit(0, kLowDigitMask, needed, above);
    const float least = weights_[tokens_[0]];
    for (const int32_t token : tokens_) {
      if (above >= needed) weights_[token] = 0;
      above += least;
    }
    return least;
  }

  // Keeps the tokens with the digit at which weights, from the highest digit down, reach `needed`; returns the weight
  // above them.
  double keep_digit(int shift, int mask, double needed, double above) {
    std::fill(by_digit_.begin(), by_digit_.begin() + mask + 1, 0.0);
    const auto digit_of = [&](int32_t token) { return bits_of(weights_[token]) >> shift & mask; };
    for (const int32_t token : tokens_) by_digit_[digit_of(token)] += weights_[token];
    int found = -1;
    for (int digit = mask; digit >= 0 && (found < 0 || above + by_digit_[found] < needed); --digit) {
      if (!(by_digit_[digit] > 0)) continue;
      if (found >= 0) above += by_digit_[found];
      found = digit;
    }
    const auto others = [&](int32_t token) { return digit_of(token) != found; };
    tokens_.erase(std::remove_if(tokens_.begin(), tokens_.end(), others), tokens_.end());
    return above;
  }

  std::vector<float> maxima_, ordered_;  // of blocks
  std::vector<int64_t> keys_;
  std::vector<Candidate> candidates_;
  std::vector<float> weights_;
  std::vector<double> sums_;  // of blocks
  std::vector<int32_t> tokens_;
  std::vector<double> by_digit_;
};

}  // namespace inflight
