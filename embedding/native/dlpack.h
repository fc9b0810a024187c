// DLPack 1.3's tensors and the C functions that a framework offers to exchange them: what torch.Tensor's
// `__dlpack_c_exchange_api__` points at. The layout is DLPack's stable ABI (https://dmlc.github.io/dlpack, dlpack.h).
#pragma once

#include <cstdint>

namespace dlpack {

constexpr uint32_t kMajor = 1, kMinor = 3;
constexpr int32_t kCpu = 1;
constexpr uint8_t kInt = 0, kFloat = 2;

struct Device {
  int32_t type, id;
};

struct DataType {
  uint8_t code, bits;
  uint16_t lanes;
};

struct Tensor {
  void* data;
  Device device;
  int32_t ndim;
  DataType dtype;
  int64_t *shape, *strides;
  uint64_t byte_offset;
};

struct Version {
  uint32_t major, minor;
};

struct Managed {
  Version version;
  void* of;
  void (*free)(Managed* self);
  uint64_t flags;
  Tensor tensor;
};

struct Exchange {
  Version version;
  const Exchange* before;
  int (*allocate)(Tensor* like, Managed** out, void* error, void (*fail)(void*, const char*, const char*));
  int (*take)(void* object, Managed** out);
  int (*give)(Managed* tensor, void** object);  // Takes ownership of the tensor.
  int (*view)(void* object, Tensor* out);       // Owns nothing; may be null.
  int (*stream)(int32_t type, int32_t id, void** out);
};

}  // namespace dlpack
