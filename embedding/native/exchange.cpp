// All-to-all exchanges between processes of one machine through shared memory: one call per exchange, without the GIL.
//
// Every rank has a mailbox in shared memory: a futex, and two message headers per sender, which locate the sender's bytes. A
// rank that has all headers of exchange n + 1 knows that all ranks have read those of n, so two headers per sender, used
// alternately, are enough. A header may be posted before its bytes: `ready` counts them, and `nonet_gather` copies rows as they
// become available. A waiting rank polls for 60 us, then sleeps on its futex; every 10 ms it checks whether the rank that it
// waits for has closed its socket.
#include <atomic>
#include <cstdint>
#include <cstring>
#ifdef __linux__
#include <linux/futex.h>
#include <poll.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>
#endif

#define NONET_API extern "C" __attribute__((visibility("default")))

namespace nonet {

struct alignas(64) Letter {
  std::atomic<uint64_t> number;  // Number of the exchange.
  std::atomic<int64_t> ready;    // Bytes that are available, of `count`.
  int64_t at, count;             // Their offset in the sender's memory, and their number.
  int64_t size;                  // Size of the sender's memory.
};

struct alignas(64) Board {
  std::atomic<uint32_t> bell, asleep;

  Letter& letter(int64_t world, uint64_t number, int64_t sender) {
    return reinterpret_cast<Letter*>(this + 1)[(number & 1) * world + sender];
  }
};

struct Ranks {  // the same fields as _Ranks in local_wire.py
  int64_t rank, world;
  Board* const* boards;    // [world], mailbox of each receiver.
  const int32_t* sockets;  // [world], which each rank closes when it ends.
  int64_t timeout_ns;

  Letter& from(int64_t sender, uint64_t number) const { return boards[rank]->letter(world, number, sender); }
  Letter& to(int64_t receiver, uint64_t number) const { return boards[receiver]->letter(world, number, rank); }
};

constexpr int64_t kLookNs = 60'000, kNapNs = 10'000'000;
constexpr int kLooks = 64;  // Polls between two readings of the clock.

#ifdef __linux__
static int64_t now_ns() {
  timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return now.tv_sec * 1'000'000'000LL + now.tv_nsec;
}

static void pause() {  // Not sched_yield, which can lose the core for milliseconds if other threads need it.
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  __asm__ __volatile__("yield");
#endif
}

static void ring(Board* board) {
  board->bell.fetch_add(1);
  if (board->asleep.load()) syscall(SYS_futex, &board->bell, FUTEX_WAKE, 1, nullptr, nullptr, 0);
}

static void nap(Board* board, uint32_t heard) {  // Sleeps until the futex differs from `heard`, or a timeout.
  timespec most{0, kNapNs};
  syscall(SYS_futex, &board->bell, FUTEX_WAIT, heard, &most, nullptr, 0);
}

static bool hung_up(int32_t socket) {
  pollfd asked{socket, 0, 0};
  return poll(&asked, 1, 0) > 0;
}

// Waits until `missing()` returns no rank (-1). Returns 0; -1 - rank if that rank is late; -1 - world - rank if it is gone.
template <class Missing>
static int64_t wait(const Ranks& ranks, const Missing& missing) {
  if (missing() < 0) return 0;
  Board* own = ranks.boards[ranks.rank];
  const int64_t began = now_ns();
  for (int64_t passed = 0; passed < kLookNs; passed = now_ns() - began)
    for (int look = 0; look < kLooks; ++look) {
      if (missing() < 0) return 0;
      pause();
    }
  for (;;) {
    const uint32_t heard = own->bell.load();
    own->asleep.store(1);
    const int64_t rank = missing();
    if (rank >= 0) nap(own, heard);
    own->asleep.store(0);
    if (rank < 0) return 0;
    if (missing() != rank) continue;
    if (hung_up(ranks.sockets[rank]) && missing() == rank) return -1 - ranks.world - rank;
    if (now_ns() - began > ranks.timeout_ns) return -1 - rank;
  }
}
#else
static void ring(Board*) {}
template <class Missing>
static int64_t wait(const Ranks&, const Missing&) { return -1; }
#endif

}  // namespace nonet

