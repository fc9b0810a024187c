// Snapshots of a table at a step, while later steps change it: rows are copied before they change, and read range by range.
//
// A row of the live table belongs to the version of step `at` if its own step is at most `at`. Rows that were created and not
// trained yet have step `at` + 1: they belong to the version unless they were copied or their key is in `born`, which is sorted.
// If rows were moved from another shard (`moved`), `born` is searched for every row. Copies are stored in order of arrival,
// chained by the top bits of their hash, in memory that is prefaulted, so that a copy is all that a change costs. The locks of
// the caller and the table are held for a batch of keys or one range of slices at a time. For a table that evicts, a version also
// copies rows that the table removes, marks as seen or scores; the table notifies it first. The layout of live rows is not used
// here.
#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <new>
#ifdef __linux__
#include <fcntl.h>
#endif

#include "hash.h"
#include "table.h"

#define NONET_API extern "C" __attribute__((visibility("default")))

namespace nonet {

static uint64_t hash_of(int64_t key) { return mix(static_cast<uint64_t>(key)); }

static bool precedes(int64_t left, int64_t right) {  // The order of Table::choose.
  uint64_t one = slice_of(hash_of(left)), other = slice_of(hash_of(right));
  return one != other ? one < other : left < right;
}

struct Columns {  // the same fields as Columns in pieces.py
  int64_t* key;
  float *row, *state;
  int64_t* step;
  int64_t *seen, *uses;  // Null if the table does not evict.

  Columns from(int64_t place, int64_t width, int64_t state_width) const {
    return {key + place,  row + place * width,           state + place * state_width,
            step + place, seen ? seen + place : nullptr, uses ? uses + place : nullptr};
  }
};

class Kept {
 public:
  const int64_t width, state_width;
  int64_t count = 0;

  // `rows` is the number of rows of the table, to prefault the memory that the next steps will use.
  Kept(int64_t width, int64_t state_width, int64_t rows)
      : width(width), state_width(state_width),
        record_(round_up(sizeof(Link) + 4 * (width + state_width), 8)), head_bits_(bits_for(rows)) {
    ready_ = heads_.ensure(sizeof(int32_t) << head_bits_) && rows_.ensure(std::min(static_cast<size_t>(rows) * record_, kSoon));
  }

  bool ready() const { return ready_; }

  // Removes the rows and keeps their memory for the next version, because allocating it again would delay steps.
  void clear() {
    if (count < kFew)
      for (int64_t place = 0; place < count; ++place) *at(head_of(hash_of(key(place)))) = 0;
    else
      memset(heads_.base, 0, sizeof(int32_t) << head_bits_);
    count = 0;
    rows_.shrink(kMostSpare);
  }
  uint32_t head_of(uint64_t hash) const { return static_cast<uint32_t>(hash >> (64 - head_bits_)); }
  int64_t first(uint32_t head) const { return *at(head) - 1; }
  int64_t next(int64_t place) const { return link(place).next; }
  int64_t key(int64_t place) const { return link(place).key; }

  int64_t find(int64_t wanted) const {
    int64_t place = first(head_of(hash_of(wanted)));
    while (place >= 0 && key(place) != wanted) place = next(place);
    return place;
  }
  void prefetch(int64_t wanted) const { __builtin_prefetch(at(head_of(hash_of(wanted)))); }

  bool add(const Columns& from, int64_t i) {
    if (count == kMost || !rows_.ensure((count + 1) * record_)) return false;
    int32_t* head = at(head_of(hash_of(from.key[i])));
    uint32_t uses = from.uses ? static_cast<uint32_t>(from.uses[i]) : 0;
    link(count) = {from.key[i], from.step[i], from.seen ? from.seen[i] : 0, *head - 1, uses};
    memcpy(numbers(count), from.row + i * width, 4 * width);
    memcpy(numbers(count) + width, from.state + i * state_width, 4 * state_width);
    *head = static_cast<int32_t>(++count);
    return true;
  }

  void read(int64_t place, const Columns& to) const {
    *to.key = key(place), *to.step = link(place).step;
    if (to.seen) *to.seen = link(place).seen;
    if (to.uses) *to.uses = link(place).uses;
    memcpy(to.row, numbers(place), 4 * width);
    memcpy(to.state, numbers(place) + width, 4 * state_width);
  }

