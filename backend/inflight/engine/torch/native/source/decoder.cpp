// A decoder's layers on a CPU: one call computes any number of them for all rows of a packed batch.
//
// Called through ctypes by `inflight.engine.torch.native`; the structs below are declared there again, field for
// field. Weights, caches and tables are the caller's memory. A call runs on `num_threads` threads of OpenMP, which are
// torch's own, and returns when all is done; one call at a time for each decoder.
#include <omp.h>

#include <memory>
#include <vector>

#include "attention.h"
#include "gemm.h"
#include "int8.h"
#include "vector_math.h"

namespace inflight {

enum Kind : int32_t { kElement = 0, kInt8 = 1 };

struct Linear {
  const void* data;
  const float* bias;          // [padded columns], or none
  const float* scales;        // int8: [padded columns]
  const int32_t* corrections;  // int8: [padded columns], 128 times the column's sum
  int32_t columns, inner, kind;
};

struct Norm {
  const float* weight;
  const float* bias;  // none: a root-mean-square norm
};

struct Layer {
  Norm attention_norm, mlp_norm;
  Linear qkv, output, up, down;
  const float *query_norm, *key_norm;  // [head_dim], or none
  void *keys, *values;
  int32_t recent, sinks;
};

struct Shape {
  int32_t hidden, heads, kv_heads, head_dim, inner;
  int32_t tokens_per_block, is_gated, activation, num_threads;
  float eps;
  const float *cos, *sin;  // [positions, head_dim / 2], or none
};

struct Batch {
  int64_t num_rows;
  const int64_t* positions;     // [num_rows]
  const int64_t* slots;         // [num_rows]
  int64_t num_spans;
  const Span* spans;
  const int64_t* block_tables;  // [slots, table_width]
  int64_t table_width;
};

template <class T>
class Buffer {  // grows, and is not initialised
 public:
  T* reserve(int64_t count) {
    if (count > size_) {
      data_.reset(static_cast<T*>(std::aligned_alloc(64, (count * sizeof(T) + 4095) / 4096 * 4096)));
      size_ = data_ ? count : 0;
    }
    return data_.get();
  }

 private:
  struct Free {
    void operator()(T* p) const { std::free(p); }
  };
  std::unique_ptr<T, Free> data_;
  int64_t size_ = 0;
};

template <class E>
void normalize(const Norm& norm, float eps, const typename E::Stored* x, typename E::Stored* out, int count) {
  __m512 sum = _mm512_setzero_ps(), squares = _mm512_setzero_ps();
  for (int i = 0; i < count; i += kLanes) {
    const __m512 v = E::load(x + i, first_lanes(count - i));
    sum = _mm512_add_ps(sum, v);
    squares = _mm512_fmadd_ps(v, v, squares);
  }
  float mean = 0.0f;
  float variance = _mm512_reduce_add_ps(squares) / count;
  if (norm.bias) {
    mean = _mm512_reduce_add_ps(sum) / count;
    __m512 deviations = _mm512_setzero_ps();
    for (int i = 0; i < count; i += kLanes) {
      const __mmask16 mask = first_lanes(count - i);
      const __m512 d = _mm512_maskz_sub_ps(mask, E::load(x + i, mask), _mm512_set1_ps(mean));
      deviations = _mm512_fmadd_ps(d, d, deviations);
    }
    variance = _mm512_reduce_add_ps(deviations) / count;
  }
  const __m512 factor = _mm512_set1_ps(1.0f / std::sqrt(variance + eps)), shift = _mm512_set1_ps(mean);
  for (int i = 0; i < count; i += kLanes) {
    const __mmask16 mask = first_lanes(count - i);
    __m512 v = _mm512_mul_ps(_mm512_sub_ps(E::load(x + i, mask), shift), factor);
    v = _mm512_mul_ps(v, _mm512_maskz_loadu_ps(mask, norm.weight + i));
    if (norm.bias) v = _mm512_add_ps(v, _mm512_maskz_loadu_ps(mask, norm.bias + i));
    E::store(out + i, v, mask);
  }
}

// In place; pairs are (i, i + head_dim / 2).
template <class E>
void rotate(typename E::Stored* head, const float* cos, const float* sin, int head_dim) {
  const int half = head_dim / 2;
  for (int i = 0; i < half; i += kLanes) {
    const __mmask16 mask = first_lanes(half - i);
    const __m512 c = _mm512_maskz_loadu_ps(mask, cos + i), s = _mm512_maskz_loadu_ps(mask, sin + i);
    const __m512 first = E::load(head + i, mask), second = E::load(head + half + i, mask);
    E::store(head + i, _mm512_fnmadd_ps(second, s, _mm512_mul_ps(first, c)), mask);
    E::store(head + half + i, _mm512_fmadd_ps(first, s, _mm512_mul_ps(second, c)), mask);
  }
}

struct Share {  // of rows or items, of one thread
  int64_t begin, end;
  Share(int64_t count, int thread, int num_threads)
      : begin(count * thread / num_threads), end(count * (thread + 1) / num_threads) {}
};

template <class E>
class Decoder {
 public:
  using Stored = typename E::Stored;

