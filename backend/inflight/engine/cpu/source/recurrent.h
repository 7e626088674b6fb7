// Recurrent layers between their input and output projections: a gated short convolution, gated DeltaNet or Mamba-2, as
// `engine/recurrent/mixers.py` computes them.
//
// Threads share the convolution by columns, linear attention by heads, and the rest by rows. A thread computes a
// sequence's rows one after the other, so that results do not depend on the chunks in which they are computed.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstring>
#include <vector>

#include "layer.h"
#include "linear_attention.h"
#include "short_convolution.h"
#include "team.h"
#include "vector_math.h"

namespace inflight {

template <class E>
class RecurrentLayers {
 public:
  using Stored = typename E::Stored;

  explicit RecurrentLayers(const Shape& shape) : shape_(shape.recurrent), activation_(shape.activation) {}

  // Prepares the layers for the rows of a batch's segments; throws bad_alloc.
  void prepare(const Segment* segments, int64_t count) {
    segments_ = segments;
    spans_.clear();
    for (int64_t i = 0; i < count; ++i) {
      if (i == 0 || segments[i].state != segments[i - 1].state) spans_.push_back({i, i});
      spans_.back().end = i + 1;
    }
  }

  // Allocates memory for `rows` rows; returns false if there is none.
  bool reserve(int64_t rows, int num_threads) {
    return convolved_.reserve(rows * shape_.conv_columns) && scratch_.reserve(scratch_size() * num_threads);
  }

  // Computes a layer's rows from its input projection `projected` [rows, projected], up to `finish`, and advances the
  // states. Rows of drafts are copied to `kept` [kept rows, projected] if it is not null.
  void advance(const Recurrent& layer, const Stored* projected, Stored* kept, Team& team, int thread) {
    const auto num_spans = static_cast<int64_t>(spans_.size());
    if (kept) keep(projected, kept, team, thread);
    const int64_t pieces = (shape_.conv_columns + kConvColumns - 1) / kConvColumns;
    const Share share(pieces * num_spans, thread, team.size());
    for (int64_t item = share.begin; item < share.end; ++item)
      convolve(layer, spans_[item % num_spans], static_cast<int>(item / num_spans) * kConvColumns, projected);
    if (shape_.heads) {
      const int parts = parts_of_head(num_spans * shape_.heads, team.size());
      team.deal(num_spans * shape_.heads * parts, thread);
      team.barrier();
      team.share(thread, [&](int64_t item) {
        const auto part = static_cast<int>(item / num_spans);
        attend(layer, spans_[item % num_spans], part / parts, part % parts, parts, projected, thread);
      });
    }
    team.barrier();
  }

  // out [output] = a row's input of the output projection, after `advance`, once for each row.
  void finish(const Recurrent& layer, const Stored* projected, int64_t row, Stored* out) {
    projected += row * shape_.projected;
    float* convolved = convolved_.get() + row * shape_.conv_columns;
    if (shape_.kind == kGatedDelta)
      finish_delta(layer, projected + shape_.conv_columns, convolved + 2 * key_width(), out);
    else if (shape_.kind == kMamba2)
      finish_mamba(layer, projected, convolved, out);
    else
      each(shape_.output, [&](int i, Mask mask) {
        E::store(out + i, mul(E::load(projected + shape_.output + i, mask), load(convolved + i, mask)), mask);
      });
  }

 private:
  static constexpr float kL2Eps = 1e-6f;

  struct Span {  // a range of segments of one sequence
    int64_t begin, end;
  };

  template <class F>
  static void each(int count, const F& f) {
    for (int i = 0; i < count; i += kLanes) f(i, first_lanes(count - i));
  }

  int key_width() const { return shape_.key_heads * shape_.key_dim; }
  int64_t head_size() const { return static_cast<int64_t>(shape_.key_dim) * shape_.value_dim; }
  // Of a thread: queries, keys, decays and weights of some tokens, and a head's state while it is advanced by drafts.
  int64_t scratch_size() const { return 2 * kTokensAtOnce * (shape_.key_dim + 1) + head_size() + kLanes; }

  // Number of parts of a head's columns that threads take separately: one, unless there are few heads.
  int parts_of_head(int64_t heads, int num_threads) const {
    if (heads >= 2 * num_threads) return 1;
    return (shape_.value_dim + kValuesAtOnce - 1) / kValuesAtOnce;
  }

  void keep(const Stored* projected, Stored* kept, const Team& team, int thread) const {
    for (auto index = static_cast<size_t>(thread); index < spans_.size(); index += team.size()) {
      const Segment& segment = segments_[spans_[index].end - 1];
      if (segment.kept < 0) continue;
      std::memcpy(kept + segment.kept * shape_.projected, projected + segment.begin * shape_.projected,
                  (segment.end - segment.begin) * shape_.projected * sizeof(Stored));
    }
  }

