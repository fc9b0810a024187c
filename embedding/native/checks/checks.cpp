// Checks of the core for sanitizers: random calls of the C ABI are compared with std::unordered_map.

#include <pthread.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <unordered_map>
#include <vector>

#include "../table.h"

extern "C" {
void* nonet_table_new(const nonet::Config*, const char*);
void nonet_table_free(void*);
int32_t nonet_table_clear(void*);
int64_t nonet_table_look(void*, const int64_t*, int64_t, float*);
int64_t nonet_table_lookup(void*, const int64_t*, int64_t, float*, int64_t);
int64_t nonet_table_apply(void*, const int64_t*, int64_t, const float*, int64_t, int64_t, double);
int64_t nonet_table_forget(void*, const int64_t*, int64_t);
int64_t nonet_table_upsert(void*, const int64_t*, int64_t, const float*, const float*, const int64_t*, const int64_t*,
                           const int64_t*);
int64_t nonet_table_choose(void*, uint64_t, uint64_t, int64_t, nonet::Chosen**);
void nonet_table_read(void*, const nonet::Chosen*, int64_t, float*, float*, int64_t*, int64_t*, int64_t*);
void nonet_chosen_free(nonet::Chosen*);
void nonet_table_take_evicted(void*, int64_t*);
int64_t nonet_table_take(void*, const int64_t*, int64_t, char*, int64_t);
int64_t nonet_table_enter(void*, const int64_t*, int64_t, const char*);
void* nonet_kept_new(int64_t, int64_t, int64_t);
void nonet_kept_free(void*);
void nonet_kept_clear(void*);
int64_t nonet_kept_count(void*);
int64_t nonet_keep(const void*, const int64_t*, int64_t);
int32_t nonet_watch(void*);
void nonet_unwatch(void*, void*);
int64_t nonet_piece(const void*, uint64_t, uint64_t, int64_t, const void*, int64_t);
int64_t nonet_board_bytes(int64_t);
void nonet_post(const void*, uint64_t, int64_t, const int64_t*, int64_t, int64_t);
void nonet_tell(const void*, uint64_t, int64_t);
int64_t nonet_await(const void*, uint64_t, int64_t*, int64_t*, int64_t*);
int64_t nonet_gather(const void*, uint64_t, const char* const*, const int64_t*, const int64_t*, int64_t, int64_t, char*);
}

