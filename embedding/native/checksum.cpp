// The checksum of checkpoint segments: each 64-bit word is mixed with its position by a bijection, and the results are added.
//
// A changed word always changes the sum, and exchanged words almost always do. It runs at memory speed, vectorises and can be
// computed piecewise. It is not cryptographic: the checkpoint's manifest has a SHA-256 of every file.
#include <cstdint>
#include <cstring>

#include "hash.h"

#define NONET_API extern "C" __attribute__((visibility("default")))

NONET_API uint64_t nonet_checksum(const char* data, int64_t bytes) {
  uint64_t sum = 0;
  const int64_t words = bytes / 8;
  for (int64_t i = 0; i < words; ++i) {
    uint64_t word;
    memcpy(&word, data + 8 * i, 8);
    sum += nonet::mix(word ^ (static_cast<uint64_t>(i) * 0xD1342543DE82EF95ull));
  }
  uint64_t last = 0;
  memcpy(&last, data + 8 * words, static_cast<size_t>(bytes - 8 * words));
  return sum + nonet::mix(last ^ (static_cast<uint64_t>(words) * 0xD1342543DE82EF95ull)) + static_cast<uint64_t>(bytes);
}