  // Computes the convolution and the activation of some columns of a sequence's rows, and advances its state.
  void convolve(const Recurrent& layer, const Span& span, int first, const Stored* projected) {
    const int64_t size = static_cast<int64_t>(shape_.conv_width - 1) * shape_.conv_columns;
    auto* const states = static_cast<Stored*>(layer.conv_states);
    Stored* const own = states + segments_[span.begin].state * size;
    ShortConvolution<E> convolution(shape_, layer, first, own);
    for (int64_t index = span.begin; index < span.end; ++index) {
      const Segment& segment = segments_[index];
      for (int64_t row = segment.begin; row < segment.end; ++row) {
        const Stored* source = projected + row * shape_.projected;
        float* out = convolved_.get() + row * shape_.conv_columns;
        if (shape_.kind == kShortConv) {
          convolution.advance([&](int i, Mask mask) { return gated_input(source + i, mask); },
                              [](Floats x) { return x; }, out);
        } else {
          if (shape_.kind == kMamba2) source += shape_.output;
          convolution.advance([&](int i, Mask mask) { return E::load(source + i, mask); },
                              [&](Floats x) { return activate<E>(activation_, x); }, out);
        }
      }
      if (segment.kept < 0) convolution.save(own);
      if (segment.saved >= 0) convolution.save(states + segment.saved * size);
    }
  }

  // The inputs of a gated short convolution, rounded as they are stored.
  Floats gated_input(const Stored* source, Mask mask) const {
    alignas(64) Stored rounded[kLanes];
    E::store(rounded, mul(E::load(source, mask), E::load(source + 2 * shape_.output, mask)));
    return E::load(rounded);
  }

  // Computes linear attention of part `part` of `parts` of a head's columns for a sequence's rows, and advances its
  // state.
  void attend(const Recurrent& layer, const Span& span, int head, int part, int parts, const Stored* projected,
              int thread) {
    const bool has_delta = shape_.kind == kGatedDelta;
    const int first = parts == 1 ? 0 : part * kValuesAtOnce;
    const int last = parts == 1 ? shape_.value_dim : std::min(first + kValuesAtOnce, shape_.value_dim);
    const auto state_of = [&](int64_t index) { return layer.states + (index * shape_.heads + head) * head_size(); };
    float* scratch = scratch_.get() + scratch_size() * thread;
    float* const of_drafts = scratch + 2 * kTokensAtOnce * (shape_.key_dim + 1);
    float* state = state_of(segments_[span.begin].state);
    for (int64_t index = span.begin; index < span.end; ++index) {
      const Segment& segment = segments_[index];
      if (segment.kept >= 0) {
        copy_columns(state, of_drafts, first, last);
        state = of_drafts;
      }
      for (int64_t row = segment.begin; row < segment.end; row += kTokensAtOnce) {
        const auto count = static_cast<int>(std::min<int64_t>(kTokensAtOnce, segment.end - row));
        const float* convolved = convolved_.get() + row * shape_.conv_columns;
        const HeadTokens tokens = has_delta ? delta_tokens(layer, head, count, projected + row * shape_.projected,
                                                           convolved, scratch)
                                            : mamba_tokens(layer, head, count, projected + row * shape_.projected,
                                                           convolved, scratch);
        float* values = convolved_.get() + row * shape_.conv_columns + head * shape_.value_dim;
        if (has_delta)
          attend_head<true>(tokens, shape_.key_dim, state, first, last, values + 2 * key_width(),
                            shape_.conv_columns);
        else
          attend_head<false>(tokens, shape_.key_dim, state, first, last, values, shape_.conv_columns);
      }
      if (segment.saved >= 0) copy_columns(state, state_of(segment.saved), first, last);
    }
  }

  void copy_columns(const float* from, float* to, int first, int last) const {
    std::copy(from + first * shape_.key_dim, from + last * shape_.key_dim, to + first * shape_.key_dim);
  }

  // Normalized queries and keys, decays, and weights of the delta rule.
  HeadTokens delta_tokens(const Recurrent& layer, int head, int count, const Stored* projected, const float* convolved,
                          float* scratch) const {
    const int key_dim = shape_.key_dim;
    float *queries = scratch, *keys = queries + kTokensAtOnce * key_dim;
    float *decays = keys + kTokensAtOnce * key_dim, *weights = decays + kTokensAtOnce;
    const int offset = head / (shape_.heads / shape_.key_heads) * key_dim;
    const Stored* betas = projected + shape_.conv_columns + shape_.output + head;
    for (int token = 0; token < count; ++token) {
      const float* own = convolved + static_cast<int64_t>(token) * shape_.conv_columns + offset;
      const int64_t row = static_cast<int64_t>(token) * shape_.projected;
      to_length(own, 1.0f / std::sqrt(static_cast<float>(key_dim)), queries + token * key_dim);
      to_length(own + key_width(), 1.0f, keys + token * key_dim);
      decays[token] = std::exp(layer.decay[head] * step_size(layer, head, betas + row + shape_.heads));
      weights[token] = shape_.beta_scale / (1.0f + std::exp(-number(betas + row)));
    }
    return {count, queries, keys, key_dim, decays, weights, 0.0f};
  }

