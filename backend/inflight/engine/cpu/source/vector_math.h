// exp, sigmoid, erf and the activations of decoders, sixteen float32 at a time.
#pragma once

#include <immintrin.h>

#include "element.h"

namespace inflight {

// Within 2 units in the last place for what it is used for (arguments from -inf to 88).
inline __m512 exp_ps(__m512 x) {
  const __m512 low = _mm512_set1_ps(-104.0f), high = _mm512_set1_ps(88.72283f);
  const __mmask16 vanishes = _mm512_cmp_ps_mask(x, low, _CMP_LT_OQ);  // exp is 0 there; -inf - -inf would be no number
  x = _mm512_min_ps(high, _mm512_max_ps(low, x));  // in this order what is no number stays none
  const __m512 n = _mm512_roundscale_ps(_mm512_mul_ps(x, _mm512_set1_ps(1.44269504088896341f)),
                                        _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  __m512 r = _mm512_fnmadd_ps(n, _mm512_set1_ps(0.693359375f), x);
  r = _mm512_fnmadd_ps(n, _mm512_set1_ps(-2.12194440e-4f), r);
  __m512 p = _mm512_set1_ps(1.9875691500e-4f);
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.3981999507e-3f));
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(8.3334519073e-3f));
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(4.1665795894e-2f));
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.6666665459e-1f));
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(5.0000001201e-1f));
  p = _mm512_fmadd_ps(p, _mm512_mul_ps(r, r), _mm512_add_ps(r, _mm512_set1_ps(1.0f)));
  return _mm512_maskz_scalef_ps(static_cast<__mmask16>(~vanishes), p, n);
}

inline __m512 sigmoid_ps(__m512 x) {
  const __m512 one = _mm512_set1_ps(1.0f);
  return _mm512_div_ps(one, _mm512_add_ps(one, exp_ps(_mm512_sub_ps(_mm512_setzero_ps(), x))));
}

// cap * tanh(x / cap)
inline __m512 soft_cap_ps(__m512 x, float cap) {
  const __m512 two = _mm512_set1_ps(2.0f), one = _mm512_set1_ps(1.0f);
  const __m512 twice = _mm512_mul_ps(x, _mm512_set1_ps(2.0f / cap));
  return _mm512_mul_ps(_mm512_set1_ps(cap), _mm512_sub_ps(_mm512_mul_ps(two, sigmoid_ps(twice)), one));
}

// Within 2^-13, and half the work: for what is rounded to bfloat16.
inline __m512 rough_sigmoid_ps(__m512 x) {
  const __m512 y = _mm512_mul_ps(x, _mm512_set1_ps(-1.44269504088896341f));
  const __m512 n = _mm512_roundscale_ps(y, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  const __m512 f = _mm512_sub_ps(y, n);
  __m512 p = _mm512_set1_ps(9.6181291e-3f);  // 2^f
  p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(5.5504109e-2f));
  p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(2.4022651e-1f));
  p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(6.9314718e-1f));
  p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(1.0f));
  return _mm512_rcp14_ps(_mm512_add_ps(_mm512_set1_ps(1.0f), _mm512_scalef_ps(p, n)));
}

// Abramowitz and Stegun 7.1.26 is good to 1.5e-7.
inline __m512 erf_ps(__m512 x) {
  const __m512 one = _mm512_set1_ps(1.0f), positive = _mm512_abs_ps(x);
  const __m512 t = _mm512_div_ps(one, _mm512_fmadd_ps(_mm512_set1_ps(0.3275911f), positive, one));
  __m512 p = _mm512_set1_ps(1.061405429f);
  p = _mm512_fmadd_ps(p, t, _mm512_set1_ps(-1.453152027f));
  p = _mm512_fmadd_ps(p, t, _mm512_set1_ps(1.421413741f));
  p = _mm512_fmadd_ps(p, t, _mm512_set1_ps(-0.284496736f));
  p = _mm512_fmadd_ps(p, t, _mm512_set1_ps(0.254829592f));
  const __m512 tail = _mm512_mul_ps(_mm512_mul_ps(p, t), exp_ps(_mm512_fnmadd_ps(x, x, _mm512_setzero_ps())));
  const __m512 result = _mm512_sub_ps(one, tail);
  const __mmask16 is_negative = _mm512_cmp_ps_mask(x, _mm512_setzero_ps(), _CMP_LT_OQ);
  return _mm512_mask_sub_ps(result, is_negative, _mm512_setzero_ps(), result);
}

enum Activation : int32_t { kSilu = 0, kGelu = 1, kGeluTanh = 2, kRelu = 3 };

template <class E>
inline __m512 activate(int32_t kind, __m512 x) {
  const __m512 half = _mm512_set1_ps(0.5f), one = _mm512_set1_ps(1.0f);
  switch (kind) {
    case kSilu:
      return _mm512_mul_ps(x, E::kPair == 2 ? rough_sigmoid_ps(x) : sigmoid_ps(x));
    case kGelu:
      return _mm512_mul_ps(_mm512_mul_ps(half, x),
                           _mm512_add_ps(one, erf_ps(_mm512_mul_ps(x, _mm512_set1_ps(0.70710678118654752f)))));
    case kGeluTanh: {  // 0.5 x (1 + tanh(u)) is x sigmoid(2 u)
      const __m512 cubic = _mm512_mul_ps(_mm512_mul_ps(x, x), _mm512_mul_ps(x, _mm512_set1_ps(0.044715f)));
      const __m512 u = _mm512_mul_ps(_mm512_set1_ps(0.7978845608028654f), _mm512_add_ps(x, cubic));
      return _mm512_mul_ps(x, sigmoid_ps(_mm512_add_ps(u, u)));
    }
    default:
      return _mm512_max_ps(x, _mm512_setzero_ps());
  }
}

// What the gate and what it gates give where both are clamped and these are raised by one, as gpt-oss has it.
template <class E>
inline __m512 clamped_swiglu(__m512 gate, __m512 gated, float limit, float alpha) {
  const __m512 highest = _mm512_set1_ps(limit), lowest = _mm512_set1_ps(-limit);
  gate = _mm512_min_ps(highest, gate);  // in this order what is no number stays none
  gated = _mm512_min_ps(highest, _mm512_max_ps(lowest, gated));
  const __m512 steep = _mm512_mul_ps(gate, _mm512_set1_ps(alpha));
  const __m512 open = _mm512_mul_ps(gate, E::kPair == 2 ? rough_sigmoid_ps(steep) : sigmoid_ps(steep));
  return _mm512_fmadd_ps(open, gated, open);
}

}  // namespace inflight