 private:
  static constexpr int kLeastBits = 10, kMostBits = 20;
  static constexpr int64_t kMost = INT32_MAX - 1;
  static constexpr int64_t kFew = 1 << 14;
  static constexpr size_t kSoon = size_t{16} << 20, kMostSpare = size_t{256} << 20;
  struct Link {
    int64_t key, step, seen;
    int32_t next;
    uint32_t uses;
  };
  static int bits_for(int64_t rows) {
    int bits = kLeastBits;
    while (bits < kMostBits && (int64_t{1} << bits) < rows) ++bits;
    return bits;
  }
  int32_t* at(uint32_t head) const { return reinterpret_cast<int32_t*>(heads_.base) + head; }  // Holds a position + 1.
  Link& link(int64_t place) const { return *reinterpret_cast<Link*>(rows_.base + place * record_); }
  float* numbers(int64_t place) const { return reinterpret_cast<float*>(&link(place) + 1); }

  const size_t record_;
  const int head_bits_;
  Slab heads_{false}, rows_{false};
  bool ready_;
};

struct Version {  // the same fields as Version in pieces.py
  Table* table;
  Kept* kept;
  int64_t at;  // Its step.
  const int64_t* born;
  int64_t born_count;
  int64_t moved;
  const uint8_t* given;  // By slice: whether its rows were read.
  int64_t broken;        // 1 if a row could not be copied without memory.

  bool is_born(int64_t key) const {
    int64_t low = 0, high = born_count;
    while (low < high) {
      int64_t middle = (low + high) / 2;
      if (born[middle] < key) low = middle + 1;
      else high = middle;
    }
    return low < born_count && born[low] == key;
  }
  // Returns whether a live row of this key and step that was not copied belongs to the version.
  bool has(int64_t key, int64_t step) const {
    if (step > at + 1) return false;
    return (step <= at && !moved) || !is_born(key);
  }
};

struct Listed {
  Chosen* list = nullptr;
  int64_t count = 0;
  ~Listed() { free(list); }
};

// Lists the copied rows between two hashes as {key, position}, in the order of Table::choose.
static bool list_kept(const Kept& kept, uint64_t low, uint64_t high, Listed& out) {
  int64_t room = 0;
  for (uint64_t head = kept.head_of(low); head <= kept.head_of(high); ++head) {
    for (int64_t place = kept.first(static_cast<uint32_t>(head)); place >= 0; place = kept.next(place)) {
      uint64_t hash = hash_of(kept.key(place));
      if (hash < low || hash > high) continue;
      if (out.count == room) {
        room = room ? 2 * room : 256;
        void* larger = realloc(out.list, room * sizeof(Chosen));
        if (!larger) return false;
        out.list = static_cast<Chosen*>(larger);
      }
      out.list[out.count++] = {kept.key(place), place};
    }
  }
  if (out.count) qsort(out.list, out.count, sizeof(Chosen), [](const void* left, const void* right) {
    int64_t one = static_cast<const Chosen*>(left)->key, other = static_cast<const Chosen*>(right)->key;
    return precedes(one, other) ? -1 : one != other;
  });
  return true;
}

// Reads the live rows of the version that changed after `since` into columns; returns their number.
static int64_t read_live(const Version& version, const Chosen* chosen, int64_t count, int64_t since, const Columns& out) {
  const int64_t width = version.kept->width, state_width = version.kept->state_width;
  version.table->read(chosen, count, out.row, out.state, out.step, out.seen, out.uses);
  int64_t stay = 0;
  for (int64_t i = 0; i < count; ++i) {
    if (out.step[i] <= since || !version.has(chosen[i].key, out.step[i])) continue;
    out.key[stay] = chosen[i].key;
    if (stay != i) {
      out.step[stay] = out.step[i];
      if (out.seen) out.seen[stay] = out.seen[i];
      if (out.uses) out.uses[stay] = out.uses[i];
      memcpy(out.row + stay * width, out.row + i * width, 4 * width);
      memcpy(out.state + stay * state_width, out.state + i * state_width, 4 * state_width);
    }
    ++stay;
  }
  return stay;
}

// Copies one row that the table is about to change.
static void keep_row(void* of, int64_t key, int64_t row) {
  Version& version = *static_cast<Version*>(of);
  Kept& kept = *version.kept;
  if (version.given[slice_of(hash_of(key))] || kept.find(key) >= 0) return;
  float numbers[kMostWidth], states[2 * kMostWidth + 1];  // Adam has the largest state.
  int64_t step, seen, uses;
  Chosen one{key, row};
  Columns out{&key, numbers, states, &step, &seen, &uses};
  if (read_live(version, &one, 1, INT64_MIN, out) && !kept.add(out, 0)) version.broken = 1;
}

}  // namespace nonet

using namespace nonet;

NONET_API void* nonet_kept_new(int64_t width, int64_t state_width, int64_t rows) {
  void* room = malloc(sizeof(Kept));
  if (!room) return nullptr;
  Kept* kept = new (room) Kept(width, state_width, rows);
  if (kept->ready()) return kept;
  kept->~Kept();
  free(room);
  return nullptr;
}

