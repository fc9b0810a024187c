// The loops over rows: hash, gather, initial values, sum of duplicates and step. There is no include guard: core.cpp includes
// this file once for each instruction set, with TARGET and its namespace around it.
//
// The time of a lookup of 8,192 random rows is memory latency. All rows are found before any is copied, because index and rows in
// one pass compete for a core's outstanding lines and page table entries (rows of 64: 11 % at 0.3 GiB, 25 at 2.3). About 32 lines
// of rows are prefetched ahead (three times as many cost 5 % at a million rows and a quarter at eight), into L2 only: a core can
// have 16 outstanding lines to L1 and three times as many to L2 (20 % on cold rows).

#include "rules.h"

constexpr int kToL2 = 2, kPastCaches = 0;

#ifdef NONET_AVX512
typedef Lanes Wide;
#else
typedef Half Wide;
#endif
constexpr int kWide = sizeof(Wide);

TARGET static inline void copy_row(char* __restrict to, const char* __restrict from, int64_t bytes) {
  int64_t at = 0;
  for (; at + kWide <= bytes; at += kWide)
    *reinterpret_cast<Wide*>(to + at) = *reinterpret_cast<const Wide*>(from + at);
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

#ifdef NONET_AVX2
template <>
TARGET inline void widen<Fp16>(float* __restrict to, const char* __restrict from, int64_t width) {
  const Fp16* narrow = reinterpret_cast<const Fp16*>(from);
  int64_t i = 0;
  for (; i + 8 <= width; i += 8)
    _mm256_storeu_ps(to + i, _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(narrow + i))));
  if (width & 7)
    for (; i < width; ++i) to[i] = Fp16::wide(narrow[i]);
}

// NaNs take the scalar path: the processor keeps their payload, and every instruction set must store the same bits.
template <>
TARGET inline void narrow_row<Fp16>(char* __restrict to, const float* __restrict from, int64_t width) {
  Fp16* narrow = reinterpret_cast<Fp16*>(to);
  int64_t i = 0;
  for (; i + 8 <= width; i += 8) {
    const __m256 wide = _mm256_loadu_ps(from + i);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(narrow + i), _mm256_cvtps_ph(wide, _MM_FROUND_TO_NEAREST_INT));
    if (__builtin_expect(_mm256_movemask_ps(_mm256_cmp_ps(wide, wide, _CMP_UNORD_Q)), 0))
      for (int64_t lane = i; lane < i + 8; ++lane) narrow[lane] = Fp16::narrow(from[lane]);
  }
  if (width & 7)
    for (; i < width; ++i) narrow[i] = Fp16::narrow(from[i]);
}
#endif

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

// Includes the last byte: Adam's count of steps is there, and a step needs it first (a third of Adam's time on cold rows).
// Inlined, as all that follow: see prefetch_all.
INLINED void prefetch(const char* at, int64_t bytes) {
  int64_t most = bytes < 1024 ? bytes : 1024;
  for (int64_t line = 0; line < most; line += 64) __builtin_prefetch(at + line, 0, kToL2);
  __builtin_prefetch(at + bytes - 1, 0, kToL2);
}

// As `same` in lines.h, with the first four keys at once.
TARGET static inline uint32_t same_of_five(const RowLine& line, int64_t key) {
#ifdef NONET_AVX2
  const __m256i four = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(line.key));
  const __m256i equal = _mm256_cmpeq_epi64(four, _mm256_set1_epi64x(key));
  const uint32_t fifth = static_cast<uint32_t>(line.key[4] == key) << 4;
  return (static_cast<uint32_t>(_mm256_movemask_pd(_mm256_castsi256_pd(equal))) | fifth) & line.rest;
#else
  return same(line, key);
#endif
}

template <int kLines>
TARGET static inline void copy_lines(char* __restrict to, const char* __restrict from) {
  for (int at = 0; at < 64 * kLines; at += kWide)
    *reinterpret_cast<Wide*>(to + at) = *reinterpret_cast<const Wide*>(from + at);
}

// Prefetches a line that will be read: into L2, or non-temporally if it is read only `once`.
INLINED void ask_line(const void* line, bool once) {
  if (once) __builtin_prefetch(line, 0, kPastCaches);
  else __builtin_prefetch(line, 0, kToL2);
}

// Prefetches a row of kLines lines, or of `bytes` if kLines is 0.
template <int kLines>
INLINED void prefetch_lines(const char* row, int64_t bytes, bool once) {
  if (kLines == 0) return prefetch(row, bytes);
  for (int line = 0; line < kLines && line < 8; ++line) ask_line(row + 64 * line, once);
}

// Computes the hashes of some keys and prefetches the lines where their searches begin. In two loops: the fewer operations
// between two prefetches, the more of them overlap.
INLINED void ask(const RowIndex::View& index, const int64_t* __restrict keys, int64_t count, bool once, uint64_t* __restrict hash,
                 const RowLine** __restrict home) {
  for (int64_t i = 0; i < count; ++i) hash[i] = mix(static_cast<uint64_t>(keys[i]));
  for (int64_t i = 0; i < count; ++i) {
    home[i] = index.home(hash[i]);
    ask_line(home[i], once);
  }
}

