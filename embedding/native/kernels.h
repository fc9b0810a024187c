// The loops that touch rows: hash, gather, first values, sum of duplicates and step. No include guard: core.cpp
// includes this once for each instruction set, with TARGET and its namespace around it.
//
// A gather of 8,192 random rows waits for memory only: slots are prefetched 24 keys ahead, rows 12.

#include "rules.h"

TARGET static void hash_keys(const int64_t* __restrict keys, int64_t count, uint64_t* __restrict hash) {
  for (int64_t i = 0; i < count; ++i) hash[i] = mix(static_cast<uint64_t>(keys[i]));
}

TARGET static inline void copy_row(char* __restrict to, const char* __restrict from, int64_t bytes) {
  int64_t at = 0;
  for (; at + 64 <= bytes; at += 64)
    *reinterpret_cast<Lanes*>(to + at) = *reinterpret_cast<const Lanes*>(from + at);
  for (; at + 16 <= bytes; at += 16) memcpy(to + at, from + at, 16);
  for (; at < bytes; at += 4) memcpy(to + at, from + at, 4);
}

template <class Value>
TARGET static inline void widen(float* __restrict to, const char* __restrict from, int64_t width) {
  const Value* narrow = reinterpret_cast<const Value*>(from);
  for (int64_t i = 0; i < width; ++i) to[i] = Value::wide(narrow[i]);
}

template <class Value>
TARGET static inline void narrow_row(char* __restrict to, const float* __restrict from, int64_t width) {
  Value* narrow = reinterpret_cast<Value*>(to);
  for (int64_t i = 0; i < width; ++i) narrow[i] = Value::narrow(from[i]);
}

TARGET static void read_row(Format format, const char* from, float* to, int64_t width) {
  if (format == kFp32) return copy_row(reinterpret_cast<char*>(to), from, 4 * width);
  if (format == kBf16) return widen<Bf16>(to, from, width);
  widen<Fp16>(to, from, width);
}

TARGET static void write_row(Format format, char* to, const float* from, int64_t width) {
  if (format == kFp32) return copy_row(to, reinterpret_cast<const char*>(from), 4 * width);
  if (format == kBf16) return narrow_row<Bf16>(to, from, width);
  narrow_row<Fp16>(to, from, width);
}

TARGET static inline void prefetch(const char* at, int64_t bytes) {
  if (bytes > 512) bytes = 512;
  for (int64_t line = 0; line < bytes; line += 64) __builtin_prefetch(at + line);
}

// Finds every key; its row's number or -1 goes to `found`, and its row, or the default, to `out` unless that is null.
// Returns how many keys are absent.
TARGET static int64_t gather(const Index::View& index, const Rows::View& rows, Format format, float fill,
                             const int64_t* keys, const uint64_t* hash, int64_t count, int64_t width,
                             int64_t* found, float* out) {
  constexpr int64_t kSlotAhead = 24, kRowAhead = 12;
  const Slot* home[32];
  uint64_t masks[32];
  int64_t absent = 0, row_bytes = rows.row_bytes;
  for (int64_t i = -kSlotAhead; i < count + kRowAhead; ++i) {
    int64_t far = i + kSlotAhead;
    if (far < count) {
      const Slot* slots = index.home(hash[far], &masks[far & 31]);
      home[far & 31] = slots;
      __builtin_prefetch(slots + (hash[far] & masks[far & 31]));
    }
    if (i >= 0 && i < count) {
      int64_t row = Index::probe(home[i & 31], masks[i & 31], hash[i], keys[i]);
      found[i] = row;
      absent += row < 0;
      if (row >= 0 && out) prefetch(rows.row(row), row_bytes);
    }
    int64_t near = i - kRowAhead;
    if (near >= 0 && out) {
      float* to = out + near * width;
      if (found[near] >= 0) {
        const char* from = rows.row(found[near]);
        if (format == kFp32) copy_row(reinterpret_cast<char*>(to), from, row_bytes);
        else read_row(format, from, to, width);
      } else {
        for (int64_t d = 0; d < width; ++d) to[d] = fill;
      }
    }
  }
  return absent;
}

// A row's first values: uniform in [-scale, scale), a function of table and key alone.
TARGET static void first_values(int64_t key, uint64_t base, float scale, int64_t width, float* __restrict to) {
  uint64_t stream = mix(static_cast<uint64_t>(key) ^ base);
  for (int64_t d = 0; d < width; ++d) {
    uint64_t bits = mix(stream + static_cast<uint64_t>(d + 1) * kGamma) >> 40;
    float unit = static_cast<float>(static_cast<int32_t>(bits)) * 0x1p-23f - 1.0f;
    to[d] = unit * scale;
  }
}

// One step on `count` distinct rows; row u's gradients are those at head[u], then next[...], until -1.
TARGET static void step_rows(const Rows::View& rows, Format format, Rule rule, const Step& step, int64_t number,
                             const int64_t* distinct, const int32_t* head, const int32_t* next, int64_t count,
                             const float* grads, int64_t width, int64_t state_at) {
  constexpr int64_t kAhead = 6;
  float sum[kMostWidth], wide[kMostWidth];
  int64_t row_bytes = rows.row_bytes, tail_bytes = rows.tail_bytes;
  for (int64_t u = 0; u < count; ++u) {
    if (u + kAhead < count) {
      prefetch(rows.row(distinct[u + kAhead]), row_bytes);
      prefetch(rows.tail(distinct[u + kAhead]), tail_bytes);
      prefetch(reinterpret_cast<const char*>(grads + head[u + kAhead] * width), 4 * width);
    }
    const float* grad = grads + head[u] * width;
    for (int64_t d = 0; d < width; ++d) sum[d] = 0.0f + grad[d];  // from zero, as index_add_ does: -0 becomes 0
    int32_t at = next[head[u]], ahead = at;
    for (int i = 0; i < 4 && ahead >= 0; ++i) ahead = next[ahead];
    for (; at >= 0; at = next[at]) {
      if (ahead >= 0) {
        prefetch(reinterpret_cast<const char*>(grads + ahead * width), 4 * width);
        ahead = next[ahead];
      }
      const float* more = grads + at * width;
      for (int64_t d = 0; d < width; ++d) sum[d] += more[d];
    }
    char *row = rows.row(distinct[u]), *tail = rows.tail(distinct[u]);
    float* state = reinterpret_cast<float*>(tail + state_at);
    reinterpret_cast<Tail*>(tail)->step = number;
    if (format == kFp32) {
      step_row(rule, reinterpret_cast<float*>(row), state, sum, width, step);
    } else {
      read_row(format, row, wide, width);
      step_row(rule, wide, state, sum, width, step);
      write_row(format, row, wide, width);
    }
  }
}

static const Kernels kernels = {hash_keys, gather, first_values, step_rows, read_row, write_row};