#define CHECK(truth)                                                     \
  do {                                                                   \
    if (!(truth)) {                                                      \
      fprintf(stderr, "%s:%d: %s is false\n", __FILE__, __LINE__, #truth); \
      exit(1);                                                           \
    }                                                                    \
  } while (0)

static uint64_t state = 7;
static uint64_t draw() { return nonet::mix(state++); }

// Returns the key that has this hash.
static int64_t unmixed(uint64_t hash) {
  hash = (hash ^ (hash >> 31) ^ (hash >> 62)) * 0x319642B2D24D8EC3ull;
  hash = (hash ^ (hash >> 27) ^ (hash >> 54)) * 0x96DE1B173F119089ull;
  return static_cast<int64_t>((hash ^ (hash >> 30) ^ (hash >> 60)) - nonet::kGamma);
}

static int64_t counters[nonet::kCounters];

static nonet::Config config(int64_t width, nonet::Format format, nonet::Rule rule, int64_t state_width) {
  nonet::Config made{};
  made.width = width;
  made.state_width = state_width;
  made.format = format;
  made.rule = rule;
  made.eps = 1e-8f;
  made.scale = 0.02f;
  made.policy.admit_count = 1;
  made.policy.admit_threshold = 1 << 24;
  made.counters = counters;
  return made;
}

// Inserts, changes and removes keys, most of which share few home lines or few segments, with values up to the maximum.
template <class Line>
static void index_against_a_map() {
  nonet::Index<Line> index;
  CHECK(index.clear());
  std::unordered_map<int64_t, int64_t> oracle;
  std::vector<int64_t> keys;
  for (int64_t i = 0; i < 20000; ++i) {
    uint64_t hash = draw();
    if (i % 4 == 1) hash &= ~uint64_t{1020};                         // Four home lines of a segment of 1,024 lines.
    if (i % 4 == 2) hash = (hash & 0xFFFFFF) | uint64_t{0xAB} << 56;  // One segment.
    keys.push_back(unmixed(hash));
  }
  for (int turn = 0; turn < 120000; ++turn) {
    // Phases in which the index grows alternate with phases in which it shrinks.
    const int64_t key = keys[draw() % keys.size()];
    const uint64_t hash = nonet::mix(static_cast<uint64_t>(key));
    const int64_t value = Line::kMostValue - static_cast<int64_t>(draw() % 2 * (draw() % 100000));
    const bool there = oracle.count(key);
    CHECK(index.find(hash, key) == (there ? oracle[key] : -1));
    if (!there && draw() % 4 < (turn / 20000 % 2 ? 1 : 3)) {
      CHECK(index.insert(hash, key, value));
      oracle[key] = value;
    } else if (there && draw() % 2) {
      index.assign(hash, key, value);
      oracle[key] = value;
    } else {
      CHECK(index.remove(hash, key) == (there ? oracle[key] : -1));
      oracle.erase(key);
    }
    CHECK(index.size() == oracle.size());
  }
  for (auto& held : oracle) CHECK(index.find(nonet::mix(static_cast<uint64_t>(held.first)), held.first) == held.second);
  size_t walked = 0;
  index.walk(0, ~uint64_t{0}, [&](int64_t key, int64_t value, uint64_t) { walked += oracle.at(key) == value; });
  CHECK(walked == oracle.size());
  if constexpr (Line::kMostValue < INT64_MAX) CHECK(!index.insert(0, unmixed(0), Line::kMostValue + 1));
}

// SGD with rate 1 on rows that start at 0: a row equals minus the number of its gradients of ones.
static void against_a_map(const char* isa, int64_t width, nonet::Format format) {
  nonet::Config made = config(width, format, /*rule: sgd*/ 0, 0);
  made.scale = 0;
  void* table = nonet_table_new(&made, isa);
  CHECK(table);
  std::unordered_map<int64_t, int> oracle;
  const int64_t odd[] = {0, -1, INT64_MIN, INT64_MAX};
  for (int64_t step = 1; step <= 40; ++step) {
    int64_t count = draw() % 700;
    std::vector<int64_t> keys(count);
    for (int64_t& key : keys) key = draw() % 50 ? static_cast<int64_t>(draw() % 9000) << (draw() % 3 * 20) : odd[draw() % 4];
    std::vector<float> rows(count * width + 1), ones(count * width + 1, 1.0f);
    CHECK(nonet_table_lookup(table, keys.data(), count, rows.data(), step) == 0);
    for (int64_t i = 0; i < count; ++i) CHECK(rows[i * width + width - 1] == -float(oracle[keys[i]]));
    CHECK(nonet_table_apply(table, keys.data(), count, ones.data(), step - 1, step, 1.0) == 0);
    for (int64_t key : keys) ++oracle[key];
    std::vector<int64_t> gone;
    for (auto& held : oracle)
      if (draw() % 3 == 0) gone.push_back(held.first);
    CHECK(nonet_table_forget(table, gone.data(), gone.size()) == int64_t(gone.size()));
    for (int64_t key : gone) oracle.erase(key);
    CHECK(counters[nonet::kRows] == int64_t(oracle.size()));
  }
  nonet::Chosen* chosen = nullptr;
  int64_t count = nonet_table_choose(table, 0, ~uint64_t{0}, -1, &chosen);
  CHECK(count == int64_t(oracle.size()));
  std::vector<float> rows(count * width + 1);
  std::vector<int64_t> steps(count + 1);
  nonet_table_read(table, chosen, count, rows.data(), rows.data(), steps.data(), nullptr, nullptr);
  for (int64_t i = 0; i < count; ++i) CHECK(rows[i * width] == -float(oracle[chosen[i].key]));
  nonet_chosen_free(chosen);
  CHECK(nonet_table_clear(table) == 0 && counters[nonet::kRows] == 0);
  nonet_table_free(table);
}

// Rows that are packed to bytes in a buffer of exactly their size are the same in the other table.
static void carried(const nonet::Config* made, const char* isa, void* table, const std::vector<int64_t>& keys) {
  const int64_t count = keys.size(), record = 4 * (made->width + made->state_width) + 16;
  char *there = static_cast<char*>(malloc(count * record)), *back = static_cast<char*>(malloc(count * record));
  void* other = nonet_table_new(made, isa);
  CHECK(nonet_table_take(table, keys.data(), count, there, 4) == 0);
  CHECK(nonet_table_enter(other, keys.data(), count, there) == 3);
  CHECK(nonet_table_take(other, keys.data(), count, back, 4) == 0);
  CHECK(!memcmp(there, back, count * record));
  nonet_table_free(other);
  free(there);
  free(back);
}

static void every_rule(const char* isa, int64_t width, nonet::Format format) {
  const int64_t states[] = {0, width, 1, 2 * width + 1, 2 * width};
  for (int rule = 0; rule < 5; ++rule) {
    nonet::Config made = config(width, format, static_cast<nonet::Rule>(rule), states[rule]);
    made.clip = 1.0f;
    made.weight_decay = 0.1;
    void* table = nonet_table_new(&made, isa);
    std::vector<int64_t> keys(300);
    std::vector<float> rows(300 * width), grads(300 * width);
    for (int64_t step = 1; step <= 3; ++step) {
      for (int64_t& key : keys) key = draw() % 90;
      for (float& grad : grads) grad = float(int64_t(draw() % 200) - 100) / 50;
      CHECK(nonet_table_lookup(table, keys.data(), 300, rows.data(), step) == 0);
      CHECK(nonet_table_apply(table, keys.data(), 300, grads.data(), step - 1, step, 0.1) == 0);
    }
    CHECK(nonet_table_look(table, keys.data(), 300, rows.data()) == 0);
    for (float number : rows) CHECK(std::isfinite(number));
    carried(&made, isa, table, keys);
    nonet_table_free(table);
  }
}

static void admission_and_eviction(const char* isa) {
  for (int kind = nonet::kLru; kind <= nonet::kScore; ++kind) {
    nonet::Config made = config(5, nonet::kFp32, /*rule: rowwise_adagrad*/ 2, 1);
    made.policy = {kind, 2, (1 << 24) / 2, 9, 3000, 1};
    void* table = nonet_table_new(&made, isa);
    std::vector<int64_t> keys(900);
    std::vector<float> rows(900 * 5), grads(900 * 5, 0.5f);
    int64_t evicted = 0;
    for (int64_t step = 1; step <= 60; ++step) {
      for (int64_t& key : keys) key = draw() % 20000;
      CHECK(nonet_table_lookup(table, keys.data(), 900, rows.data(), step) >= 0);
      CHECK(nonet_table_apply(table, keys.data(), 900, grads.data(), step - 1, step, 0.1) >= 0);
      std::vector<int64_t> gone(counters[nonet::kEvicted] + 1);
      evicted += counters[nonet::kEvicted];
      nonet_table_take_evicted(table, gone.data());
      CHECK(counters[nonet::kRows] <= 3000 && counters[nonet::kEvicted] == 0);
    }
    CHECK(evicted > 500 && counters[nonet::kRefused] > 500);
    nonet_table_free(table);
  }
}

static void* read_on(void* table) {
  std::vector<int64_t> keys(5000);
  std::vector<float> rows(5000 * 8);
  for (int64_t i = 0; i < 5000; ++i) keys[i] = i;
  for (int turn = 0; turn < 60; ++turn) nonet_table_look(table, keys.data(), 5000, rows.data());
  return nullptr;
}

static void readers_beside_a_writer(const char* isa) {
  nonet::Config made = config(8, nonet::kFp32, /*rule: adagrad*/ 1, 8);
  void* table = nonet_table_new(&made, isa);
  pthread_t readers[2];
  for (pthread_t& reader : readers) pthread_create(&reader, nullptr, read_on, table);
  std::vector<int64_t> keys(500);
  std::vector<float> rows(500 * 8, 1.0f);
  for (int64_t step = 1; step <= 80; ++step) {
    for (int64_t i = 0; i < 500; ++i) keys[i] = step * 400 + i;
    nonet_table_lookup(table, keys.data(), 500, rows.data(), step);
    nonet_table_apply(table, keys.data(), 500, rows.data(), step - 1, step, 0.1);
    nonet_table_forget(table, keys.data(), 200);
  }
  for (pthread_t& reader : readers) pthread_join(reader, nullptr);
  nonet_table_free(table);
}

struct Version {  // as in pieces.cpp
  void *table, *kept;
  int64_t at;
  const int64_t* born;
  int64_t born_count, moved;
  const uint8_t* given;
  int64_t broken;
};

struct Columns {  // as in pieces.cpp
  int64_t* key;
  float *row, *state;
  int64_t *step, *seen, *uses;
};

// A version of a table that evicts, read in two halves during steps, equals the table at that step; twice in the same memory.
static void a_version_while_rows_go(const char* isa) {
  constexpr int64_t kWidth = 5, kKeys = 600, kBatch = 200;
  nonet::Config made = config(kWidth, nonet::kFp32, /*rule: adagrad*/ 1, kWidth);
  made.policy.evict = nonet::kLru;
  made.policy.budget_rows = 300;
  made.policy.ttl_steps = 9;
  void *table = nonet_table_new(&made, isa), *kept = nonet_kept_new(kWidth, kWidth, kKeys);
  std::vector<uint8_t> given(1 << 16);
  Version version{};
  int64_t step = 0;
  auto train = [&](bool versioned) {
    std::vector<int64_t> keys(kBatch), evicted(kKeys);
    std::vector<float> rows(kBatch * kWidth);
    for (int64_t& key : keys) key = static_cast<int64_t>(draw() % kKeys) - 300;
    nonet_table_lookup(table, keys.data(), kBatch, rows.data(), step + 1);
    if (versioned) CHECK(nonet_keep(&version, keys.data(), kBatch) >= 0);
    CHECK(nonet_table_apply(table, keys.data(), kBatch, rows.data(), step, step + 1, 0.1) >= 0);
    ++step;
    nonet_table_take_evicted(table, evicted.data());
  };
  auto read = [&](uint64_t low, uint64_t high, std::vector<int64_t>& key, std::vector<float>& row) {
    std::vector<float> state(kKeys * kWidth);
    std::vector<int64_t> changed(kKeys), seen(kKeys), uses(kKeys);
    size_t before = key.size();
    key.resize(before + kKeys), row.resize((before + kKeys) * kWidth);
    Columns out{key.data() + before, row.data() + before * kWidth, state.data(), changed.data(), seen.data(), uses.data()};
    int64_t count = nonet_piece(&version, low, high, INT64_MIN, &out, kKeys);
    CHECK(count >= 0);
    key.resize(before + count), row.resize((before + count) * kWidth);
  };
  for (int turn = 0; turn < 2; ++turn) {
    for (int i = 0; i < 8; ++i) train(false);
    std::fill(given.begin(), given.end(), 0);
    version = Version{table, kept, step, nullptr, 0, 0, given.data(), 0};
    std::vector<int64_t> was, is;
    std::vector<float> rows_were, rows_are;
    read(0, ~uint64_t{0}, was, rows_were);
    CHECK(static_cast<int64_t>(was.size()) == counters[nonet::kRows]);
    CHECK(nonet_watch(&version));
    std::vector<int64_t> born;  // Keys that may get rows in the first step.
    for (int64_t key = -300; key < kKeys - 300; ++key)
      if (std::find(was.begin(), was.end(), key) == was.end()) born.push_back(key);
    version.born = born.data(), version.born_count = static_cast<int64_t>(born.size());
    constexpr uint64_t kHalf = uint64_t{1} << 63;
    for (int half = 0; half < 2; ++half) {
      for (int i = 0; i < 6; ++i) train(true);
      read(half * kHalf, half ? ~uint64_t{0} : kHalf - 1, is, rows_are);
      std::fill_n(given.begin() + (half << 15), 1 << 15, 1);
    }
    CHECK(was == is && rows_were == rows_are);
    CHECK(nonet_kept_count(kept) > 50);
    nonet_unwatch(table, &version);
    nonet_kept_clear(kept);
    CHECK(nonet_kept_count(kept) == 0);
  }
  nonet_kept_free(kept);
  nonet_table_free(table);
}

struct Ranks {  // as in exchange.cpp
  int64_t rank, world;
  void* const* boards;
  const int32_t* sockets;
  int64_t timeout_ns;
};

constexpr int64_t kRows = 400;
static int64_t halves[2][2][kRows];  // What each rank sends, by rank and half.

// Two ranks in two threads: rows are announced, reported one by one, and gathered meanwhile, in successive exchanges.
struct Exchanging {
  Ranks ranks;
  bool dies;
};
static void* exchange(void* of) {
  const Exchanging& self = *static_cast<Exchanging*>(of);
  const int64_t rank = self.ranks.rank, other = 1 - rank, none = 0;
  int64_t at[2], came[2], size[2], place[kRows], out[kRows];
  for (int64_t i = 0; i < kRows; ++i) place[i] = (i * 7) % kRows;
  for (uint64_t number = 1; number <= 2000; ++number) {
    int64_t* sent = halves[rank][number & 1];
    const int64_t counts[2] = {rank ? 8 * kRows : 0, rank ? 0 : 8 * kRows};
    nonet_post(&self.ranks, number, (number & 1) * 8 * kRows, counts, sizeof(halves[0]), 0);
    for (int64_t i = 0; i < kRows; ++i) {
      if (self.dies && number == 2000 && i == kRows / 2) {
        close(self.ranks.sockets[other]);
        return nullptr;
      }
      sent[i] = static_cast<int64_t>(number) * 1000 + i + rank;
      if (i % 50 == 49) nonet_tell(&self.ranks, number, 8 * (i + 1));
    }
    CHECK(nonet_await(&self.ranks, number, at, came, size) == none);
    CHECK(came[other] == 8 * kRows && size[other] == static_cast<int64_t>(sizeof(halves[0])));
    const char* rows[2] = {nullptr, nullptr};
    rows[other] = reinterpret_cast<char*>(halves[other]) + at[other];
    const int64_t starts[3] = {0, rank ? kRows : 0, kRows};
    const int64_t code = nonet_gather(&self.ranks, number, rows, starts, place, kRows, 8, reinterpret_cast<char*>(out));
    if (number == 2000 && !self.dies) {
      CHECK(code == -1 - 2 - other);  // The other rank is gone.
      return nullptr;
    }
    CHECK(code == none);
    for (int64_t i = 0; i < kRows; ++i) CHECK(out[i] == static_cast<int64_t>(number) * 1000 + place[i] + other);
  }
  return nullptr;
}

static void exchanges_between_ranks() {
  void* boards[2];
  for (void*& board : boards) {
    board = aligned_alloc(64, nonet_board_bytes(2));
    memset(board, 0, nonet_board_bytes(2));
  }
  int ends[2];
  CHECK(!socketpair(AF_UNIX, SOCK_SEQPACKET, 0, ends));
  const int32_t sockets[2][2] = {{-1, ends[0]}, {ends[1], -1}};
  Exchanging both[2];
  pthread_t threads[2];
  for (int64_t rank = 0; rank < 2; ++rank) {
    both[rank] = {{rank, 2, boards, sockets[rank], 10'000'000'000}, rank == 1};
    CHECK(!pthread_create(&threads[rank], nullptr, exchange, &both[rank]));
  }
  for (pthread_t thread : threads) pthread_join(thread, nullptr);
  close(ends[0]);
  for (void* board : boards) free(board);
}

int main(int count, char** words) {
  const char* isa = count > 1 ? words[1] : nullptr;
  for (int64_t width : {1, 7, 16, 64, 100}) {
    for (nonet::Format format : {nonet::kFp32, nonet::kBf16, nonet::kFp16}) {
      against_a_map(isa, width, format);
      every_rule(isa, width, format);
    }
  }
  every_rule(isa, 4096, nonet::kFp16);
  index_against_a_map<nonet::RowLine>();
  index_against_a_map<nonet::WideLine>();
  admission_and_eviction(isa);
  readers_beside_a_writer(isa);
  a_version_while_rows_go(isa);
  exchanges_between_ranks();
  printf("checks passed (%s)\n", isa ? isa : "best");
}