// Positions of keys that may be in a later line, because theirs is full.
struct Late {
  static constexpr int64_t kMost = 16;
  int64_t place[kMost];
  int64_t count = 0;
};

// Finds them and returns the number of absent ones. Not inlined in the loop before, which needs every register.
TARGET static __attribute__((noinline)) int64_t find_late(const RowIndex::View& index, const int64_t* keys, Late& late,
                                                          const uint64_t* hash, int64_t* found) {
  int64_t absent = 0;
  for (int64_t i = 0; i < late.count; ++i) {
    const int64_t at = late.place[i];
    absent += (found[at] = index.find(hash[at], keys[at], 1)) < 0;
  }
  late.count = 0;
  return absent;
}

// Finds every key, its hash and its row's number or -1; returns the number of absent keys. `found` may be the memory of `hash`.
//
// Lines are prefetched in blocks, one block ahead: successive prefetches wait for their page tables together, whereas one between
// two comparisons overlaps with few others, and a mispredicted branch discards these (a fifth less time at 1, 8 and 100 M rows).
// The few keys outside their line are found a little later, when the next line has arrived.
TARGET static int64_t find(const RowIndex::View& index, const int64_t* keys, int64_t count, bool once, uint64_t* hash,
                           int64_t* found) {
  constexpr int64_t kBlock = 24;
  const RowLine* home[2][kBlock];
  Late late;
  int64_t absent = 0;
  const RowIndex::View table = index;
  const auto block = [count](int64_t from) { return count - from < kBlock ? count - from : kBlock; };
  ask(table, keys, block(0), once, hash, home[0]);
  for (int64_t from = 0, turn = 0; from < count; from += kBlock, turn ^= 1) {
    const int64_t next = from + kBlock;
    if (next < count) ask(table, keys + next, block(next), once, hash + next, home[turn ^ 1]);
    const RowLine* const* line = home[turn];
    const int64_t* its = keys + from;
    int64_t* to = found + from;
    for (int64_t left = block(from); left > 0; --left, ++line, ++its, ++to) {
      const uint32_t places = same_of_five(**line, *its);
      if (__builtin_expect(places, 1)) {
        *to = (*line)->value(__builtin_ctz(places));
      } else if (full(**line)) {
        __builtin_prefetch(*line + 1);
        late.place[late.count++] = to - found;
        if (late.count == Late::kMost) absent += find_late(table, keys, late, hash, found);
      } else {
        *to = -1;
        ++absent;
      }
    }
  }
  return late.count ? absent + find_late(table, keys, late, hash, found) : absent;
}

constexpr int64_t rows_ahead(int lines) { return lines <= 1 ? 24 : lines >= 8 ? 4 : 32 / lines; }

// Prefetches row number `at` and returns its address; for a negative number `fill` if rows have four-byte numbers, else null.
template <int kLines, int kBytes>
INLINED const char* ask_row(const Rows::View& rows, const float* fill, int64_t at, bool once) {
  const char* none = kBytes == 4 ? reinterpret_cast<const char*>(fill) : nullptr;
  const char* row = at < 0 ? none : rows.row(at);
  prefetch_lines<kLines>(row, rows.row_bytes, once);
  return row;
}

template <int kLines, int kBytes>
INLINED void put_row(Format format, const float* fill, const char* row, int64_t width, float* to) {
  if (kBytes == 4) copy_lines<kLines>(reinterpret_cast<char*>(to), row);
  else if (__builtin_expect(!row, 0)) memcpy(to, fill, 4 * width);
  else read_row(format, row, to, width);
}

// Copies the rows of these numbers, the default row for negative ones. Rows have kWidth numbers of kBytes; 0 means any.
template <int kWidth, int kBytes>
TARGET static void copy_rows(const Rows::View& rows, Format format, const float* fill, const int64_t* found,
                             int64_t count, int64_t any_width, bool once, float* out) {
  constexpr int kLines = kWidth * kBytes / 64;
  constexpr int64_t kAhead = rows_ahead(kLines);
  const int64_t width = kWidth ? kWidth : any_width, first = count < kAhead ? count : kAhead;
  const char* from[32];
  const Rows::View store = rows;
  int64_t i = 0;
  for (; i < first; ++i) from[i] = ask_row<kLines, kBytes>(store, fill, found[i], once);
  for (; i < count; ++i) {
    from[i & 31] = ask_row<kLines, kBytes>(store, fill, found[i], once);
    put_row<kLines, kBytes>(format, fill, from[(i - kAhead) & 31], width, out + (i - kAhead) * width);
  }
  for (i = count - first; i < count; ++i) put_row<kLines, kBytes>(format, fill, from[i & 31], width, out + i * width);
}

