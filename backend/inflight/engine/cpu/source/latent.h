// Latent attention (DeepSeek's MLA): for each token, the cache has a latent [rank], of which the keys and values of all
// heads are projections, followed by a rotated key [rope] that all heads share.
//
//     cached  [blocks][tokens_per_block][rank + rope]
//
// There are two equivalent forms. In the absorbed form, queries are multiplied by the projection of keys, and attend to
// the latents, which are also the values; the result is multiplied by the projection of values. In the decompressed
// form, the latents are projected to keys and values of each head, to which queries attend. Each span takes the form
// with fewer multiplications, so that a row's form does not depend on other sequences.
//
// Sums are float32, with lanes along the vectors: in both forms, keys and values are rows.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <vector>

#include "attention.h"
#include "gemm.h"
#include "layer.h"
#include "vector_math.h"

namespace inflight {

struct LatentShape {
  int32_t query_rank;  // width of the vector that queries are projected from; 0: they are projected from hidden states
  int32_t rank;                // width of a latent
  int32_t nope, rope, value;  // widths of a head: of both parts of its queries and keys, and of its values
  int32_t is_interleaved;     // whether dimensions 2i and 2i + 1 are rotated together
  float eps;                   // of the norms below
  int query() const { return nope + rope; }
  int cached() const { return rank + rope; }
  int unfolded() const { return nope + value; }
};

// Whether a span takes fewer multiplications in the decompressed form.
inline bool takes_fewer_decompressed(const LatentShape& shape, const Span& span) {
  const int64_t rows = span.end - span.begin, keys = span.start + rows;
  const int64_t pairs = rows * span.start + rows * (rows + 1) / 2;
  const int64_t of_projection = static_cast<int64_t>(shape.unfolded()) * shape.rank;
  return keys * of_projection + pairs * (shape.query() + shape.value) <
         rows * of_projection + pairs * (shape.cached() + shape.rank);
}

// The forms of a batch's spans, for all layers.
class LatentForms {
 public:
  struct AbsorbedRow {
    int64_t row, slot, position;
  };
  struct DecompressedTile {  // rows begin .. end - 1 of a span
    Span span;
    int64_t begin, end;
    int64_t first_key;  // index of the span's first key among those of all spans
  };
  struct Key {
    int64_t slot, position;
  };

  void make(const LatentShape& shape, const Batch& batch, int heads, int num_threads) {
    absorbed_.clear(), tiles_.clear(), keys_.clear(), by_head_.clear();
    for (int64_t index = 0; index < batch.num_spans; ++index) {
      const Span& span = batch.spans[index];
      if (!takes_fewer_decompressed(shape, span)) {
        for (int64_t row = span.begin; row < span.end; ++row)
          absorbed_.push_back({row, span.slot, span.start + row - span.begin});
        continue;
      }
      const auto first_key = static_cast<int64_t>(keys_.size());
      for (int64_t begin = span.begin; begin < span.end; begin += kTile)
        tiles_.push_back({span, begin, std::min(begin + kTile, span.end), first_key});
      for (int64_t key = 0; key < span.start + span.end - span.begin; ++key) keys_.push_back({span.slot, key});
    }
    const auto rows = static_cast<int64_t>(absorbed_.size());
    heads_per_tile_ = static_cast<int>(std::clamp<int64_t>(heads * rows / num_threads, 1, std::min(kTile, heads)));
  }

  // Sorts the rows of the absorbed form by head, in blocks for tiles or for other products.
  void sort(int heads, bool by_tiles) {
    by_head_.clear();
    const RowBlocks blocks(static_cast<int64_t>(absorbed_.size()), by_tiles);
    const int64_t chunks = blocks.rows ? (blocks.count + blocks.at_once() - 1) / blocks.at_once() : 0;
    for (int head = 0; head < heads; ++head)
      for (int64_t chunk = 0; chunk < chunks; ++chunk)
        by_head_.push_back({blocks, head * blocks.rows, blocks.count * chunk / chunks,
                            blocks.count * (chunk + 1) / chunks, head});
  }

  const std::vector<AbsorbedRow>& absorbed() const { return absorbed_; }
  const std::vector<DecompressedTile>& tiles() const { return tiles_; }
  const std::vector<Key>& keys() const { return keys_; }  // of all spans in the decompressed form
  const std::vector<MatrixRows>& by_head() const { return by_head_; }
  int heads_per_tile() const { return heads_per_tile_; }

 private:
  std::vector<AbsorbedRow> absorbed_;
  std::vector<DecompressedTile> tiles_;
  std::vector<Key> keys_;
  std::vector<MatrixRows> by_head_;
  int heads_per_tile_ = 1;
};

// Rotates a vector in place.
template <class E>
void rotate_latent(const LatentShape& shape, typename E::Stored* data, const float* cos, const float* sin,
                   int rotary_dim) {
  if (shape.is_interleaved) {
    typename E::Stored apart[kMaxHeadDim];
    const int half = shape.rope / 2;
    for (int i = 0; i < half; ++i) apart[i] = data[2 * i], apart[half + i] = data[2 * i + 1];
    std::memcpy(data, apart, shape.rope * sizeof *data);
  }
  if (cos) rotate<E>(data, cos, sin, rotary_dim);
}

// Attention of a tile of up to kTile query vectors; one per thread.
template <class E>
class LatentTile {
 public:
  using Stored = typename E::Stored;
  static constexpr int kKeys = 64;  // scored before the sums are rescaled