  Decoder(const Shape& shape, const Layer* layers) : shape_(shape), layers_(layers) {
    attention_.heads = shape.heads;
    attention_.kv_heads = shape.kv_heads;
    attention_.head_dim = shape.head_dim;
    attention_.tokens_per_block = shape.tokens_per_block;
    tiles_.resize(shape.num_threads);
    for (auto& tile : tiles_) tile.reset(new (std::align_val_t(64)) TileState<E>);
  }

  // Layers first .. last - 1, x [rows, hidden] in place. With `partial` it is one half of one layer (0 attention,
  // 1 MLP), whose contribution goes there, [rows, hidden], without the output's bias.
  bool run(const Batch& batch, Stored* x, int first, int last, Stored* partial, int half) {
    if (!reserve(batch)) return false;
#pragma omp parallel num_threads(shape_.num_threads)
    {
      const int thread = omp_get_thread_num(), num_threads = omp_get_num_threads();
      for (int index = first; index < last; ++index) {
        const Layer& layer = layers_[index];
        if (!partial || half == 0) attend(layer, batch, x, partial, thread, num_threads);
        if (!partial || half == 1) feed_forward(layer, batch, x, partial, thread, num_threads);
      }
    }
    return true;
  }

  // out [rows, columns] float32 = norm(x) * head.
  bool logits(const Norm& norm, const Linear& head, const Stored* x, int64_t rows, float* out) {
    Stored* normed = normed_.reserve(rows * shape_.hidden);
    if (!normed || !reserve_quantized(rows)) return false;
#pragma omp parallel num_threads(shape_.num_threads)
    {
      const int thread = omp_get_thread_num(), num_threads = omp_get_num_threads();
      normalize_rows(norm, x, rows, thread, num_threads);
#pragma omp barrier
      multiply_by(head, normed, rows, shape_.hidden, thread, num_threads, [&](int row, int panel, __m512 low, __m512 high) {
        float* target = out + static_cast<int64_t>(row) * head.columns + panel * kPanel;
        const int left = head.columns - panel * kPanel;
        _mm512_mask_storeu_ps(target, first_lanes(left), low);
        _mm512_mask_storeu_ps(target + kLanes, first_lanes(left - kLanes), high);
      });
    }
    return true;
  }

 private:
  struct FreeTile {
    void operator()(TileState<E>* tile) const { ::operator delete(tile, std::align_val_t(64)); }
  };

  bool reserve(const Batch& batch) {
    const int64_t rows = batch.num_rows;
    return normed_.reserve(rows * shape_.hidden) && qkv_.reserve(rows * qkv_width()) &&
           read_.reserve(rows * read_width()) && inner_.reserve(rows * shape_.inner) && reserve_quantized(rows);
  }
  bool reserve_quantized(int64_t rows) {
    const int64_t widest = std::max({shape_.hidden, shape_.inner, read_width()}) + 3;
    return quantized_.reserve(rows * widest) && row_scales_.reserve(rows);
  }
  int qkv_width() const { return (shape_.heads + 2 * shape_.kv_heads) * shape_.head_dim; }
  int read_width() const { return shape_.heads * shape_.head_dim; }

  void normalize_rows(const Norm& norm, const Stored* x, int64_t rows, int thread, int num_threads) {
    const Share share(rows, thread, num_threads);
    for (int64_t row = share.begin; row < share.end; ++row)
      normalize<E>(norm, shape_.eps, x + row * shape_.hidden, normed_.reserve(0) + row * shape_.hidden, shape_.hidden);
  }

