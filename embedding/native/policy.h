// Admission and eviction: which absent keys get a row, and which rows are removed by age or budget.
//
// Every decision is a function of keys, steps and the table's seed, not of order of arrival or layout, so it is the same for any
// sharding. The budget is divided among groups of neighbouring slices with about a thousand rows each: a full group evicts its
// own rows of least weight, an eighth of them at a time, so an eviction costs tens of microseconds however large the table is.
#pragma once

#include <algorithm>
#include <cstdint>

#include "index.h"

namespace nonet {

enum Evict : int32_t { kKeepAll = 0, kLru = 1, kLfu = 2, kScore = 3 };

struct Policy {
  int32_t evict;
  int32_t admit_count;      // Number of steps that must request a key before it gets a row.
  int64_t admit_threshold;  // Probability that a step admits it, times 2^24.
  int64_t ttl_steps;        // 0: none
  int64_t budget_rows;      // 0: none
  int32_t group_bits;

  bool admits_all() const { return admit_count <= 1 && admit_threshold >= (1 << 24); }
  bool evicts() const { return ttl_steps > 0 || budget_rows > 0; }
  bool lenient() const { return !admits_all() || evicts(); }
  int64_t quota() const { return budget_rows >> group_bits; }
  uint64_t group_of(uint64_t hash) const { return group_bits ? hash >> (64 - group_bits) : 0; }
};

// Counts the steps that requested absent keys.
class Admission {
 public:
  Index<WideLine> waiting;  // key -> low 31 bits of the last step << 32 | steps counted

  // Returns 1 if admitted, 0 if refused, -1 without memory.
  int decide(const Policy& policy, uint64_t hash, int64_t key, uint64_t base, int64_t step) {
    if (policy.admits_all()) return 1;
    if (policy.admit_count > 1) {
      int64_t count = seen(hash, key, step);
      if (count < 0) return -1;
      if (count < policy.admit_count) return 0;
    }
    uint64_t draw = mix(mix(static_cast<uint64_t>(key) ^ ~base) + static_cast<uint64_t>(step)) >> 40;
    if (static_cast<int64_t>(draw) >= policy.admit_threshold) return 0;
    waiting.remove(hash, key);
    return 1;
  }

  static int64_t pack(int64_t step, int64_t count) { return ((step & 0x7FFFFFFF) << 32) | count; }

 private:
  int64_t seen(uint64_t hash, int64_t key, int64_t step) {
    int64_t held = waiting.find(hash, key);
    if (held < 0) return waiting.insert(hash, key, pack(step, 1)) ? 1 : -1;
    int64_t count = held & 0xFFFFFFFF;
    if (held >> 32 != (step & 0x7FFFFFFF)) waiting.assign(hash, key, pack(step, ++count));
    return count;
  }
};

// A candidate for eviction.
struct Candidate {
  uint64_t weight;  // Uses or score as an ordered number; 0 for LRU.
  int64_t seen;
  uint64_t hash;
  int64_t key;
  bool operator<(const Candidate& other) const {
    if (weight != other.weight) return weight < other.weight;
    return seen != other.seen ? seen < other.seen : hash < other.hash;
  }
};

// Returns the slices whose rows' age is checked when the step advances: all of them within a quarter of the ttl.
static inline void due(int64_t ttl, int64_t before, int64_t step, uint64_t* first, uint64_t* count) {
  unsigned __int128 slices = static_cast<unsigned __int128>(1) << (kSliceBits + 2);
  uint64_t from = static_cast<uint64_t>(slices * before / ttl), to = static_cast<uint64_t>(slices * step / ttl);
  uint64_t all = uint64_t{1} << kSliceBits;
  *count = to - from < all ? to - from : all;
  *first = (to - *count) & (all - 1);
}

}  // namespace nonet
