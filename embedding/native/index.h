// An index from 64-bit keys to values: extendible hashing over segments of open addressing.
//
// A directory on the top bits of the hash selects a segment; low bits select a cache line in it, where a linear search begins.
// If two of five keys are used, 1 % of the keys are outside their line, with three 5 %. A segment doubles up to 1,024 lines and
// then splits in two, so growth costs at most one segment at a time (20 to 100 us), never a complete rehash. Lines have a bit per
// key that marks it as used, so every key is legal. Deleting shifts keys back: there are no tombstones. Segments are ordered by
// hash, hence by slice. Keys that share their top bits cannot enlarge the directory without limit: it stays under a quarter of
// the lines' bytes, and their segment grows beyond 1,024 lines instead.
#pragma once

#include <cstdint>
#include <cstdlib>
#include <cstring>

#include "hash.h"
#include "lines.h"
#include "slab.h"

namespace nonet {

template <class Line>
class Index {
 public:
  struct Segment {  // 64 bytes before its lines
    uint32_t count;
    uint8_t depth;  // Number of top bits of the hash that its keys share.
    uint8_t log2;   // Of the number of its lines.
    char pad[58];
    Line* lines() { return reinterpret_cast<Line*>(this + 1); }
    uint64_t mask() const { return (uint64_t{1} << log2) - 1; }
  };
  static_assert(sizeof(Segment) == 64, "lines must stay aligned");

  ~Index() { free(directory_); }

  size_t size() const { return count_; }
  size_t bytes() const { return used_ + (directory_ ? sizeof(uint64_t) << depth_ : 0); }

  bool clear() {
    slab_.release();
    free(directory_);
    directory_ = nullptr;
    count_ = used_ = 0;
    depth_ = 0;
    memset(free_, 0xff, sizeof free_);
    directory_ = static_cast<uint64_t*>(malloc(sizeof(uint64_t)));
    if (!directory_ || !slab_.ensure(kSmallPage)) return false;
    directory_[0] = make(kLeastLog2, 0);
    return directory_[0] != kNone;
  }

  // The fields that a search needs, separate from the class, so that they can stay in registers over a batch.
  struct View {
    const uint64_t* directory;
    char* base;
    int shift;
    const Line* lines(uint64_t hash, uint64_t* mask) const {
      uint64_t entry = directory[(hash >> 1) >> shift];
      *mask = (uint64_t{1} << (entry & 63)) - 1;
      return reinterpret_cast<const Line*>(base + (entry & ~uint64_t{63})) + 1;  // after the 64-byte head
    }
    const Line* home(uint64_t hash) const {
      uint64_t mask;
      const Line* first = lines(hash, &mask);
      return first + (hash & mask);
    }
    // Returns the line of a key and its position there; null if it is absent. The search begins `beyond` lines after its home.
    const Line* seek(uint64_t hash, int64_t key, int* place, uint64_t beyond = 0) const {
      uint64_t mask;
      const Line* first = lines(hash, &mask);
      for (uint64_t number = (hash + beyond) & mask;; number = (number + 1) & mask) {
        const Line& line = first[number];
        uint32_t found = same(line, key);
        if (found) return *place = __builtin_ctz(found), &line;
        if (!full(line)) return nullptr;
      }
    }
    // Returns the value of a key, -1 if it is absent.
    int64_t find(uint64_t hash, int64_t key, uint64_t beyond = 0) const {
      int at;
      const Line* line = seek(hash, key, &at, beyond);
      return line ? line->value(at) : -1;
    }
  };
  View view() const { return {directory_, slab_.base, 63 - depth_}; }

  int64_t find(uint64_t hash, int64_t key) const { return view().find(hash, key); }

  // Changes the value of an existing key.
  void assign(uint64_t hash, int64_t key, int64_t value) {
    int at;
    Line* line = seek(hash, key, &at);
    if (line) line->set(at, key, value);
  }

  // Adds an absent key; returns false without memory, and then nothing has changed.
  bool insert(uint64_t hash, int64_t key, int64_t value) {
    if (value > Line::kMostValue) return false;
    Segment* segment = at(entry(hash));
    while (crowded(segment, hash)) {
      if (!grow(hash)) return false;
      segment = at(entry(hash));
    }
    put(segment, key, value);
    ++count_;
    return true;
  }

  // Removes a key by shifting later ones back; returns its value, or -1 if it was absent.
  int64_t remove(uint64_t hash, int64_t key) {
    int place;
    Line* line = seek(hash, key, &place);
    if (!line) return -1;
    int64_t value = line->value(place);
    Segment* segment = at(entry(hash));
    close(segment->lines(), segment->mask(), line - segment->lines(), place);
    --segment->count;
    --count_;
    return value;
  }

