// A decoder's layers for all rows of a packed batch: a layer's steps, in which every thread of a team has its share.
//
// Weights, caches and tables are the caller's memory; what is between two steps is the decoder's.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstring>
#include <memory>
#include <new>
#include <vector>

#include "attention.h"
#include "draw.h"
#include "gemm.h"
#include "int8.h"
#include "layer.h"
#include "peaks.h"
#include "penalties.h"
#include "team.h"
#include "vector_math.h"
#include "weights.h"

namespace inflight {

#ifdef INFLIGHT_INT8
constexpr bool kHasInt8 = true;
#else
constexpr bool kHasInt8 = false;  // half as much to compile
#endif

template <class E>
class Decoder {
 public:
  using Stored = typename E::Stored;

  Decoder(const Shape& shape, const Layer* layers) : shape_(shape), layers_(layers), team_(shape.num_threads) {
    attention_.heads = shape.heads;
    attention_.kv_heads = shape.kv_heads;
    attention_.head_dim = shape.head_dim;
    attention_.tokens_per_block = shape.tokens_per_block;
    states_.resize(shape.num_threads);
    for (auto& state : states_) state.reset(new (std::align_val_t(64)) TileState<E>);
    penalizers_.resize(shape.num_threads);
    drawers_.resize(shape.num_threads);
  }

  // Cuts the spans into tiles; before `run`, for all layers of a batch.
  bool plan(const Batch& batch) try {
    tiles_.clear();
    const int tile_rows = attention_.rows_per_tile();
    for (int64_t index = 0; index < batch.num_spans; ++index) {
      const Span& span = batch.spans[index];
      for (int64_t begin = span.begin; begin < span.end; begin += tile_rows)
        for (int head = 0; head < shape_.kv_heads; ++head)
          tiles_.push_back({span, begin, std::min(begin + tile_rows, span.end), head});
    }
    return true;
  } catch (const std::bad_alloc&) {
    return false;
  }

  // Layers first .. last - 1, x [rows, hidden] in place. With `partial` it is one half of one layer (0 attention,
  // 1 MLP), whose contribution goes there, [rows, hidden], without the output's bias.
  bool run(const Batch& batch, Stored* x, int first, int last, Stored* partial, int half) {
    if (!reserve(batch)) return false;
    team_.run([&](int thread) {
      for (int index = first; index < last; ++index) {
        const Layer& layer = layers_[index];
        if (!partial || half == 0) attend(layer, batch, x, partial, thread);
        if (!partial || half == 1) feed_forward(layer, batch, x, partial, thread);
      }
    });
    return true;
  }

  // out [rows, columns] float32 = norm(x) * head, for the rows of x at `indices`.
  bool logits(const Norm& norm, const Linear& head, const Stored* x, const int64_t* indices, int64_t rows, float* out) {
    if (!reserve_operand(rows)) return false;
    team_.run([&](int thread) {
      load_normalized(head, norm, rows, thread, [&](int64_t row) { return x + indices[row] * shape_.hidden; });
      multiply_by(head, rows, thread, [&](int row, int panel, __m512 low, __m512 high) {
        float* target = out + static_cast<int64_t>(row) * head.columns + panel * kPanel;
        const int left = head.columns - panel * kPanel;
        if (left >= kPanel && reinterpret_cast<uintptr_t>(target) % 64 == 0) {  // past the cache: they are many
          _mm512_stream_ps(target, low);
          _mm512_stream_ps(target + kLanes, high);
        } else {
          _mm512_mask_storeu_ps(target, first_lanes(left), low);
          _mm512_mask_storeu_ps(target + kLanes, first_lanes(left - kLanes), high);
        }
      });
      _mm_sfence();
    });
    return true;
  }

  // logits [rows, columns] -> [rows] each.
  void find_peaks(const float* logits, int64_t rows, int columns, float* highest, int64_t* tokens) {
    each(rows, rows > 2, [&](int64_t row, int) {
      const Peak peak = find_peak(logits + row * columns, columns);
      highest[row] = peak.highest;
      tokens[row] = peak.token;
    });
  }

  // logits [any, columns], in place. 0: done; 1: no memory; 2: not all of a row's tokens are there, or are columns.
  int penalize(float* logits, int columns, const PenalizedRows& of) {
    if (!reserve_for_choice(columns)) return 1;
    std::atomic<bool> is_wrong{false};
    each(of.count, of.count > 2, [&](int64_t i, int thread) {
      const int32_t* tokens = of.history + of.slots[i] * of.history_width;
      float* row = logits + of.rows[i] * columns;
      if (of.lengths[i] > of.history_width ||
          !penalizers_[thread].penalize(row, columns, tokens, of.lengths[i], of.penalties[i]))
        is_wrong = true;
    });
    return is_wrong ? 2 : 0;
  }

