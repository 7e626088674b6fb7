// Registers of 16 bytes in GCC's vector extensions, which Clang supports too.
#pragma once

#include <cstdint>

namespace inflight {

typedef float FloatQuad __attribute__((vector_size(16)));
typedef int32_t IntQuad __attribute__((vector_size(16)));
typedef uint32_t BitQuad __attribute__((vector_size(16)));
typedef int64_t LongQuad __attribute__((vector_size(16)));
typedef int16_t Shorts __attribute__((vector_size(16)));
typedef int8_t Bytes __attribute__((vector_size(16)));
typedef uint16_t FourShorts __attribute__((vector_size(8)));
typedef uint8_t FourBytes __attribute__((vector_size(4)));

}  // namespace inflight
