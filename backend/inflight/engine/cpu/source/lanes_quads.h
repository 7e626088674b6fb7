// The lanes of lanes.h in four registers of 16 bytes, "quads", for which compilers have operators (GCC's vector
// extensions). lanes_generic.h and lanes_neon.h define the operations without an operator, and include this file.
//
// A mask has all bits of a lane equal. Every function gives the same bits as with AVX2, except `fmadd` and `fnmadd` on
// processors without fused multiply-add, which round twice.
#pragma once

namespace inflight {

struct Floats {
  FloatQuad of[4];
};
struct Ints {
  IntQuad of[4];
};
struct Mask {
  IntQuad of[4];

  bool all() const {
    const auto both = (LongQuad)(of[0] & of[1] & of[2] & of[3]);
    return (both[0] & both[1]) == -1;
  }
  explicit operator bool() const {
    const auto any = (LongQuad)(of[0] | of[1] | of[2] | of[3]);
    return (any[0] | any[1]) != 0;
  }
};

// Returns the results of f(i) for the four quads.
template <class T, class F>
inline __attribute__((always_inline)) T in_quads(const F& f) {
  return {{f(0), f(1), f(2), f(3)}};
}
template <class Quad>
inline Quad load_quad(const void* p) {
  Quad quad;
  std::memcpy(&quad, p, sizeof quad);
  return quad;
}
inline FloatQuad same(float x) { return FloatQuad{x, x, x, x}; }
inline IntQuad same(int32_t x) { return IntQuad{x, x, x, x}; }
inline FloatQuad select(IntQuad mask, FloatQuad yes, FloatQuad no) {
  return (FloatQuad)(((IntQuad)yes & mask) | ((IntQuad)no & ~mask));
}

inline Mask operator&(Mask a, Mask b) {
  return in_quads<Mask>([&](int i) { return a.of[i] & b.of[i]; });
}
inline Mask operator|(Mask a, Mask b) {
  return in_quads<Mask>([&](int i) { return a.of[i] | b.of[i]; });
}
inline Mask& operator&=(Mask& a, Mask b) { return a = a & b; }
inline Mask& operator|=(Mask& a, Mask b) { return a = a | b; }

// The same value in every lane.
inline Floats floats(float x) {
  return in_quads<Floats>([&](int) { return same(x); });
}
inline Ints ints(int32_t x) {
  return in_quads<Ints>([&](int) { return same(x); });
}

// Masks.
inline Mask no_lanes() { return {}; }
inline Mask first_lanes(int count) {
  return in_quads<Mask>([&](int i) { return IntQuad{0, 1, 2, 3} + same(4 * i) < same(count); });
}
inline Mask mask_of(uint16_t bits) {
  return in_quads<Mask>([&](int i) {
    const IntQuad of_lanes = IntQuad{1, 2, 4, 8} << same(4 * i);
    return (same(int32_t{bits}) & of_lanes) == of_lanes;
  });
}
inline uint32_t lane_bits(Mask mask) {
  const IntQuad of_lanes = {1, 2, 4, 8};
  const IntQuad bits = (mask.of[0] & of_lanes) | (mask.of[1] & of_lanes << 4) | (mask.of[2] & of_lanes << 8) |
                       (mask.of[3] & of_lanes << 12);
  return static_cast<uint32_t>(bits[0] | bits[1] | bits[2] | bits[3]);
}
inline Mask other_lanes(Mask mask) {
  return in_quads<Mask>([&](int i) { return ~mask.of[i]; });
}

// Keeps the lanes in a mask; the others become zero.
inline Ints keep(Mask mask, Ints x) {
  return in_quads<Ints>([&](int i) { return mask.of[i] & x.of[i]; });
}
inline Floats keep(Mask mask, Floats x) {
  return in_quads<Floats>([&](int i) { return (FloatQuad)(mask.of[i] & (IntQuad)x.of[i]); });
}
inline Floats select(Mask mask, Floats yes, Floats no) {
  return in_quads<Floats>([&](int i) { return select(mask.of[i], yes.of[i], no.of[i]); });
}
inline Ints select(Mask mask, Ints yes, Ints no) {
  return in_quads<Ints>([&](int i) { return (mask.of[i] & yes.of[i]) | (~mask.of[i] & no.of[i]); });
}

// Copies the values whose bit in `bits` is set.
template <class T>
__attribute__((noinline)) void copy_where(T* to, const T* from, uint32_t bits) {
  for (; bits; bits &= bits - 1) to[__builtin_ctz(bits)] = from[__builtin_ctz(bits)];
}

// Memory. Lanes that are not in a mask are neither read nor written; they are read as zero, or as `other`.
inline Floats load(const float* p) {
  return in_quads<Floats>([&](int i) { return load_quad<FloatQuad>(p + 4 * i); });
}
inline Floats load(const float* p, Mask mask) {
  if (mask.all()) return load(p);
  float own[kLanes] = {};
  copy_where(own, p, lane_bits(mask));
  return load(own);
}
inline Floats load_aligned(const float* p) { return load(p); }
inline Floats load_or(Floats other, const float* p, Mask mask) { return select(mask, load(p, mask), other); }
inline void store(float* p, Floats x) { std::memcpy(p, &x, sizeof x); }
inline void store(float* p, Floats x, Mask mask) {
  if (mask.all()) return store(p, x);
  float own[kLanes];
  store(own, x);
  copy_where(p, own, lane_bits(mask));
}
inline void store_aligned(float* p, Floats x) { store(p, x); }
inline Ints load(const int32_t* p) {
  return in_quads<Ints>([&](int i) { return load_quad<IntQuad>(p + 4 * i); });
}
inline Ints load_aligned(const int32_t* p) { return load(p); }
inline Ints load_words(const void* p, Mask mask) {
  const auto* words = static_cast<const int32_t*>(p);
  if (mask.all()) return load(words);
  int32_t own[kLanes] = {};
  copy_where(own, words, lane_bits(mask));
  return load(own);
}
inline void store_words(void* p, Ints x, Mask mask) {
  int32_t own[kLanes];
  std::memcpy(own, &x, sizeof own);
  if (mask.all())
    std::memcpy(p, own, sizeof own);
  else
    copy_where(static_cast<int32_t*>(p), own, lane_bits(mask));
}
inline Ints load_halves(const uint16_t* p) {  // the upper halves become zero
  return in_quads<Ints>([&](int i) { return __builtin_convertvector(load_quad<FourShorts>(p + 4 * i), IntQuad); });
}
inline Ints load_halves(const uint16_t* p, Mask mask) {
  if (mask.all()) return load_halves(p);
  uint16_t own[kLanes] = {};
  copy_where(own, p, lane_bits(mask));
  return load_halves(own);
}
inline void store_bytes(void* p, Ints x, Mask mask) {  // the lowest byte of each
  uint8_t own[kLanes];
  for (int i = 0; i < 4; ++i)
    for (int lane = 0; lane < 4; ++lane) own[4 * i + lane] = static_cast<uint8_t>(x.of[i][lane]);
  if (mask.all())
    std::memcpy(p, own, sizeof own);
  else
    copy_where(static_cast<uint8_t*>(p), own, lane_bits(mask));
}
inline FourShorts round_to_bfloat16(FloatQuad x) {  // to nearest, ties to even
  const auto bits = (BitQuad)x;
  const BitQuad up = bits + ((bits >> 16 & 1) + 0x7fff), quiet = bits | 0x400000;
  const auto is_number = (BitQuad)(x == x);
  return __builtin_convertvector(((up & is_number) | (quiet & ~is_number)) >> 16, FourShorts);
}
inline void store_bfloat16(uint16_t* p, Floats x) {
  for (int i = 0; i < 4; ++i) {
    const FourShorts rounded = round_to_bfloat16(x.of[i]);
    std::memcpy(p + 4 * i, &rounded, sizeof rounded);
  }
}
inline void store_bfloat16(uint16_t* p, Floats x, Mask mask) {
  if (mask.all()) return store_bfloat16(p, x);
  uint16_t own[kLanes];
  store_bfloat16(own, x);
  copy_where(p, own, lane_bits(mask));
}
// Other targets bypass the cache here; callers call `end_streams` afterwards.
inline void stream(float* p, Floats x) { store(p, x); }
inline void end_streams() {}

// Floats. `min` and `max` return the second operand if either is NaN.
inline Floats add(Floats a, Floats b) {
  return in_quads<Floats>([&](int i) { return a.of[i] + b.of[i]; });
}
inline Floats sub(Floats a, Floats b) {
  return in_quads<Floats>([&](int i) { return a.of[i] - b.of[i]; });
}
inline Floats mul(Floats a, Floats b) {
  return in_quads<Floats>([&](int i) { return a.of[i] * b.of[i]; });
}
inline Floats div(Floats a, Floats b) {
  return in_quads<Floats>([&](int i) { return a.of[i] / b.of[i]; });
}
inline Floats min(Floats a, Floats b) {
  return in_quads<Floats>([&](int i) { return a.of[i] < b.of[i] ? a.of[i] : b.of[i]; });
}
inline Floats max(Floats a, Floats b) {
  return in_quads<Floats>([&](int i) { return a.of[i] > b.of[i] ? a.of[i] : b.of[i]; });
}
inline Floats abs(Floats x) {
  return in_quads<Floats>([&](int i) { return (FloatQuad)((IntQuad)x.of[i] & same(0x7fffffff)); });
}
inline Floats fmadd(Floats a, Floats b, Floats c) {
  return in_quads<Floats>([&](int i) { return multiply_add(c.of[i], a.of[i], b.of[i]); });
}
inline Floats fnmadd(Floats a, Floats b, Floats c) {
  return in_quads<Floats>([&](int i) { return multiply_add(c.of[i], -a.of[i], b.of[i]); });
}
inline Floats rounded(Floats x) {
  return in_quads<Floats>([&](int i) { return rounded(x.of[i]); });
}
inline float sum_of(Floats x) {
  const FloatQuad sums = (x.of[3] + x.of[1]) + (x.of[2] + x.of[0]);
  return (sums[0] + sums[2]) + (sums[1] + sums[3]);
}
inline float largest_of(Floats x) {
  float largest = x.of[0][0];
  for (int i = 0; i < 4; ++i)
    for (int lane = 0; lane < 4; ++lane) largest = x.of[i][lane] > largest ? x.of[i][lane] : largest;
  return largest;
}

// Ints.
inline Ints add(Ints a, Ints b) {
  return in_quads<Ints>([&](int i) { return (IntQuad)((BitQuad)a.of[i] + (BitQuad)b.of[i]); });
}
inline Ints sub(Ints a, Ints b) {
  return in_quads<Ints>([&](int i) { return (IntQuad)((BitQuad)a.of[i] - (BitQuad)b.of[i]); });
}
inline Ints bit_and(Ints a, Ints b) {
  return in_quads<Ints>([&](int i) { return a.of[i] & b.of[i]; });
}
inline Ints bit_or(Ints a, Ints b) {
  return in_quads<Ints>([&](int i) { return a.of[i] | b.of[i]; });
}
inline Ints bit_or(Mask mask, Ints a, Ints b) { return keep(mask, bit_or(a, b)); }
template <int kBits>
inline Ints shift_left(Ints x) {
  return in_quads<Ints>([&](int i) { return (IntQuad)((BitQuad)x.of[i] << kBits); });
}
template <int kBits>
inline Ints shift_right(Ints x) {  // shifts in zeros
  return in_quads<Ints>([&](int i) { return (IntQuad)((BitQuad)x.of[i] >> kBits); });
}
inline Mask greater(Ints a, Ints b) {
  return in_quads<Mask>([&](int i) { return a.of[i] > b.of[i]; });
}
inline Mask less(Ints a, Ints b) { return greater(b, a); }
inline Mask at_most(Ints a, Ints b) { return other_lanes(greater(a, b)); }
inline int32_t sum_of(Ints x) {
  const BitQuad sums = ((BitQuad)x.of[0] + (BitQuad)x.of[1]) + ((BitQuad)x.of[2] + (BitQuad)x.of[3]);
  return static_cast<int32_t>(sums[0] + sums[1] + sums[2] + sums[3]);
}
inline int32_t smallest_of(Mask mask, Ints x) {
  const Ints own = select(mask, x, ints(INT32_MAX));
  int32_t least = INT32_MAX;
  for (int i = 0; i < 4; ++i)
    for (int lane = 0; lane < 4; ++lane) least = own.of[i][lane] < least ? own.of[i][lane] : least;
  return least;
}

// Conversions, to nearest, ties to even; or reinterpretation of the bits.
inline Floats to_floats(Ints x) {
  return in_quads<Floats>([&](int i) { return __builtin_convertvector(x.of[i], FloatQuad); });
}
inline Ints to_ints(Floats x) {
  return in_quads<Ints>([&](int i) { return to_ints(x.of[i]); });
}
inline Ints to_ints(Mask mask, Floats x) { return keep(mask, to_ints(x)); }
inline Floats as_floats(Ints x) {
  return in_quads<Floats>([&](int i) { return (FloatQuad)x.of[i]; });
}
inline Ints as_ints(Floats x) {
  return in_quads<Ints>([&](int i) { return (IntQuad)x.of[i]; });
}

// x 2^exponent, for x between 2^-2 and 2^2, in two steps as in lanes_avx2.h.
inline Floats scaled(Floats x, Floats exponent) {
  const Ints whole = to_ints(max(min(exponent, floats(256.0f)), floats(-252.0f)));
  const Ints half = in_quads<Ints>([&](int i) { return whole.of[i] >> 1; });
  const auto power = [](Ints of_two) { return as_floats(shift_left<23>(add(of_two, ints(127)))); };
  return mul(mul(x, power(half)), power(sub(whole, half)));
}
inline Floats rough_reciprocal(Floats x) { return div(floats(1.0f), x); }

// Operations on the lanes in a mask; the others become zero, false or `x`.
inline Floats sub(Mask mask, Floats a, Floats b) { return keep(mask, sub(a, b)); }
inline Floats mul(Mask mask, Floats a, Floats b) { return keep(mask, mul(a, b)); }
inline Floats scaled(Mask mask, Floats x, Floats exponent) { return keep(mask, scaled(x, exponent)); }
inline Floats add_where(Mask mask, Floats x, Floats y) { return select(mask, add(x, y), x); }
inline Floats negated_where(Mask mask, Floats x) { return select(mask, sub(floats(0.0f), x), x); }

inline Mask less(Floats a, Floats b) {
  return in_quads<Mask>([&](int i) { return a.of[i] < b.of[i]; });
}
inline Mask at_least(Floats a, Floats b) {
  return in_quads<Mask>([&](int i) { return a.of[i] >= b.of[i]; });
}
inline Mask equal(Floats a, Floats b) {
  return in_quads<Mask>([&](int i) { return a.of[i] == b.of[i]; });
}
inline Mask differ(Floats a, Floats b) { return other_lanes(equal(a, b)); }  // also if either is NaN
inline Mask is_number(Floats x) { return equal(x, x); }
inline Mask is_no_number(Floats x) { return differ(x, x); }
inline Mask is_no_number(Mask mask, Floats x) { return mask & is_no_number(x); }
inline Mask at_least(Mask mask, Floats a, Floats b) { return mask & at_least(a, b); }
inline Mask greater(Mask mask, Floats a, Floats b) { return mask & less(b, a); }

}  // namespace inflight
