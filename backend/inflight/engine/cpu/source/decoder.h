// A decoder's layers for all rows of a packed batch. Every thread of a team computes a share of each step of a layer.
//
// The caller owns the memory of weights, caches and tables; the decoder owns that of intermediate results.
#pragma once

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstring>
#include <memory>
#include <new>
#include <vector>

#include "attention.h"
#include "draw.h"
#include "experts.h"
#include "gemm.h"
#include "groups.h"
#include "int8.h"
#include "lanes.h"
#include "latent.h"
#include "layer.h"
#include "low_rank.h"
#include "masks.h"
#include "peaks.h"
#include "penalties.h"
#include "recurrent.h"
#include "team.h"
#include "vector_math.h"
#include "weights.h"

namespace inflight {

#ifdef INFLIGHT_INT8
constexpr bool kHasInt8 = true;
#else
constexpr bool kHasInt8 = false;  // halves the code to compile
#endif
#ifdef INFLIGHT_ROUNDED_CACHE
constexpr bool kHasLevels = true;
#else
constexpr bool kHasLevels = false;  // halves the code to compile
#endif

template <class E>
class Decoder {
 public:
  using Stored = typename E::Stored;

  // other: a decoder whose threads this one uses, too, and which must outlive it; null: it has threads of its own.
  Decoder(const Shape& shape, const Layer* layers, Decoder* other)
      : shape_(shape),
        layers_(layers),
        recurrent_(shape),
        own_team_(other ? nullptr : new Team(shape.num_threads, std::chrono::microseconds(shape.spin_us))),
        team_(other ? other->team_ : *own_team_) {
    attention_.heads = shape.heads;
    attention_.kv_heads = shape.kv_heads;
    attention_.head_dim = shape.head_dim;
    attention_.tokens_per_block = shape.tokens_per_block;
    attention_.scale = shape.attention_scale;
    attention_.soft_cap = shape.attention_soft_cap;
    states_.resize(shape.num_threads);
    for (auto& state : states_) state.reset(new (std::align_val_t(64)) TileState<E>);
    if (shape.latent) latent_ = *shape.latent, latent_tiles_.resize(shape.num_threads);
    for (auto& tile : latent_tiles_)
      if (!tile.reserve(latent_)) throw std::bad_alloc();
    penalizers_.resize(shape.num_threads);
    drawers_.resize(shape.num_threads);
  }

  // Cuts the spans into tiles and sorts rows by their adapters; called before `run`, for all layers of a batch.
  // wanted [count]: the only rows whose output of the last layer is used; null: all rows. For the others, the last layer
  // only stores keys and values, or advances the states. If rows have adapters, all rows are computed, because adapters
  // find their rows by the numbers in the batch.
  bool prepare(const Batch& batch, const int64_t* wanted = nullptr, int64_t count = 0) try {
    if (batch.adapters) by_adapter_.sort(batch);
    recurrent_.prepare(batch.segments, batch.num_segments);
    has_wanted_ = wanted && !batch.adapters;
    wanted_.reserve(1);  // its data is not null even if no row is wanted
    wanted_.assign(wanted, wanted + (has_wanted_ ? count : 0));
    std::sort(wanted_.begin(), wanted_.end());
    wanted_.erase(std::unique(wanted_.begin(), wanted_.end()), wanted_.end());
    tiles_.clear();
    wanted_tiles_.clear();
    if (shape_.latent) {
      latent_forms_.make(latent_, batch, shape_.heads, team_.size());
      latent_forms_.sort(shape_.heads, kByTiles<E>);
      return true;
    }
    const int tile_rows = attention_.rows_per_tile();
    for (int64_t index = 0; index < batch.num_spans; ++index) {
      const Span& span = batch.spans[index];
      for (int64_t begin = span.begin; begin < span.end; begin += tile_rows) {
        const int64_t end = std::min(begin + tile_rows, span.end);
        const auto first = std::lower_bound(wanted_.begin(), wanted_.end(), begin);
        const bool is_wanted = first != wanted_.end() && *first < end;
        for (int head = 0; head < shape_.kv_heads; ++head) {
          tiles_.push_back({span, begin, end, head});
          if (is_wanted) wanted_tiles_.push_back({span, *first, end, head});
        }
      }
    }
    return true;
  } catch (const std::bad_alloc&) {
    return false;
  }

  // Computes layers first .. last - 1 on x [rows, hidden] in place. After `prepare` with wanted rows, `last` - 1 is the
  // last layer. With `partial` it computes one half of one layer (0 attention, 1 MLP), whose contribution [rows, hidden]
  // is written to `partial`, without the output's bias.
  bool run(const Batch& batch, Stored* x, int first, int last, Stored* partial, int half) {
    if (!reserve(batch, first, last)) return false;
    team_.run([&](int thread) {
      for (int index = first; index < last; ++index) {
        Rows rows{batch.num_rows, nullptr};
        if (has_wanted_ && index == last - 1) rows = {static_cast<int64_t>(wanted_.size()), wanted_.data()};
        if (!partial || half == 0) {
          if (layers_[index].recurrent.conv)
            recur(index, batch, rows, x, partial, thread);
          else if (shape_.latent)
            attend_latent(index, batch, rows, x, partial, thread);
          else
            attend(index, batch, rows, x, partial, thread);
        }
        if (rows.count && (!partial || half == 1)) feed_forward(index, batch, rows, x, partial, thread);
      }
    });
    return true;
  }

  // Advances the states of all `num_layers` layers by accepted drafts; `segments` are rows of `kept`, as in a Batch.
  bool accept(const Segment* segments, int64_t count, const Stored* kept, int64_t num_kept, int num_layers) try {
    recurrent_.prepare(segments, count);
    if (!recurrent_.reserve(num_kept, team_.size())) return false;
    team_.run([&](int thread) {
      for (int index = 0; index < num_layers; ++index)
        if (layers_[index].recurrent.conv)
          recurrent_.advance(layers_[index].recurrent, kept + index * num_kept * shape_.recurrent.projected, nullptr,
                             team_, thread);
    });
    return true;
  } catch (const std::bad_alloc&) {
    return false;
  }

  // out [rows, columns] float32 = norm(x) * head, scaled and capped, for the rows of x at `indices`.
  bool logits(const Norm& norm, const Linear& head, const Stored* x, const int64_t* indices, int64_t rows, float* out) {
    if (!reserve_operand(rows)) return false;
    team_.run([&](int thread) {
      const Product product{head};
      load_normalized(product, norm, rows, thread, [&](int64_t row) { return x + indices[row] * shape_.hidden; });
      multiply_by(product, tasks_of(product, rows), thread, [&](int row, int panel, Floats low, Floats high) {
        finish_logits(low, high);
        float* target = out + static_cast<int64_t>(row) * head.columns + panel * kPanel;
        const int left = head.columns - panel * kPanel;
        if (left >= kPanel && reinterpret_cast<uintptr_t>(target) % 64 == 0) {  // bypasses the cache, as there are many
          stream(target, low);
          stream(target + kLanes, high);
        } else {
          store(target, low, first_lanes(left));
          store(target + kLanes, high, first_lanes(left - kLanes));
        }
      });
      end_streams();
    });
    return true;
  }

