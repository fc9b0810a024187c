// Eviction of rows: those unseen for too long, and those of least weight in a full group.

#include <algorithm>

#include "table.h"

namespace nonet {

static inline uint64_t group_end(uint64_t group, int bits) {
  return bits ? ((group + 1) << (64 - bits)) - 1 : ~uint64_t{0};
}

// Called after a step: removes expired rows, then makes room in full groups. Returns false without memory.
bool Table::sweep(int64_t before, int64_t step) {
  int64_t full = full_count_, still = 0;
  bool ready = config_.policy.ttl_steps == 0 || expire(before, step);
  for (int64_t i = 0; ready && i < full; ++i) {
    uint64_t group = full_[i];
    ready = make_room(group, step);
    if (group_count_[group] > config_.policy.quota()) full_[still++] = group;
  }
  if (ready) full_count_ = still;
  tally();
  return ready;
}

bool Table::expire(int64_t before, int64_t step) {
  uint64_t first, count, all = uint64_t{1} << kSliceBits;
  due(config_.policy.ttl_steps, before, step, &first, &count);
  uint64_t until = std::min(first + count, all), around = first + count - until;
  if (count == 0) return true;
  auto low = [](uint64_t slice) { return slice << (64 - kSliceBits); };
  auto high = [](uint64_t end) { return (end << (64 - kSliceBits)) - 1; };  // For end = 65,536: all ones.
  return expire_range(low(first), high(until), step) && (!around || expire_range(0, high(around), step));
}

bool Table::expire_range(uint64_t low, uint64_t high, int64_t step) {
  int64_t oldest = step - config_.policy.ttl_steps, count = 0, waiting = 0;
  bool enough = true;
  auto take = [&](int64_t key, uint64_t hash) {
    enough = enough && candidates_.ensure(count + waiting + 1);
    if (enough) candidates_[count + waiting] = {0, 0, hash, key};
    return enough;
  };
  index_.walk(low, high, [&](int64_t key, int64_t row, uint64_t hash) {
    if (tail(row)->seen < oldest && take(key, hash)) ++count;
  });
  admission_.waiting.walk(low, high, [&](int64_t key, int64_t packed, uint64_t hash) {
    if (packed >> 32 < oldest && take(key, hash)) ++waiting;
  });
  if (!enough) return false;
  for (int64_t i = 0; i < count; ++i)
    if (!evict(candidates_[i].hash, candidates_[i].key)) return false;
  for (int64_t i = count; i < count + waiting; ++i)
    admission_.waiting.remove(candidates_[i].hash, candidates_[i].key);
  return true;
}

// Rows that were looked up for future steps are in flight and stay.
bool Table::make_room(uint64_t group, int64_t step) {
  const Policy& policy = config_.policy;
  int64_t held = group_count_[group], quota = policy.quota();
  if (held <= quota) return true;
  int64_t surplus = held - (quota - quota / 8), count = 0;
  bool enough = true;
  index_.walk(policy.group_bits ? group << (64 - policy.group_bits) : 0, group_end(group, policy.group_bits),
              [&](int64_t key, int64_t row, uint64_t hash) {
                const Tail* its = tail(row);
                if (!enough || its->seen > step) return;
                enough = candidates_.ensure(count + 1);
                if (!enough) return;
                uint64_t weight = policy.evict == kLru ? 0 : its->uses;
                candidates_[count++] = {weight, its->seen, hash, key};
              });
  if (!enough) return false;
  surplus = std::min(surplus, count);
  if (surplus < count) std::nth_element(candidates_.data, candidates_.data + surplus, candidates_.data + count);
  for (int64_t i = 0; i < surplus; ++i)
    if (!evict(candidates_[i].hash, candidates_[i].key)) return false;
  return true;
}

bool Table::evict(uint64_t hash, int64_t key) {
  if (!evicted_.ensure(evicted_count_ + 1)) return false;
  if (watching_) tell(key, index_.find(hash, key));
  if (!drop(hash, key)) return false;
  evicted_[evicted_count_++] = key;
  batch_ = -1;
  return true;
}

void Table::take_evicted(int64_t* out) {
  WriteLock lock(&lock_);
  if (evicted_count_) memcpy(out, evicted_.data, evicted_count_ * sizeof(int64_t));
  evicted_count_ = 0;
  tally();
}

// Scores are stored in the field of uses, as unsigned numbers in the order of the floats.
int64_t Table::score(const int64_t* keys, const float* scores, int64_t count) {
  WriteLock lock(&lock_);
  int64_t absent = 0;
  for (int64_t i = 0; i < count; ++i) {
    int64_t row = index_.find(mix(static_cast<uint64_t>(keys[i])), keys[i]);
    absent += row < 0;
    if (row < 0) continue;
    tell(keys[i], row);
    uint32_t bits = bits_of(0.0f + scores[i]);
    tail(row)->uses = bits & kScoreZero ? ~bits : bits | kScoreZero;
  }
  return absent;
}

int64_t Table::waiting(int64_t* keys, int64_t* packed) {
  ReadLock lock(&lock_);
  int64_t count = 0;
  admission_.waiting.walk(0, ~uint64_t{0}, [&](int64_t key, int64_t value, uint64_t) {
    keys[count] = key;
    packed[count++] = value;
  });
  return count;
}

int64_t Table::wait(const int64_t* keys, const int64_t* packed, int64_t count) {
  WriteLock lock(&lock_);
  for (int64_t i = 0; i < count; ++i) {
    uint64_t hash = mix(static_cast<uint64_t>(keys[i]));
    admission_.waiting.remove(hash, keys[i]);
    if (!admission_.waiting.insert(hash, keys[i], packed[i])) return kNoMemory;
  }
  tally();
  return count;
}

}  // namespace nonet
