// Attention of packed rows over the paged KV cache, reading blocks in place.
//
// A span is consecutive rows of one sequence: a context chunk, or the single row of a sequence in generation. The query
// heads of one key head are processed together, some rows at a time, as a tile of up to 12 query vectors, so that every
// key is loaded once for the whole tile. Within a block, keys are stored in pairs along head_dim, 16 keys side by side
// (a lane is a key: scores need no horizontal sum), and values in pairs along tokens (a lane is a part of head_dim):
//
//     keys    [blocks][kv_heads][head_dim / pair][tokens_per_block][pair]
//     values  [blocks][kv_heads][ceil(tokens_per_block / pair)][head_dim][pair]
//
// A cache of 8-bit levels has this order too, and a scale for each token's key and value:
//
//     scales  [blocks][kv_heads][tokens_per_block]
#pragma once

#include <algorithm>
#include <cmath>
#include <limits>
#include <type_traits>

#include "element.h"
#include "kv_levels.h"
#include "lanes.h"
#include "products.h"
#include "vector_math.h"

namespace inflight {

constexpr int kTile = 12;         // query vectors
constexpr int kGroupsAtOnce = 16;  // of 16 keys: scored before the sums are rescaled
constexpr int kMaxHeadDim = 256;
constexpr int kLine = 64;  // bytes of a cache line

struct Span {
  int64_t slot, begin, end, start;  // rows begin .. end - 1 are at positions start .. of the slot's sequence
};

struct Tile {  // rows begin .. end - 1 of a span, for one key head
  Span span;
  int64_t begin, end;
  int kv_head;
};

struct AttentionShape {
  int heads, kv_heads, head_dim, tokens_per_block;
  // Window: a row sees all earlier keys if `recent` is 0. Otherwise it sees the `recent` last ones except those before
  // position `first`, and the first `sinks`.
  int recent, sinks, first;
  float scale, soft_cap;  // of scores; 0: no cap
  const float* learned_sinks;  // [heads], an additional score in each row's softmax, without a value; or null
  const int64_t* ends;         // [rows], the last position that each row sees; null: its own
  int group() const { return heads / kv_heads; }
  int rows_per_tile() const { return std::max(1, kTile / group()); }
  int64_t head_elements() const { return static_cast<int64_t>(head_dim) * tokens_per_block; }
  int64_t block_elements() const { return kv_heads * head_elements(); }
  int groups_per_block() const { return (tokens_per_block + kLanes - 1) / kLanes; }
};

// A layer's keys and values, and their scales if the cache has any.
template <class C>
struct LayerCache {
  const typename C::Stored *keys, *values;
  const float *key_scales, *value_scales;
};

// A layer's part of a cache of 8-bit levels, for writing.
struct LevelsOfLayer {
  uint8_t *keys, *values;
  float *key_scales, *value_scales;
};

// Quantizes a row's keys and values, [2][kv_heads][head_dim], head by head, and stores them at block, offset.
template <class E, class Levels>
void store_levels(const AttentionShape& shape, const LevelsOfLayer& layer, int64_t block, int64_t offset,
                  const typename E::Stored* keys) {
  const int head_dim = shape.head_dim, size = shape.tokens_per_block;
  const typename E::Stored* values = keys + static_cast<int64_t>(shape.kv_heads) * head_dim;
  alignas(kLine) uint8_t levels[kMaxHeadDim];
  for (int head = 0; head < shape.kv_heads; ++head) {
    const int64_t at = block * shape.block_elements() + head * shape.head_elements();
    const int64_t scale = (block * shape.kv_heads + head) * size + offset;
    layer.key_scales[scale] = round_head<E, Levels>(keys + static_cast<int64_t>(head) * head_dim, head_dim, levels);
    uint8_t* key = layer.keys + at + offset * E::kPair;
    for (int d = 0; d < head_dim; d += E::kPair)
      std::memcpy(key + static_cast<int64_t>(d) * size, levels + d, E::kPair);
    layer.value_scales[scale] = round_head<E, Levels>(values + static_cast<int64_t>(head) * head_dim, head_dim, levels);
    // The other token of a pair belongs to another row, maybe of another thread, so only one byte is written.
    uint8_t* value = layer.values + at + offset / E::kPair * head_dim * E::kPair + offset % E::kPair;
    for (int d = 0; d < head_dim; ++d) value[d * E::kPair] = levels[d];
  }
}

// Working memory for one key head's tile; one per thread.
template <class E>
struct TileState {
  alignas(64) typename E::Operand queries[kTile][kMaxHeadDim];
  alignas(64) float scores[kTile][kGroupsAtOnce * kLanes];
  alignas(64) typename E::Operand weights[kTile][kGroupsAtOnce * kLanes];
  alignas(64) float sums[kTile][kMaxHeadDim];
  float largest[kTile], total[kTile];
  int64_t position[kTile], end[kTile];
};

// Up to 16 groups of 16 keys, side by side, that are scored together and whose values are summed together.
template <class C>
struct KeyGroups {
  const typename C::Stored *keys[kGroupsAtOnce], *values[kGroupsAtOnce];
  const float *key_scales[kGroupsAtOnce], *value_scales[kGroupsAtOnce];  // if the cache has scales
  int64_t first_keys[kGroupsAtOnce];
  int num_keys[kGroupsAtOnce], num_pairs[kGroupsAtOnce];
  int count = 0;
};

// Reads the part of a layer's cache to which a tile attends, piece by piece. Pieces that are summed together do not
// depend on the row or the batch.
template <class C>
class CacheReader {
 public:
  CacheReader(const AttentionShape& shape, const Tile& tile, const LayerCache<C>& cache, const int64_t* block_table)
      : shape_(shape), cache_(cache), block_table_(block_table), kv_head_(tile.kv_head) {
    const int64_t first_position = tile.span.start + (tile.begin - tile.span.begin);
    last_position_ = shape.ends ? *std::max_element(shape.ends + tile.begin, shape.ends + tile.end)
                                : first_position + (tile.end - tile.begin) - 1;
    oldest_ = shape.recent ? std::max<int64_t>(0, first_position - shape.recent + 1) : 0;
    sink_blocks_ = shape.recent ? (shape.sinks + shape.tokens_per_block - 1) / shape.tokens_per_block : 0;
  }