using namespace nonet;

NONET_API int64_t nonet_board_bytes(int64_t world) { return sizeof(Board) + 2 * world * sizeof(Letter); }

// Posts the headers of exchange `number` to all other ranks: count [world] bytes, one after the other from `start`, in memory of
// `size` bytes. With `ready` they are available already, else `nonet_tell` reports when they are.
NONET_API void nonet_post(const Ranks* ranks, uint64_t number, int64_t start, const int64_t* count, int64_t size, int64_t ready) {
  for (int64_t rank = 0; rank < ranks->world; start += count[rank++]) {
    if (rank == ranks->rank) continue;
    Letter& letter = ranks->to(rank, number);
    letter.at = start, letter.count = count[rank], letter.size = size;
    letter.ready.store(ready ? count[rank] : 0, std::memory_order_relaxed);
    letter.number.store(number, std::memory_order_release);
    ring(ranks->boards[rank]);
  }
}

// Reports that the first `bytes` that this rank sends in exchange `number` are available, in rank order without its own.
NONET_API void nonet_tell(const Ranks* ranks, uint64_t number, int64_t bytes) {
  int64_t start = 0;
  for (int64_t rank = 0; rank < ranks->world; ++rank) {
    if (rank == ranks->rank) continue;
    Letter& letter = ranks->to(rank, number);
    int64_t there = bytes - start;
    there = there < 0 ? 0 : there > letter.count ? letter.count : there;
    start += letter.count;
    if (there == letter.ready.load(std::memory_order_relaxed)) continue;
    letter.ready.store(there, std::memory_order_release);
    ring(ranks->boards[rank]);
  }
}

// Waits for all headers of exchange `number` and copies them to at, count and size [world]. Returns as `wait`.
NONET_API int64_t nonet_await(const Ranks* ranks, uint64_t number, int64_t* at, int64_t* count, int64_t* size) {
  int64_t next = 0;  // Ranks below it have posted.
  int64_t code = wait(*ranks, [&] {
    while (next < ranks->world &&
           (next == ranks->rank || ranks->from(next, number).number.load(std::memory_order_acquire) == number))
      ++next;
    return next < ranks->world ? next : -1;
  });
  for (int64_t rank = 0; rank < ranks->world && !code; ++rank) {
    if (rank == ranks->rank) continue;
    const Letter& letter = ranks->from(rank, number);
    at[rank] = letter.at, count[rank] = letter.count, size[rank] = letter.size;
  }
  return code;
}

// Gathers the rows of exchange `number` as they become available: out [n, row_bytes], where row i is number place[i] of the rows
// of all ranks one after the other, starts [world + 1]. rows [world] point to the first row of each rank; this rank's own rows
// are available. Returns as `wait`.
NONET_API int64_t nonet_gather(const Ranks* ranks, uint64_t number, const char* const* rows, const int64_t* starts,
                               const int64_t* place, int64_t n, int64_t row_bytes, char* out) {
  int64_t ready = 0, sender = 0;  // Rows of the last sender below this position are available.
  for (int64_t i = 0; i < n; ++i) {
    const int64_t wanted = place[i];
    if (wanted >= ready || wanted < starts[sender]) {
      sender = 0;
      while (wanted >= starts[sender + 1]) ++sender;
      if (sender == ranks->rank) {
        ready = starts[sender + 1];
      } else {
        const Letter& letter = ranks->from(sender, number);
        const int64_t needed = (wanted - starts[sender] + 1) * row_bytes;
        int64_t there = 0;
        const int64_t code = wait(*ranks, [&] {
          there = letter.ready.load(std::memory_order_acquire);
          return there < needed ? sender : -1;
        });
        if (code) return code;
        ready = starts[sender] + there / row_bytes;
      }
    }
    memcpy(out + i * row_bytes, rows[sender] + (wanted - starts[sender]) * row_bytes, row_bytes);
  }
  return 0;
}
