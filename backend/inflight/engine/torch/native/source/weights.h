// Weights in the layout that products read, made once, while a model is loaded.
#pragma once

#include "gemm.h"
#include "int8.h"
#include "layer.h"
#include "team.h"

namespace inflight {

// columns x inner, row-major with `stride`, to panels; order[i] is the source row of column i, negative for zeros.
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

// A matrix [rows, inner] to int8, with a scale and the sum of each row.
template <class E>
void quantize(const typename E::Stored* source, int64_t rows, int inner, int8_t* target, float* scales, int32_t* sums,
              int num_threads) {
  in_parallel(num_threads, [&](int thread, int size) {
    const Share share(rows, thread, size);
    for (int64_t row = share.begin; row < share.end; ++row)
      quantize_weights<E>(source + row * inner, inner, target + row * inner, scales + row, sums + row);
  });
}

}  // namespace inflight
