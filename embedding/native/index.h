// From 64-bit keys to 63-bit values: extendible hashing over segments of open addressing.
//
// A directory on the top bits of the hash names a segment; low bits name a line of four slots in it, where a search begins,
// to go on linearly: half full, 2 % of keys lie beyond their line. A segment doubles up to 4,096 slots and then splits in
// two, so growth costs at most one segment at a time (20 to 100 us) and never a rehash of everything. A slot is empty when
// its value is negative, so every key is legal. Deleting shifts back: there are no tombstones. Segments follow each other by
// hash, hence by slice. Keys that share their top bits cannot blow the directory up: it stays under a quarter of the slots'
// bytes, and their segment grows beyond 4,096 slots instead.
#pragma once

#include <cstdint>
#include <cstdlib>
#include <cstring>

#include "hash.h"
#include "slab.h"

namespace nonet {

struct Slot {
  int64_t key;
  int64_t value;
};

class Index {
 public:
  struct Segment {  // 64 bytes before its slots
    uint32_t count;
    uint8_t depth;  // how many top bits of the hash its keys share
    uint8_t log2;
    char pad[58];
    Slot* slots() { return reinterpret_cast<Slot*>(this + 1); }
    uint64_t mask() const { return (uint64_t{1} << log2) - 1; }
  };
  static_assert(sizeof(Segment) == 64, "slots must stay line-aligned");

  ~Index() { free(directory_); }

  size_t size() const { return count_; }
  size_t bytes() const { return used_ + (directory_ ? sizeof(uint64_t) << depth_ : 0); }

  bool clear() {
    slots_.release();
    free(directory_);
    directory_ = nullptr;
    count_ = used_ = 0;
    depth_ = 0;
    memset(free_, 0xff, sizeof free_);
    directory_ = static_cast<uint64_t*>(malloc(sizeof(uint64_t)));
    if (!directory_ || !slots_.ensure(kSmallPage)) return false;
    directory_[0] = make(kLeastLog2, 0);
    return directory_[0] != kNone;
  }

  // What a search needs, apart from the class, so that it can be held in registers over a batch.
  struct View {
    const uint64_t* directory;
    char* base;
    int shift;
    const Slot* home(uint64_t hash, uint64_t* mask) const {
      uint64_t entry = directory[(hash >> 1) >> shift];
      *mask = (uint64_t{1} << (entry & 63)) - 1;
      return reinterpret_cast<const Slot*>(base + (entry & ~uint64_t{63})) + 4;  // after the 64-byte head
    }
  };
  View view() const { return {directory_, slots_.base, 63 - depth_}; }

  // Where the search for a hash begins: the first slot of a cache line.
  static inline uint64_t first(uint64_t hash, uint64_t mask) { return hash & mask & ~uint64_t{3}; }

  static inline int64_t probe(const Slot* slots, uint64_t mask, uint64_t hash, int64_t key) {
    for (uint64_t at = first(hash, mask);; at = (at + 1) & mask) {
      int64_t value = slots[at].value;
      if (value < 0 || slots[at].key == key) return value;
    }
  }

  int64_t find(uint64_t hash, int64_t key) const {
    uint64_t mask;
    const Slot* slots = view().home(hash, &mask);
    return probe(slots, mask, hash, key);
  }

  // Where the value of a key that is there lies, else null.
  int64_t* locate(uint64_t hash, int64_t key) {
    Segment* segment = at(entry(hash));
    uint64_t mask = segment->mask();
    for (uint64_t place = first(hash, mask);; place = (place + 1) & mask) {
      Slot& slot = segment->slots()[place];
      if (slot.value < 0) return nullptr;
      if (slot.key == key) return &slot.value;
    }
  }

  // Adds a key that is absent; false when memory is out, and then nothing has changed.
  bool insert(uint64_t hash, int64_t key, int64_t value) {
    Segment* segment = at(entry(hash));
    while (full(segment, hash)) {
      if (!grow(hash)) return false;
      segment = at(entry(hash));
    }
    put(segment, hash, key, value);
    ++count_;
    return true;
  }

  // Forgets a key by shifting later ones back; returns its value, or -1 if it wasn't there.
  int64_t remove(uint64_t hash, int64_t key) {
    Segment* segment = at(entry(hash));
    Slot* slots = segment->slots();
    uint64_t mask = segment->mask(), hole = first(hash, mask);
    while (slots[hole].value >= 0 && slots[hole].key != key) hole = (hole + 1) & mask;
    int64_t value = slots[hole].value;
    if (value < 0) return -1;
    for (uint64_t next = (hole + 1) & mask; slots[next].value >= 0; next = (next + 1) & mask) {
      uint64_t home = first(mix(slots[next].key), mask);
      if (((next - home) & mask) >= ((next - hole) & mask)) {
        slots[hole] = slots[next];
        hole = next;
      }
    }
    slots[hole].value = -1;
    --segment->count;
    --count_;
    return value;
  }

  // Calls visit(key, value, hash) for every key whose hash lies in [low, high], segment by segment.
  template <class Visit>
  void walk(uint64_t low, uint64_t high, Visit visit) {
    uint64_t first = (low >> 1) >> (63 - depth_), last = (high >> 1) >> (63 - depth_);
    for (uint64_t place = first; place <= last;) {
      Segment* segment = at(directory_[place]);
      for (uint64_t slot = 0; slot <= segment->mask(); ++slot) {
        const Slot& held = segment->slots()[slot];
        if (held.value < 0) continue;
        uint64_t hash = mix(held.key);
        if (hash >= low && hash <= high) visit(held.key, held.value, hash);
      }
      uint64_t span = uint64_t{1} << (depth_ - segment->depth);
      place = (place / span + 1) * span;
    }
  }