  // tokens [count] for the rows `rows` [count] of logits [any, columns].
  bool draw(const float* logits, int columns, int64_t count, const int64_t* rows, const Chance* chances,
            int64_t* tokens) {
    if (!reserve_for_choice(columns)) return false;
    each(count, count > 2, [&](int64_t i, int thread) {
      tokens[i] = drawers_[thread].draw(logits + rows[i] * columns, columns, chances[i]);
    });
    return true;
  }

  // Rows of what was packed: out[i] = column ids[i]. A few take less time than it takes to wake the others.
  void unpack_rows(const Linear& linear, const int64_t* ids, int64_t count, Stored* out) {
    const Packed<E> packed{static_cast<const Stored*>(linear.data), linear.columns, linear.inner};
    const int width = shape_.hidden;
    each(count, count > 128, [&](int64_t i, int) {
      const auto* panel = packed.panel(static_cast<int>(ids[i] / kPanel)) + ids[i] % kPanel * E::kPair;
      for (int k = 0; k < width; ++k) out[i * width + k] = panel[k / E::kPair * kPanel * E::kPair + k % E::kPair];
    });
  }

 private:
  // f(i, thread) for all i below `count`.
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

  bool reserve(const Batch& batch) {
    const int64_t rows = batch.num_rows;
    return qkv_.reserve(rows * qkv_width()) && read_.reserve(rows * read_width()) &&
           inner_.reserve(rows * shape_.inner) && reserve_operand(rows);
  }
  bool reserve_operand(int64_t rows) {
    return operand_.reserve(rows * pairs_of_widest()) && row_scales_.reserve(rows) &&
           scratch_.reserve(2 * pairs_of_widest() * team_.size());
  }
  // Of bfloat16 and float32 there are at least as many as of int8.
  int64_t pairs_of_widest() const {
    return (std::max({shape_.hidden, shape_.inner, read_width()}) + E::kPair - 1) / E::kPair + kLanes;
  }
  int qkv_width() const { return (shape_.heads + 2 * shape_.kv_heads) * shape_.head_dim; }
  int read_width() const { return shape_.heads * shape_.head_dim; }

  // Packs rows for a product, quantized where it wants that. read_row(row, scratch) returns the row, `width` elements.
  template <class ReadRow>
  void load_operand(const Linear& linear, int64_t rows, int width, int thread, const ReadRow& read_row) {
    const Tasks tasks(rows, linear.columns, team_.size());
    team_.deal(tasks.count(), thread);
    const Share share(rows, thread, team_.size());
    uint32_t* row_memory = scratch_.get() + 2 * pairs_of_widest() * thread;
    auto* plain = reinterpret_cast<Stored*>(row_memory);
    auto* quantized = reinterpret_cast<uint8_t*>(row_memory + pairs_of_widest());
    for (int64_t row = share.begin; row < share.end; ++row) {
      const Stored* source = read_row(row, plain);
      if (linear.kind == kElement) {
        if (width < linear.inner) source = pad(source, width, linear.inner, plain);
        pack_row(source, linear.inner / E::kPair, operand_.get(), tasks.blocks, row);
      } else {
        row_scales_.get()[row] = quantize_row<E>(source, width, linear.inner, quantized);
        pack_row(quantized, linear.inner / Int8::kPair, operand_.get(), tasks.blocks, row);
      }
    }
    team_.barrier();
  }

  static const Stored* pad(const Stored* source, int width, int padded, Stored* target) {
    if (source != target) std::memcpy(target, source, width * sizeof(Stored));
    std::fill(target + width, target + padded, Stored{0});
    return target;
  }

  template <class FindRow>
  void load_normalized(const Linear& linear, const Norm& norm, int64_t rows, int thread, const FindRow& find_row) {
    load_operand(linear, rows, shape_.hidden, thread, [&](int64_t row, Stored* scratch) {
      normalize<E>(norm, shape_.eps, find_row(row), scratch, shape_.hidden);
      return scratch;
    });
  }