  // Decays and step sizes; queries and keys of the head's group.
  HeadTokens mamba_tokens(const Recurrent& layer, int head, int count, const Stored* projected, const float* convolved,
                          float* scratch) const {
    float *decays = scratch, *weights = decays + kTokensAtOnce;
    const int offset = shape_.output + head / (shape_.heads / shape_.key_heads) * shape_.key_dim;
    const Stored* steps = projected + shape_.output + shape_.conv_columns + head;
    for (int token = 0; token < count; ++token) {
      const float step = step_size(layer, head, steps + static_cast<int64_t>(token) * shape_.projected);
      // NaN stays NaN
      weights[token] = step < shape_.least_step ? shape_.least_step : step > shape_.most_step ? shape_.most_step : step;
      decays[token] = std::exp(layer.decay[head] * weights[token]);
    }
    const float* keys = convolved + offset;
    const float skip = layer.skip ? layer.skip[head] : 0.0f;
    return {count, keys + key_width(), keys, shape_.conv_columns, decays, weights, skip};
  }

  // out = a query or key divided by its length, times `scale`.
  void to_length(const float* x, float scale, float* out) const {
    Floats squares = floats(0.0f);
    each(shape_.key_dim, [&](int i, Mask mask) {
      const Floats own = load(x + i, mask);
      squares = fmadd(own, own, squares);
    });
    const Floats factor = floats(scale / std::sqrt(sum_of(squares) + kL2Eps));
    each(shape_.key_dim, [&](int i, Mask mask) { store(out + i, mul(factor, load(x + i, mask)), mask); });
  }

  static float number(const Stored* x) {
    alignas(64) float own[kLanes];
    store_aligned(own, E::load(x, first_lanes(1)));
    return own[0];
  }

  // Softplus of the projected step size.
  static float step_size(const Recurrent& layer, int head, const Stored* projected) {
    const float x = number(projected) + layer.step_bias[head];
    return x > 20.0f ? x : std::log1p(std::exp(x));
  }

  // Normalizes the result of each head, and multiplies it by its gates.
  void finish_delta(const Recurrent& layer, const Stored* gates, const float* results, Stored* out) const {
    for (int head = 0; head < shape_.heads; ++head) {
      const float* own = results + head * shape_.value_dim;
      const int64_t place = static_cast<int64_t>(head) * shape_.value_dim;
      Floats squares = floats(0.0f);
      each(shape_.value_dim, [&](int i, Mask mask) {
        const Floats x = load(own + i, mask);
        squares = fmadd(x, x, squares);
      });
      const Floats factor = floats(1.0f / std::sqrt(sum_of(squares) / shape_.value_dim + shape_.eps));
      each(shape_.value_dim, [&](int i, Mask mask) {
        const Floats normalized = mul(mul(load(own + i, mask), factor), load(layer.norm + i, mask));
        E::store(out + place + i, mul(normalized, activate<E>(kSilu, E::load(gates + place + i, mask))), mask);
      });
    }
  }

  // Multiplies the results, in place, by their gates, and normalizes each group of heads.
  void finish_mamba(const Recurrent& layer, const Stored* gates, float* results, Stored* out) const {
    const int width = shape_.output / shape_.key_heads;
    for (int first = 0; first < shape_.output; first += width) {
      Floats squares = floats(0.0f);
      each(width, [&](int i, Mask mask) {
        float* own = results + first + i;
        const Floats x = mul(load(own, mask), activate<E>(kSilu, E::load(gates + first + i, mask)));
        squares = fmadd(x, x, squares);
        store(own, x, mask);
      });
      const Floats factor = floats(1.0f / std::sqrt(sum_of(squares) / width + shape_.eps));
      each(width, [&](int i, Mask mask) {
        const Floats normalized = mul(load(results + first + i, mask), factor);
        E::store(out + first + i, mul(normalized, load(layer.norm + first + i, mask)), mask);
      });
    }
  }

  const RecurrentShape shape_;
  const int32_t activation_;
  const Segment* segments_ = nullptr;
  std::vector<Span> spans_;
  Buffer<float> convolved_;  // [rows, conv_columns]: outputs of the convolution; results replace values
  Buffer<float> scratch_;    // per thread
};

}  // namespace inflight
