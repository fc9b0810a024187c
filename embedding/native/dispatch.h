// The kernels, compiled for several instruction sets in one library and chosen when it is loaded.
//
// No -march=native: a wheel runs on any machine of its architecture, and the float results do not depend on the
// set that was chosen. On aarch64 the baseline has NEON and is the only one.
#pragma once

#include "kernel_types.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace nonet {

namespace baseline {
#define TARGET
#include "kernels.h"
#undef TARGET
}  // namespace baseline

#if defined(__x86_64__)
namespace avx2 {
#define TARGET __attribute__((target("avx2")))
#include "kernels.h"
#undef TARGET
}  // namespace avx2

namespace avx512 {
#define TARGET __attribute__((target("avx512f,avx512dq,avx512bw,avx512vl,prefer-vector-width=512")))
#define NONET_AVX512
#include "kernels.h"
#undef NONET_AVX512
#undef TARGET
}  // namespace avx512
#endif

// Named "baseline", "avx2" or "avx512"; anything else is the best this machine has.
static inline const Kernels* choose(const char* wanted) {
#if defined(__x86_64__)
  __builtin_cpu_init();
  bool has_avx2 = __builtin_cpu_supports("avx2");
  bool has_avx512 = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512dq") &&
                    __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl");
  if (wanted && !strcmp(wanted, "baseline")) return &baseline::kernels;
  if (has_avx512 && !(wanted && !strcmp(wanted, "avx2"))) return &avx512::kernels;
  if (has_avx2) return &avx2::kernels;
#endif
  (void)wanted;
  return &baseline::kernels;
}

}  // namespace nonet
