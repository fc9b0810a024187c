// Rows and what is kept with them, by number: blocks of 32 rows followed by the 32 tails of the same rows.
//
// A row and its optimizer state share a block, hence a page, and no bytes pad a row to a cache line: 16 floats
// with row-wise Adagrad take 80 bytes, not 128, and every row of a multiple of 16 floats starts a line.
// A tail is {last step, mark of the batch's dedup, [uses, last seen], optimizer state}.
#pragma once

#include <cstdint>

#include "slab.h"

namespace nonet {

struct Tail {
  int64_t step;   // the step that last changed the row
  uint32_t mark;  // its place among the batch's distinct rows, when that place names it back
  uint32_t uses;  // present only where a table evicts: steps in which it was looked up
  int64_t seen;   // likewise: the last such step
};
constexpr int kPlainTail = 12, kEvictTail = 24;  // bytes before the optimizer's floats

class Rows {
 public:
  void shape(int64_t row_bytes, int64_t tail_bytes) {
    row_bytes_ = row_bytes;
    tail_bytes_ = static_cast<int64_t>(round_up(tail_bytes, 8));
    block_bytes_ = static_cast<int64_t>(round_up(kBlock * (row_bytes_ + tail_bytes_), 64));
  }

  struct View {
    char* base;
    int64_t row_bytes, tail_bytes, block_bytes;
    char* row(int64_t at) const { return base + (at >> 5) * block_bytes + (at & 31) * row_bytes; }
    char* tail(int64_t at) const {
      return base + (at >> 5) * block_bytes + kBlock * row_bytes + (at & 31) * tail_bytes;
    }
  };
  View view() const { return {slab_.base, row_bytes_, tail_bytes_, block_bytes_}; }

  int64_t size() const { return live_; }
  int64_t row_bytes() const { return row_bytes_; }
  size_t bytes() const { return (next_ + kBlock - 1) / kBlock * block_bytes_ + spare_.capacity() * 8; }

  // A row to write to, one that was given back if there is any; -1 without memory.
  int64_t take() {
    if (spares_) return ++live_, spare_[--spares_];
    if (!slab_.ensure((next_ / kBlock + 1) * block_bytes_)) return -1;
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
  static constexpr int64_t kBlock = 32;
  Slab slab_;
  Buffer<int64_t> spare_;
  size_t spares_ = 0;
  int64_t next_ = 0, live_ = 0, row_bytes_ = 0, tail_bytes_ = 0, block_bytes_ = 0;
};

}  // namespace nonet