  // Calls done(row, panel, low, high) with the products of all rows, bias included where `with_bias` says so.
  template <class Done>
  void multiply_by(const Linear& linear, const Stored* a, int64_t rows, int64_t stride, int thread, int num_threads,
                   const Done& done, bool with_bias = true) {
    const float* bias = with_bias ? linear.bias : nullptr;
    const auto add_bias = [bias](int panel, __m512& low, __m512& high) {
      if (!bias) return;
      low = _mm512_add_ps(low, _mm512_loadu_ps(bias + panel * kPanel));
      high = _mm512_add_ps(high, _mm512_loadu_ps(bias + panel * kPanel + kLanes));
    };
    if (linear.kind == kElement) {
      const Packed<E> packed{static_cast<const Stored*>(linear.data), linear.columns, linear.inner};
      multiply<E>(a, stride, static_cast<int>(rows), packed, thread, num_threads,
                  [&](int row, int panel, __m512 low, __m512 high) {
                    add_bias(panel, low, high);
                    done(row, panel, low, high);
                  });
      return;
    }
    const Share share(rows, thread, num_threads);
    uint8_t* quantized = quantized_.reserve(0);
    float* row_scales = row_scales_.reserve(0);
    for (int64_t row = share.begin; row < share.end; ++row)
      row_scales[row] = quantize_row<E>(a + row * stride, static_cast<int>(stride), linear.inner,
                                        quantized + row * linear.inner);
#pragma omp barrier
    const Packed<Int8> packed{static_cast<const uint8_t*>(linear.data), linear.columns, linear.inner};
    multiply<Int8>(quantized, linear.inner, static_cast<int>(rows), packed, thread, num_threads,
                   [&](int row, int panel, __m512 low, __m512 high) {
                     const __m512 scale = _mm512_set1_ps(row_scales[row]);
                     low = rescale(linear, panel * kPanel, low, scale);
                     high = rescale(linear, panel * kPanel + kLanes, high, scale);
                     add_bias(panel, low, high);
                     done(row, panel, low, high);
                   });
  }

  static __m512 rescale(const Linear& linear, int column, __m512 sums, __m512 row_scale) {
    const __m512i exact =
        _mm512_sub_epi32(_mm512_castps_si512(sums), _mm512_loadu_si512(linear.corrections + column));
    return _mm512_mul_ps(_mm512_mul_ps(_mm512_cvtepi32_ps(exact), _mm512_loadu_ps(linear.scales + column)), row_scale);
  }

  static void store_panel(Stored* row, int panel, int width, __m512 low, __m512 high) {
    Stored* target = row + panel * kPanel;
    const int left = width - panel * kPanel;
    E::store(target, low, first_lanes(left));
    E::store(target + kLanes, high, first_lanes(left - kLanes));
  }

  // The end of a half layer: added to x, or put where the other ranks' parts are added first.
  void contribute(const Linear& linear, const Stored* a, int64_t stride, int64_t rows, Stored* x, Stored* partial,
                  int thread, int num_threads) {
    const int hidden = shape_.hidden;
    if (partial) {
      multiply_by(linear, a, rows, stride, thread, num_threads, [&](int row, int panel, __m512 low, __m512 high) {
        store_panel(partial + static_cast<int64_t>(row) * hidden, panel, hidden, low, high);
      }, false);
    } else {
      multiply_by(linear, a, rows, stride, thread, num_threads, [&](int row, int panel, __m512 low, __m512 high) {
        Stored* target = x + static_cast<int64_t>(row) * hidden + panel * kPanel;
        const int left = hidden - panel * kPanel;
        const __mmask16 first = first_lanes(left), second = first_lanes(left - kLanes);
        E::store(target, _mm512_add_ps(low, E::load(target, first)), first);
        E::store(target + kLanes, _mm512_add_ps(high, E::load(target + kLanes, second)), second);
      });
    }
#pragma omp barrier
  }

  void attend(const Layer& layer, const Batch& batch, Stored* x, Stored* partial, int thread, int num_threads) {
    const int64_t rows = batch.num_rows;
    const int width = qkv_width();
    Stored *normed = normed_.reserve(0), *qkv = qkv_.reserve(0), *read = read_.reserve(0);
    normalize_rows(layer.attention_norm, x, rows, thread, num_threads);
#pragma omp barrier
    multiply_by(layer.qkv, normed, rows, shape_.hidden, thread, num_threads,
                [&](int row, int panel, __m512 low, __m512 high) {
                  store_panel(qkv + static_cast<int64_t>(row) * width, panel, width, low, high);
                });
#pragma omp barrier
    const Share share(rows, thread, num_threads);
    for (int64_t row = share.begin; row < share.end; ++row) place(layer, batch, row, qkv + row * width);
#pragma omp barrier
    AttentionShape attention = attention_;
    attention.recent = layer.recent;
    attention.sinks = layer.sinks;
    read_cache(layer, batch, attention, qkv, read, thread);
    contribute(layer.output, read, read_width(), rows, x, partial, thread, num_threads);
  }

