// Cache lines of an index: some keys with their values, in any order.
#pragma once

#include <cstdint>

namespace nonet {

// Five keys with values of 37 bits: a row's number.
struct alignas(64) RowLine {
  static constexpr int kKeys = 5;
  static constexpr int64_t kMostValue = (int64_t{1} << 37) - 1;
  int64_t key[kKeys];
  uint32_t low[kKeys];
  uint32_t rest;  // One bit per key marks it as used, then five bits per key are the top of its value.

  uint32_t taken() const { return rest & 31; }
  int64_t value(int at) const {
    int64_t its = low[at];
    if (__builtin_expect(rest >> kKeys, 0)) its |= static_cast<int64_t>(rest >> (5 + 5 * at) & 31) << 32;  // 4 G rows or more
    return its;
  }
  void set(int at, int64_t its, int64_t to) {
    key[at] = its;
    low[at] = static_cast<uint32_t>(to);
    const int top = 5 + 5 * at;
    rest = (rest & ~(31u << top)) | static_cast<uint32_t>(to >> 32) << top | 1u << at;
  }
  void drop(int at) { rest &= ~(1u << at); }
  void wipe() { rest = 0; }
};

// Four keys with values of 63 bits.
struct alignas(64) WideLine {
  static constexpr int kKeys = 4;
  static constexpr int64_t kMostValue = INT64_MAX;
  int64_t key[kKeys];
  int64_t held[kKeys];  // Negative if there is no key.

  uint32_t taken() const {
    uint32_t there = 0;
    for (int at = 0; at < kKeys; ++at) there |= static_cast<uint32_t>(held[at] >= 0) << at;
    return there;
  }
  int64_t value(int at) const { return held[at]; }
  void set(int at, int64_t its, int64_t to) {
    key[at] = its;
    held[at] = to;
  }
  void drop(int at) { held[at] = -1; }
  void wipe() {
    for (int at = 0; at < kKeys; ++at) held[at] = -1;
  }
};

static_assert(sizeof(RowLine) == 64 && sizeof(WideLine) == 64, "a line of an index is a cache line");

template <class Line>
static inline bool full(const Line& line) {
  return line.taken() == (1u << Line::kKeys) - 1;
}

// Returns a bit for the line's key that equals this one, without a branch.
template <class Line>
static inline uint32_t same(const Line& line, int64_t key) {
  uint32_t found = 0;
  for (int at = 0; at < Line::kKeys; ++at) found |= static_cast<uint32_t>(line.key[at] == key) << at;
  return found & line.taken();
}

}  // namespace nonet