  bool next(KeyGroups<C>& groups) {
    const int size = shape_.tokens_per_block;
    groups.count = 0;
    int64_t part = -1;
    for (; block_ <= last_position_ / size; ++block_, offset_ = 0) {
      if (block_ >= sink_blocks_ && (block_ + 1) * size <= oldest_) {
        block_ = std::max(block_, oldest_ / size - 1);
        continue;
      }
      for (; offset_ < size; offset_ += kLanes) {
        const int64_t first_key = block_ * size + offset_;
        if (first_key > last_position_) break;
        if (shape_.recent && first_key + kLanes <= oldest_ && first_key >= shape_.sinks) continue;
        const int64_t own_part = (block_ * shape_.groups_per_block() + offset_ / kLanes) / kGroupsAtOnce;
        if (groups.count && own_part != part) return true;
        part = own_part;
        add(groups, first_key);
      }
    }
    return groups.count > 0;
  }

 private:
  void add(KeyGroups<C>& groups, int64_t first_key) {
    const int64_t at = block_table_[block_] * shape_.block_elements() + kv_head_ * shape_.head_elements();
    const int index = groups.count++;
    groups.keys[index] = cache_.keys + at + offset_ * C::kPair;
    groups.values[index] = cache_.values + at + offset_ * shape_.head_dim;
    if constexpr (C::kHasScales) {
      const int64_t scale =
          (block_table_[block_] * shape_.kv_heads + kv_head_) * shape_.tokens_per_block + offset_;
      groups.key_scales[index] = cache_.key_scales + scale;
      groups.value_scales[index] = cache_.value_scales + scale;
    }
    groups.first_keys[index] = first_key;
    groups.num_keys[index] = static_cast<int>(std::min<int64_t>(kLanes, shape_.tokens_per_block - offset_));
    const int64_t used = std::min<int64_t>(groups.num_keys[index], last_position_ - first_key + 1);
    groups.num_pairs[index] = static_cast<int>((used + C::kPair - 1) / C::kPair);
  }