  // out [rows, columns] = x [rows, width] * linear.
  bool product(const Linear& linear, const Stored* x, int64_t rows, int width, Stored* out) {
    if (!reserve_operand(rows)) return false;
    team_.run([&](int thread) {
      const Product product{linear};
      const Tasks tasks = tasks_of(product, rows);
      load_operand(product, tasks, rows, width, thread, [&](int64_t row, Stored*) { return x + row * width; });
      multiply_into(product, tasks, thread, out, linear.columns);
    });
    return true;
  }

  // highest, tokens [count]: peaks of the rows `rows` [count] of logits [any, columns], or of the first `count` rows.
  void find_peaks(const float* logits, int columns, int64_t count, const int64_t* rows, float* highest,
                  int64_t* tokens) {
    each(count, count > 2, [&](int64_t i, int) {
      const Peak peak = find_peak(logits + (rows ? rows[i] : i) * columns, columns);
      highest[i] = peak.highest;
      tokens[i] = peak.token;
    });
  }

  // Masks logits [any, columns] in place; tokens [count] receives the most likely allowed token of each row.
  void apply_masks(float* logits, int columns, const MaskedRows& of, int64_t* tokens) {
    each(of.count, of.count > 2, [&](int64_t i, int) {
      tokens[i] = apply_mask(logits + of.rows[i] * columns, columns, of.masks + i * of.pieces);
    });
  }

  // Penalizes logits [any, columns] in place. kWrongTokens: a row's history is longer than the table or has negative
  // tokens.
  PenaltyStatus penalize(float* logits, int columns, const PenalizedRows& of) {
    if (!reserve_for_choice(columns)) return kNoMemory;
    std::atomic<bool> is_wrong{false};
    each(of.count, of.count > 2, [&](int64_t i, int thread) {
      const int32_t* tokens = of.history + of.slots[i] * of.history_width;
      float* row = logits + of.rows[i] * columns;
      if (of.lengths[i] > of.history_width ||
          !penalizers_[thread].penalize(row, columns, tokens, of.lengths[i], of.penalties[i]))
        is_wrong = true;
    });
    return is_wrong ? kWrongTokens : kPenalized;
  }

  // Draws tokens [count] for the rows `rows` [count] of logits [any, columns].
  bool draw(const float* logits, int columns, int64_t count, const int64_t* rows, const Chance* chances,
            int64_t* tokens) {
    if (!reserve_for_choice(columns)) return false;
    each(count, count > 2, [&](int64_t i, int thread) {
      tokens[i] = drawers_[thread].draw(logits + rows[i] * columns, columns, chances[i]);
    });
    return true;
  }

  // Totals over the layers with experts so far.
  const Routed& routed() const { return routed_; }

  // Unpacks columns as rows: out[i] = column ids[i]. On the caller's thread alone if there are too few to wake others.
  void unpack_rows(const Linear& linear, const int64_t* ids, int64_t count, Stored* out) {
    const int width = shape_.hidden;
    if (linear.kind == kGroupedInt8) {
      const Packed<GroupedInt8> packed = packed_groups<GroupedInt8>(linear);
      each(count, count > 128, [&](int64_t i, int) { unpack_column<E>(packed, ids[i], width, out + i * width); });
      return;
    }
    const Packed<E> packed{static_cast<const Stored*>(linear.data), linear.columns, linear.inner};
    each(count, count > 128, [&](int64_t i, int) {
      const auto* panel = packed.panel(static_cast<int>(ids[i] / kPanel)) + ids[i] % kPanel * E::kPair;
      for (int k = 0; k < width; ++k) out[i * width + k] = panel[k / E::kPair * kPanel * E::kPair + k % E::kPair];
    });
  }

 private:
  void finish_logits(Floats& low, Floats& high) const {
    if (shape_.logits_scale != 1.0f) {
      low = mul(low, floats(shape_.logits_scale));
      high = mul(high, floats(shape_.logits_scale));
    }
    if (shape_.logits_soft_cap > 0.0f) {
      low = soft_cap_ps(low, shape_.logits_soft_cap);
      high = soft_cap_ps(high, shape_.logits_soft_cap);
    }
  }

  template <class Type>
  static Packed<Type> packed_groups(const Linear& linear) {
    return {static_cast<const uint8_t*>(linear.data), linear.columns, linear.inner,
            linear.group_size + Type::kOfGroup};
  }

  // Calls f(i, thread) for all i below `count`.
  template <class F>
  void each(int64_t count, bool in_parallel, const F& f) {
    if (!in_parallel) {
      for (int64_t i = 0; i < count; ++i) f(i, 0);
      return;
    }
    team_.run([&](int thread) {
      team_.deal(count, thread);
      team_.barrier();
      team_.share(thread, [&](int64_t i) { f(i, thread); });
    });
  }

  bool reserve_for_choice(int columns) try {
    for (Penalizer& penalizer : penalizers_) penalizer.reserve(columns);
    for (Drawer& drawer : drawers_) drawer.reserve(columns);
    return true;
  } catch (const std::bad_alloc&) {
    return false;
  }

  struct FreeState {
    void operator()(TileState<E>* state) const { ::operator delete(state, std::align_val_t(64)); }
  };

  bool reserve(const Batch& batch, int first, int last) {
    const int64_t rows = batch.num_rows;
    return qkv_.reserve(rows * std::max(qkv_width(), shape_.recurrent.projected)) &&
           read_.reserve(rows * read_width()) &&
           inner_.reserve(rows * std::max(shape_.inner, shape_.shared_inner)) && reserve_operand(rows) &&
           (!shape_.is_parallel || before_.reserve(rows * shape_.hidden)) &&
           (!has_given(first, last) || given_.reserve(rows * shape_.hidden)) &&
           (!shape_.experts || reserve_experts(rows)) && (!shape_.latent || reserve_latent(rows)) &&
           (!shape_.recurrent.kind || recurrent_.reserve(rows, team_.size())) &&
           (!batch.adapters || reserve_low_rank(rows));
  }
  bool reserve_latent(int64_t rows) {
    const auto keys = static_cast<int64_t>(latent_forms_.keys().size());
    const int64_t absorbed = shape_.heads * static_cast<int64_t>(latent_forms_.absorbed().size());
    const int64_t pairs = pairs_of(std::max(latent_.nope, latent_.rank));
    return queries_.reserve(rows * shape_.heads * latent_.query()) && absorbed_.reserve(absorbed * latent_stride()) &&
           latents_.reserve(absorbed * latent_.rank) &&
           unfolded_.reserve(keys * heads_at_once() * latent_.unfolded()) &&
           operand_.reserve(std::max(absorbed, keys) * pairs * E::kWords);
  }
  bool has_given(int first, int last) const {
    return shape_.shared_inner || std::any_of(layers_ + first, layers_ + last, [](const Layer& layer) {
             return layer.attention_post_norm.weight || layer.mlp_post_norm.weight;
           });
  }
  bool reserve_experts(int64_t rows) {
    if (!routing_.reserve(shape_, rows)) return false;
    const int64_t visits = routing_.visits();
    return inner_.reserve(visits * shape_.expert_inner) && reserve_operand(visits) &&
           normalized_.reserve(rows * shape_.hidden) && mixed_.reserve(visits * shape_.hidden);
  }
  bool reserve_operand(int64_t rows) {
    return operand_.reserve(rows * pairs_of_widest() * E::kWords) && row_scales_.reserve(rows) &&
           scratch_.reserve(kScratchRows * pairs_of_widest() * team_.size());
  }
  bool reserve_low_rank(int64_t rows) {
    return ranks_.reserve(rows * by_adapter_.widest()) && added_.reserve(kMaxRowsOfTask * kPanel * team_.size());
  }
  static constexpr int kScratchRows = kRowsAtOnce + 2;
  // A row in bfloat16 or float32 has at least as many pairs as in int8, also in groups of 8.
  int64_t pairs_of_widest() const {
    const int widest = std::max({shape_.hidden, shape_.inner, shape_.expert_inner, shape_.shared_inner, read_width(),
                                 shape_.recurrent.output, shape_.widest_operand});
    return pairs_of(std::max({widest, latent_.query_rank, latent_.rank, latent_.nope}));
  }
  static int64_t pairs_of(int width) { return (width + E::kPair - 1) / E::kPair + kLanes; }
  int gate_width() const { return shape_.gates_attention ? read_width() : 0; }
  int qkv_width() const {
    if (!shape_.latent) return gate_width() + (shape_.heads + 2 * shape_.kv_heads) * shape_.head_dim;
    return (latent_.query_rank ? latent_.query_rank : shape_.heads * latent_.query()) + latent_.cached();
  }
  int read_width() const { return shape_.heads * (shape_.latent ? latent_.value : shape_.head_dim); }

