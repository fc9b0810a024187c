// Rows as bytes, for a trainer that steps them itself: a row's numbers, its optimizer state, its step, and whether it is absent.
//
// This takes one pass over the table, whereas columns and their bytes would take four. All numbers are float32 or int64, whatever
// the table stores. There is no padding, so a record's int64s may be unaligned.

#include "table.h"

#define NONET_API extern "C" __attribute__((visibility("default")))

namespace nonet {

// Returns the number of keys that have no row because they were not admitted.
int64_t Table::take(const int64_t* keys, int64_t count, char* out, int64_t step) {
  WriteLock lock(&lock_);
  int64_t refused = find_or_make(keys, count, nullptr, step);
  if (refused < 0) return refused;
  const int64_t width = 4 * config_.width, state = 4 * config_.state_width;
  for (int64_t i = 0; i < count; ++i, out += width + state + 16) {
    if (i + kRowAhead < count && found_[i + kRowAhead] >= 0) prefetch_row(found_[i + kRowAhead]);
    int64_t row = found_[i], absent = row < 0;
    if (absent) {
      memset(out, 0, width + state + 8);
    } else {
      kernels_->read_row(format(), rows_.view().row(row), reinterpret_cast<float*>(out), config_.width);
      memcpy(out + width, rows_.view().state(row), state);
      memcpy(out + width + state, &tail(row)->step, 8);
    }
    memcpy(out + width + state + 8, &absent, 8);
  }
  return refused;
}

// Returns the last step of the rows, 0 if there are none. Absent ones are skipped.
int64_t Table::enter(const int64_t* keys, int64_t count, const char* bytes) {
  WriteLock lock(&lock_);
  if (search(keys, count) < 0) return kNoMemory;
  const int64_t width = 4 * config_.width, state = 4 * config_.state_width;
  int64_t last = 0;
  for (int64_t i = 0; i < count; ++i, bytes += width + state + 16) {
    int64_t step, absent;
    memcpy(&step, bytes + width + state, 8);
    memcpy(&absent, bytes + width + state + 8, 8);
    if (absent) continue;
    int64_t row = row_for(keys, count, i);
    if (row < 0) return tally(), kNoMemory;
    write(row, reinterpret_cast<const float*>(bytes), reinterpret_cast<const float*>(bytes + width), step);
    if (step > last) last = step;
  }
  tally();
  return last;
}

}  // namespace nonet

NONET_API int64_t nonet_table_take(void* table, const int64_t* keys, int64_t count, char* out, int64_t step) {
  return static_cast<nonet::Table*>(table)->take(keys, count, out, step);
}

NONET_API int64_t nonet_table_enter(void* table, const int64_t* keys, int64_t count, const char* bytes) {
  return static_cast<nonet::Table*>(table)->enter(keys, count, bytes);
}
