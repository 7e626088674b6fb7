// int8 weights with one scale per column, and activations quantized row by row.
//
// A row's values become round(x / scale), in -127 .. 127 with scale = max |x| / 127 over the row alone, so that a row's
// result does not depend on other rows. VNNI multiplies unsigned by signed bytes: where Int8::kOffset is 128, it is
// added to activations, and its contribution to a product is known beforehand: 128 times the column's sum.
#pragma once

#include <algorithm>

#include "element.h"

namespace inflight {

// Quantizes one row; returns its scale. `padded` is a multiple of 4 and at least `count`.
template <class E>
float quantize_row(const typename E::Stored* source, int count, int padded, uint8_t* target) {
  const float most = largest_magnitude<E>(source, count);
  const Floats factor = floats(most > 0 ? 127.0f / most : 0.0f);
  for (int i = 0; i < padded; i += kLanes) {
    const Floats x = E::load(source + i, first_lanes(count - i));
    const Ints q = add(to_ints(mul(x, factor)), ints(Int8::kOffset));
    store_bytes(target + i, q, first_lanes(padded - i));
  }
  return most / 127.0f;
}

// Quantizes a row of a weight matrix to -127 .. 127, bit for bit like `quantize_int8` of engine/quantize.py.
template <class E>
void quantize_weights(const typename E::Stored* source, int count, int8_t* target, float* scale, int32_t* sum) {
  *scale = largest_magnitude<E>(source, count) / 127.0f;
  const Floats divisor = floats(std::max(*scale, kMinScale));
  Ints total = ints(0);
  for (int i = 0; i < count; i += kLanes) {
    const Mask mask = first_lanes(count - i);
    const Ints q = to_ints(mask, div(E::load(source + i, mask), divisor));
    total = add(total, q);
    store_bytes(target + i, q, mask);
  }
  *sum = sum_of(total);
}

}  // namespace inflight
