// The causal convolution of recurrent layers: for each column, over the inputs of the last few tokens.
//
// A thread computes some columns for all rows of a sequence, so that it needs nothing from other threads.
#pragma once

#include "layer.h"
#include "vector_math.h"

namespace inflight {

constexpr int kMaxConvWidth = 8;
constexpr int kConvColumns = 64;  // columns that are computed together

// The convolution of some columns of a sequence: `advance` takes one token after the other.
template <class E>
class ShortConvolution {
 public:
  using Stored = typename E::Stored;

  // The columns from `first` on, after the tokens whose inputs are in `state` [conv_width - 1, conv_columns].
  ShortConvolution(const RecurrentShape& shape, const Recurrent& layer, int first, const Stored* state)
      : shape_(shape), layer_(layer), first_(first), next_(shape.conv_width - 1) {
    for (int token = 0; token < next_; ++token) fill(token, [&](int i, Mask mask) {
      return E::load(state + static_cast<int64_t>(token) * shape.conv_columns + first + i, mask);
    });
  }

  // out [conv_columns] = the convolution at the next token, whose input is load_input(column, mask).
  template <class Load, class Activate>
  void advance(const Load& load_input, const Activate& activate, float* out) {
    fill(next_, [&](int i, Mask mask) { return load_input(first_ + i, mask); });
    next_ = next_ + 1 == shape_.conv_width ? 0 : next_ + 1;
    const float* inputs[kMaxConvWidth];
    for (int token = 0; token < shape_.conv_width; ++token) inputs[token] = input(token);
    each([&](int i, Mask mask) {
      const int column = first_ + i;
      Floats sum = layer_.conv_bias ? load(layer_.conv_bias + column, mask) : floats(0.0f);
      const float* weights = layer_.conv + column;
      for (int token = 0; token < shape_.conv_width; ++token, weights += shape_.conv_columns)
        sum = fmadd(load(weights, mask), load_aligned(inputs[token] + i), sum);
      store(out + column, activate(sum), mask);
    });
  }

  // Stores the inputs of the last tokens.
  void save(Stored* state) const {
    for (int token = 1; token < shape_.conv_width; ++token)
      each([&](int i, Mask mask) {
        E::store(state + static_cast<int64_t>(token - 1) * shape_.conv_columns + first_ + i,
                 load_aligned(input(token) + i), mask);
      });
  }

 private:
  // The inputs of the last conv_width tokens, the oldest being number 0.
  const float* input(int token) const {
    const int place = next_ + token;
    return window_[place < shape_.conv_width ? place : place - shape_.conv_width];
  }

  template <class Load>
  void fill(int place, const Load& load_own) {
    each([&](int i, Mask mask) { store_aligned(window_[place] + i, load_own(i, mask)); });
  }

  template <class F>
  void each(const F& f) const {
    for (int i = 0; i < kConvColumns && first_ + i < shape_.conv_columns; i += kLanes)
      f(i, first_lanes(shape_.conv_columns - first_ - i));
  }

  const RecurrentShape& shape_;
  const Recurrent& layer_;
  const int first_;
  int next_;  // place of the next token's input, which replaces the oldest one
  alignas(64) float window_[kMaxConvWidth][kConvColumns];
};

}  // namespace inflight