  // Calls done(row, panel, low, high) with the products of the packed rows, bias included where `with_bias` says so.
  template <class Done>
  void multiply_by(const Linear& linear, int64_t rows, int thread, const Done& done, bool with_bias = true) {
    const Tasks tasks(rows, linear.columns, team_.size());
    const float* bias = with_bias ? linear.bias : nullptr;
    const auto add_bias = [bias](int panel, __m512& low, __m512& high) {
      if (!bias) return;
      low = _mm512_add_ps(low, _mm512_loadu_ps(bias + panel * kPanel));
      high = _mm512_add_ps(high, _mm512_loadu_ps(bias + panel * kPanel + kLanes));
    };
    if (!kHasInt8 || linear.kind == kElement) {
      const Packed<E> packed{static_cast<const Stored*>(linear.data), linear.columns, linear.inner};
      multiply<E>(reinterpret_cast<const Stored*>(operand_.get()), tasks, packed, team_, thread,
                  [&](int row, int panel, __m512 low, __m512 high) {
                    add_bias(panel, low, high);
                    done(row, panel, low, high);
                  });
      return;
    }
    if constexpr (kHasInt8) {
      const float* row_scales = row_scales_.get();
      const Packed<Int8> packed{static_cast<const uint8_t*>(linear.data), linear.columns, linear.inner};
      multiply<Int8>(reinterpret_cast<const uint8_t*>(operand_.get()), tasks, packed, team_, thread,
                     [&](int row, int panel, __m512i low_sums, __m512i high_sums) {
                       const __m512 scale = _mm512_set1_ps(row_scales[row]);
                       __m512 low = rescale(linear, panel * kPanel, low_sums, scale);
                       __m512 high = rescale(linear, panel * kPanel + kLanes, high_sums, scale);
                       add_bias(panel, low, high);
                       done(row, panel, low, high);
                     });
    }
  }

  static __m512 rescale(const Linear& linear, int column, __m512i sums, __m512 row_scale) {
    const __m512i exact = _mm512_sub_epi32(sums, _mm512_loadu_si512(linear.corrections + column));
    return _mm512_mul_ps(_mm512_mul_ps(_mm512_cvtepi32_ps(exact), _mm512_loadu_ps(linear.scales + column)), row_scale);
  }

  static void store_panel(Stored* row, int panel, int width, __m512 low, __m512 high) {
    Stored* target = row + panel * kPanel;
    const int left = width - panel * kPanel;
    E::store(target, low, first_lanes(left));
    E::store(target + kLanes, high, first_lanes(left - kLanes));
  }

  // The end of a half layer: a's rows, `width` elements each, times `linear`, added to x or put where the other ranks'
  // parts are added first.
  void contribute(const Linear& linear, const Stored* a, int width, int64_t rows, Stored* x, Stored* partial,
                  int thread) {
    const int hidden = shape_.hidden;
    load_operand(linear, rows, width, thread, [&](int64_t row, Stored*) { return a + row * width; });
    if (partial) {
      multiply_by(linear, rows, thread, [&](int row, int panel, __m512 low, __m512 high) {
        store_panel(partial + static_cast<int64_t>(row) * hidden, panel, hidden, low, high);
      }, false);
    } else {
      multiply_by(linear, rows, thread, [&](int row, int panel, __m512 low, __m512 high) {
        Stored* target = x + static_cast<int64_t>(row) * hidden + panel * kPanel;
        const int left = hidden - panel * kPanel;
        const __mmask16 first = first_lanes(left), second = first_lanes(left - kLanes);
        E::store(target, _mm512_add_ps(low, E::load(target, first)), first);
        E::store(target + kLanes, _mm512_add_ps(high, E::load(target + kLanes, second)), second);
      });
    }
    team_.barrier();
  }

  void attend(const Layer& layer, const Batch& batch, Stored* x, Stored* partial, int thread) {
    const int64_t rows = batch.num_rows;
    const int width = qkv_width();
    Stored *qkv = qkv_.get(), *read = read_.get();
    load_normalized(layer.qkv, layer.attention_norm, rows, thread,
                    [&](int64_t row) { return x + row * shape_.hidden; });
    multiply_by(layer.qkv, rows, thread, [&](int row, int panel, __m512 low, __m512 high) {
      store_panel(qkv + static_cast<int64_t>(row) * width, panel, width, low, high);
    });
    team_.barrier();
    const Share share(rows, thread, team_.size());
    for (int64_t row = share.begin; row < share.end; ++row) place(layer, batch, row, qkv + row * width);
    team_.deal(static_cast<int64_t>(tiles_.size()), thread);
    team_.barrier();
    AttentionShape attention = attention_;
    attention.recent = layer.recent;
    attention.sinks = layer.sinks;
    read_cache(layer, batch, attention, qkv, read, thread);
    team_.barrier();
    contribute(layer.output, read, read_width(), rows, x, partial, thread);
  }