  const AttentionShape& shape_;
  const LayerCache<C> cache_;
  const int64_t* block_table_;
  const int kv_head_;
  int64_t last_position_, oldest_, sink_blocks_;
  int64_t block_ = 0, offset_ = 0;
};

// A range of groups that stays in a core's first-level cache while all rows of a tile are processed.
struct GroupRange {
  int begin, end;
};

// Calls f(range) for all ranges of `count` groups.
template <class F>
inline void in_ranges(int count, const F& f) {
  for (int begin = 0; begin < count; begin += kGroupsInCache)
    f(GroupRange{begin, std::min(begin + kGroupsInCache, count)});
}

// Computes scores[m][g * 16 + lane] for kGroups groups of 16 keys, whose first pairs of head_dim are at keys[g]. With
// kFetchesValues, prefetches these tokens' values meanwhile.
template <class E, class C, int kRows, int kGroups>
inline void score(const TileState<E>& state, float (*scores)[kGroupsAtOnce * kLanes], int first_row, int first_group,
                  const KeyGroups<C>& groups, int head_dim, int64_t pair_stride, float scale) {
  constexpr int kPairsOfLine = kLine / (kLanes * C::kPair * sizeof(typename C::Stored));  // of a group's values
  Floats sums[kRows][kGroups];
#pragma GCC unroll 16
  for (int m = 0; m < kRows; ++m)
#pragma GCC unroll 16
    for (int g = 0; g < kGroups; ++g) sums[m][g] = floats(0.0f);
  for (int d = 0, p = 0; d < head_dim; d += E::kPair, ++p) {
    typename E::Pairs k[kGroups];
#pragma GCC unroll 16
    for (int g = 0; g < kGroups; ++g) {
      k[g] = C::load_pairs(groups.keys[first_group + g] + p * pair_stride);
      if (kFetchesValues && p % kPairsOfLine == 0)
        prefetch(reinterpret_cast<const char*>(groups.values[first_group + g]) + p / kPairsOfLine * kLine);
    }
#pragma GCC unroll 16
    for (int m = 0; m < kRows; ++m) {
      const typename E::Pairs q = E::broadcast_operand(&state.queries[first_row + m][d]);
#pragma GCC unroll 16
      for (int g = 0; g < kGroups; ++g) sums[m][g] = E::multiply_add(sums[m][g], q, k[g]);
    }
  }
  Floats factors[kGroups];
#pragma GCC unroll 16
  for (int g = 0; g < kGroups; ++g) {
    factors[g] = floats(scale);
    if constexpr (C::kHasScales) {
      const Mask is_key = first_lanes(groups.num_keys[first_group + g]);
      factors[g] = mul(factors[g], load(groups.key_scales[first_group + g], is_key));
    }
  }
#pragma GCC unroll 16
  for (int m = 0; m < kRows; ++m)
#pragma GCC unroll 16
    for (int g = 0; g < kGroups; ++g)
      store_aligned(&scores[first_row + m][(first_group + g) * kLanes], mul(sums[m][g], factors[g]));
}

template <class E, class C, int kRows>
inline void score_rows(TileState<E>& state, int first_row, const KeyGroups<C>& groups, const GroupRange& range,
                       int head_dim, int64_t pair_stride, float scale) {
  constexpr int kAtOnce = scored_groups(kRows);
  int g = range.begin;
  for (; g + kAtOnce <= range.end; g += kAtOnce)
    score<E, C, kRows, kAtOnce>(state, state.scores, first_row, g, groups, head_dim, pair_stride, scale);
  for (; g < range.end; ++g)
    score<E, C, kRows, 1>(state, state.scores, first_row, g, groups, head_dim, pair_stride, scale);
}

// Prefetches `num_lines` lines that are `stride` elements apart.
template <class Stored>
inline void fetch_lines(const Stored* first, int num_lines, int64_t stride) {
  for (int i = 0; i < num_lines; ++i, first += stride)
    prefetch(first);
}

// sums[m][d] += weights[m][key] * values[key][d] for kParts registers of d from `first_d` on, the last limited by
// `last_mask`. Meanwhile prefetches the keys at `ahead`, which are read next.
template <class E, class C, int kRows, int kParts>
inline void add_values(TileState<E>& state, int first_row, int first_d, const KeyGroups<C>& groups,
                       const GroupRange& range, const KeyGroups<C>& ahead, int head_dim, int64_t pair_stride,
                       Mask last_mask) {
  Floats sums[kRows][kParts];
#pragma GCC unroll 16
  for (int m = 0; m < kRows; ++m)
#pragma GCC unroll 16
    for (int i = 0; i < kParts; ++i) sums[m][i] = load_aligned(&state.sums[first_row + m][first_d + i * kLanes]);
  int fetched = ahead.count * range.begin / groups.count;  // of the groups ahead
  for (int g = range.begin; g < range.end; ++g) {
    for (; ahead.count && fetched < ahead.count * (g + 1) / groups.count; ++fetched)
      // Two groups of 8-bit levels share a cache line.
      if (!C::kHasScales || reinterpret_cast<uintptr_t>(ahead.keys[fetched]) % kLine == 0)
        fetch_lines(ahead.keys[fetched] + first_d / E::kPair * pair_stride, kParts * kLanes / E::kPair, pair_stride);
    const typename C::Stored* v = groups.values[g] + static_cast<int64_t>(first_d) * E::kPair;
    for (int pair = 0; pair < groups.num_pairs[g]; ++pair, v += static_cast<int64_t>(head_dim) * E::kPair) {
      typename E::Pairs part[kParts];
#pragma GCC unroll 16
      for (int i = 0; i < kParts; ++i)
        part[i] = i + 1 < kParts ? C::load_pairs(v + i * kLanes * E::kPair)
                                 : C::load_pairs(v + i * kLanes * E::kPair, last_mask);
#pragma GCC unroll 16
      for (int m = 0; m < kRows; ++m) {
        const typename E::Pairs w = E::broadcast_operand(&state.weights[first_row + m][g * kLanes + pair * E::kPair]);
#pragma GCC unroll 16
        for (int i = 0; i < kParts; ++i) sums[m][i] = E::multiply_add(sums[m][i], w, part[i]);
      }
    }
  }
#pragma GCC unroll 16
  for (int m = 0; m < kRows; ++m)
#pragma GCC unroll 16
    for (int i = 0; i < kParts; ++i) store_aligned(&state.sums[first_row + m][first_d + i * kLanes], sums[m][i]);
}

template <class E, class C, int kRows>
inline void add_values_of_rows(TileState<E>& state, int first_row, const KeyGroups<C>& groups, const GroupRange& range,
                               const KeyGroups<C>& ahead, int head_dim, int64_t stride) {
  for (int d = 0; d < head_dim; d += kSummedParts * kLanes) {
    const int left = head_dim - d;
    const int parts = std::min(kSummedParts, (left + kLanes - 1) / kLanes);
    const Mask last = first_lanes(left - (parts - 1) * kLanes);
    if constexpr (kSummedParts == 1) {
      add_values<E, C, kRows, 1>(state, first_row, d, groups, range, ahead, head_dim, stride, last);
    } else {
      switch (parts) {
        case 4: add_values<E, C, kRows, 4>(state, first_row, d, groups, range, ahead, head_dim, stride, last); break;
        case 3: add_values<E, C, kRows, 3>(state, first_row, d, groups, range, ahead, head_dim, stride, last); break;
        case 2: add_values<E, C, kRows, 2>(state, first_row, d, groups, range, ahead, head_dim, stride, last); break;
        default: add_values<E, C, kRows, 1>(state, first_row, d, groups, range, ahead, head_dim, stride, last); break;
      }
    }
  }
}

// Calls f with a compile-time number of rows, 1 .. kMax, repeatedly until `count` rows are done.
template <int kMax, class F>
inline void in_blocks(int count, const F& f) {
  const int num_blocks = (count + kMax - 1) / kMax;
  int row = 0;
  for (int block = 0; block < num_blocks; ++block) {
    const int stop = count * (block + 1) / num_blocks;
    switch (stop - row) {
      case 1: f(std::integral_constant<int, 1>{}, row); break;
      case 2: f(std::integral_constant<int, 2>{}, row); break;
      case 3: f(std::integral_constant<int, 3>{}, row); break;
      case 4: f(std::integral_constant<int, 4>{}, row); break;
      default:
        if constexpr (kMax > 4) {
          switch (stop - row) {
            case 5: f(std::integral_constant<int, 5>{}, row); break;
            case 6: f(std::integral_constant<int, 6>{}, row); break;
            default:
              if constexpr (kMax > 6) {
                switch (stop - row) {
                  case 7: f(std::integral_constant<int, 7>{}, row); break;
                  case 8: f(std::integral_constant<int, 8>{}, row); break;
                  case 9: f(std::integral_constant<int, 9>{}, row); break;
                  case 10: f(std::integral_constant<int, 10>{}, row); break;
                  case 11: f(std::integral_constant<int, 11>{}, row); break;
                  default: f(std::integral_constant<int, 12>{}, row); break;
                }
              }
          }
        }
    }
    row = stop;
  }
}

// Converts scores to weights and rescales earlier sums to the largest score so far.
template <class E, class C>
inline void soften(TileState<E>& state, int num_vectors, const KeyGroups<C>& groups,
                   const AttentionShape& shape) {
  const Floats hidden_score = floats(-std::numeric_limits<float>::infinity());
  const Ints lanes = lane_numbers();
  for (int m = 0; m < num_vectors; ++m) {
    const int position = static_cast<int>(state.position[m]), end = static_cast<int>(state.end[m]);
    Floats largest = hidden_score;
    for (int g = 0; g < groups.count; ++g) {
      const Ints keys = add(ints(static_cast<int>(groups.first_keys[g])), lanes);
      Mask seen = at_most(keys, ints(end)) & first_lanes(groups.num_keys[g]);
      if (shape.recent) {
        const int last_unseen = std::max(position - shape.recent, shape.first - 1);
        seen &= greater(keys, ints(last_unseen)) | less(keys, ints(shape.sinks));
      }
      float* scores = &state.scores[m][g * kLanes];
      Floats score = load_aligned(scores);
      if (shape.soft_cap > 0.0f) score = soft_cap_ps(score, shape.soft_cap);
      const Floats masked = select(seen, score, hidden_score);
      store_aligned(scores, masked);
      largest = max(largest, masked);
    }
    const float before = state.largest[m];
    const float now = std::max(before, largest_of(largest));
    const bool sees_any = now > -std::numeric_limits<float>::infinity();
    const Floats shift = floats(sees_any ? now : 0.0f);
    Floats total = floats(0.0f);
    for (int g = 0; g < groups.count; ++g) {
      const Floats weight = exp_ps(sub(load_aligned(&state.scores[m][g * kLanes]), shift));
      total = add(total, weight);
      if constexpr (C::kHasScales) {  // masked keys may have a NaN scale
        const Mask counts = differ(weight, floats(0.0f));
        E::store_operand(&state.weights[m][g * kLanes],
                         mul(counts, weight, load(groups.value_scales[g], counts)));
      } else {
        E::store_operand(&state.weights[m][g * kLanes], weight);
      }
    }
    const float fade = before == now || !sees_any ? 1.0f : std::exp(before - now);
    state.largest[m] = now;
    state.total[m] = state.total[m] * fade + sum_of(total);
    if (fade != 1.0f) {
      const Floats factor = floats(fade);
      for (int d = 0; d < shape.head_dim; d += kLanes)
        store_aligned(&state.sums[m][d], mul(load_aligned(&state.sums[m][d]), factor));
    }
  }
}

// Attends to all keys that `reader` returns, and meanwhile prefetches the first part of `next`, if it is not null.
//
//   queries, out   [rows, ...] with row strides in elements; the tile's head is selected by its index
template <class E, class C>
void attend_tile(TileState<E>& state, const AttentionShape& shape, const Tile& tile, CacheReader<C>& reader,
                 CacheReader<C>* next, const typename E::Stored* queries, int64_t query_stride,
                 typename E::Stored* out, int64_t out_stride) {
  using Stored = typename E::Stored;
  const int group = shape.group(), head_dim = shape.head_dim;
  const int num_vectors = static_cast<int>(tile.end - tile.begin) * group;
  const int padded = (head_dim + kLanes - 1) / kLanes * kLanes;
  for (int m = 0; m < num_vectors; ++m) {
    const int64_t row = tile.begin + m / group;
    const int head = tile.kv_head * group + m % group;
    E::load_operand(state.queries[m], queries + row * query_stride + static_cast<int64_t>(head) * head_dim, head_dim);
    state.position[m] = tile.span.start + (row - tile.span.begin);
    state.end[m] = shape.ends ? shape.ends[row] : state.position[m];
    state.largest[m] = shape.learned_sinks ? shape.learned_sinks[head] : -std::numeric_limits<float>::infinity();
    state.total[m] = shape.learned_sinks ? 1.0f : 0.0f;
    std::memset(state.sums[m], 0, padded * sizeof(float));
  }
  const int64_t pair_stride = static_cast<int64_t>(shape.tokens_per_block) * E::kPair;
  KeyGroups<C> two[2];
  KeyGroups<C>*groups = &two[0], *ahead = &two[1];
  for (bool is_more = reader.next(*groups); is_more; std::swap(groups, ahead)) {
    is_more = reader.next(*ahead);
    if (!is_more && next) next->next(*ahead);
    in_ranges(groups->count, [&](const GroupRange& range) {
      in_blocks<kScoredRows>(num_vectors, [&](auto rows, int row) {
        score_rows<E, C, decltype(rows)::value>(state, row, *groups, range, head_dim, pair_stride, shape.scale);
      });
    });
    soften(state, num_vectors, *groups, shape);
    in_ranges(groups->count, [&](const GroupRange& range) {
      in_blocks<kSummedRows>(num_vectors, [&](auto rows, int row) {
        add_values_of_rows<E, C, decltype(rows)::value>(state, row, *groups, range, *ahead, head_dim, pair_stride);
      });
    });
  }
  for (int m = 0; m < num_vectors; ++m) {
    const int64_t row = tile.begin + m / group;
    const int head = tile.kv_head * group + m % group;
    Stored* target = out + row * out_stride + static_cast<int64_t>(head) * head_dim;
    const Floats factor = floats(1.0f / state.total[m]);
    for (int d = 0; d < head_dim; d += kLanes)
      E::store(target + d, mul(load_aligned(&state.sums[m][d]), factor), first_lanes(head_dim - d));
  }
}

}  // namespace inflight
