// Linear attention with decay, token by token: the recurrence of gated DeltaNet and Mamba-2.
//
// A head's state S [key_dim, value_dim] maps keys to values. For each token, the state decays, the token's value is
// added at its key, and the result is read at its query; `engine/recurrent/linear_attention.py` has the formulas.
// Columns of S do not depend on each other: 32 at a time are advanced by up to `kTokensAtOnce` tokens, while they are
// in the first-level cache. These 32 columns are stored together, [key_dim, 32]; a head's last columns [key_dim, rest].
#pragma once

#include <algorithm>

#include "layer.h"
#include "vector_math.h"

namespace inflight {

constexpr int kTokensAtOnce = 32;
constexpr int kValuesAtOnce = 2 * kLanes;

// The inputs of one head for up to kTokensAtOnce consecutive tokens.
struct HeadTokens {
  int count;
  const float *queries, *keys;  // [count, key_dim], rows `stride` apart
  int64_t stride;
  const float* decays;   // [count], factors of the state
  const float* weights;  // [count], factors of the values that are written
  float skip;            // factor of the values that are added to the results
};

// Advances a state [key_dim, columns] of up to 32 columns by some tokens. values [count, columns], rows `stride` apart:
// the tokens' values, which are replaced by the results. With kDelta, the value that the state has at a token's key is
// subtracted from the token's value before it is added.
template <bool kDelta, bool kWhole>
inline void attend_columns(const HeadTokens& tokens, int key_dim, float* state, int columns, float* values,
                           int64_t stride) {
  const int width = kWhole ? kValuesAtOnce : columns;
  const Mask lows = first_lanes(columns), highs = first_lanes(columns - kLanes);
  const auto load_low = [&](const float* p) { return kWhole ? load(p) : load(p, lows); };
  const auto load_high = [&](const float* p) { return kWhole ? load(p + kLanes) : load(p + kLanes, highs); };
  const auto store_both = [&](float* p, Floats low, Floats high) {
    if (kWhole) {
      store(p, low);
      store(p + kLanes, high);
    } else {
      store(p, low, lows);
      store(p + kLanes, high, highs);
    }
  };
  for (int token = 0; token < tokens.count; ++token, values += stride) {
    const float *query = tokens.queries + token * tokens.stride, *key = tokens.keys + token * tokens.stride;
    const Floats decay = floats(tokens.decays[token]), weight = floats(tokens.weights[token]);
    const Floats low = load_low(values), high = load_high(values);
    Floats low_written = low, high_written = high;
    if (kDelta) {
      Floats held[4] = {floats(0.0f), floats(0.0f), floats(0.0f), floats(0.0f)};  // even keys, and odd ones
      const float* row = state;
      int i = 0;
      for (; i + 1 < key_dim; i += 2, row += 2 * width) {
        const Floats even = floats(key[i]), odd = floats(key[i + 1]);
        held[0] = fmadd(even, load_low(row), held[0]);
        held[1] = fmadd(even, load_high(row), held[1]);
        held[2] = fmadd(odd, load_low(row + width), held[2]);
        held[3] = fmadd(odd, load_high(row + width), held[3]);
      }
      if (i < key_dim) {
        held[0] = fmadd(floats(key[i]), load_low(row), held[0]);
        held[1] = fmadd(floats(key[i]), load_high(row), held[1]);
      }
      low_written = fnmadd(decay, add(held[0], held[2]), low);
      high_written = fnmadd(decay, add(held[1], held[3]), high);
    }
    low_written = mul(weight, low_written);
    high_written = mul(weight, high_written);
    Floats low_read = mul(floats(tokens.skip), low), high_read = mul(floats(tokens.skip), high);
    float* row = state;
    for (int i = 0; i < key_dim; ++i, row += width) {
      const Floats own_key = floats(key[i]), own_query = floats(query[i]);
      const Floats new_low = fmadd(own_key, low_written, mul(decay, load_low(row)));
      const Floats new_high = fmadd(own_key, high_written, mul(decay, load_high(row)));
      store_both(row, new_low, new_high);
      low_read = fmadd(own_query, new_low, low_read);
      high_read = fmadd(own_query, new_high, high_read);
    }
    store_both(values, low_read, high_read);
  }
}

// Advances the columns `first` to `last` - 1 of a head by some tokens; `first` is a multiple of 32. values [count,
// value_dim], rows `stride` apart: the tokens' values, whose columns are replaced by the results.
template <bool kDelta>
__attribute__((noinline)) void attend_head(const HeadTokens& tokens, int key_dim, float* state, int first, int last,
                                           float* values, int64_t stride) {
  for (int column = first; column < last; column += kValuesAtOnce) {
    const int columns = std::min(kValuesAtOnce, last - column);
    const auto attend = columns == kValuesAtOnce ? attend_columns<kDelta, true> : attend_columns<kDelta, false>;
    attend(tokens, key_dim, state + static_cast<int64_t>(column) * key_dim, columns, values + column, stride);
  }
}

}  // namespace inflight