  // Calls visit(key, value, hash) for every key whose hash is in [low, high], segment by segment.
  template <class Visit>
  void walk(uint64_t low, uint64_t high, Visit visit) {
    uint64_t first = (low >> 1) >> (63 - depth_), last = (high >> 1) >> (63 - depth_);
    for (uint64_t place = first; place <= last;) {
      Segment* segment = at(directory_[place]);
      each(segment, [&](int64_t key, int64_t value) {
        uint64_t hash = mix(key);
        if (hash >= low && hash <= high) visit(key, value, hash);
      });
      uint64_t span = uint64_t{1} << (depth_ - segment->depth);
      place = (place / span + 1) * span;
    }
  }

 private:
  static constexpr int kLeastLog2 = 4, kSplitLog2 = 10;
  static constexpr uint64_t kNone = ~uint64_t{0};

  Segment* at(uint64_t entry) const {
    return reinterpret_cast<Segment*>(slab_.base + (entry & ~uint64_t{63}));
  }
  uint64_t entry(uint64_t hash) const { return directory_[(hash >> 1) >> (63 - depth_)]; }

  Line* seek(uint64_t hash, int64_t key, int* place) { return const_cast<Line*>(view().seek(hash, key, place)); }

  template <class Visit>
  static void each(Segment* segment, Visit visit) {
    for (uint64_t number = 0; number <= segment->mask(); ++number) {
      const Line& line = segment->lines()[number];
      for (uint32_t left = line.taken(); left; left &= left - 1)
        visit(line.key[__builtin_ctz(left)], line.value(__builtin_ctz(left)));
    }
  }

  // Removes a key from its line. The lines between a key's home and its own are full, so a full line gets back a key from a later
  // line whose search passes it, if there is one, and the same holds for that key's line if it was full.
  static void close(Line* lines, uint64_t mask, uint64_t hole, int at) {
    for (bool was_full = true; was_full;) {
      was_full = full(lines[hole]);
      lines[hole].drop(at);
      uint64_t next = hole;
      int moved = -1;
      while (was_full && moved < 0) {
        next = (next + 1) & mask;
        moved = movable(lines[next], mask, next, hole);
        was_full = moved >= 0 || full(lines[next]);
      }
      if (moved < 0) return;
      lines[hole].set(at, lines[next].key[moved], lines[next].value(moved));
      hole = next;
      at = moved;
    }
  }

  // Returns a key of line `number` whose search passes line `hole`; -1 if there is none.
  static int movable(const Line& line, uint64_t mask, uint64_t number, uint64_t hole) {
    for (uint32_t left = line.taken(); left; left &= left - 1) {
      int at = __builtin_ctz(left);
      uint64_t home = mix(line.key[at]) & mask;
      if (((number - home) & mask) >= ((number - hole) & mask)) return at;
    }
    return -1;
  }

  // Segments fill at the same rate, so each has its own limit between 3 and 3.4 keys per line, to spread their splits over time.
  static bool crowded(const Segment* segment, uint64_t hash) {
    uint64_t lines = segment->mask() + 1;
    uint64_t prefix = segment->depth ? hash >> (64 - segment->depth) : 0;
    return segment->count >= 3 * lines + lines * (mix(prefix) & 15) / 40;
  }

  static void put(Segment* segment, int64_t key, int64_t value) {
    uint64_t mask = segment->mask(), number = mix(key) & mask;
    while (full(segment->lines()[number])) number = (number + 1) & mask;
    Line& line = segment->lines()[number];
    line.set(__builtin_ctz(~line.taken()), key, value);
    ++segment->count;
  }

  // Returns an empty segment, its position | log2 of its lines, or kNone without memory.
  uint64_t make(int log2, int depth) {
    size_t bytes = sizeof(Segment) + (sizeof(Line) << log2);
    uint64_t place = free_[log2];
    if (place != kNone) {
      memcpy(&free_[log2], slab_.base + place, sizeof place);
    } else {
      if (!slab_.ensure(used_ + bytes)) return kNone;
      place = used_;
      used_ += bytes;
    }
    Segment* segment = at(place);
    segment->count = 0;
    segment->depth = static_cast<uint8_t>(depth);
    segment->log2 = static_cast<uint8_t>(log2);
    for (uint64_t number = 0; number <= segment->mask(); ++number) segment->lines()[number].wipe();
    return place | static_cast<uint64_t>(log2);
  }

