// Lookups that create rows, steps that update them, and reading and writing of checkpoints.

#include "table.h"

#include <algorithm>

namespace nonet {

// Keys that a reader hashes on its stack per batch; 2,048 cost 9 %, because each batch refills the pipeline.
constexpr int64_t kReadBatch = 8192;
constexpr int64_t kMakeAhead = 8, kTailAhead = 64;  // Keys; a tail takes 3 ns to mark and 200 ns to arrive.

bool Table::clear() {
  WriteLock lock(&lock_);
  rows_.clear();
  batch_ = -1;
  full_count_ = evicted_count_ = 0;
  size_t groups = size_t{1} << config_.policy.group_bits;
  if (!group_count_.ensure(groups) || !fill_.ensure(config_.width)) return false;
  for (int64_t d = 0; d < config_.width; ++d) fill_[d] = config_.fill;
  memset(group_count_.data, 0, groups * sizeof(uint32_t));
  bool ready = index_.clear() && admission_.waiting.clear();
  if (ready) tally();
  return ready;
}

void Table::tally() {
  int64_t* counters = config_.counters;
  counters[kRows] = rows_.size();
  counters[kEvicted] = evicted_count_;
  counters[kWaiting] = static_cast<int64_t>(admission_.waiting.size());
  counters[kBytes] = static_cast<int64_t>(rows_.bytes() + index_.bytes() + admission_.waiting.bytes());
}

int64_t Table::lookup(const int64_t* keys, int64_t count, float* out, int64_t step) {
  WriteLock lock(&lock_);
  return find_or_make(keys, count, out, step);
}

// Finds the rows of keys, -1 for absent ones, and stores them in `found_`; returns the number of absent keys.
int64_t Table::search(const int64_t* keys, int64_t count) {
  batch_ = -1;
  if (!batch_keys_.ensure(count) || !found_.ensure(count) || !hash_.ensure(count)) return kNoMemory;
  return kernels_->find(index_.view(), keys, count, false, hash_.data, found_.data);
}

// Stores the rows of a batch in `found_`, creates absent ones that are admitted, and copies values to `out` if it is given;
// returns the number of refused positions.
int64_t Table::find_or_make(const int64_t* keys, int64_t count, float* out, int64_t step) {
  if (!count) return 0;
  int64_t absent = search(keys, count);
  if (absent < 0) return absent;
  if (out) kernels_->copy(rows_.view(), format(), fill_.data, found_.data, count, config_.width, false, out);
  if (absent) {
    absent = fill_absent(keys, count, out, step);
    tally();
    if (absent < 0) return absent;
  }
  if (evicts()) mark_seen(keys, count, step);
  memcpy(batch_keys_.data, keys, count * sizeof(int64_t));
  batch_ = count;
  return absent;
}

int64_t Table::look(const int64_t* keys, int64_t count, float* out) {
  ReadLock lock(&lock_);
  return read_rows(keys, count, out);
}

bool Table::look_now(const int64_t* keys, int64_t count, float* out) {
  if (pthread_rwlock_tryrdlock(&lock_)) return false;
  read_rows(keys, count, out);
  pthread_rwlock_unlock(&lock_);
  return true;
}

int64_t Table::read_rows(const int64_t* keys, int64_t count, float* out) {
  uint64_t hash[kReadBatch];
  const bool once = beyond_caches();
  int64_t absent = 0;
  for (int64_t at = 0; at < count; at += kReadBatch) {
    int64_t some = std::min(kReadBatch, count - at);
    int64_t* found = reinterpret_cast<int64_t*>(hash);
    absent += kernels_->find(index_.view(), keys + at, some, once, hash, found);
    kernels_->copy(rows_.view(), format(), fill_.data, found, some, config_.width, once, out + at * config_.width);
  }
  if (absent) __atomic_fetch_add(&config_.counters[kAbsent], absent, __ATOMIC_RELAXED);
  return absent;
}

// Creates the rows of keys that were not found, if the policy admits them; returns the number of refused positions.
int64_t Table::fill_absent(const int64_t* keys, int64_t count, float* out, int64_t step) {
  int64_t refused = 0;
  for (int64_t i = 0; i < count; ++i) {
    int64_t far = i + kMakeAhead;
    if (far < count && found_[far] < 0) {
      __builtin_prefetch(index_.view().home(hash_[far]), 1);
    }
    if (found_[i] >= 0) continue;
    int64_t row = index_.find(hash_[i], keys[i]);
    if (row < 0) {
      int admitted = admission_.decide(config_.policy, hash_[i], keys[i], config_.base, step);
      if (admitted < 0) return kNoMemory;
      refused += !admitted;
      if (!admitted) continue;
      row = make(hash_[i], keys[i], step);
      if (row < 0) return kNoMemory;
    }
    found_[i] = row;
    if (out) kernels_->read_row(format(), rows_.view().row(row), out + i * config_.width, config_.width);
  }
  config_.counters[kRefused] += refused;
  return refused;
}

int64_t Table::make(uint64_t hash, int64_t key, int64_t step) {
  int64_t row = take_row(hash, key);
  if (row < 0) return kNoMemory;
  float first[kMostWidth];
  kernels_->first_values(key, config_.base, config_.scale, config_.width, first);
  kernels_->write_row(format(), rows_.view().row(row), first, config_.width);
  memset(rows_.view().tail(row), 0, head());
  memset(rows_.view().state(row), 0, 4 * config_.state_width);
  tail(row)->step = step;
  if (evicts() && config_.policy.evict == kScore) tail(row)->uses = kScoreZero;
  return row;
}

// Allocates a row for a key and counts it in its group; its bytes are not initialised.
int64_t Table::take_row(uint64_t hash, int64_t key) {
  const Policy& policy = config_.policy;
  if (policy.budget_rows && !full_.ensure(full_count_ + 1)) return kNoMemory;
  int64_t row = rows_.take();
  if (row < 0) return kNoMemory;
  if (!index_.insert(hash, key, row)) {
    rows_.give_back(row);
    return kNoMemory;
  }
  if (policy.budget_rows) {
    uint64_t group = policy.group_of(hash);
    if (++group_count_[group] == policy.quota() + 1) full_[full_count_++] = group;
  }
  return row;
}

void Table::mark_seen(const int64_t* keys, int64_t count, int64_t step) {
  bool counts = config_.policy.evict != kScore;
  for (int64_t i = 0; i < count; ++i) {
    if (i + kTailAhead < count && found_[i + kTailAhead] >= 0) __builtin_prefetch(tail(found_[i + kTailAhead]), 1);
    if (found_[i] < 0) continue;
    Tail* held = tail(found_[i]);
    if (watching_ && held->seen != step) tell(keys[i], found_[i]);
    if (counts) held->uses += held->seen != step || held->uses == 0;
    held->seen = step;
  }
}

int64_t Table::apply(const int64_t* keys, int64_t count, const float* grads, int64_t before, int64_t step,
                     double lr) {
  WriteLock lock(&lock_);
  int64_t absent = locate_batch(keys, count);
  if (absent < 0) return absent;
  if (absent && !config_.policy.lenient()) return kAbsentKeys;
  config_.counters[kDropped] += absent;
  int64_t rows = distinct(count);
  if (rows < 0) return rows;
  Step how{static_cast<float>(lr), 1.0f, config_.eps, config_.clip, config_.l1, config_.l2, lr};
  if (config_.weight_decay != 0.0) how.decay = static_cast<float>(1.0 - lr * config_.weight_decay);
  const Batch batch{distinct_.data, head_.data, next_.data, rows, grads};
  kernels_->step_rows(rows_.view(), format(), static_cast<Rule>(config_.rule), how, batch, config_.width, step);
  if (evicts() && !sweep(before, step)) return kNoMemory;
  return absent;
}

// Stores the rows of a batch in `found_`, reusing the last lookup if it had the same keys. Returns the number of absent keys.
int64_t Table::locate_batch(const int64_t* keys, int64_t count) {
  if (!count) return 0;
  if (batch_ != count || memcmp(batch_keys_.data, keys, count * sizeof(int64_t))) return search(keys, count);
  if (!config_.policy.lenient()) return 0;
  int64_t absent = 0;
  for (int64_t i = 0; i < count; ++i) absent += found_[i] < 0;
  return absent;
}

// Lists the batch's distinct rows by first position, each with the chain of its positions; returns their number.
//
// A row's mark is its index in `distinct_`. A mark of another batch is an index whose entry does not refer to the row.
int64_t Table::distinct(int64_t count) {
  if (!distinct_.ensure(count) || !head_.ensure(count) || !last_.ensure(count) || !next_.ensure(count))
    return kNoMemory;
  int64_t rows = 0;
  for (int64_t i = 0; i < count; ++i) {
    if (i + kTailAhead < count && found_[i + kTailAhead] >= 0) __builtin_prefetch(tail(found_[i + kTailAhead]), 1);
    int64_t row = found_[i];
    if (row < 0) continue;
    next_[i] = -1;
    Tail* held = tail(row);
    int64_t mark = held->mark;
    if (mark < rows && distinct_[mark] == row) {
      next_[last_[mark]] = static_cast<int32_t>(i);
      last_[mark] = static_cast<int32_t>(i);
    } else {
      held->mark = static_cast<uint32_t>(rows);
      distinct_[rows] = row;
      head_[rows] = last_[rows] = static_cast<int32_t>(i);
      ++rows;
    }
  }
  return rows;
}

int64_t Table::find(const int64_t* keys, int64_t count, int64_t* found) {
  uint64_t* hash = reinterpret_cast<uint64_t*>(found);
  return kernels_->find(index_.view(), keys, count, false, hash, found);
}

int64_t Table::upsert(const int64_t* keys, int64_t count, const float* rows, const float* state,
                      const int64_t* step, const int64_t* seen, const int64_t* uses) {
  WriteLock lock(&lock_);
  if (search(keys, count) < 0) return kNoMemory;
  for (int64_t i = 0; i < count; ++i) {
    int64_t row = row_for(keys, count, i);
    if (row < 0) return tally(), kNoMemory;
    write(row, rows + i * config_.width, state + i * config_.state_width, step[i]);
    if (evicts() && seen) tail(row)->seen = seen[i];
    if (evicts() && uses) tail(row)->uses = static_cast<uint32_t>(uses[i]);
  }
  tally();
  return count;
}

// Returns the row of key `at` of the last search, or a new one; the key no longer waits for admission.
int64_t Table::row_for(const int64_t* keys, int64_t count, int64_t at) {
  const int64_t far = at + kRowAhead;
  if (far < count) {
    if (found_[far] >= 0) prefetch_row(found_[far]);
    else __builtin_prefetch(index_.view().home(hash_[far]), 1);
  }
  if (found_[at] >= 0) return found_[at];
  int64_t row = index_.find(hash_[at], keys[at]);  // A key may occur twice.
  if (row >= 0) return row;
  admission_.waiting.remove(hash_[at], keys[at]);
  return take_row(hash_[at], keys[at]);
}

// Writes a row from another table, counted as looked up once, at its last step.
void Table::write(int64_t row, const float* values, const float* state, int64_t step) {
  kernels_->write_row(format(), rows_.view().row(row), values, config_.width);
  memset(rows_.view().tail(row), 0, head());
  memcpy(rows_.view().state(row), state, 4 * config_.state_width);
  tail(row)->step = step;
  if (!evicts()) return;
  tail(row)->seen = step;
  tail(row)->uses = config_.policy.evict == kScore ? kScoreZero : 1;
}

int64_t Table::forget(const int64_t* keys, int64_t count) {
  WriteLock lock(&lock_);
  batch_ = -1;
  int64_t gone = 0;
  for (int64_t i = 0; i < count; ++i) {
    uint64_t hash = mix(static_cast<uint64_t>(keys[i]));
    gone += drop(hash, keys[i]);
    admission_.waiting.remove(hash, keys[i]);
  }
  tally();
  return gone;
}

// Returns whether the key existed. Room to remember the free row is reserved first, so that no row is leaked.
bool Table::drop(uint64_t hash, int64_t key) {
  if (!rows_.can_give_back()) return false;
  int64_t row = index_.remove(hash, key);
  if (row < 0) return false;
  rows_.give_back(row);
  if (config_.policy.budget_rows) --group_count_[config_.policy.group_of(hash)];
  return true;
}

// Lists the rows between two hashes that changed after `since`, by slice and key, in memory that the caller frees.
//
// A row's step is read 64 rows later, when its tail has arrived. Its slice is stored, because a comparison would hash two keys.
int64_t Table::choose(uint64_t low, uint64_t high, int64_t since, Chosen** chosen) {
  struct Found {
    uint64_t slice;
    Chosen row;
  };
  Buffer<Found> list;
  Found coming[kTailAhead];  // Rows whose tails are being prefetched.
  int64_t count = 0, seen = 0;
  bool enough = true;
  auto list_if_changed = [&](const Found& found) {
    if (since > INT64_MIN && tail(found.row.row)->step <= since) return;
    enough = enough && list.ensure(count + 1);
    if (enough) list[count++] = found;
  };
  index_.walk(low, high, [&](int64_t key, int64_t row, uint64_t hash) {
    if (since == INT64_MIN) return list_if_changed({slice_of(hash), {key, row}});
    __builtin_prefetch(tail(row));
    Found& next = coming[seen % kTailAhead];
    if (seen++ >= kTailAhead) list_if_changed(next);
    next = {slice_of(hash), {key, row}};
  });
  for (int64_t i = seen < kTailAhead ? 0 : seen - kTailAhead; i < seen; ++i) list_if_changed(coming[i % kTailAhead]);
  if (!enough) return kNoMemory;
  std::sort(list.data, list.data + count, [](const Found& a, const Found& b) {
    return a.slice != b.slice ? a.slice < b.slice : a.row.key < b.row.key;
  });
  Chosen* rows = static_cast<Chosen*>(malloc(count ? count * sizeof(Chosen) : 1));
  if (!rows) return kNoMemory;
  for (int64_t i = 0; i < count; ++i) rows[i] = list[i].row;
  *chosen = rows;
  return count;
}

void Table::read(const Chosen* chosen, int64_t count, float* rows, float* state, int64_t* step, int64_t* seen,
                 int64_t* uses) {
  for (int64_t i = 0; i < count; ++i) {
    if (i + kRowAhead < count) prefetch_row(chosen[i + kRowAhead].row);
    int64_t row = chosen[i].row;
    kernels_->read_row(format(), rows_.view().row(row), rows + i * config_.width, config_.width);
    memcpy(state + i * config_.state_width, rows_.view().state(row), 4 * config_.state_width);
    step[i] = tail(row)->step;
    if (evicts() && seen) seen[i] = tail(row)->seen;
    if (evicts() && uses) uses[i] = tail(row)->uses;
  }
}

bool Table::watch(const Watcher& watcher) {
  WriteLock lock(&lock_);
  if (!watchers_.ensure(watching_ + 1)) return false;
  watchers_[watching_++] = watcher;
  return true;
}

void Table::unwatch(void* of) {
  WriteLock lock(&lock_);
  int64_t stay = 0;
  for (int64_t i = 0; i < watching_; ++i)
    if (watchers_[i].of != of) watchers_[stay++] = watchers_[i];
  watching_ = stay;
}

}  // namespace nonet
