// The parts of a layer, and the computations on single rows. structs.py declares the same structs, with the same
// fields.
#pragma once

#include <sys/mman.h>

#include <cmath>
#include <cstdlib>
#include <memory>

#include "attention.h"
#include "element.h"

namespace inflight {

enum Kind : int32_t { kElement = 0, kInt8 = 1, kInt4 = 2, kFloat4 = 3, kGroupedInt8 = 4 };

struct Linear {
  const void* data;
  const float* bias;          // [padded columns], or null
  const float* scales;        // int8: [padded columns]
  const int32_t* corrections;  // int8: [padded columns], 128 times the column's sum
  const int32_t* order;        // in groups: [width], the source index of each input; null: unchanged order
  int32_t columns, inner, kind;  // in groups: `inner` is bytes of an operand's row
  int32_t groups, group_size;  // in groups: of inputs
  bool has_groups() const { return kind == kInt4 || kind == kFloat4 || kind == kGroupedInt8; }
};

struct Norm {
  const float* weight;
  const float* bias;  // null: a root-mean-square norm
};

// The ranks that change 16 columns.
struct RankRange {
  int32_t first, count;  // in pairs of ranks
  int32_t at;            // index of their first register of B
};

// An adapter's delta to a product, computed in low_rank.h. The ranks of the product's modules are stored one after the
// other; each module's ranks are padded to whole pairs.
struct LowRank {
  const void* a;            // [ranks / 4][inner / 16 pairs][4][16 pairs], padded with zeros
  const void* b;            // registers of 16 columns for a pair of ranks each, those of the first columns first
  const RankRange* ranges;  // [padded columns / 16]
  const float* magnitude;   // [padded columns], or null
  int32_t ranks;            // a multiple of 4; 0: no delta
};

struct LayerAdapter {
  LowRank qkv, query_up, output;              // of attention
  LowRank recurrent_input, recurrent_output;  // of a recurrent layer's qkv and output
  LowRank up, down;
};

struct Adapter {
  const LayerAdapter* layers;
  int32_t ranks;  // maximum over all products
};

struct LatentShape;  // in latent.h

// A layer's weights of latent attention (latent.h), other than its first and last projections.
struct LatentLayer {
  Norm query_norm, kv_norm;  // on the vector that queries are projected from, and on the latent
  Linear query_up;           // without data: queries are projected from hidden states
  // Stacks with a matrix for each head, each padded to whole panels.
  Linear absorb;    // [rank, nope]: the projection of keys, transposed
  Linear value_up;  // [value, rank]
  Linear kv_up;     // [nope + value, rank]
};

enum RecurrentKind : int32_t { kNotRecurrent = 0, kShortConv = 1, kGatedDelta = 2, kMamba2 = 3 };

// Sizes of a model's recurrent layers. A short convolution has no heads.
struct RecurrentShape {
  int32_t kind;
  int32_t key_heads, heads;    // of queries and keys; of values and states
  int32_t key_dim, value_dim;  // widths of a key and of a value
  int32_t conv_width, conv_columns;  // numbers of tokens and of columns of the convolution
  int32_t projected, output;    // number of columns of the input projection, and of inputs of the output projection
  float eps;                    // of the norm before the output projection
  float beta_scale;             // gated DeltaNet
  float least_step, most_step;  // Mamba-2
};

// A recurrent layer's weights other than projections, which are the layer's `qkv` and `output`, and its states.
struct Recurrent {
  const float* conv;       // [conv_width, conv_columns], for the present token last; null in a layer with attention
  const float* conv_bias;  // [conv_columns], or null
  const float *decay, *step_bias;  // [heads]
  const float* skip;       // [heads], or null
  const float* norm;       // gated DeltaNet: [value_dim]; Mamba-2: [output]
  void* conv_states;       // [states, conv_width - 1, conv_columns]: the last inputs of the convolution
  float* states;           // [states, heads, key_dim * value_dim], in the order of linear_attention.h
};

// Consecutive rows of a sequence, by which its state advances.
struct Segment {
  int64_t state;       // index of the sequence's state
  int64_t begin, end;  // rows; those of the next segment may continue the same sequence
  int64_t saved;       // index of the state that receives a copy after the last row; -1: none
  // Place of the first row of drafts, which leave the state as it is, among kept rows; -1: no drafts.
  int64_t kept;
};

struct Layer {
  Norm attention_norm, mlp_norm;            // on the inputs of attention and MLP; without weight: none
  Norm attention_post_norm, mlp_post_norm;  // on the outputs of attention and MLP; without weight: none
  Linear qkv, output;             // with `gates_attention` gates precede queries, keys and values
  Linear up, down;                // in a layer with experts those of the shared MLP, if there is one
  Linear router;                  // a column for each expert, then the shared MLP's gate; without data: no experts
  Linear expert_up, expert_down;  // of all experts, each padded to whole panels
  const float* choice_bias;       // [experts], added to probabilities when experts are chosen; or null
  const float *query_norm, *key_norm;  // [head_dim], or of all heads; or null
  const float* learned_sinks;          // [heads], or null
  const float *cos, *sin;              // [positions, rotary_dim / 2], or null
  const float* query_factors;          // [positions], or null
  void *keys, *values;
  float *key_scales, *value_scales;  // of a cache of levels
  Recurrent recurrent;
  int32_t recent, sinks, first;
  int32_t is_bidirectional;  // whether rows see up to `Batch.ends`
  LatentLayer latent;
};

struct Shape {
  int32_t hidden, heads, kv_heads, head_dim, inner;
  int32_t tokens_per_block, is_gated, activation, num_threads;
  int32_t rotary_dim;           // number of rotated dimensions of a head
  int32_t norms_heads_together;  // whether query_norm spans all query heads, and key_norm all key heads
  int32_t norms_rotated;         // whether heads are rotated before these norms
  int32_t is_parallel;           // whether the MLP reads the same rows as attention
  int32_t experts, experts_per_row, expert_inner, shared_inner;  // of layers with experts; 0: there are none
  int32_t normalizes_chances;    // whether the probabilities of a row's experts are divided by their sum
  int32_t scores_by_sigmoid;     // whether probabilities are sigmoids of scores, not their softmax
  int32_t groups, groups_per_row, scores_per_group;  // of experts: see `ExpertsConfig`
  int32_t cache_kind;            // format of keys and values in the cache: a CacheKind
  int32_t spin_us;               // microseconds that a thread spins at a barrier before it sleeps
  int32_t gates_attention;       // whether qkv's columns begin with gates of the heads' results
  int32_t widest_operand;        // at least the width of inputs of `product` and of `Batch::read`; 0: there are none
  float eps, attention_scale, attention_soft_cap, residual_scale, logits_scale, logits_soft_cap;  // cap 0: none
  float chances_scale;               // of experts, after normalization
  float swiglu_limit, swiglu_alpha;  // of a clamped SwiGLU, which replaces `activation`; limit 0: not clamped
  const LatentShape* latent;         // null: ordinary attention
  RecurrentShape recurrent;
};

struct Batch {
  int64_t num_rows;
  const int64_t* positions;     // [num_rows]
  const int64_t* slots;         // [num_rows]
  int64_t num_spans;
  const Span* spans;
  const int64_t* block_tables;  // [slots, table_width]
  int64_t table_width;
  const Adapter* const* adapters;  // [num_rows], null for a row without adapter; null if no row has one
  int64_t num_segments;            // 0 without recurrent layers
  const Segment* segments;
  void* kept;                      // [layers, num_kept, projected]: receives the drafts' rows in recurrent layers
  int64_t num_kept;
  const float *cos, *sin;          // [num_rows, rotary_dim / 2], instead of those of positions; or null
  const int64_t* ends;  // [num_rows], the last position that each row sees in bidirectional layers; null: its own
  const void* read;     // [num_rows, 2 * hidden], attention's input; null: the residual stream after the norm
};

template <class T>
class Buffer {  // grows, and is not initialized
 public:
  T* reserve(int64_t count) {
    if (!data_ || count > size_) {
      constexpr size_t kHugePage = 2 << 20;
      const size_t bytes = (count * sizeof(T) / kHugePage + 1) * kHugePage;
      data_.reset();
      data_.reset(static_cast<T*>(std::aligned_alloc(kHugePage, bytes)));
      if (data_) madvise(data_.get(), bytes, MADV_HUGEPAGE);
      size_ = data_ ? bytes / sizeof(T) : 0;
    }
    return data_.get();
  }
  T* get() const { return data_.get(); }