  void give_back(uint64_t entry) {
    uint64_t place = entry & ~uint64_t{63};
    memcpy(slab_.base + place, &free_[entry & 63], sizeof place);
    free_[entry & 63] = place;
  }

  static int log2_for(uint64_t count) {
    int log2 = kLeastLog2;
    while ((uint64_t{2} << log2) < count) ++log2;
    return log2;
  }

  // Makes room for `hash`: a larger segment, or two.
  bool grow(uint64_t hash) {
    uint64_t old = entry(hash);
    Segment* segment = at(old);
    bool split = segment->log2 >= kSplitLog2 && (segment->depth < depth_ || may_double());
    if (split && segment->depth == depth_ && !double_directory()) return false;
    return split ? split_segment(hash, old) : enlarge(hash, old);
  }

  bool may_double() const {
    return depth_ < 40 && (sizeof(uint64_t) << (depth_ + 1)) <= used_ / 4 + kSmallPage;
  }

  bool double_directory() {
    uint64_t count = uint64_t{1} << depth_;
    uint64_t* larger = static_cast<uint64_t*>(malloc(2 * count * sizeof(uint64_t)));
    if (!larger) return false;
    for (uint64_t at = 0; at < count; ++at) larger[2 * at] = larger[2 * at + 1] = directory_[at];
    free(directory_);
    directory_ = larger;
    ++depth_;
    return true;
  }

  bool enlarge(uint64_t hash, uint64_t old) {
    uint64_t fresh = make(static_cast<int>(old & 63) + 1, at(old)->depth);
    if (fresh == kNone) return false;
    each(at(old), [&](int64_t key, int64_t value) { put(at(fresh), key, value); });
    point(hash, at(old)->depth, fresh);
    give_back(old);
    return true;
  }

  bool split_segment(uint64_t hash, uint64_t old) {
    int depth = at(old)->depth;
    uint64_t bit = uint64_t{1} << (63 - depth), ones = 0;
    each(at(old), [&](int64_t key, int64_t) { ones += (mix(key) & bit) != 0; });
    uint64_t low = make(log2_for(at(old)->count - ones), depth + 1);
    if (low == kNone) return false;
    uint64_t high = make(log2_for(ones), depth + 1);
    if (high == kNone) return give_back(low), false;
    bool usual = (old & 63) == kSplitLog2 && (low & 63) <= kSplitLog2 && (high & 63) <= kSplitLog2;
    if (usual) deal(at(old), at(low), at(high), 63 - depth);
    else each(at(old), [&](int64_t key, int64_t value) { put(mix(key) & bit ? at(high) : at(low), key, value); });
    point(hash & ~bit, depth + 1, low);
    point(hash | bit, depth + 1, high);
    give_back(old);
    return true;
  }

  // Moves every key with a count per line instead of a search, whose branches would be mispredicted; few lines are full.
  static void deal(Segment* from, Segment* low, Segment* high, int bit) {
    constexpr uint64_t kLines = uint64_t{1} << kSplitLog2;
    struct Late {
      int64_t key, value;
    };
    uint8_t held[2][kLines];
    Late late[Line::kKeys * kLines];
    memset(held, 0, sizeof held);
    Segment* const half[2] = {low, high};
    uint32_t lates = 0;
    each(from, [&](int64_t key, int64_t value) {
      uint64_t hash = mix(key), which = hash >> bit & 1, number = hash & half[which]->mask();
      uint8_t& count = held[which][number];
      late[lates] = {key, value};
      lates += count == Line::kKeys;
      if (count == Line::kKeys) return;
      half[which]->lines()[number].set(count++, key, value);
      ++half[which]->count;
    });
    for (uint32_t i = 0; i < lates; ++i) put(half[mix(late[i].key) >> bit & 1], late[i].key, late[i].value);
  }

  // Sets every directory entry that shares the first `depth` bits with `hash` to this segment.
  void point(uint64_t hash, int depth, uint64_t entry) {
    uint64_t span = uint64_t{1} << (depth_ - depth);
    uint64_t first = ((hash >> 1) >> (63 - depth_)) / span * span;
    for (uint64_t at = first; at < first + span; ++at) directory_[at] = entry;
  }

  Slab slab_;
  uint64_t* directory_ = nullptr;
  uint64_t free_[64];
  size_t used_ = 0, count_ = 0;
  int depth_ = 0;
};

typedef Index<RowLine> RowIndex;

}  // namespace nonet
