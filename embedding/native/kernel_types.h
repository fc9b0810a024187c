// Types that the kernels of all instruction sets share: formats, rules, and the table of functions to choose from.
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
using Rule = int32_t;  // the number of an optimizer, see step_row in rules.h and tables/optimizers

struct Step {
  float lr, decay, eps, clip, l1, l2;  // decay: 1 - lr * weight_decay, or 1
  double lr64;
};

// The gradients [N, D] of a batch by distinct row: those of row u are at positions head[u], then next[...], until -1.
struct Batch {
  const int64_t* rows;
  const int32_t *head, *next;
  int64_t count;
  const float* grads;
};

// GCC spills a vector wider than the registers to memory (a third of a step's time), so the width depends on the set.
typedef float Lanes __attribute__((vector_size(64), aligned(4), may_alias));
typedef float Half __attribute__((vector_size(32), aligned(4), may_alias));
typedef float Quarter __attribute__((vector_size(16), aligned(4), may_alias));

// Computes beta^t by squaring, with the same products as in NumPy.
static inline double power(double beta, int64_t t) {
  double result = 1.0;
  for (; t; t >>= 1, beta *= beta)
    if (t & 1) result *= beta;
  return result;
}

// Adam's corrections of a row's t-th step. The first 4,096 are tabulated, because they take a third of a step's arithmetic.
struct Correction {
  double first;  // 1 - beta1^t
  float second;  // 1 / sqrt(1 - beta2^t)

  static Correction compute(int64_t t) {
    return {1.0 - power(0.9, t), static_cast<float>(1.0 / __builtin_sqrt(1.0 - power(0.999, t)))};
  }
};

struct Corrections {
  static constexpr int64_t kKnown = 4096;
  Correction known[kKnown];
  Corrections() {
    for (int64_t t = 0; t < kKnown; ++t) known[t] = Correction::compute(t ? t : 1);
  }
  Correction at(int64_t t) const { return t > 0 && t < kKnown ? known[t] : Correction::compute(t); }
};

static const Corrections corrections;

struct Kernels {
  int64_t (*find)(const RowIndex::View&, const int64_t*, int64_t, bool once, uint64_t*, int64_t*);
  void (*copy)(const Rows::View&, Format, const float*, const int64_t*, int64_t, int64_t, bool once, float*);
  void (*first_values)(int64_t, uint64_t, float, int64_t, float*);
  void (*step_rows)(const Rows::View&, Format, Rule, const Step&, const Batch&, int64_t, int64_t);
  void (*read_row)(Format, const char*, float*, int64_t);
  void (*write_row)(Format, char*, const float*, int64_t);
};

}  // namespace nonet
