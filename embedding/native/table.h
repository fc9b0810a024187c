// A table from keys to rows, which training lookups create, steps update and the policy evicts.
//
// A table has one lock: readers share it, and operations that create, update or remove rows hold it exclusively. Nothing here
// throws: operations without memory report it and leave only complete rows.
#pragma once

#include <pthread.h>

#include "kernel_types.h"
#include "policy.h"

namespace nonet {

constexpr int64_t kNoMemory = -1, kAbsentKeys = -2;
constexpr size_t kManyRows = size_t{1} << 24;  // see beyond_caches
constexpr int64_t kRowAhead = 8;  // Rows whose lines are prefetched ahead: as many lines as a core can have outstanding.
constexpr uint32_t kScoreZero = 0x80000000u;  // Score 0.0; scores are ordered as unsigned numbers.

struct Config {  // the same fields as Config in native_library.py
  int64_t width, state_width;
  int32_t format, rule;
  uint64_t base;
  float scale, fill, eps, clip, l1, l2;
  double weight_decay;
  Policy policy;
  int64_t* counters;  // kCounters counters in the caller's memory.
};

enum Counter { kRows, kEvicted, kRefused, kDropped, kWaiting, kBytes, kAbsent, kCounters };

struct Chosen {  // A row of an export.
  int64_t key, row;
};

// Is notified of a row before the table changes it by itself; called with the table's lock held.
struct Watcher {
  void* of;
  void (*changes)(void* of, int64_t key, int64_t row);
};

class ReadLock {
 public:
  explicit ReadLock(pthread_rwlock_t* lock) : lock_(lock) { pthread_rwlock_rdlock(lock_); }
  ~ReadLock() { pthread_rwlock_unlock(lock_); }

 private:
  pthread_rwlock_t* lock_;
};

class WriteLock {
 public:
  explicit WriteLock(pthread_rwlock_t* lock) : lock_(lock) { pthread_rwlock_wrlock(lock_); }
  ~WriteLock() { pthread_rwlock_unlock(lock_); }

 private:
  pthread_rwlock_t* lock_;
};

class Table {
 public:
  Table(const Config& config, const Kernels* kernels) : config_(config), kernels_(kernels) {
    pthread_rwlockattr_t attributes;
    pthread_rwlockattr_init(&attributes);
#ifdef __GLIBC__  // Else successive readers could delay a step for seconds; no thread takes the lock twice.
    pthread_rwlockattr_setkind_np(&attributes, PTHREAD_RWLOCK_PREFER_WRITER_NONRECURSIVE_NP);
#endif
    pthread_rwlock_init(&lock_, &attributes);
    pthread_rwlockattr_destroy(&attributes);
    int64_t number = config.format == kFp32 ? 4 : 2;
    rows_.shape(number * config.width, head(), 4 * config.state_width);
  }
  ~Table() { pthread_rwlock_destroy(&lock_); }

  bool clear();
  int64_t width() const { return config_.width; }
  int64_t look(const int64_t* keys, int64_t count, float* out);      // For readers: creates no rows, returns the absent keys.
  bool look_now(const int64_t* keys, int64_t count, float* out);  // The same, unless it would wait for a writer.
  int64_t lookup(const int64_t* keys, int64_t count, float* out, int64_t step);
  int64_t apply(const int64_t* keys, int64_t count, const float* grads, int64_t before, int64_t step, double lr);
  int64_t upsert(const int64_t* keys, int64_t count, const float* rows, const float* state, const int64_t* step,
                 const int64_t* seen, const int64_t* uses);
  int64_t forget(const int64_t* keys, int64_t count);

  // For a trainer that steps rows itself: packs rows to bytes, creating absent ones, and writes such bytes back.
  int64_t take(const int64_t* keys, int64_t count, char* out, int64_t step);
  int64_t enter(const int64_t* keys, int64_t count, const char* bytes);