TARGET static void copy(const Rows::View& rows, Format format, const float* fill, const int64_t* found, int64_t count,
                        int64_t width, bool once, float* out) {
#define NONET_COPY(known)                                                               \
  if (format == kFp32) copy_rows<known, 4>(rows, format, fill, found, count, width, once, out); \
  else copy_rows<known, 2>(rows, format, fill, found, count, width, once, out);                 \
  return
  switch (width) {
    case 16: NONET_COPY(16);
    case 32: NONET_COPY(32);
    case 64: NONET_COPY(64);
    case 128: NONET_COPY(128);
    case 256: NONET_COPY(256);
    default: copy_rows<0, 0>(rows, format, fill, found, count, width, once, out);
  }
#undef NONET_COPY
}

// Computes a row's initial values: uniform in [-scale, scale), a function of table and key only.
TARGET static void first_values(int64_t key, uint64_t base, float scale, int64_t width, float* __restrict to) {
  uint64_t stream = mix(static_cast<uint64_t>(key) ^ base);
  for (int64_t d = 0; d < width; ++d) {
    uint64_t bits = mix(stream + static_cast<uint64_t>(d + 1) * kGamma) >> 40;
    float unit = static_cast<float>(static_cast<int32_t>(bits)) * 0x1p-23f - 1.0f;
    to[d] = unit * scale;
  }
}

// Prefetches what a step will need soon of a row that is a block of its own: 13 lines with Adam's state of 64 numbers. The first
// eight and the last are prefetched early, all of them into L1 two rows ahead: this saves 4 % of Adam's steps, 10 with uniform
// ids (and would cost 4 % if rows shared blocks).
INLINED void prefetch_alone(const Rows::View& rows, const Batch& batch, int64_t width, int64_t u, int64_t early) {
  constexpr int64_t kSoon = 2, kEarlyBytes = 512;
  if (u + early < batch.count) {
    const char* row = rows.row(batch.rows[u + early]);
    prefetch(row, rows.block_bytes < kEarlyBytes ? rows.block_bytes : kEarlyBytes);
    __builtin_prefetch(row + rows.block_bytes - 1, 0, kToL2);
  }
  if (u + kSoon < batch.count) {
    prefetch_all(rows.row(batch.rows[u + kSoon]), rows.block_bytes);
    prefetch_all(reinterpret_cast<const char*>(batch.grads + batch.head[u + kSoon] * width), 4 * width);
  }
}

// Applies step `number` to a batch's distinct rows. Widths known at compile time (kWidth, else 0) save a tenth of the time.
template <int kWidth>
TARGET static void step_batch(const Rows::View& rows, Format format, Rule rule, const Step& how, const Batch& batch,
                              int64_t any_width, int64_t number) {
  constexpr int64_t kAhead = 10;
  constexpr int kChain = 8;  // Positions of a row that are prefetched with it.
  const int64_t width = kWidth ? kWidth : any_width;
  float sum[kWidth ? kWidth : kMostWidth], wide[kWidth ? kWidth : kMostWidth];
  const Rows::View store = rows;
  const Step step = how;
  const auto [distinct, head, next, count, grads] = batch;
  for (int64_t u = 0; u < count; ++u) {
    if (store.alone()) prefetch_alone(store, batch, width, u, kAhead);
    if (u + kAhead < count) {
      if (!store.alone()) {
        prefetch(store.row(distinct[u + kAhead]), store.row_bytes);
        prefetch(store.tail(distinct[u + kAhead]), store.tail_bytes);
      }
      int32_t far = head[u + kAhead];
      for (int i = 0; i < kChain && far >= 0; ++i, far = next[far])
        prefetch(reinterpret_cast<const char*>(grads + far * width), 4 * width);
    }
    const float* grad = grads + head[u] * width;
    for (int64_t d = 0; d < width; ++d) sum[d] = 0.0f + grad[d];  // Starts from zero, as index_add_ does: -0 becomes 0.
    int32_t at = next[head[u]], ahead = at;
    for (int i = 1; i < kChain && ahead >= 0; ++i) ahead = next[ahead];
    for (; at >= 0; at = next[at]) {
      if (ahead >= 0) {
        prefetch(reinterpret_cast<const char*>(grads + ahead * width), 4 * width);
        ahead = next[ahead];
      }
      const float* more = grads + at * width;
      for (int64_t d = 0; d < width; ++d) sum[d] += more[d];
    }
    char *row = store.row(distinct[u]), *tail = store.tail(distinct[u]);
    float* state = store.state(distinct[u]);
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

TARGET static void step_rows(const Rows::View& rows, Format format, Rule rule, const Step& step, const Batch& batch,
                             int64_t width, int64_t number) {
#define NONET_STEP(known) step_batch<known>(rows, format, rule, step, batch, width, number)
  switch (width) {
    case 16: return NONET_STEP(16);
    case 32: return NONET_STEP(32);
    case 64: return NONET_STEP(64);
    case 128: return NONET_STEP(128);
    default: NONET_STEP(0);
  }
#undef NONET_STEP
}

static const Kernels kernels = {find, copy, first_values, step_rows, read_row, write_row};