  // Packs rows for a product, quantized if its weights require that, and multiplies rows with an adapter by its A.
  // read_row(row, scratch) returns the row, `width` elements.
  template <class ReadRow>
  void load_operand(const Product& product, const Tasks& tasks, int64_t rows, int width, int thread,
                    const ReadRow& read_row) {
    const Linear& linear = product.linear;
    team_.deal(tasks.count(), thread);
    uint32_t* row_memory = scratch_.get() + kScratchRows * pairs_of_widest() * thread;
    auto* quantized = reinterpret_cast<uint8_t*>(row_memory);
    const auto plain = [&](int i) { return reinterpret_cast<Stored*>(row_memory + (i + 1) * pairs_of_widest()); };
    auto* const permuted = plain(kRowsAtOnce);
    const auto pack = [&](int64_t row, const Stored* source) {
      if (linear.kind == kElement) {
        if (width < linear.inner) source = pad(source, width, linear.inner, plain(0));
        tasks.pack<E>(source, linear.inner / E::kPair, operand_.get(), row);
      } else if (linear.has_groups()) {
        quantize_groups<E>(source, width, linear.order, linear.groups, linear.group_size, quantized, permuted);
        tasks.pack<Int4>(quantized, linear.inner / Int4::kPair, operand_.get(), row);
      } else {
        row_scales_.get()[row] = quantize_row<E>(source, width, linear.inner, quantized);
        tasks.pack<Int8>(quantized, linear.inner / Int8::kPair, operand_.get(), row);
      }
    };
    if (product.adapters) {
      by_adapter_.share(thread, team_.size(), [&](const Adapter* adapter, const int64_t* group, int count) {
        const Stored* sources[kRowsAtOnce];
        Stored* ranks[kRowsAtOnce];
        for (int i = 0; i < count; ++i) {
          sources[i] = read_row(group[i], plain(i));
          ranks[i] = ranks_of(group[i]);
        }
        if (adapter) shrink<E>(product.of(adapter), count, sources, width, ranks);
        for (int i = 0; i < count; ++i) pack(group[i], sources[i]);
      });
    } else {
      const Share share(rows, thread, team_.size());
      for (int64_t row = share.begin; row < share.end; ++row) pack(row, read_row(row, plain(0)));
    }
    team_.barrier();
  }

  static bool is_by_tiles(const Linear& linear) {
    return linear.kind == kElement ? kByTiles<E> : !linear.has_groups() && kByTiles<Int8>;
  }

  Tasks tasks_of(const Product& product, int64_t rows) const {
    return Tasks(rows, product.linear.columns, team_.size(), is_by_tiles(product.linear));
  }

  Stored* ranks_of(int64_t row) const { return ranks_.get() + row * by_adapter_.widest(); }

  static const Stored* pad(const Stored* source, int width, int padded, Stored* target) {
    if (source != target) std::memcpy(target, source, width * sizeof(Stored));
    std::fill(target + width, target + padded, Stored{0});
    return target;
  }

  template <class FindRow>
  void load_normalized(const Product& product, const Norm& norm, int64_t rows, int thread, const FindRow& find_row) {
    load_operand(product, tasks_of(product, rows), rows, shape_.hidden, thread,
                 [&](int64_t row, Stored* scratch) -> const Stored* {
      if (!norm.weight) return find_row(row);
      normalize<E>(norm, shape_.eps, find_row(row), scratch, shape_.hidden);
      return scratch;
    });
  }

  // Calls done(row, panel of its matrix, low, high) with the products of the packed rows, including the adapters'
  // deltas and, if `with_bias`, the bias.
  template <class Done>
  void multiply_by(const Product& product, const Tasks& tasks, int thread, const Done& done, bool with_bias = true) {
    const Linear& linear = product.linear;
    const float* bias = with_bias ? linear.bias : nullptr;
    float* const added = product.adapters ? added_.get() + kMaxRowsOfTask * kPanel * thread : nullptr;
    int64_t first_row = 0;
    const auto begin = [&](int panel, int64_t first, int64_t last) {
      if (!added) return;
      first_row = first;
      expand_rows(product, panel, first, last, added);
    };
    const auto finish = [&](int row, int panel, Floats& low, Floats& high) {
      if (added) adapt(product, row, panel, added + (row - first_row) * kPanel, low, high);
      if (!bias) return;
      low = add(low, load(bias + panel * kPanel));
      high = add(high, load(bias + panel * kPanel + kLanes));
    };
    if (!kHasInt8 || linear.kind == kElement) {
      const Packed<E> packed{static_cast<const Stored*>(linear.data), linear.columns, linear.inner};
      multiply<E>(reinterpret_cast<const RowOperand<E>*>(operand_.get()), tasks, packed, team_, thread, begin,
                  [&](int row, int panel, Floats low, Floats high) {
                    finish(row, panel, low, high);
                    done(row, tasks.within_matrix(panel), low, high);
                  });
      return;
    }
    if constexpr (kHasInt8) {
      const auto of_groups = [&](auto type) {
        using Type = decltype(type);
        const Packed<Type> packed = packed_groups<Type>(linear);
        multiply<Type>(reinterpret_cast<const uint8_t*>(operand_.get()), tasks, packed, team_, thread, begin,
                       [&](int row, int panel, Floats low, Floats high) {
                         finish(row, panel, low, high);
                         done(row, tasks.within_matrix(panel), low, high);
                       });
      };
      if (linear.kind == kInt4) return of_groups(Int4{});
      if (linear.kind == kFloat4) return of_groups(Float4{});
      if (linear.kind == kGroupedInt8) return of_groups(GroupedInt8{});
      const float* row_scales = row_scales_.get();
      const Packed<Int8> packed{static_cast<const uint8_t*>(linear.data), linear.columns, linear.inner};
      multiply<Int8>(reinterpret_cast<const RowOperand<Int8>*>(operand_.get()), tasks, packed, team_, thread, begin,
                     [&](int row, int panel, Ints low_sums, Ints high_sums) {
                       const Floats scale = floats(row_scales[row]);
                       Floats low = rescale(linear, panel * kPanel, low_sums, scale);
                       Floats high = rescale(linear, panel * kPanel + kLanes, high_sums, scale);
                       finish(row, panel, low, high);
                       done(row, tasks.within_matrix(panel), low, high);
                     });
    }
  }

