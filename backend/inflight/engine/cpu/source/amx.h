// The tile instructions of AMX (Sapphire Rapids and later), and a stand-in that runs on any processor.
//
// Eight registers, tiles, hold up to 16 rows of 64 bytes each. A thread configures rows and bytes of each tile before
// it uses them, and releases them afterwards, so that the kernel need not save 8 KB at every thread switch. The
// stand-in implements the description of each instruction in Intel's manual (Software Developer's Manual, volume 2),
// and aborts where the manual specifies an exception. This project has never executed the instructions themselves,
// for lack of a machine with AMX.
#pragma once

#include <cstdint>
#include <cstring>

#ifdef INFLIGHT_AMX_STAND_IN
#include <cmath>
#include <cstdlib>
#include <limits>
#else
#include <cerrno>
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace inflight {

constexpr int kTileRows = 16, kTileBytes = 64;

// LDTILECFG's operand: bytes per row and number of rows of every tile; both are 0 for unused tiles.
struct alignas(64) TileConfig {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t row_bytes[16] = {};
  uint8_t rows[16] = {};
  void set(int tile, int num_rows) {
    rows[tile] = static_cast<uint8_t>(num_rows);
    row_bytes[tile] = num_rows ? kTileBytes : 0;
  }
};
static_assert(sizeof(TileConfig) == 64);

#ifndef INFLIGHT_AMX_STAND_IN

// In assembly, because GCC's intrinsics do not tell it which memory they read and write.
struct TileInstructions {
  static void configure(const TileConfig& config) { asm volatile("ldtilecfg %0" : : "m"(config)); }
  static void release() { asm volatile("tilerelease"); }
  template <int kTile>
  static void zero() { asm volatile("tilezero %%tmm%c0" : : "i"(kTile)); }
  template <int kTile>
  static void load(const void* rows, int64_t stride) {
    asm volatile("tileloadd (%0,%1,1), %%tmm%c2" : : "r"(rows), "r"(stride), "i"(kTile) : "memory");
  }
  template <int kTile>
  static void store(void* rows, int64_t stride) {
    asm volatile("tilestored %%tmm%c2, (%0,%1,1)" : : "r"(rows), "r"(stride), "i"(kTile) : "memory");
  }
  // Adds rows * columns to the sums, pair by pair: products of bfloat16, or of unsigned and signed bytes.
  template <int kSums, int kRows, int kColumns>
  static void multiply_bfloat16() {
    asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(kSums), "i"(kRows), "i"(kColumns));
  }
  template <int kSums, int kRows, int kColumns>
  static void multiply_bytes() {
    asm volatile("tdpbusd %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(kSums), "i"(kRows), "i"(kColumns));
  }
  // Asks the kernel to let this process use tiles; returns 0, or the error.
  static int permit() {
    constexpr long kRequestPermission = 0x1023, kTileData = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
    return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0 ? 0 : errno;
  }
};

#else

// The stand-in: the manual's semantics in plain C++. INFLIGHT_AMX_STAND_IN is 1; 2 requests a wrong sum, 3 a crash.
class TileInstructions {
 public:
  static void configure(const TileConfig& config) {
    expect(config.palette == 1 && config.start_row == 0);
    for (int tile = 0; tile < 16; ++tile) {
      const int rows = config.rows[tile], bytes = config.row_bytes[tile];
      expect((rows == 0) == (bytes == 0) && rows <= kTileRows && bytes <= kTileBytes && (tile < 8 || rows == 0));
    }
    release();
    for (int tile = 0; tile < 8; ++tile) own_[tile].rows = config.rows[tile], own_[tile].row_bytes = config.row_bytes[tile];
  }
  static void release() {
    std::memset(own_, 0, sizeof own_);
  }
  template <int kTile>
  static void zero() {
    std::memset(find(kTile).bytes, 0, sizeof own_[kTile].bytes);
  }
  template <int kTile>
  static void load(const void* rows, int64_t stride) {
    Tile& tile = find(kTile);
    std::memset(tile.bytes, 0, sizeof tile.bytes);
    for (int row = 0; row < tile.rows; ++row)
      std::memcpy(tile.bytes[row], static_cast<const char*>(rows) + row * stride, tile.row_bytes);
  }
  template <int kTile>
  static void store(void* rows, int64_t stride) {
    const Tile& tile = find(kTile);
    for (int row = 0; row < tile.rows; ++row)
      std::memcpy(static_cast<char*>(rows) + row * stride, tile.bytes[row], tile.row_bytes);
  }
  template <int kSums, int kRows, int kColumns>
  static void multiply_bfloat16() {
    Tile& sums = check_shapes(kSums, kRows, kColumns);
    for (int m = 0; m < sums.rows; ++m) {
      float products[2 * kTileRows] = {};  // sums over the first, and over the second, of each pair
      for (int k = 0; k < own_[kRows].row_bytes / 4; ++k)
        for (int n = 0; n < sums.row_bytes / 4; ++n)
          for (int i = 0; i < 2; ++i) {
            const float a = wide(own_[kRows].bytes[m] + 4 * k + 2 * i), b = wide(own_[kColumns].bytes[k] + 4 * n + 2 * i);
            products[2 * n + i] = flushed(std::fma(a, b, products[2 * n + i]));
          }
      for (int n = 0; n < sums.row_bytes / 4; ++n) {
        float sum;
        std::memcpy(&sum, sums.bytes[m] + 4 * n, sizeof sum);
        sum = flushed(flushed(sum) + flushed(products[2 * n] + products[2 * n + 1]));
        if (INFLIGHT_AMX_STAND_IN == 2 && m == 15 && n == 3) sum *= 1.001f;
        std::memcpy(sums.bytes[m] + 4 * n, &sum, sizeof sum);
      }
    }
  }
  template <int kSums, int kRows, int kColumns>
  static void multiply_bytes() {
    Tile& sums = check_shapes(kSums, kRows, kColumns);
    for (int m = 0; m < sums.rows; ++m)
      for (int n = 0; n < sums.row_bytes / 4; ++n) {
        int32_t sum;
        std::memcpy(&sum, sums.bytes[m] + 4 * n, sizeof sum);
        for (int k = 0; k < own_[kRows].row_bytes / 4; ++k)
          for (int i = 0; i < 4; ++i)
            sum += own_[kRows].bytes[m][4 * k + i] * static_cast<int8_t>(own_[kColumns].bytes[k][4 * n + i]);
        std::memcpy(sums.bytes[m] + 4 * n, &sum, sizeof sum);
      }
  }
  static int permit() { return 0; }

 private:
  struct Tile {
    int rows, row_bytes;
    uint8_t bytes[kTileRows][kTileBytes];
  };
  static void expect(bool is_so) {
    if (!is_so || INFLIGHT_AMX_STAND_IN == 3) std::abort();
  }
  static Tile& find(int tile) {
    expect(own_[tile].rows > 0);
    return own_[tile];
  }
  static Tile& check_shapes(int sums, int rows, int columns) {
    const Tile &c = find(sums), &a = find(rows), &b = find(columns);
    expect(sums != rows && sums != columns && rows != columns);
    expect(c.rows == a.rows && c.row_bytes == b.row_bytes && a.row_bytes == 4 * b.rows);
    return own_[sums];
  }
  // Numbers below the smallest normal one count as zero, as input and as result.
  static float flushed(float x) {
    return std::fabs(x) < std::numeric_limits<float>::min() ? std::copysign(0.0f, x) : x;
  }
  static float wide(const uint8_t* bfloat16) {
    uint16_t half;
    std::memcpy(&half, bfloat16, sizeof half);
    const uint32_t word = static_cast<uint32_t>(half) << 16;
    float x;
    std::memcpy(&x, &word, sizeof x);
    return flushed(x);
  }

  static inline thread_local Tile own_[8];
};

#endif

}  // namespace inflight