 private:
  static constexpr int kLeastLog2 = 6, kSplitLog2 = 12;
  static constexpr uint64_t kNone = ~uint64_t{0};

  Segment* at(uint64_t entry) const {
    return reinterpret_cast<Segment*>(slots_.base + (entry & ~uint64_t{63}));
  }
  uint64_t entry(uint64_t hash) const { return directory_[(hash >> 1) >> (63 - depth_)]; }
  // Segments fill up alike, so each has a limit of its own between 75 and 84 %: their splits don't come all at once.
  static bool full(const Segment* segment, uint64_t hash) {
    uint64_t slots = segment->mask() + 1;
    uint64_t prefix = segment->depth ? hash >> (64 - segment->depth) : 0;
    return segment->count >= slots / 4 * 3 + slots * (mix(prefix) & 15) / 160;
  }

  static void put(Segment* segment, uint64_t hash, int64_t key, int64_t value) {
    uint64_t mask = segment->mask(), place = first(hash, mask);
    while (segment->slots()[place].value >= 0) place = (place + 1) & mask;
    segment->slots()[place] = {key, value};
    ++segment->count;
  }

  // An empty segment: its place | log2 of its slots, or kNone without memory.
  uint64_t make(int log2, int depth) {
    size_t bytes = sizeof(Segment) + (sizeof(Slot) << log2);
    uint64_t place = free_[log2];
    if (place != kNone) {
      memcpy(&free_[log2], slots_.base + place, sizeof place);
    } else {
      if (!slots_.ensure(used_ + bytes)) return kNone;
      place = used_;
      used_ += bytes;
    }
    Segment* segment = at(place);
    segment->count = 0;
    segment->depth = static_cast<uint8_t>(depth);
    segment->log2 = static_cast<uint8_t>(log2);
    for (uint64_t slot = 0; slot <= segment->mask(); ++slot) segment->slots()[slot].value = -1;
    return place | static_cast<uint64_t>(log2);
  }

  void give_back(uint64_t entry) {
    uint64_t place = entry & ~uint64_t{63};
    memcpy(slots_.base + place, &free_[entry & 63], sizeof place);
    free_[entry & 63] = place;
  }

  static int log2_for(uint64_t count) {
    int log2 = kLeastLog2;
    while ((uint64_t{1} << log2) < 2 * count) ++log2;
    return log2;
  }

  // Makes room where `hash` goes: a larger segment, or two.
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
    deal_one_by_one(at(old), at(fresh), at(fresh), 0);
    point(hash, at(old)->depth, fresh);
    give_back(old);
    return true;
  }

  bool split_segment(uint64_t hash, uint64_t old) {
    int depth = at(old)->depth;
    uint64_t bit = uint64_t{1} << (63 - depth), ones = 0;
    for (uint64_t slot = 0; slot <= at(old)->mask(); ++slot) {
      const Slot& held = at(old)->slots()[slot];
      ones += held.value >= 0 && (mix(held.key) & bit);
    }
    uint64_t low = make(log2_for(at(old)->count - ones), depth + 1);
    if (low == kNone) return false;
    uint64_t high = make(log2_for(ones), depth + 1);
    if (high == kNone) return give_back(low), false;
    bool usual = (old & 63) == kSplitLog2 && (low & 63) <= kSplitLog2 && (high & 63) <= kSplitLog2;
    if (usual) deal(at(old), at(low), at(high), 63 - depth);
    else deal_one_by_one(at(old), at(low), at(high), bit);
    point(hash & ~bit, depth + 1, low);
    point(hash | bit, depth + 1, high);
    give_back(old);
    return true;
  }

  static void deal_one_by_one(Segment* from, Segment* low, Segment* high, uint64_t bit) {
    for (uint64_t slot = 0; slot <= from->mask(); ++slot) {
      const Slot& held = from->slots()[slot];
      if (held.value < 0) continue;
      uint64_t its = mix(held.key);
      put(its & bit ? high : low, its, held.key, held.value);
    }
  }

  // The same with a count for each line, not a search that mispredicts at every key; few find their line full.
  static void deal(Segment* from, Segment* low, Segment* high, int bit) {
    constexpr uint64_t kLines = uint64_t{1} << (kSplitLog2 - 2);
    uint8_t held[2][kLines];
    uint16_t late[4 * kLines];
    memset(held, 0, sizeof held);
    Segment* const half[2] = {low, high};
    uint32_t lates = 0;
    for (uint64_t slot = 0; slot < 4 * kLines; ++slot) {
      const Slot moved = from->slots()[slot];
      if (moved.value < 0) continue;
      uint64_t its = mix(moved.key), which = its >> bit & 1;
      uint64_t place = first(its, half[which]->mask());
      uint8_t& count = held[which][place / 4];
      late[lates] = static_cast<uint16_t>(slot);
      lates += count == 4;
      if (count == 4) continue;
      half[which]->slots()[place + count++] = moved;
      ++half[which]->count;
    }
    for (uint32_t i = 0; i < lates; ++i) {
      const Slot& moved = from->slots()[late[i]];
      put(half[mix(moved.key) >> bit & 1], mix(moved.key), moved.key, moved.value);
    }
  }

  // Lets every directory place that shares the first `depth` bits with `hash` name this segment.
  void point(uint64_t hash, int depth, uint64_t entry) {
    uint64_t span = uint64_t{1} << (depth_ - depth);
    uint64_t first = ((hash >> 1) >> (63 - depth_)) / span * span;
    for (uint64_t at = first; at < first + span; ++at) directory_[at] = entry;
  }

  Slab slots_;
  uint64_t* directory_ = nullptr;
  uint64_t free_[64];
  size_t used_ = 0, count_ = 0;
  int depth_ = 0;
};

}  // namespace nonet
