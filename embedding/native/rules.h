// What one optimizer step does to one row, in an order of float operations that tables/optimizers repeats to the bit.
//
// There is no fused multiply-add (built with -ffp-contract=off). Sums over a row's width have 16 lanes, element i in lane i mod
// 16, and the lanes are added as a tree. Included once for each instruction set.

// Shapes: w [D] row, s [S] state, g [D] summed gradient.

// Forces inlining, so that loops know widths that callers know at compile time, which saves 3 % of Adam.
#undef INLINED
#define INLINED TARGET static inline __attribute__((always_inline))

INLINED float square_sum(const float* g, int64_t width) {
  Half low = {}, high = {};
  int64_t at = 0;
  for (; at + 16 <= width; at += 16) {
    Half first = *reinterpret_cast<const Half*>(g + at), second = *reinterpret_cast<const Half*>(g + at + 8);
    low += first * first;
    high += second * second;
  }
  if (at < width) {
    float rest[16] = {};
    for (int64_t lane = 0; at + lane < width; ++lane) rest[lane] = g[at + lane];
    Half first = *reinterpret_cast<const Half*>(rest), second = *reinterpret_cast<const Half*>(rest + 8);
    low += first * first;
    high += second * second;
  }
  low += high;
  Quarter sum = Quarter{low[0], low[1], low[2], low[3]} + Quarter{low[4], low[5], low[6], low[7]};
  return (sum[0] + sum[2]) + (sum[1] + sum[3]);
}

INLINED void sgd(float* __restrict w, const float* __restrict g, int64_t width, const Step& p) {
  float lr = p.lr;
  for (int64_t i = 0; i < width; ++i) w[i] -= lr * g[i];
}

INLINED void adagrad(float* __restrict w, float* __restrict s, const float* __restrict g,
                     int64_t width, const Step& p) {
  float lr = p.lr, eps = p.eps;
  for (int64_t i = 0; i < width; ++i) {
    s[i] += g[i] * g[i];
    w[i] -= lr * g[i] / (__builtin_sqrtf(s[i]) + eps);
  }
}

INLINED void rowwise_adagrad(float* __restrict w, float* __restrict s, const float* __restrict g,
                             int64_t width, const Step& p) {
  s[0] += square_sum(g, width) / static_cast<float>(width);
  float rate = p.lr / (__builtin_sqrtf(s[0]) + p.eps);
  for (int64_t i = 0; i < width; ++i) w[i] -= rate * g[i];
}

INLINED void adam(float* __restrict w, float* __restrict s, const float* __restrict g, int64_t width,
                  const Step& p) {
  float *__restrict first = s, *__restrict second = s + width;
  float steps = s[2 * width] += 1.0f;
  Correction correction = corrections.at(static_cast<int64_t>(steps));
  float rate = static_cast<float>(p.lr64 / correction.first), scale = correction.second;
  const float one_beta1 = static_cast<float>(1.0 - 0.9), one_beta2 = static_cast<float>(1.0 - 0.999);
  float eps = p.eps;
  for (int64_t i = 0; i < width; ++i) {
    float m = first[i] + one_beta1 * (g[i] - first[i]);
    float v = second[i] + one_beta2 * (g[i] * g[i] - second[i]);
    first[i] = m;
    second[i] = v;
    w[i] -= rate * m / (__builtin_sqrtf(v) * scale + eps);
  }
}

// McMahan et al., KDD 2013; eps is their beta, which is added to the square root of n.
INLINED void ftrl(float* __restrict w, float* __restrict s, const float* __restrict g, int64_t width,
                  const Step& p) {
  float *__restrict z = s, *__restrict n = s + width;
  float lr = p.lr, eps = p.eps, l1 = p.l1, l2 = p.l2;
  for (int64_t i = 0; i < width; ++i) {
    float before = __builtin_sqrtf(n[i]);
    float sum = n[i] + g[i] * g[i];
    float after = __builtin_sqrtf(sum);
    float pull = z[i] + (g[i] - (after - before) / lr * w[i]);
    n[i] = sum;
    z[i] = pull;
    float size = __builtin_fabsf(pull) - l1;
    float moved = __builtin_copysignf(size, pull) / ((eps + after) / lr + l2);
    w[i] = size > 0.0f ? -moved : 0.0f;
  }
}

INLINED void step_row(Rule rule, float* w, float* s, float* g, int64_t width, const Step& p) {
  if (p.clip > 0.0f) {
    float norm = __builtin_sqrtf(square_sum(g, width));
    float factor = p.clip / norm;
    if (norm > p.clip)
      for (int64_t i = 0; i < width; ++i) g[i] *= factor;
  }
  if (p.decay != 1.0f)
    for (int64_t i = 0; i < width; ++i) w[i] *= p.decay;
  switch (rule) {
    case 0: return sgd(w, g, width, p);
    case 1: return adagrad(w, s, g, width, p);
    case 2: return rowwise_adagrad(w, s, g, width, p);
    case 3: return adam(w, s, g, width, p);
    case 4: return ftrl(w, s, g, width, p);
  }
}
