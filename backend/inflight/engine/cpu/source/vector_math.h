// exp, sigmoid, erf and the activations of decoders, sixteen float32 at a time.
#pragma once

#include "element.h"

namespace inflight {

// With an error of at most 2 units in the last place, for arguments from -inf to 88.
inline Floats exp_ps(Floats x) {
  const Floats low = floats(-104.0f), high = floats(88.72283f);
  const Mask vanishes = less(x, low);  // exp is 0 there; -inf - -inf would be NaN
  x = min(high, max(low, x));  // in this order NaN stays NaN
  const Floats n = rounded(mul(x, floats(1.44269504088896341f)));
  Floats r = fnmadd(n, floats(0.693359375f), x);
  r = fnmadd(n, floats(-2.12194440e-4f), r);
  Floats p = floats(1.9875691500e-4f);
  p = fmadd(p, r, floats(1.3981999507e-3f));
  p = fmadd(p, r, floats(8.3334519073e-3f));
  p = fmadd(p, r, floats(4.1665795894e-2f));
  p = fmadd(p, r, floats(1.6666665459e-1f));
  p = fmadd(p, r, floats(5.0000001201e-1f));
  p = fmadd(p, mul(r, r), add(r, floats(1.0f)));
  return scaled(other_lanes(vanishes), p, n);
}

inline Floats sigmoid_ps(Floats x) {
  const Floats one = floats(1.0f);
  return div(one, add(one, exp_ps(sub(floats(0.0f), x))));
}

// cap * tanh(x / cap)
inline Floats soft_cap_ps(Floats x, float cap) {
  const Floats two = floats(2.0f), one = floats(1.0f);
  const Floats twice = mul(x, floats(2.0f / cap));
  return mul(floats(cap), sub(mul(two, sigmoid_ps(twice)), one));
}

// A sigmoid with an error below 2^-13, in half the time: for results that are rounded to bfloat16.
inline Floats rough_sigmoid_ps(Floats x) {
  const Floats y = mul(x, floats(-1.44269504088896341f));
  const Floats n = rounded(y);
  const Floats f = sub(y, n);
  Floats p = floats(9.6181291e-3f);  // 2^f
  p = fmadd(p, f, floats(5.5504109e-2f));
  p = fmadd(p, f, floats(2.4022651e-1f));
  p = fmadd(p, f, floats(6.9314718e-1f));
  p = fmadd(p, f, floats(1.0f));
  return rough_reciprocal(add(floats(1.0f), scaled(p, n)));
}

// Abramowitz and Stegun 7.1.26, with an error below 1.5e-7.
inline Floats erf_ps(Floats x) {
  const Floats one = floats(1.0f), positive = abs(x);
  const Floats t = div(one, fmadd(floats(0.3275911f), positive, one));
  Floats p = floats(1.061405429f);
  p = fmadd(p, t, floats(-1.453152027f));
  p = fmadd(p, t, floats(1.421413741f));
  p = fmadd(p, t, floats(-0.284496736f));
  p = fmadd(p, t, floats(0.254829592f));
  const Floats tail = mul(mul(p, t), exp_ps(fnmadd(x, x, floats(0.0f))));
  const Floats result = sub(one, tail);
  const Mask is_negative = less(x, floats(0.0f));
  return negated_where(is_negative, result);
}

enum Activation : int32_t { kSilu = 0, kGelu = 1, kGeluTanh = 2, kRelu = 3, kRelu2 = 4 };

template <class E>
inline Floats activate(int32_t kind, Floats x) {
  const Floats half = floats(0.5f), one = floats(1.0f);
  switch (kind) {
    case kSilu:
      return mul(x, E::kPair == 2 ? rough_sigmoid_ps(x) : sigmoid_ps(x));
    case kGelu:
      return mul(mul(half, x), add(one, erf_ps(mul(x, floats(0.70710678118654752f)))));
    case kGeluTanh: {  // 0.5 x (1 + tanh(u)) is x sigmoid(2 u)
      const Floats cubic = mul(mul(x, x), mul(x, floats(0.044715f)));
      const Floats u = mul(floats(0.7978845608028654f), add(x, cubic));
      return mul(x, sigmoid_ps(add(u, u)));
    }
    case kRelu2: {
      const Floats positive = max(x, floats(0.0f));
      return mul(positive, positive);
    }
    default:
      return max(x, floats(0.0f));
  }
}

// gate * sigmoid(alpha * gate) * (gated + 1) with gate and gated clamped, as in gpt-oss.
template <class E>
inline Floats clamped_swiglu(Floats gate, Floats gated, float limit, float alpha) {
  const Floats highest = floats(limit), lowest = floats(-limit);
  gate = min(highest, gate);  // in this order NaN stays NaN
  gated = min(highest, max(lowest, gated));
  const Floats steep = mul(gate, floats(alpha));
  const Floats open = mul(gate, E::kPair == 2 ? rough_sigmoid_ps(steep) : sigmoid_ps(steep));
  return fmadd(open, gated, open);
}

}  // namespace inflight