  // Consecutive keys: a head's part without rotation, the shared rotated part, and the values.
  struct Keys {
    const Stored *own[kKeys], *shared[kKeys], *values[kKeys];
    int64_t first;
    int count;
  };

  bool reserve(const LatentShape& shape) {
    rope_ = shape.rope;
    shared_at_ = (std::max(shape.rank, shape.nope) + kPanel - 1) / kPanel * kPanel;  // room for an absorbed query
    query_stride_ = shared_at_ + whole(rope_) + kLanes;  // not a power of two
    sum_stride_ = whole(std::max(shape.rank, shape.value)) + kLanes;
    return memory_.reserve(kTile * (query_stride_ + sum_stride_ + kKeys));
  }

  // A vector's two parts, padded to whole lanes with zeros.
  float* own(int vector) { return memory_.get() + vector * query_stride_; }
  void set_own(int vector, const Stored* source, int width) { widen(source, width, own(vector)); }
  void set_shared(int vector, const Stored* source) { widen(source, rope_, own(vector) + shared_at_); }
  void set_position(int vector, int64_t position) { positions_[vector] = position; }

  // Attends to keys 0 .. `last` with `count` vectors. find(first, keys) finds the keys from `first` on; `width` is the
  // width of the part of a key that is not shared, `value` the width of a value.
  template <class FindKeys>
  void attend(const AttentionShape& shape, int count, int width, int value, int64_t last, const FindKeys& find) {
    for (int m = 0; m < count; ++m) {
      largest_[m] = -std::numeric_limits<float>::infinity();
      total_[m] = 0.0f;
      std::memset(sums(m), 0, whole(value) * sizeof(float));
    }
    const int64_t oldest = shape.recent ? *std::min_element(positions_, positions_ + count) - shape.recent + 1 : 0;
    Keys keys;
    for (int64_t first = 0; first <= last; first += kKeys) {
      if (shape.recent && first + kKeys <= oldest && first >= shape.sinks) continue;
      keys.first = first;
      keys.count = static_cast<int>(std::min<int64_t>(kKeys, last - first + 1));
      find(first, keys);
      score(count, width, keys, shape.scale);
      soften(count, value, keys, shape);
      for (int d = 0; d < value;) {
        const int left = value - d;
        if (left >= kSummedParts * kLanes) {
          add_values<kSummedParts>(count, d, keys, kLanes);
          d += kSummedParts * kLanes;
        } else {
          add_values<1>(count, d, keys, std::min(left, kLanes));
          d += kLanes;
        }
      }
    }
  }

  // Stores the result of a query vector: the weighted sum of values, divided by the sum of the weights.
  void finish(int vector, int value, Stored* target) {
    const Floats factor = floats(1.0f / total_[vector]);
    for (int d = 0; d < value; d += kLanes)
      E::store(target + d, mul(load_aligned(sums(vector) + d), factor), first_lanes(value - d));
  }

 private:
  static constexpr int kKeysInCache = 16;  // of 32 kB, while all vectors are multiplied

  static int whole(int width) { return (width + kLanes - 1) / kLanes * kLanes; }
  static void widen(const Stored* source, int width, float* target) {
    for (int i = 0; i < width; i += kLanes) store_aligned(target + i, E::load(source + i, first_lanes(width - i)));
  }
  float* sums(int vector) { return memory_.get() + kTile * query_stride_ + vector * sum_stride_; }
  float* weights(int vector) { return memory_.get() + kTile * (query_stride_ + sum_stride_) + vector * kKeys; }

  // sums[m][k] += queries [kRows, any] * keys[k], `width` numbers each.
  template <int kRows, int kCount>
  static void multiply_keys(const float* queries, int64_t stride, const Stored* const* keys, int width,
                            Floats (*sums)[kCount]) {
    const auto add_at = [&](int d, auto load_key) {
      Floats own[kCount];
#pragma GCC unroll 16
      for (int k = 0; k < kCount; ++k) own[k] = load_key(keys[k] + d);
#pragma GCC unroll 16
      for (int m = 0; m < kRows; ++m) {
        const Floats query = load_aligned(queries + m * stride + d);
#pragma GCC unroll 16
        for (int k = 0; k < kCount; ++k) sums[m][k] = fmadd(query, own[k], sums[m][k]);
      }
    };
    const int last = width / kLanes * kLanes;
    for (int d = 0; d < last; d += kLanes) add_at(d, [](const Stored* key) { return E::load(key); });
    const Mask rest = first_lanes(width - last);
    if (last < width) add_at(last, [&](const Stored* key) { return E::load(key, rest); });
  }