  // added [rows of the task, 32] = B h for a panel's columns, in those of the rows first .. last - 1 with an adapter.
  __attribute__((noinline)) void expand_rows(const Product& product, int panel, int64_t first, int64_t last,
                                             float* added) {
    by_adapter_.within(first, last, [&](const Adapter* adapter, const int64_t* group, int count) {
      if (!product.of(adapter).ranks) return;
      const Stored* ranks[kRowsAtOnce];
      float* sums[kRowsAtOnce];
      for (int i = 0; i < count; ++i) {
        ranks[i] = ranks_of(group[i]);
        sums[i] = added + (group[i] - first) * kPanel;
      }
      expand<E>(product.of(adapter), panel, count, ranks, sums);
    });
  }

  // Adds the delta `added` [32] of this row and panel.
  static void adapt(const Product& product, int row, int panel, const float* added, Floats& low, Floats& high) {
    const Adapter* adapter = product.adapters[row];
    if (!adapter || !product.of(adapter).ranks) return;
    low = add(low, load_aligned(added));
    high = add(high, load_aligned(added + kLanes));
    const float* magnitude = product.of(adapter).magnitude;
    if (!magnitude) return;
    low = mul(low, load(magnitude + panel * kPanel));
    high = mul(high, load(magnitude + panel * kPanel + kLanes));
  }

  static Floats rescale(const Linear& linear, int column, Ints sums, Floats row_scale) {
    const Ints exact = Int8::kOffset ? sub(sums, load(linear.corrections + column)) : sums;
    return mul(mul(to_floats(exact), load(linear.scales + column)), row_scale);
  }

  static void store_panel(Stored* row, int panel, int width, Floats low, Floats high) {
    Stored* target = row + panel * kPanel;
    const int left = width - panel * kPanel;
    if (left >= kPanel) {  // faster than with a mask of all lanes
      E::store(target, low);
      E::store(target + kLanes, high);
      return;
    }
    E::store(target, low, first_lanes(left));
    E::store(target + kLanes, high, first_lanes(left - kLanes));
  }

  // out [rows, width] = the products of the packed rows.
  void multiply_into(const Product& product, const Tasks& tasks, int thread, Stored* out, int width,
                     bool with_bias = true) {
    multiply_by(product, tasks, thread, [&](int row, int panel, Floats low, Floats high) {
      store_panel(out + static_cast<int64_t>(row) * width, panel, width, low, high);
    }, with_bias);
  }

  // The end of half a layer: multiplies rows from `read_row` (as in `load_operand`), `width` elements each, applies
  // `post_norm` and adds the results to the rows of x; with `partial`, stores the product there instead, to be summed
  // over ranks.
  template <class ReadRow>
  void contribute(const Product& product, int width, const Rows& rows, const Norm& post_norm, Stored* x,
                  Stored* partial, int thread, const ReadRow& read_row) {
    if (!rows.count) return;
    const int hidden = shape_.hidden;
    const Tasks tasks = tasks_of(product, rows.count);
    load_operand(product, tasks, rows.count, width, thread, read_row);
    if (partial) {
      multiply_into(product, tasks, thread, partial, hidden, false);
    } else if (post_norm.weight) {
      multiply_into(product, tasks, thread, given_.get(), hidden);
      team_.barrier();
      const Share share(rows.count, thread, team_.size());
      for (int64_t i = share.begin; i < share.end; ++i)
        add_normalized(post_norm, given_.get() + i * hidden, x + rows[i] * hidden);
    } else {
      multiply_by(product, tasks, thread, [&](int row, int panel, Floats low, Floats high) {
        Stored* target = x + rows[row] * hidden + panel * kPanel;
        const int left = hidden - panel * kPanel;
        if (left >= kPanel) {
          add_to(target, low);
          add_to(target + kLanes, high);
          return;
        }
        add_to(target, low, first_lanes(left));
        add_to(target + kLanes, high, first_lanes(left - kLanes));
      });
    }
    team_.barrier();
  }

  // Normalizes a row of attention's or the MLP's output in place and adds it to the residual stream.
  void add_normalized(const Norm& norm, Stored* given, Stored* x) const {
    const int hidden = shape_.hidden;
    normalize<E>(norm, shape_.eps, given, given, hidden);
    for (int i = 0; i < hidden; i += kLanes)
      add_to(x + i, E::load(given + i, first_lanes(hidden - i)), first_lanes(hidden - i));
  }

  // Adds attention's or the MLP's output to the residual stream.
  void add_to(Stored* x, Floats given) const {
    E::store(x, fmadd(given, floats(shape_.residual_scale), E::load(x)));
  }
  void add_to(Stored* x, Floats given, Mask mask) const {
    E::store(x, fmadd(given, floats(shape_.residual_scale), E::load(x, mask)), mask);
  }

  void attend(int index, const Batch& batch, const Rows& rows, Stored* x, Stored* partial, int thread) {
    const Layer& layer = layers_[index];
    const Product qkv_of_x{layer.qkv, batch.adapters, index, &LayerAdapter::qkv};
    const Product output{layer.output, batch.adapters, index, &LayerAdapter::output};
    const int width = qkv_width();
    Stored *qkv = qkv_.get() + gate_width(), *read = read_.get();
    if (batch.read) {
      const auto* given = static_cast<const Stored*>(batch.read);
      const int inputs = 2 * shape_.hidden;
      load_operand(qkv_of_x, tasks_of(qkv_of_x, batch.num_rows), batch.num_rows, inputs, thread,
                   [&](int64_t row, Stored*) { return given + row * inputs; });
    } else {
      load_normalized(qkv_of_x, layer.attention_norm, batch.num_rows, thread, [&](int64_t row) {
        const Stored* own = x + row * shape_.hidden;
        if (shape_.is_parallel) std::memcpy(before_.get() + row * shape_.hidden, own, shape_.hidden * sizeof *own);
        return own;
      });
    }
    multiply_into(qkv_of_x, tasks_of(qkv_of_x, batch.num_rows), thread, qkv_.get(), width);
    team_.barrier();
    const Share share(batch.num_rows, thread, team_.size());
    for (int64_t row = share.begin; row < share.end; ++row) place(layer, batch, row, qkv + row * width);
    const std::vector<Tile>& tiles = rows.numbers ? wanted_tiles_ : tiles_;
    team_.deal(static_cast<int64_t>(tiles.size()), thread);
    team_.barrier();
    AttentionShape attention = attention_;
    attention.recent = layer.recent;
    attention.sinks = layer.sinks;
    attention.first = layer.first;
    attention.learned_sinks = layer.learned_sinks;
    attention.ends = layer.is_bidirectional ? batch.ends : nullptr;
    read_cache(layer, batch, tiles, attention, qkv, read, thread);
    team_.barrier();
    contribute(output, read_width(), rows, layer.attention_post_norm, x, partial, thread,
               [&](int64_t i, Stored* scratch) -> const Stored* {
      const Stored* own = read + rows[i] * read_width();
      if (!shape_.gates_attention) return own;
      const Stored* gates = qkv_.get() + rows[i] * width;
      for (int at = 0; at < read_width(); at += kLanes) {
        const Mask mask = first_lanes(read_width() - at);
        E::store(scratch + at, mul(E::load(own + at, mask), sigmoid_ps(E::load(gates + at, mask))), mask);
      }
      return scratch;
    });
  }

