// What a target does its own way: how many rows its registers take, the pairs that it multiplies, the products'
// innermost loops, and how a cache's levels of 8 bits become pairs.
//
// A "pair" has four bytes: two bfloat16 along the inner dimension, one float32, or four int8. Packed operands are laid
// out in pairs, alike on all targets, so that all types share every loop. Packed activations are a target's own: each
// pair becomes kWords words of four bytes, which one lane of a multiply-add takes one after the other.
#pragma once

#include "lanes.h"

namespace inflight {

constexpr int kPanel = 32;  // columns

// What memory is to bring: a kernel asks for the line at `first` and the line at `second` with every pair.
struct Ahead {
  const char *first, *second;
  int step;
};

}  // namespace inflight

#if defined(__AVX512F__)
#include "products_avx512.h"
#else
#include "products_avx2.h"
#endif
