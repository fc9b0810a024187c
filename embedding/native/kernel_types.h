// What the kernels of every instruction set share: formats, rules, and the table of functions to choose from.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#include "half.h"
#include "hash.h"
#include "index.h"
#include "rows.h"

namespace nonet {

constexpr int64_t kMostWidth = 4096;

enum Format : int32_t { kFp32 = 0, kBf16 = 1, kFp16 = 2 };
enum Rule : int32_t { kSgd = 0, kAdagrad = 1, kRowwiseAdagrad = 2, kAdam = 3, kFtrl = 4 };

struct Step {
  float lr, decay, eps, clip, l1, l2;  // decay: 1 - lr * weight_decay, or 1
  double lr64;
};

typedef float Lanes __attribute__((vector_size(64), aligned(4), may_alias));

// beta^t by squaring: the same products in NumPy.
static inline double power(double beta, int64_t t) {
  double result = 1.0;
  for (; t; t >>= 1, beta *= beta)
    if (t & 1) result *= beta;
  return result;
}

struct Kernels {
  void (*hash_keys)(const int64_t*, int64_t, uint64_t*);
  int64_t (*gather)(const Index::View&, const Rows::View&, Format, float, const int64_t*, const uint64_t*, int64_t,
                    int64_t, int64_t*, float*);
  void (*first_values)(int64_t, uint64_t, float, int64_t, float*);
  void (*step_rows)(const Rows::View&, Format, Rule, const Step&, int64_t, const int64_t*, const int32_t*,
                    const int32_t*, int64_t, const float*, int64_t, int64_t);
  void (*read_row)(Format, const char*, float*, int64_t);
  void (*write_row)(Format, char*, const float*, int64_t);
};

}  // namespace nonet