  // A recurrent layer in place of attention.
  void recur(int index, const Batch& batch, const Rows& rows, Stored* x, Stored* partial, int thread) {
    const Layer& layer = layers_[index];
    const RecurrentShape& shape = shape_.recurrent;
    const Product projection{layer.qkv, batch.adapters, index, &LayerAdapter::recurrent_input};
    const Product output{layer.output, batch.adapters, index, &LayerAdapter::recurrent_output};
    Stored* projected = qkv_.get();
    load_normalized(projection, layer.attention_norm, batch.num_rows, thread,
                    [&](int64_t row) { return x + row * shape_.hidden; });
    multiply_into(projection, tasks_of(projection, batch.num_rows), thread, projected, shape.projected);
    team_.barrier();
    auto* const kept = static_cast<Stored*>(batch.kept);  // null without drafts
    recurrent_.advance(layer.recurrent, projected, kept ? kept + index * batch.num_kept * shape.projected : nullptr,
                       team_, thread);
    contribute(output, shape.output, rows, layer.attention_post_norm, x, partial, thread,
               [&](int64_t i, Stored* scratch) {
      recurrent_.finish(layer.recurrent, projected, rows[i], scratch);
      return const_cast<const Stored*>(scratch);
    });
  }

  // Normalizes and rotates a row's queries and keys, and stores its keys and values in the cache.
  void place(const Layer& layer, const Batch& batch, int64_t row, Stored* qkv) {
    const int head_dim = shape_.head_dim;
    const int64_t position = batch.positions[row];
    const int64_t at = (batch.cos ? row : position) * (shape_.rotary_dim / 2);
    const float *cos = (batch.cos ? batch.cos : layer.cos) + at, *sin = (batch.cos ? batch.sin : layer.sin) + at;
    const bool norms_each = layer.query_norm && !shape_.norms_heads_together;
    if (layer.query_norm && shape_.norms_heads_together) {
      const int queries = shape_.heads * head_dim;
      normalize<E>(Norm{layer.query_norm, nullptr}, shape_.eps, qkv, qkv, queries);
      normalize<E>(Norm{layer.key_norm, nullptr}, shape_.eps, qkv + queries, qkv + queries, shape_.kv_heads * head_dim);
    }
    for (int head = 0; head < shape_.heads + shape_.kv_heads; ++head) {
      Stored* data = qkv + static_cast<int64_t>(head) * head_dim;
      const float* weight = head < shape_.heads ? layer.query_norm : layer.key_norm;
      const auto norm = [&] { normalize<E>(Norm{weight, nullptr}, shape_.eps, data, data, head_dim); };
      if (norms_each && !shape_.norms_rotated) norm();
      if (layer.cos) rotate<E>(data, cos, sin, shape_.rotary_dim);
      if (norms_each && shape_.norms_rotated) norm();
    }
    if (layer.query_factors) scale_by<E>(layer.query_factors[position], qkv, shape_.heads * head_dim);
    const int size = shape_.tokens_per_block;
    const int64_t block = batch.block_tables[batch.slots[row] * batch.table_width + position / size];
    const Stored* keys = qkv + static_cast<int64_t>(shape_.heads) * head_dim;
    if constexpr (kHasLevels) {
      const LevelsOfLayer levels{static_cast<uint8_t*>(layer.keys), static_cast<uint8_t*>(layer.values),
                                 layer.key_scales, layer.value_scales};
      if (shape_.cache_kind == kInt8Levels)
        return store_levels<E, Int8Levels>(attention_, levels, block, position % size, keys);
      if (shape_.cache_kind == kFp8Levels)
        return store_levels<E, Fp8Levels>(attention_, levels, block, position % size, keys);
    }
    store_keys(static_cast<Stored*>(layer.keys) + block * attention_.block_elements(), position % size, keys);
    store_values(static_cast<Stored*>(layer.values) + block * attention_.block_elements(), position % size, batch, row,
                 keys + static_cast<int64_t>(shape_.kv_heads) * head_dim);
  }

  // block, offset: the place in the cache.
  void store_keys(Stored* block, int64_t offset, const Stored* keys) {
    for (int head = 0; head < shape_.kv_heads; ++head) {
      Stored* target = block + head * attention_.head_elements() + offset * E::kPair;
      const Stored* key = keys + static_cast<int64_t>(head) * shape_.head_dim;
      for (int d = 0; d < shape_.head_dim; d += E::kPair)
        std::memcpy(target + static_cast<int64_t>(d) * shape_.tokens_per_block, key + d, E::kPair * sizeof(Stored));
    }
  }

  void store_values(Stored* block, int64_t offset, const Batch& batch, int64_t row, const Stored* values) {
    const bool is_second = offset % E::kPair != 0;
    if (is_second && row > 0 && follows(batch, row)) return;  // the previous row stores both
    const bool has_second = !is_second && E::kPair > 1 && row + 1 < batch.num_rows && follows(batch, row + 1);
    for (int head = 0; head < shape_.kv_heads; ++head) {
      Stored* target = block + head * attention_.head_elements() + offset / E::kPair * shape_.head_dim * E::kPair;
      const Stored* value = values + static_cast<int64_t>(head) * shape_.head_dim;
      E::store_values(target, value, has_second ? value + qkv_width() : nullptr, is_second, shape_.head_dim);
    }
  }

  // Whether a row is the token after the previous row's in the same sequence.
  static bool follows(const Batch& batch, int64_t row) {
    return batch.slots[row] == batch.slots[row - 1] && batch.positions[row] == batch.positions[row - 1] + 1;
  }