  template <int kRows, int kCount>
  void score_some(int row, int key, int width, const Keys& keys, float scale) {
    Floats sums[kRows][kCount];
#pragma GCC unroll 16
    for (int m = 0; m < kRows; ++m)
#pragma GCC unroll 16
      for (int k = 0; k < kCount; ++k) sums[m][k] = floats(0.0f);
    multiply_keys<kRows, kCount>(own(row), query_stride_, keys.own + key, width, sums);
    multiply_keys<kRows, kCount>(own(row) + shared_at_, query_stride_, keys.shared + key, rope_, sums);
#pragma GCC unroll 16
    for (int m = 0; m < kRows; ++m)
#pragma GCC unroll 16
      for (int k = 0; k < kCount; ++k) weights(row + m)[key + k] = sum_of(sums[m][k]) * scale;
  }

  void score(int count, int width, const Keys& keys, float scale) {
    for (int begin = 0; begin < keys.count; begin += kKeysInCache) {
      const int end = std::min(begin + kKeysInCache, keys.count);
      in_blocks<kScoredRows>(count, [&](auto rows, int row) {
        constexpr int kRows = decltype(rows)::value, kAtOnce = scored_groups(kRows);
        int key = begin;
        for (; key + kAtOnce <= end; key += kAtOnce) score_some<kRows, kAtOnce>(row, key, width, keys, scale);
        for (; key < end; ++key) score_some<kRows, 1>(row, key, width, keys, scale);
      });
    }
  }

  // Converts scores to weights and rescales earlier sums to the largest score so far.
  void soften(int count, int value, const Keys& keys, const AttentionShape& shape) {
    const Floats hidden_score = floats(-std::numeric_limits<float>::infinity());
    for (int m = 0; m < count; ++m) {
      const int position = static_cast<int>(positions_[m]);
      Floats largest = hidden_score;
      for (int i = 0; i < keys.count; i += kLanes) {
        const Ints numbers = add(ints(static_cast<int>(keys.first) + i), lane_numbers());
        Mask seen = at_most(numbers, ints(position)) & first_lanes(keys.count - i);
        if (shape.recent) {
          const int last_unseen = std::max(position - shape.recent, shape.first - 1);
          seen &= greater(numbers, ints(last_unseen)) | less(numbers, ints(shape.sinks));
        }
        const Floats masked = select(seen, load_aligned(weights(m) + i), hidden_score);
        store_aligned(weights(m) + i, masked);
        largest = max(largest, masked);
      }
      const float before = largest_[m], now = std::max(before, largest_of(largest));
      const bool sees_any = now > -std::numeric_limits<float>::infinity();
      const Floats shift = floats(sees_any ? now : 0.0f);
      Floats total = floats(0.0f);
      for (int i = 0; i < keys.count; i += kLanes) {
        const Floats weight = exp_ps(sub(load_aligned(weights(m) + i), shift));
        total = add(total, weight);
        store_aligned(weights(m) + i, weight);
      }
      const float fade = before == now || !sees_any ? 1.0f : std::exp(before - now);
      largest_[m] = now;
      total_[m] = total_[m] * fade + sum_of(total);
      if (fade == 1.0f) continue;
      for (int d = 0; d < value; d += kLanes)
        store_aligned(sums(m) + d, mul(load_aligned(sums(m) + d), floats(fade)));
    }
  }

  // sums[m][d] += weights[m][k] * values[k][d], kParts registers of d from `first` on, the last of `left` lanes.
  template <int kParts>
  void add_values(int count, int first, const Keys& keys, int left) {
    const Mask mask = first_lanes(left);
    in_blocks<kSummedRows>(count, [&](auto rows, int row) {
      constexpr int kRows = decltype(rows)::value;
      Floats totals[kRows][kParts];
#pragma GCC unroll 16
      for (int m = 0; m < kRows; ++m)
#pragma GCC unroll 16
        for (int i = 0; i < kParts; ++i) totals[m][i] = load_aligned(sums(row + m) + first + i * kLanes);
      for (int k = 0; k < keys.count; ++k) {
        Floats value[kParts];
#pragma GCC unroll 16
        for (int i = 0; i < kParts; ++i) {
          const Stored* source = keys.values[k] + first + i * kLanes;
          value[i] = left == kLanes ? E::load(source) : E::load(source, mask);
        }
#pragma GCC unroll 16
        for (int m = 0; m < kRows; ++m) {
          const Floats weight = floats(weights(row + m)[k]);
#pragma GCC unroll 16
          for (int i = 0; i < kParts; ++i) totals[m][i] = fmadd(weight, value[i], totals[m][i]);
        }
      }
#pragma GCC unroll 16
      for (int m = 0; m < kRows; ++m)
#pragma GCC unroll 16
        for (int i = 0; i < kParts; ++i) store_aligned(sums(row + m) + first + i * kLanes, totals[m][i]);
    });
  }

  int rope_ = 0, shared_at_ = 0;
  int64_t query_stride_ = 0, sum_stride_ = 0;
  Buffer<float> memory_;  // queries, sums, and scores or weights of each vector
  float largest_[kTile], total_[kTile];
  int64_t positions_[kTile];
};

}  // namespace inflight
