// Storage of rows by number: blocks of 32 rows followed by the 32 tails of the same rows, each {last step, mark of the batch's
// dedup, [uses, last seen]} and the optimizer's state.
//
// Rows are not padded to cache lines: 16 floats with row-wise Adagrad take 80 bytes, not 128, and every row of a multiple of 16
// floats starts a line. If the state is long (Adam's of 64 floats has 516 bytes), a block is one row, its state and its tail,
// mostly in one 4 KiB page: Adam's steps take 5 to 14 % less at 64 floats, 11 to 15 at 128, for 6 and 3 % more bytes. At 32
// floats it gains nothing.
#pragma once

#include <cstdint>

#include "slab.h"

namespace nonet {

// Prefetches every line of these bytes. Inlined, because GCC removes calls of functions that only prefetch.
__attribute__((always_inline)) static inline void prefetch_all(const char* at, int64_t bytes) {
  for (int64_t line = 0; line < bytes; line += 64) __builtin_prefetch(at + line);
}

struct Tail {
  int64_t step;   // The step that last changed the row.
  uint32_t mark;  // Its index among the batch's distinct rows, if the entry at that index refers to this row.
  uint32_t uses;  // Only in tables that evict: number of steps that looked it up.
  int64_t seen;   // Only in tables that evict: the last such step.
};
constexpr int kPlainTail = 12, kEvictTail = 24;  // Bytes before the optimizer's floats.

class Rows {
 public:
  struct View {
    char* base;
    int64_t row_bytes, tail_bytes, block_bytes, tails_at, state_at;
    int log2;  // Of the number of rows in a block.

    char* row(int64_t at) const { return block(at) + within(at) * row_bytes; }
    char* tail(int64_t at) const { return block(at) + tails_at + within(at) * tail_bytes; }
    float* state(int64_t at) const { return reinterpret_cast<float*>(tail(at) + state_at); }
    bool alone() const { return !log2; }  // A block is a row, its state and its tail, in this order.

   private:
    char* block(int64_t at) const { return base + (at >> log2) * block_bytes; }
    int64_t within(int64_t at) const { return at & ((int64_t{1} << log2) - 1); }
  };

  // Sets the sizes of a row, of its Tail (`head` bytes), and of the optimizer state.
  void shape(int64_t row_bytes, int64_t head, int64_t state_bytes) {
    shape_.row_bytes = row_bytes;
    if (state_bytes < kLongState) {
      shape_.log2 = 5, shape_.state_at = head;
      shape_.tail_bytes = up(head + state_bytes, 8), shape_.tails_at = row_bytes << 5;
    } else {
      const int64_t state = up(row_bytes, 4);
      shape_.log2 = 0, shape_.tail_bytes = up(head, 8), shape_.tails_at = up(state + state_bytes, 8);
      shape_.state_at = state - shape_.tails_at;
    }
    shape_.block_bytes = up(shape_.tails_at + (shape_.tail_bytes << shape_.log2), 64);
  }

  View view() const {
    View view = shape_;
    view.base = slab_.base;
    return view;
  }

  int64_t size() const { return live_; }
  size_t bytes() const { return blocks(next_) * shape_.block_bytes + spare_.capacity() * 8; }

  // Returns a row to write to, a freed one if there is any; -1 without memory.
  int64_t take() {
    if (spares_) return ++live_, spare_[--spares_];
    if (!slab_.ensure(blocks(next_ + 1) * shape_.block_bytes)) return -1;
    return ++live_, next_++;
  }

  bool can_give_back() { return spare_.ensure(spares_ + 1); }

  void give_back(int64_t at) {
    if (!can_give_back()) return;
    spare_[spares_++] = at;
    --live_;
  }

  void clear() {
    slab_.release();
    next_ = live_ = 0;
    spares_ = 0;
  }

 private:
  static constexpr int64_t kLongState = 512;
  static int64_t up(int64_t value, size_t step) { return static_cast<int64_t>(round_up(value, step)); }
  int64_t blocks(int64_t rows) const { return (rows + (int64_t{1} << shape_.log2) - 1) >> shape_.log2; }

  View shape_{};
  Slab slab_;
  Buffer<int64_t> spare_;
  size_t spares_ = 0;
  int64_t next_ = 0, live_ = 0;
};

}  // namespace nonet