  void read_cache(const Layer& layer, const Batch& batch, const std::vector<Tile>& tiles, const AttentionShape& shape,
                  const Stored* qkv, Stored* read, int thread) {
    if constexpr (kHasLevels) {
      if (shape_.cache_kind == kInt8Levels)
        return read_cache_of<Rounded<E, Int8Levels>>(layer, batch, tiles, shape, qkv, read, thread);
      if (shape_.cache_kind == kFp8Levels)
        return read_cache_of<Rounded<E, Fp8Levels>>(layer, batch, tiles, shape, qkv, read, thread);
    }
    read_cache_of<AsComputed<E>>(layer, batch, tiles, shape, qkv, read, thread);
  }

  template <class C>
  void read_cache_of(const Layer& layer, const Batch& batch, const std::vector<Tile>& tiles,
                     const AttentionShape& shape, const Stored* qkv, Stored* read, int thread) {
    const LayerCache<C> cache{static_cast<const typename C::Stored*>(layer.keys),
                              static_cast<const typename C::Stored*>(layer.values), layer.key_scales,
                              layer.value_scales};
    const auto reader_of = [&](const Tile& tile) {
      return CacheReader<C>(shape, tile, cache, batch.block_tables + tile.span.slot * batch.table_width);
    };
    const auto num_tiles = static_cast<int64_t>(tiles.size());
    team_.share(thread, [&](int64_t index) {
      const int64_t following = std::min(index + 1, num_tiles - 1);
      CacheReader<C> reader = reader_of(tiles[index]), next = reader_of(tiles[following]);
      attend_tile<E, C>(*states_[thread], shape, tiles[index], reader, following == index ? nullptr : &next, qkv,
                     qkv_width(), read, read_width());
    });
  }

  void attend_latent(int index, const Batch& batch, const Rows& wanted, Stored* x, Stored* partial, int thread) {
    const Layer& layer = layers_[index];
    const LatentLayer& latent = layer.latent;
    const int64_t rows = batch.num_rows, width = qkv_width();
    const Product first{layer.qkv, batch.adapters, index, &LayerAdapter::qkv};
    const Product output{layer.output, batch.adapters, index, &LayerAdapter::output};
    load_normalized(first, layer.attention_norm, rows, thread, [&](int64_t row) { return x + row * shape_.hidden; });
    multiply_into(first, tasks_of(first, rows), thread, qkv_.get(), static_cast<int>(width));
    team_.barrier();
    const Share share(rows, thread, team_.size());
    for (int64_t row = share.begin; row < share.end; ++row)
      place_latent(layer, batch, row, qkv_.get() + row * width);
    if (!wanted.count) return;
    LatentQueries queries{qkv_.get(), width};
    if (latent.query_up.data) {
      const Product up{latent.query_up, batch.adapters, index, &LayerAdapter::query_up};
      if (batch.adapters) team_.barrier();  // threads read rows that others have placed
      queries = {queries_.get(), shape_.heads * latent_.query()};
      load_operand(up, tasks_of(up, rows), rows, latent_.query_rank, thread,
                   [&](int64_t row, Stored*) { return qkv_.get() + row * width; });
      multiply_into(up, tasks_of(up, rows), thread, queries_.get(), static_cast<int>(queries.stride));
      team_.barrier();
    }
    const int half = shape_.rotary_dim / 2;
    for (int64_t row = share.begin; row < share.end; ++row) {
      const int64_t at = layer.cos ? batch.positions[row] * half : 0;
      for (int head = 0; head < shape_.heads; ++head)
        rotate_latent<E>(latent_, queries.of(latent_, row, head) + latent_.nope, layer.cos ? layer.cos + at : nullptr,
                         layer.sin + at, shape_.rotary_dim);
      if (layer.query_factors)
        scale_by<E>(layer.query_factors[batch.positions[row]], queries.of(latent_, row, 0),
                    shape_.heads * latent_.query());
    }
    team_.barrier();
    AttentionShape attention = attention_;
    attention.recent = layer.recent;
    attention.sinks = layer.sinks;
    attention.first = layer.first;
    if (!latent_forms_.absorbed().empty()) attend_absorbed(layer, batch, attention, queries, thread);
    if (!latent_forms_.tiles().empty()) attend_decompressed(layer, batch, attention, queries, thread);
    contribute(output, read_width(), wanted, layer.attention_post_norm, x, partial, thread,
               [&](int64_t i, Stored*) -> const Stored* { return read_.get() + wanted[i] * read_width(); });
  }

  // The queries of rows for latent attention, with both parts of every head.
  struct LatentQueries {
    Stored* data;
    int64_t stride;  // of rows
    Stored* of(const LatentShape& shape, int64_t row, int head) const {
      return data + row * stride + static_cast<int64_t>(head) * shape.query();
    }
  };

  // Normalizes a row's latent, rotates its shared key, and stores both in the cache.
  void place_latent(const Layer& layer, const Batch& batch, int64_t row, Stored* qkv) {
    const LatentLayer& latent = layer.latent;
    const int64_t position = batch.positions[row], at = position * (shape_.rotary_dim / 2);
    Stored* own = qkv + qkv_width() - latent_.cached();
    if (latent_.query_rank) normalize<E>(latent.query_norm, latent_.eps, qkv, qkv, latent_.query_rank);
    normalize<E>(latent.kv_norm, latent_.eps, own, own, latent_.rank);
    rotate_latent<E>(latent_, own + latent_.rank, layer.cos ? layer.cos + at : nullptr, layer.sin + at,
                     shape_.rotary_dim);
    std::memcpy(cached(layer, batch, batch.slots[row], position), own, latent_.cached() * sizeof *own);
  }

  Stored* cached(const Layer& layer, const Batch& batch, int64_t slot, int64_t position) const {
    const int size = shape_.tokens_per_block;
    const int64_t block = batch.block_tables[slot * batch.table_width + position / size];
    return static_cast<Stored*>(layer.keys) + (block * size + position % size) * latent_.cached();
  }