  // Norms and turns a row's queries and keys, and stores its keys and values in the cache.
  void place(const Layer& layer, const Batch& batch, int64_t row, Stored* qkv) {
    const int head_dim = shape_.head_dim, size = shape_.tokens_per_block;
    const int64_t position = batch.positions[row];
    for (int head = 0; head < shape_.heads + shape_.kv_heads; ++head) {
      Stored* data = qkv + static_cast<int64_t>(head) * head_dim;
      const float* weight = head < shape_.heads ? layer.query_norm : layer.key_norm;
      if (weight) normalize<E>(Norm{weight, nullptr}, shape_.eps, data, data, head_dim);
      if (shape_.cos)
        rotate<E>(data, shape_.cos + position * (head_dim / 2), shape_.sin + position * (head_dim / 2), head_dim);
    }
    const int64_t block = batch.block_tables[batch.slots[row] * batch.table_width + position / size];
    const int64_t offset = position % size;
    const Stored* keys = qkv + static_cast<int64_t>(shape_.heads) * head_dim;
    const Stored* values = keys + static_cast<int64_t>(shape_.kv_heads) * head_dim;
    const int64_t head_elements = CacheLayout<E>::head_elements(attention_);
    for (int head = 0; head < shape_.kv_heads; ++head) {
      const int64_t at = block * CacheLayout<E>::block_elements(attention_) + head * head_elements;
      Stored* key_target = static_cast<Stored*>(layer.keys) + at + offset * E::kPair;
      Stored* value_target = static_cast<Stored*>(layer.values) + at + offset / E::kPair * head_dim * E::kPair +
                             offset % E::kPair;
      const Stored *key = keys + static_cast<int64_t>(head) * head_dim, *value = values + static_cast<int64_t>(head) * head_dim;
      for (int d = 0; d < head_dim; d += E::kPair)
        std::memcpy(key_target + static_cast<int64_t>(d) * size, key + d, E::kPair * sizeof(Stored));
      for (int d = 0; d < head_dim; ++d) value_target[static_cast<int64_t>(d) * E::kPair] = value[d];
    }
  }

  void read_cache(const Layer& layer, const Batch& batch, const AttentionShape& shape, const Stored* qkv, Stored* read,
                  int thread) {
    const int64_t tile_rows = shape.rows_per_tile();
#pragma omp for schedule(dynamic, 1)
    for (int64_t item = 0; item < num_items_; ++item) {
      const Item& it = items_[item];
      const Span& span = batch.spans[it.span];
      attend_tile<E>(*tiles_[thread], shape, span, it.begin, std::min(it.begin + tile_rows, span.end), it.kv_head, qkv,
                     qkv_width(), static_cast<const Stored*>(layer.keys), static_cast<const Stored*>(layer.values),
                     batch.block_tables + span.slot * batch.table_width, read, read_width());
    }
  }

  void feed_forward(const Layer& layer, const Batch& batch, Stored* x, Stored* partial, int thread, int num_threads) {
    const int64_t rows = batch.num_rows;
    const int inner = shape_.inner, kind = shape_.activation;
    Stored *normed = normed_.reserve(0), *activated = inner_.reserve(0);
    normalize_rows(layer.mlp_norm, x, rows, thread, num_threads);
#pragma omp barrier
    if (shape_.is_gated) {  // a panel is 16 columns of the gate and the same 16 of what it gates
      multiply_by(layer.up, normed, rows, shape_.hidden, thread, num_threads,
                  [&](int row, int panel, __m512 gate, __m512 up) {
                    E::store(activated + static_cast<int64_t>(row) * inner + panel * kLanes,
                             _mm512_mul_ps(activate(kind, gate), up), first_lanes(inner - panel * kLanes));
                  });
    } else {
      multiply_by(layer.up, normed, rows, shape_.hidden, thread, num_threads,
                  [&](int row, int panel, __m512 low, __m512 high) {
                    store_panel(activated + static_cast<int64_t>(row) * inner, panel, inner, activate(kind, low),
                                activate(kind, high));
                  });
    }
#pragma omp barrier
    contribute(layer.down, activated, inner, rows, x, partial, thread, num_threads);
  }

 public:
  // Cuts the spans into tiles; before `run`, for all layers of a batch.
  void plan(const Batch& batch) {
    items_.clear();
    const int tile_rows = attention_.rows_per_tile();
    for (int64_t index = 0; index < batch.num_spans; ++index)
      for (int64_t begin = batch.spans[index].begin; begin < batch.spans[index].end; begin += tile_rows)
        for (int head = 0; head < shape_.kv_heads; ++head) items_.push_back({index, begin, head});
    num_items_ = static_cast<int64_t>(items_.size());
  }

