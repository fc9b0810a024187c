// bfloat16 and float16 to float32 and back, round to nearest even, in integer arithmetic that vectorises.
//
// NaN stays NaN, overflow becomes infinity, and float16 keeps its denormals. The bits equal those of NumPy and torch.
#pragma once

#include <cstdint>
#include <cstring>

#define NONET_INLINE inline __attribute__((always_inline))

namespace nonet {

static NONET_INLINE uint32_t bits_of(float value) {
  uint32_t bits;
  memcpy(&bits, &value, sizeof bits);
  return bits;
}

static NONET_INLINE float float_of(uint32_t bits) {
  float value;
  memcpy(&value, &bits, sizeof value);
  return value;
}

struct Bf16 {
  uint16_t bits;
  static NONET_INLINE float wide(Bf16 narrow) { return float_of(uint32_t{narrow.bits} << 16); }
  static NONET_INLINE Bf16 narrow(float value) {
    uint32_t bits = bits_of(value);
    uint32_t rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16;
    uint32_t nan = (bits >> 16) | 0x40;
    return {static_cast<uint16_t>((bits & 0x7FFFFFFF) > 0x7F800000 ? nan : rounded)};
  }
};

struct Fp16 {
  uint16_t bits;
  static NONET_INLINE float wide(Fp16 narrow) {
    uint32_t sign = uint32_t{narrow.bits & 0x8000u} << 16, rest = narrow.bits & 0x7FFFu;
    float normal = float_of((rest << 13) + 0x38000000u);
    float small = float_of((rest << 13) + 0x38800000u) - float_of(0x38800000u);  // exact: 2^-14 is subtracted
    uint32_t huge = (rest << 13) | 0x7F800000u;
    uint32_t value = rest >= 0x7C00u ? huge : rest < 0x400u ? bits_of(small) : bits_of(normal);
    return float_of(sign | value);
  }
  static NONET_INLINE Fp16 narrow(float value) {
    uint32_t bits = bits_of(value), sign = (bits >> 16) & 0x8000u, rest = bits & 0x7FFFFFFFu;
    uint32_t normal = (rest - 0x38000000u + 0xFFFu + ((rest >> 13) & 1)) >> 13;
    // Adding 0.5 aligns the mantissa of a denormal with float32's last bits, and the addition rounds it.
    uint32_t small = bits_of(float_of(rest) + 0.5f) - 0x3F000000u;
    uint32_t huge = rest > 0x7F800000u ? 0x7E00u : 0x7C00u;
    uint32_t half = rest >= 0x47800000u ? huge : rest < 0x38800000u ? small : normal;
    return {static_cast<uint16_t>(sign | half)};
  }
};

struct Fp32 {
  float value;
  static NONET_INLINE float wide(Fp32 same) { return same.value; }
  static NONET_INLINE Fp32 narrow(float value) { return {value}; }
};

}  // namespace nonet
