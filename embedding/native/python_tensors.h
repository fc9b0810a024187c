// Tensors that the core reads and creates directly: keys and gradients in the memory of torch or NumPy, rows in memory that is
// allocated here. Included only by python_call.cpp, after Python.h.
#pragma once

#include <atomic>
#include <cstdlib>
#include <new>

#include "dlpack.h"

namespace {

const dlpack::Exchange* torch;
PyTypeObject *tensor_type, *array_type;  // torch.Tensor and numpy.ndarray; the Python methods handle subclasses.

struct alignas(64) Rows {  // DLPack's description of the rows, which follow it.
  dlpack::Managed managed;
  int64_t shape[2], strides[2];

  float* data() { return reinterpret_cast<float*>(this + 1); }
  int64_t bytes() const { return shape[0] * shape[1] * static_cast<int64_t>(sizeof(float)); }
};

// The last freed small block of rows, for the next call: malloc and free take 1 us with cold caches. Any thread may free.
constexpr int64_t kSpareBytes = 1 << 18;
std::atomic<Rows*> spare;

void put_away(dlpack::Managed* managed) {
  auto* rows = static_cast<Rows*>(managed->of);
  free(rows->bytes() <= kSpareBytes ? spare.exchange(rows) : rows);
}

void* room_for(int64_t bytes) {
  if (Rows* last = bytes <= kSpareBytes ? spare.exchange(nullptr) : nullptr) {
    if (last->bytes() == bytes) return last;
    free(last);
  }
  void* room;
  return posix_memalign(&room, 64, sizeof(Rows) + bytes) ? nullptr : room;
}

Rows* make(int64_t count, int64_t width) {
  void* room = room_for(count * width * static_cast<int64_t>(sizeof(float)));
  if (!room) return nullptr;
  Rows* rows = new (room) Rows{{{dlpack::kMajor, dlpack::kMinor}, room, put_away, 0, {}}, {count, width}, {width, 1}};
  rows->managed.tensor = {rows->data(), {dlpack::kCpu, 0}, 2, {dlpack::kFloat, 32, 1}, rows->shape, rows->strides, 0};
  return rows;
}

// Returns DLPack's description of a tensor in host memory.
bool view(PyObject* object, dlpack::Tensor* out) {
  if (Py_TYPE(object) != tensor_type) return false;
  if (torch->view(object, out)) {
    PyErr_Clear();
    return false;
  }
  return out->device.type == dlpack::kCpu;
}

void* start_of(const dlpack::Tensor& tensor) { return static_cast<char*>(tensor.data) + tensor.byte_offset; }

// The keys int64 [N] of a tensor or array that the core can read in place, for the lifetime of this object.
class Keys {
 public:
  Keys() = default;
  Keys(const Keys&) = delete;
  Keys& operator=(const Keys&) = delete;
  ~Keys() {
    if (held_.obj) PyBuffer_Release(&held_);
  }

  const int64_t* first = nullptr;
  int64_t count = 0;

  bool read(PyObject* keys) { return Py_TYPE(keys) == array_type ? read_array(keys) : read_tensor(keys); }

 private:
  bool read_tensor(PyObject* keys) {
    dlpack::Tensor tensor;
    if (!view(keys, &tensor)) return false;
    first = static_cast<const int64_t*>(start_of(tensor));
    count = tensor.ndim == 1 ? tensor.shape[0] : 0;
    return tensor.ndim == 1 && tensor.dtype.code == dlpack::kInt && tensor.dtype.bits == 64 &&
           (count < 2 || tensor.strides[0] == 1);
  }

  bool read_array(PyObject* keys) {
    if (PyObject_GetBuffer(keys, &held_, PyBUF_ND | PyBUF_FORMAT)) {  // It may be strided.
      held_.obj = nullptr;
      PyErr_Clear();
      return false;
    }
    first = static_cast<const int64_t*>(held_.buf);
    count = held_.ndim == 1 ? held_.shape[0] : 0;
    const char* format = held_.format;  // One letter means this machine's byte order.
    return held_.ndim == 1 && held_.itemsize == 8 && (*format == 'l' || *format == 'q') && !format[1];
  }

  Py_buffer held_{};
};

// Returns the address of a contiguous tensor float32 [count, width]; false for other tensors.
bool numbers(PyObject* object, int64_t count, int64_t width, float** out) {
  dlpack::Tensor tensor;
  if (!view(object, &tensor) || tensor.ndim != 2 || tensor.shape[0] != count || tensor.shape[1] != width) return false;
  *out = static_cast<float*>(start_of(tensor));
  return tensor.dtype.code == dlpack::kFloat && tensor.dtype.bits == 32 && (width < 2 || tensor.strides[1] == 1) &&
         (count < 2 || tensor.strides[0] == width);
}

}  // namespace