 private:
  struct Item {
    int64_t span, begin;
    int kv_head;
  };
  Shape shape_;
  const Layer* layers_;
  AttentionShape attention_{};
  std::vector<Item> items_;
  int64_t num_items_ = 0;
  std::vector<std::unique_ptr<TileState<E>, FreeTile>> tiles_;
  Buffer<Stored> normed_, qkv_, read_, inner_;
  Buffer<uint8_t> quantized_;
  Buffer<float> row_scales_;
};

// columns x inner, row-major with `stride`, to panels; order[i] is the source row of column i, negative for zeros.
template <class E>
void pack(const typename E::Stored* source, int64_t stride, const int64_t* order, int columns, int inner,
          typename E::Stored* target, int num_threads) {
  const int pairs = (inner + E::kPair - 1) / E::kPair;
  const int panels = (columns + kPanel - 1) / kPanel;
#pragma omp parallel for num_threads(num_threads)
  for (int panel = 0; panel < panels; ++panel) {
    auto* out = target + static_cast<int64_t>(panel) * pairs * kPanel * E::kPair;
    for (int lane = 0; lane < kPanel; ++lane) {
      const int column = panel * kPanel + lane;
      const int64_t from = column < columns ? order[column] : -1;
      const auto* row = source + from * stride;
      for (int p = 0; p < pairs; ++p)
        for (int i = 0; i < E::kPair; ++i) {
          const int k = p * E::kPair + i;
          out[(static_cast<int64_t>(p) * kPanel + lane) * E::kPair + i] = from >= 0 && k < inner ? row[k] : 0;
        }
    }
  }
}

// Rows of what was packed: out[i] = column ids[i].
template <class E>
void unpack_rows(const Linear& linear, const int64_t* ids, int64_t count, int width, typename E::Stored* out,
                 int num_threads) {
  const Packed<E> packed{static_cast<const typename E::Stored*>(linear.data), linear.columns, linear.inner};
#pragma omp parallel for num_threads(num_threads) if (count > 8)
  for (int64_t i = 0; i < count; ++i) {
    const auto* panel = packed.panel(static_cast<int>(ids[i] / kPanel)) + ids[i] % kPanel * E::kPair;
    for (int k = 0; k < width; ++k) out[i * width + k] = panel[k / E::kPair * kPanel * E::kPair + k % E::kPair];
  }
}

}  // namespace inflight

using namespace inflight;

#define INFLIGHT_FUNCTIONS(name, E)                                                                                  \
  void* name##_create(const Shape* shape, const Layer* layers) {                                                    \
    return new (std::nothrow) Decoder<E>(*shape, layers);                                                           \
  }                                                                                                                  \
  void name##_destroy(void* decoder) { delete static_cast<Decoder<E>*>(decoder); }                                  \
  void name##_plan(void* decoder, const Batch* batch) { static_cast<Decoder<E>*>(decoder)->plan(*batch); }          \
  bool name##_run(void* decoder, const Batch* batch, E::Stored* x, int first, int last, E::Stored* partial,         \
                  int half) {                                                                                        \
    return static_cast<Decoder<E>*>(decoder)->run(*batch, x, first, last, partial, half);                           \
  }                                                                                                                  \
  bool name##_logits(void* decoder, const Norm* norm, const Linear* head, const E::Stored* x, int64_t rows,         \
                     float* out) {                                                                                   \
    return static_cast<Decoder<E>*>(decoder)->logits(*norm, *head, x, rows, out);                                   \
  }                                                                                                                  \
  void name##_pack(const E::Stored* source, int64_t stride, const int64_t* order, int columns, int inner,           \
                   E::Stored* target, int num_threads) {                                                             \
    pack<E>(source, stride, order, columns, inner, target, num_threads);                                            \
  }                                                                                                                  \
  void name##_unpack_rows(const Linear* linear, const int64_t* ids, int64_t count, int width, E::Stored* out,       \
                          int num_threads) {                                                                         \
    unpack_rows<E>(*linear, ids, count, width, out, num_threads);                                                   \
  }

extern "C" {
INFLIGHT_FUNCTIONS(bfloat16, Bf16)
INFLIGHT_FUNCTIONS(float32, F32)
void int8_pack(const uint8_t* source, int64_t stride, const int64_t* order, int columns, int inner, uint8_t* target,
               int num_threads) {
  pack<Int8>(source, stride, order, columns, inner, target, num_threads);
}
}