  // Norms and turns a row's queries and keys, and stores its keys and values in the cache.
  void place(const Layer& layer, const Batch& batch, int64_t row, Stored* qkv) {
    const int head_dim = shape_.head_dim;
    const int64_t position = batch.positions[row];
    for (int head = 0; head < shape_.heads + shape_.kv_heads; ++head) {
      Stored* data = qkv + static_cast<int64_t>(head) * head_dim;
      const float* weight = head < shape_.heads ? layer.query_norm : layer.key_norm;
      if (weight) normalize<E>(Norm{weight, nullptr}, shape_.eps, data, data, head_dim);
      if (shape_.cos)
        rotate<E>(data, shape_.cos + position * (head_dim / 2), shape_.sin + position * (head_dim / 2), head_dim);
    }
    const int size = shape_.tokens_per_block;
    const int64_t block = batch.block_tables[batch.slots[row] * batch.table_width + position / size];
    const Stored* keys = qkv + static_cast<int64_t>(shape_.heads) * head_dim;
    store_keys(static_cast<Stored*>(layer.keys) + block * attention_.block_elements(), position % size, keys);
    store_values(static_cast<Stored*>(layer.values) + block * attention_.block_elements(), position % size, batch, row,
                 keys + static_cast<int64_t>(shape_.kv_heads) * head_dim);
  }

  // block, offset: where in the cache.
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
    if (is_second && row > 0 && follows(batch, row)) return;  // the row before stores both
    const bool has_second = !is_second && E::kPair > 1 && row + 1 < batch.num_rows && follows(batch, row + 1);
    for (int head = 0; head < shape_.kv_heads; ++head) {
      Stored* target = block + head * attention_.head_elements() + offset / E::kPair * shape_.head_dim * E::kPair;
      const Stored* value = values + static_cast<int64_t>(head) * shape_.head_dim;
      E::store_values(target, value, has_second ? value + qkv_width() : nullptr, is_second, shape_.head_dim);
    }
  }

  // Whether a row is the token after that of the row before it.
  static bool follows(const Batch& batch, int64_t row) {
    return batch.slots[row] == batch.slots[row - 1] && batch.positions[row] == batch.positions[row - 1] + 1;
  }

  void read_cache(const Layer& layer, const Batch& batch, const AttentionShape& shape, const Stored* qkv, Stored* read,
                  int thread) {
    const auto reader_of = [&](const Tile& tile) {
      return CacheReader<E>(shape, tile, static_cast<const Stored*>(layer.keys),
                            static_cast<const Stored*>(layer.values),
                            batch.block_tables + tile.span.slot * batch.table_width);
    };
    const auto num_tiles = static_cast<int64_t>(tiles_.size());
    team_.share(thread, [&](int64_t index) {
      const int64_t following = std::min(index + 1, num_tiles - 1);
      CacheReader<E> reader = reader_of(tiles_[index]), next = reader_of(tiles_[following]);
      attend_tile<E>(*states_[thread], shape, tiles_[index], reader, following == index ? nullptr : &next, qkv,
                     qkv_width(), read, read_width());
    });
  }

  void feed_forward(const Layer& layer, const Batch& batch, Stored* x, Stored* partial, int thread) {
    const int64_t rows = batch.num_rows;
    const int inner = shape_.inner, kind = shape_.activation;
    Stored* activated = inner_.get();
    load_normalized(layer.up, layer.mlp_norm, rows, thread, [&](int64_t row) { return x + row * shape_.hidden; });
    if (shape_.is_gated) {  // a panel is 16 columns of the gate and the same 16 of what it gates
      multiply_by(layer.up, rows, thread, [&](int row, int panel, __m512 gate, __m512 up) {
        E::store(activated + static_cast<int64_t>(row) * inner + panel * kLanes,
                 _mm512_mul_ps(activate<E>(kind, gate), up), first_lanes(inner - panel * kLanes));
      });
    } else {
      multiply_by(layer.up, rows, thread, [&](int row, int panel, __m512 low, __m512 high) {
        store_panel(activated + static_cast<int64_t>(row) * inner, panel, inner, activate<E>(kind, low),
                    activate<E>(kind, high));
      });
    }
    team_.barrier();
    contribute(layer.down, activated, inner, rows, x, partial, thread);
  }

  Shape shape_;
  const Layer* layers_;
  AttentionShape attention_{};
  Team team_;
  std::vector<Tile> tiles_;
  std::vector<std::unique_ptr<TileState<E>, FreeState>> states_;  // of every thread
  std::vector<Penalizer> penalizers_;  // of every thread
  std::vector<Drawer> drawers_;  // of every thread
  Buffer<Stored> qkv_, read_, inner_;
  Buffer<uint32_t> operand_;  // packed rows, a pair each
  Buffer<uint32_t> scratch_;  // of every thread, a row and a quantized one
  Buffer<float> row_scales_;
};

}  // namespace inflight