  // Computes read_, attention's results, for the rows in the absorbed form.
  void attend_absorbed(const Layer& layer, const Batch& batch, const AttentionShape& attention,
                       const LatentQueries& queries, int thread) {
    const LatentLayer& latent = layer.latent;
    const auto& absorbed = latent_forms_.absorbed();
    const auto rows = static_cast<int64_t>(absorbed.size()), visits = rows * shape_.heads;  // by head
    const int rank = latent_.rank;
    const auto tasks_of_heads = [&](const Linear& linear) {
      return Tasks(latent_forms_.by_head(), linear.columns / kPanel / shape_.heads);
    };
    const Product absorb{latent.absorb}, value_up{latent.value_up};
    load_operand(absorb, tasks_of_heads(latent.absorb), visits, latent_.nope, thread, [&](int64_t visit, Stored*) {
      return queries.of(latent_, absorbed[visit % rows].row, static_cast<int>(visit / rows));
    });
    multiply_by(absorb, tasks_of_heads(latent.absorb), thread, [&](int visit, int panel, Floats low, Floats high) {
      float* target = absorbed_.get() + visit * latent_stride() + panel * kPanel;
      store(target, low);
      store(target + kLanes, high);
    });
    team_.barrier();
    const int at_once = latent_forms_.heads_per_tile(), tiles = (shape_.heads + at_once - 1) / at_once;
    team_.deal(rows * tiles, thread);
    team_.barrier();
    team_.share(thread, [&](int64_t number) {
      const auto& row = absorbed[number / tiles];
      const int first = static_cast<int>(number % tiles) * at_once, heads = std::min(at_once, shape_.heads - first);
      LatentTile<E>& tile = latent_tiles_[thread];
      const auto visit_of = [&](int m) { return (first + m) * rows + number / tiles; };
      for (int m = 0; m < heads; ++m) {
        std::memcpy(tile.own(m), absorbed_.get() + visit_of(m) * latent_stride(), latent_stride() * sizeof(float));
        tile.set_shared(m, queries.of(latent_, row.row, first + m) + latent_.nope);
        tile.set_position(m, row.position);
      }
      tile.attend(attention, heads, rank, rank, row.position, [&](int64_t from, auto& keys) {
        for (int i = 0; i < keys.count; ++i) {
          keys.own[i] = keys.values[i] = cached(layer, batch, row.slot, from + i);
          keys.shared[i] = keys.own[i] + rank;
        }
      });
      for (int m = 0; m < heads; ++m) tile.finish(m, rank, latents_.get() + visit_of(m) * rank);
    });
    team_.barrier();
    load_operand(value_up, tasks_of_heads(latent.value_up), visits, rank, thread,
                 [&](int64_t visit, Stored*) { return latents_.get() + visit * rank; });
    multiply_by(value_up, tasks_of_heads(latent.value_up), thread, [&](int visit, int panel, Floats low, Floats high) {
      Stored* target = read_.get() + absorbed[visit % rows].row * read_width() + visit / rows * latent_.value;
      store_panel(target, panel, latent_.value, low, high);
    });
    team_.barrier();
  }

  // Computes read_, attention's results, for the rows in the decompressed form, some heads at a time.
  void attend_decompressed(const Layer& layer, const Batch& batch, const AttentionShape& attention,
                           const LatentQueries& queries, int thread) {
    const auto& keys = latent_forms_.keys();
    const auto count = static_cast<int64_t>(keys.size());
    const int width = latent_.unfolded(), nope = latent_.nope, panels = (width + kPanel - 1) / kPanel;
    for (int begin = 0; begin < shape_.heads; begin += heads_at_once()) {
      const int heads = std::min(heads_at_once(), shape_.heads - begin);
      Linear own = layer.latent.kv_up;
      own.data = static_cast<const Stored*>(own.data) + static_cast<int64_t>(begin) * panels * kPanel * own.inner;
      own.columns = heads * panels * kPanel;
      const Product up{own};
      load_operand(up, tasks_of(up, count), count, latent_.rank, thread, [&](int64_t key, Stored*) {
        return cached(layer, batch, keys[key].slot, keys[key].position);
      });
      multiply_by(up, tasks_of(up, count), thread, [&](int key, int panel, Floats low, Floats high) {
        Stored* target = unfolded_.get() + (panel / panels * count + key) * width;
        store_panel(target, panel % panels, width, low, high);
      });
      team_.barrier();
      team_.deal(static_cast<int64_t>(latent_forms_.tiles().size()) * heads, thread);
      team_.barrier();
      team_.share(thread, [&](int64_t number) {
        const int head = static_cast<int>(number % heads);
        const auto& rows = latent_forms_.tiles()[number / heads];
        LatentTile<E>& tile = latent_tiles_[thread];
        const int64_t first = rows.span.start + rows.begin - rows.span.begin;  // position
        const int vectors = static_cast<int>(rows.end - rows.begin);
        for (int m = 0; m < vectors; ++m) {
          const Stored* query = queries.of(latent_, rows.begin + m, begin + head);
          tile.set_own(m, query, nope);
          tile.set_shared(m, query + nope);
          tile.set_position(m, first + m);
        }
        tile.attend(attention, vectors, nope, latent_.value, first + vectors - 1, [&](int64_t from, auto& found) {
          for (int i = 0; i < found.count; ++i) {
            found.own[i] = unfolded_.get() + (head * count + rows.first_key + from + i) * width;
            found.values[i] = found.own[i] + nope;
            found.shared[i] = cached(layer, batch, rows.span.slot, from + i) + latent_.rank;
          }
        });
        for (int m = 0; m < vectors; ++m)
          tile.finish(m, latent_.value,
                      read_.get() + (rows.begin + m) * read_width() + (begin + head) * latent_.value);
      });
      team_.barrier();
    }
  }

  // Number of floats of an absorbed query, which is padded with zeros to whole panels.
  int64_t latent_stride() const { return (latent_.rank + kPanel - 1) / kPanel * kPanel; }
  // Number of heads whose decompressed keys and values are in memory at a time.
  int heads_at_once() const {
    const int64_t of_head = static_cast<int64_t>(latent_forms_.keys().size()) * latent_.unfolded() * sizeof(Stored);
    return static_cast<int>(std::clamp<int64_t>(kUnfoldedBytes / std::max<int64_t>(of_head, 1), 1, shape_.heads));
  }
  static constexpr int64_t kUnfoldedBytes = 32 << 20;

  void feed_forward(int index, const Batch& batch, const Rows& rows, Stored* x, Stored* partial, int thread) {
    const Layer& layer = layers_[index];
    if (layer.router.data) return mix_experts(index, batch, rows, x, partial, thread);
    const Product up{layer.up, batch.adapters, index, &LayerAdapter::up};
    const Product down{layer.down, batch.adapters, index, &LayerAdapter::down};
    const Stored* read = shape_.is_parallel ? before_.get() : x;
    load_normalized(up, layer.mlp_norm, rows.count, thread, [&](int64_t i) { return read + rows[i] * shape_.hidden; });
    multiply_activated(up, tasks_of(up, rows.count), thread, shape_.inner);
    contribute(down, shape_.inner, rows, layer.mlp_post_norm, x, partial, thread,
               [&](int64_t i, Stored*) -> const Stored* { return inner_.get() + i * shape_.inner; });
  }

  // inner_ [rows, inner] = the input of an MLP's second product, for the packed rows.
  void multiply_activated(const Product& up, const Tasks& tasks, int thread, int inner) {
    const int kind = shape_.activation;
    Stored* activated = inner_.get();
    if (shape_.is_gated) {  // a panel is 16 columns of gate and the same 16 columns of up
      multiply_by(up, tasks, thread, [&](int row, int panel, Floats gate, Floats gated) {
        const Floats given = shape_.swiglu_limit > 0.0f
                                 ? clamped_swiglu<E>(gate, gated, shape_.swiglu_limit, shape_.swiglu_alpha)
                                 : mul(activate<E>(kind, gate), gated);
        Stored* target = activated + static_cast<int64_t>(row) * inner + panel * kLanes;
        const int left = inner - panel * kLanes;
        if (left >= kLanes)
          E::store(target, given);
        else
          E::store(target, given, first_lanes(left));
      });
    } else {
      multiply_by(up, tasks, thread, [&](int row, int panel, Floats low, Floats high) {
        store_panel(activated + static_cast<int64_t>(row) * inner, panel, inner, activate<E>(kind, low),
                    activate<E>(kind, high));
      });
    }
    team_.barrier();
  }

