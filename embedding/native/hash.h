// The hash of the engine: SplitMix64 (Steele, Lea and Flood, OOPSLA 2014), a bijection of 64 bits.
//
// Its top 16 bits are a key's slice, so the order by hash is also an order by slice. slices.py and the initial rows use the same
// hash, bit for bit.
#pragma once

#include <cstdint>

namespace nonet {

constexpr uint64_t kGamma = 0x9E3779B97F4A7C15ull;
constexpr int kSliceBits = 16;

static inline uint64_t mix(uint64_t x) {
  x += kGamma;
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9ull;
  x = (x ^ (x >> 27)) * 0x94D049BB133111EBull;
  return x ^ (x >> 31);
}

static inline uint64_t slice_of(uint64_t hash) { return hash >> (64 - kSliceBits); }

}  // namespace nonet