NONET_API void nonet_kept_free(void* kept) {
  static_cast<Kept*>(kept)->~Kept();
  free(kept);
}

NONET_API void nonet_kept_clear(void* kept) { static_cast<Kept*>(kept)->clear(); }

NONET_API int64_t nonet_kept_count(void* kept) { return static_cast<Kept*>(kept)->count; }

// Marks which keys were copied, and reads their rows if `rows` is given; rows of other keys are not changed.
NONET_API void nonet_kept_find(const Version* version, const int64_t* keys, int64_t count, uint8_t* found, float* rows) {
  ReadLock lock = version->table->reading();
  const Kept& kept = *version->kept;
  Buffer<float> state;
  if (rows && !state.ensure(kept.state_width + 1)) rows = nullptr;
  for (int64_t i = 0; i < count; ++i) {
    int64_t place = kept.find(keys[i]), key, step;
    found[i] = place >= 0;
    if (rows && place >= 0) kept.read(place, {&key, rows + i * kept.width, state.data, &step, nullptr, nullptr});
  }
}

// Reads the version's rows between two hashes that changed after `since`, by slice and key, into columns with room for `room`
// rows. Returns their number; -1 without memory; -2 - n if room for n rows is needed, and then nothing is read.
NONET_API int64_t nonet_piece(const Version* version, uint64_t low, uint64_t high, int64_t since, const Columns* columns,
                              int64_t room) {
  ReadLock lock = version->table->reading();
  const Kept& kept = *version->kept;
  Listed now, old;
  if (version->broken) return -1;
  now.count = version->table->choose(low, high, since, &now.list);  // Only rows that changed after `since`.
  if (now.count < 0 || !list_kept(kept, low, high, old)) return -1;
  if (now.count + old.count > room) return -2 - (now.count + old.count);
  int64_t place = 0;
  for (int64_t i = 0, j = 0; i < now.count || j < old.count;) {
    int64_t stop = i;
    while (stop < now.count && (j == old.count || precedes(now.list[stop].key, old.list[j].key))) ++stop;
    if (stop > i) {
      Columns out = columns->from(place, kept.width, kept.state_width);
      place += read_live(*version, now.list + i, stop - i, since, out);
      i = stop;
    }
    if (j == old.count) continue;
    i += i < now.count && now.list[i].key == old.list[j].key;  // The row has changed, so the copy is used.
    Columns out = columns->from(place, kept.width, kept.state_width);
    kept.read(old.list[j++].row, out);
    place += *out.step > since;
  }
  return place;
}

// Copies the version's rows of these keys, except in slices that were read already; returns -1 without memory.
NONET_API int64_t nonet_keep(const Version* version, const int64_t* keys, int64_t count) {
  constexpr int64_t kBatch = 256, kAhead = 16;
  Kept& kept = *version->kept;
  ReadLock lock = version->table->reading();
  Buffer<float> numbers;
  if (!numbers.ensure(kBatch * (kept.width + kept.state_width))) return -1;
  int64_t asked[kBatch], found[kBatch], step[kBatch], seen[kBatch], uses[kBatch];
  Chosen chosen[kBatch];
  Columns out{asked, numbers.data, numbers.data + kBatch * kept.width, step, seen, uses};
  for (int64_t start = 0; start < count;) {
    int64_t some = 0, fresh = 0;
    for (; start < count && some < kBatch; ++start) {
      if (start + kAhead < count) kept.prefetch(keys[start + kAhead]);
      if (!version->given[slice_of(hash_of(keys[start]))] && kept.find(keys[start]) < 0) asked[some++] = keys[start];
    }
    version->table->find(asked, some, found);
    for (int64_t i = 0; i < some; ++i)
      if (found[i] >= 0) chosen[fresh++] = {asked[i], found[i]};
    fresh = read_live(*version, chosen, fresh, INT64_MIN, out);
    for (int64_t i = 0; i < fresh; ++i)  // A key may occur twice.
      if (kept.find(asked[i]) < 0 && !kept.add(out, i)) return -1;
  }
  return kept.count;
}

// Lets the table notify this version of rows that it changes by itself; returns false without memory.
NONET_API int32_t nonet_watch(Version* version) { return version->table->watch({version, keep_row}); }

NONET_API void nonet_unwatch(void* table, Version* version) { static_cast<Table*>(table)->unwatch(version); }

// Starts writeback of these bytes of a file without waiting for the disk.
NONET_API void nonet_write_out(int32_t file, int64_t offset, int64_t bytes) {
#ifdef SYNC_FILE_RANGE_WRITE
  sync_file_range(file, offset, bytes, SYNC_FILE_RANGE_WRITE);
#else
  (void)file, (void)offset, (void)bytes;
#endif
}
