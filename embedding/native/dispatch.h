// The kernels, compiled for several instruction sets in one library and chosen when it is loaded.
//
// -march=native is not used: a wheel runs on any machine of its architecture, and float results do not depend on the chosen
// set. On aarch64 the baseline has NEON and is the only set.
#pragma once

#include "kernel_types.h"

#if defined(__x86_64__)
#include <cpuid.h>
#include <immintrin.h>
#endif

namespace nonet {

namespace baseline {
#define TARGET
#include "kernels.h"
#undef TARGET
}  // namespace baseline

#if defined(__x86_64__)
#define NONET_AVX2  // and F16C: see Features
namespace avx2 {
#define TARGET __attribute__((target("avx2,f16c")))
#include "kernels.h"
#undef TARGET
}  // namespace avx2

namespace avx512 {
#if defined(__clang__)
#define TARGET __attribute__((target("avx512f,avx512dq,avx512bw,avx512vl,f16c")))
#else
#define TARGET __attribute__((target("avx512f,avx512dq,avx512bw,avx512vl,f16c,prefer-vector-width=512")))
#endif
#define NONET_AVX512
#include "kernels.h"
#undef NONET_AVX512
#undef TARGET
}  // namespace avx512
#endif

#if defined(__x86_64__)
// Read with cpuid and xgetbv, because __builtin_cpu_supports needs a runtime library.
struct Features {
  bool avx2 = false, avx512 = false;
  Features() {
    unsigned a, b, c, d;
    if (!__get_cpuid(1, &a, &b, &c, &d) || !(c & (1u << 27))) return;  // The system does not save wide registers.
    const bool halves = c & (1u << 29);  // F16C: every processor with AVX2 has it
    unsigned saved, unused;
    __asm__("xgetbv" : "=a"(saved), "=d"(unused) : "c"(0));
    if (!__get_cpuid_count(7, 0, &a, &b, &c, &d)) return;
    const unsigned wanted = (1u << 16) | (1u << 17) | (1u << 30) | (1u << 31);  // F, DQ, BW, VL
    avx2 = halves && (saved & 0x6) == 0x6 && (b & (1u << 5));
    avx512 = avx2 && (saved & 0xE6) == 0xE6 && (b & wanted) == wanted;
  }
};

static const Features has;
#endif

// Returns the set named "baseline", "avx2" or "avx512"; for any other name the best set of this machine.
static inline const Kernels* choose(const char* wanted) {
#if defined(__x86_64__)
  if (wanted && !strcmp(wanted, "baseline")) return &baseline::kernels;
  if (has.avx512 && !(wanted && !strcmp(wanted, "avx2"))) return &avx512::kernels;
  if (has.avx2) return &avx2::kernels;
#endif
  (void)wanted;
  return &baseline::kernels;
}

}  // namespace nonet