  // A layer's experts, and the shared MLP: the results of each row's experts are weighted and summed in the order of
  // their indices.
  void mix_experts(int index, const Batch& batch, const Rows& rows, Stored* x, Stored* partial, int thread) {
    const Layer& layer = layers_[index];
    const int hidden = shape_.hidden;
    route(layer, rows, x, thread);
    const auto read = [&](int64_t i) -> const Stored* {
      return layer.mlp_norm.weight ? normalized_.get() + i * hidden : x + rows[i] * hidden;
    };
    const auto tasks_of_experts = [&](const Linear& linear) {
      return Tasks(routing_.of_expert(), linear.columns / kPanel / shape_.experts);
    };
    run_mlp({layer.expert_up}, tasks_of_experts(layer.expert_up), {layer.expert_down},
            tasks_of_experts(layer.expert_down), routing_.visits(), shape_.expert_inner, thread, mixed_.get(),
            [&](int64_t visit, Stored*) { return read(routing_.row_at(visit)); });
    const bool has_shared = layer.up.data;
    if (has_shared) {
      const Product up{layer.up, batch.adapters, index, &LayerAdapter::up};
      const Product down{layer.down, batch.adapters, index, &LayerAdapter::down};
      run_mlp(up, tasks_of(up, rows.count), down, tasks_of(down, rows.count), rows.count, shape_.shared_inner, thread,
              given_.get(), [&](int64_t i, Stored*) { return read(i); });
    }
    const bool has_gate = layer.router.columns > shape_.experts;
    const Share share(rows.count, thread, team_.size());
    for (int64_t row = share.begin; row < share.end; ++row) {
      const Floats weight = has_gate ? sigmoid_ps(floats(routing_.gate(row))) : floats(1.0f);
      Stored *own = x + rows[row] * hidden, *to_norm = normalized_.get() + row * hidden;
      for (int i = 0; i < hidden; i += kLanes) {
        const Mask mask = first_lanes(hidden - i);
        Floats given = routing_.mix<E>(row, mixed_.get(), hidden, i);
        if (has_shared) given = fmadd(weight, E::load(given_.get() + row * hidden + i, mask), given);
        if (partial)
          E::store(partial + row * hidden + i, given, mask);
        else if (layer.mlp_post_norm.weight)
          E::store(to_norm + i, given, mask);
        else
          add_to(own + i, given, mask);
      }
      if (!partial && layer.mlp_post_norm.weight) add_normalized(layer.mlp_post_norm, to_norm, own);
    }
    team_.barrier();
  }

  // Normalizes the rows, into normalized_ if there is a norm, and finds every row's experts.
  void route(const Layer& layer, const Rows& rows, const Stored* x, int thread) {
    const auto begun = std::chrono::steady_clock::now();
    const int hidden = shape_.hidden;
    const Product router{layer.router};
    const Tasks tasks = tasks_of(router, rows.count);
    if (thread == 0) routing_.begin(rows.count);
    load_operand(router, tasks, rows.count, hidden, thread, [&](int64_t i, Stored*) {
      const Stored* own = x + rows[i] * hidden;
      if (!layer.mlp_norm.weight) return own;
      Stored* normalized = normalized_.get() + i * hidden;
      normalize<E>(layer.mlp_norm, shape_.eps, own, normalized, hidden);
      return const_cast<const Stored*>(normalized);
    });
    const int columns = layer.router.columns;
    multiply_by(router, tasks, thread, [&](int row, int panel, Floats low, Floats high) {
      float* scores = routing_.scores(row) + panel * kPanel;
      store(scores, low, first_lanes(columns - panel * kPanel));
      store(scores + kLanes, high, first_lanes(columns - panel * kPanel - kLanes));
    });
    team_.barrier();
    const Share share(rows.count, thread, team_.size());
    for (int64_t row = share.begin; row < share.end; ++row) routing_.choose(row, layer.choice_bias);
    team_.barrier();
    if (thread == 0) routing_.sort(is_by_tiles(layer.expert_up) && is_by_tiles(layer.expert_down));
    team_.barrier();
    if (thread == 0) {
      routed_.ns += std::chrono::nanoseconds(std::chrono::steady_clock::now() - begun).count();
      routed_.experts += routing_.num_read();
    }
  }

  // out [rows, hidden] = the MLP `up`, `down` with inner width `inner` for the rows that read_row(row, scratch)
  // returns.
  template <class ReadRow>
  void run_mlp(const Product& up, const Tasks& of_up, const Product& down, const Tasks& of_down, int64_t rows,
               int inner, int thread, Stored* out, const ReadRow& read_row) {
    load_operand(up, of_up, rows, shape_.hidden, thread, read_row);
    multiply_activated(up, of_up, thread, inner);
    load_operand(down, of_down, rows, inner, thread,
                 [&](int64_t row, Stored*) -> const Stored* { return inner_.get() + row * inner; });
    multiply_into(down, of_down, thread, out, shape_.hidden);
    team_.barrier();
  }

  Shape shape_;
  const Layer* layers_;
  AttentionShape attention_{};
  RecurrentLayers<E> recurrent_;
  std::unique_ptr<Team> own_team_;
  Team& team_;
  std::vector<Tile> tiles_, wanted_tiles_;  // of all rows, and of wanted rows
  bool has_wanted_ = false;                 // whether the last layer is computed for wanted rows only
  std::vector<int64_t> wanted_;             // rows, ascending
  std::vector<std::unique_ptr<TileState<E>, FreeState>> states_;  // one per thread
  std::vector<Penalizer> penalizers_;  // one per thread
  std::vector<Drawer> drawers_;  // one per thread
  Buffer<Stored> qkv_, read_, inner_;
  LatentShape latent_{};
  LatentForms latent_forms_;
  std::vector<LatentTile<E>> latent_tiles_;  // one per thread
  Buffer<Stored> queries_;   // [rows, heads, query], of latent attention, as all of these
  Buffer<float> absorbed_;   // [heads, absorbed rows, rank in whole panels]
  Buffer<Stored> latents_;   // [heads, absorbed rows, rank], sums of latents
  Buffer<Stored> unfolded_;  // [some heads, keys, nope + value], keys and values
  Buffer<Stored> before_;  // [rows, hidden], the input of a layer whose MLP reads the same as attention
  Buffer<Stored> given_;  // [rows, hidden], output of attention or MLP if it has a post-norm or there are experts
  Routed routed_;
  Routing routing_;            // of a layer with experts, like the next two
  Buffer<Stored> normalized_;  // [rows, hidden]
  Buffer<Stored> mixed_;       // [visits, hidden], results of every expert for its rows
  Buffer<uint32_t> operand_;  // packed rows, words of pairs
  Buffer<uint32_t> scratch_;  // per thread: a quantized row, a few plain ones, and a permuted one
  Buffer<float> row_scales_;
  RowsByAdapter by_adapter_;
  Buffer<Stored> ranks_;  // [rows, highest LoRA rank of a product], A x of rows with adapters
  Buffer<float> added_;   // per thread: B A x of a task's rows with adapters, for a panel's columns
};

}  // namespace inflight
