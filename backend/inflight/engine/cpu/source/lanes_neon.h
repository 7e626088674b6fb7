// The lanes of lanes.h in NEON: quads (lanes_quads.h), with instructions for operations without an operator.
#pragma once

#include <arm_neon.h>

#include "quads.h"

namespace inflight {

inline FloatQuad multiply_add(FloatQuad total, FloatQuad a, FloatQuad b) { return vfmaq_f32(total, a, b); }
inline FloatQuad rounded(FloatQuad x) { return vrndnq_f32(x); }
inline IntQuad to_ints(FloatQuad x) { return vcvtnq_s32_f32(x); }

// Adds the sum of each pair of neighbours to `total`.
inline IntQuad add_pairs(IntQuad total, Shorts x) { return vpadalq_s16(total, x); }

inline void spin_pause() { asm volatile("yield"); }

}  // namespace inflight

#include "lanes_quads.h"