  // Held during the three methods below (a watcher's `changes` is called with it), and during operations that must be atomic.
  ReadLock reading() { return ReadLock(&lock_); }
  int64_t find(const int64_t* keys, int64_t count, int64_t* found);
  int64_t choose(uint64_t low, uint64_t high, int64_t since, Chosen** chosen);
  void read(const Chosen* chosen, int64_t count, float* rows, float* state, int64_t* step, int64_t* seen,
            int64_t* uses);

  bool watch(const Watcher& watcher);
  void unwatch(void* of);
  int64_t score(const int64_t* keys, const float* scores, int64_t count);
  void take_evicted(int64_t* out);
  int64_t waiting(int64_t* keys, int64_t* packed);
  int64_t wait(const int64_t* keys, const int64_t* packed, int64_t count);

 private:
  bool evicts() const { return config_.policy.evicts(); }
  int64_t head() const { return evicts() ? kEvictTail : kPlainTail; }
  Tail* tail(int64_t row) { return reinterpret_cast<Tail*>(rows_.view().tail(row)); }
  Format format() const { return static_cast<Format>(config_.format); }
  // Whether rows are narrow and so many that a reader's keys find nothing in the caches again; then lookups bypass the caches
  // (this saves 5 % of an isolated lookup and 2 % of a cold one at 100 M rows of 64 bytes, and would cost 4 to 10 % at 8 M of
  // 256).
  bool beyond_caches() const { return rows_.view().row_bytes <= 128 && index_.size() > kManyRows; }
  int64_t search(const int64_t* keys, int64_t count);
  int64_t read_rows(const int64_t* keys, int64_t count, float* out);
  int64_t find_or_make(const int64_t* keys, int64_t count, float* out, int64_t step);
  void write(int64_t row, const float* values, const float* state, int64_t step);
  int64_t row_for(const int64_t* keys, int64_t count, int64_t at);
  __attribute__((always_inline)) void prefetch_row(int64_t row) const {  // Inlined, see prefetch_all.
    const Rows::View rows = rows_.view();
    if (rows.alone()) return prefetch_all(rows.row(row), rows.block_bytes);
    prefetch_all(rows.row(row), rows.row_bytes);
    prefetch_all(rows.tail(row), rows.tail_bytes);
  }
  int64_t make(uint64_t hash, int64_t key, int64_t step);
  int64_t take_row(uint64_t hash, int64_t key);
  int64_t fill_absent(const int64_t* keys, int64_t count, float* out, int64_t step);
  void mark_seen(const int64_t* keys, int64_t count, int64_t step);
  int64_t locate_batch(const int64_t* keys, int64_t count);
  int64_t distinct(int64_t count);
  bool drop(uint64_t hash, int64_t key);
  void tell(int64_t key, int64_t row) {
    for (int64_t i = 0; i < watching_; ++i) watchers_[i].changes(watchers_[i].of, key, row);
  }
  bool evict(uint64_t hash, int64_t key);
  bool sweep(int64_t before, int64_t step);
  bool expire(int64_t before, int64_t step);
  bool expire_range(uint64_t low, uint64_t high, int64_t step);
  bool make_room(uint64_t group, int64_t step);
  void tally();

  Config config_;
  const Kernels* kernels_;
  pthread_rwlock_t lock_;
  RowIndex index_;
  Rows rows_;
  Admission admission_;
  Buffer<float> fill_;  // The default row.

  // The last training lookup: an apply of the same keys need not search again.
  Buffer<int64_t> batch_keys_, found_;
  Buffer<uint64_t> hash_;
  int64_t batch_ = -1;

  // An apply's distinct rows and the chains of their positions.
  Buffer<int64_t> distinct_;
  Buffer<int32_t> head_, last_, next_;

  Buffer<uint32_t> group_count_;
  Buffer<uint64_t> full_;  // Groups over their quota.
  int64_t full_count_ = 0;
  Buffer<Candidate> candidates_;
  Buffer<Watcher> watchers_;
  int64_t watching_ = 0;
  Buffer<int64_t> evicted_;
  int64_t evicted_count_ = 0;
};

}  // namespace nonet