 private:
  struct Free {
    void operator()(T* p) const { std::free(p); }
  };
  std::unique_ptr<T, Free> data_;
  int64_t size_ = 0;
};

template <class E>
void normalize(const Norm& norm, float eps, const typename E::Stored* x, typename E::Stored* out, int count) {
  Floats sum = floats(0.0f), squares = floats(0.0f);
  for (int i = 0; i < count; i += kLanes) {
    const Floats v = E::load(x + i, first_lanes(count - i));
    sum = add(sum, v);
    squares = fmadd(v, v, squares);
  }
  float mean = 0.0f;
  float variance = sum_of(squares) / count;
  if (norm.bias) {
    mean = sum_of(sum) / count;
    Floats deviations = floats(0.0f);
    for (int i = 0; i < count; i += kLanes) {
      const Mask mask = first_lanes(count - i);
      const Floats d = sub(mask, E::load(x + i, mask), floats(mean));
      deviations = fmadd(d, d, deviations);
    }
    variance = sum_of(deviations) / count;
  }
  const Floats factor = floats(1.0f / std::sqrt(variance + eps)), shift = floats(mean);
  for (int i = 0; i < count; i += kLanes) {
    const Mask mask = first_lanes(count - i);
    Floats v = mul(sub(E::load(x + i, mask), shift), factor);
    v = mul(v, load(norm.weight + i, mask));
    if (norm.bias) v = add(v, load(norm.bias + i, mask));
    E::store(out + i, v, mask);
  }
}

// Rotates the first `rotary_dim` dimensions in place; pairs are (i, i + rotary_dim / 2).
template <class E>
void rotate(typename E::Stored* head, const float* cos, const float* sin, int rotary_dim) {
  const int half = rotary_dim / 2;
  for (int i = 0; i < half; i += kLanes) {
    const Mask mask = first_lanes(half - i);
    const Floats c = load(cos + i, mask), s = load(sin + i, mask);
    const Floats first = E::load(head + i, mask), second = E::load(head + half + i, mask);
    E::store(head + i, fnmadd(second, s, mul(first, c)), mask);
    E::store(head + half + i, fmadd(first, s, mul(second, c)), mask);
  }
}

template <class E>
void scale_by(float factor, typename E::Stored* x, int count) {
  for (int i = 0; i < count; i += kLanes) {
    const Mask mask = first_lanes(count - i);
    E::store(x + i, mul(E::load(x + i, mask), floats(factor)), mask);
  }
}

// Rows of a batch that are computed: some, or all.
struct Rows {
  int64_t count;
  const int64_t* numbers;  // [count], ascending; null: 0 .. count - 1
  int64_t operator[](int64_t i) const { return numbers ? numbers[i] : i; }
};

struct Share {  // one thread's range of rows or items
  int64_t begin, end;
  Share(int64_t count, int thread, int num_threads)
      : begin(count * thread / num_threads), end(count * (thread + 1) / num_threads) {}
};

}  // namespace inflight
