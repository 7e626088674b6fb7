// Converts weights to the layout that products read, once, while a model is loaded.
#pragma once

#include "gemm.h"
#include "int8.h"
#include "layer.h"
#include "low_rank.h"
#include "team.h"

namespace inflight {

// Packs columns x inner, row-major with `stride`, to panels; order[i] is the source row of column i, negative for
// zeros.
template <class E>
void pack(const typename E::Stored* source, int64_t stride, const int64_t* order, int columns, int inner,
          typename E::Stored* target, int num_threads) {
  const int pairs = (inner + E::kPair - 1) / E::kPair;
  const int panels = (columns + kPanel - 1) / kPanel;
  in_parallel(num_threads, [&](int thread, int size) {
    const Share share(panels, thread, size);
    for (int panel = static_cast<int>(share.begin); panel < share.end; ++panel) {
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
  });
}

// Quantizes a matrix [rows, inner] to int8, with the scale and the sum of each row.
template <class E>
void quantize(const typename E::Stored* source, int64_t rows, int inner, int8_t* target, float* scales, int32_t* sums,
              int num_threads) {
  in_parallel(num_threads, [&](int thread, int size) {
    const Share share(rows, thread, size);
    for (int64_t row = share.begin; row < share.end; ++row)
      quantize_weights<E>(source + row * inner, inner, target + row * inner, scales + row, sums + row);
  });
}

// Packs a module's A [rank, inner], rows `stride` apart, from rank `first` of its product on; the padding is zeros.
template <class E>
void pack_a(const typename E::Stored* source, int64_t stride, int rank, int inner, int first,
            typename E::Stored* target) {
  constexpr int kStep = kLanes * E::kPair;
  const int64_t registers = (inner + kStep - 1) / kStep;
  for (int i = 0; i < rank; ++i) {
    const auto* row = source + i * stride;
    const int64_t place = first + i;
    auto* out = target + (place / kRanksAtOnce * registers * kRanksAtOnce + place % kRanksAtOnce) * kStep;
    for (int k = 0; k < inner; k += kStep, out += kRanksAtOnce * kStep)
      std::memcpy(out, row + k, std::min(kStep, inner - k) * sizeof *row);
  }
}

// Packs a module's B [rows, rank]: rows[half][lane] is the row of a column, negative for other modules' columns, and
// at[half] the register of the module's first pair of ranks; the padding is zeros.
template <class E>
void pack_b(const typename E::Stored* source, int rank, const int64_t* rows, const int64_t* at, int64_t num_halves,
            typename E::Stored* target) {
  for (int64_t i = 0; i < num_halves * kLanes; ++i) {
    if (rows[i] < 0) continue;
    const auto* row = source + rows[i] * rank;
    auto* out = target + (at[i / kLanes] * kLanes + i % kLanes) * E::kPair;
    for (int k = 0; k < rank; ++k) out[k / E::kPair * kLanes * E::kPair + k % E::kPair] = row[k];
  }
}

}  // namespace inflight
