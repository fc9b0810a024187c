// A reader's lookup as Python calls it: keys read where torch holds them, rows given to torch in memory made here.
//
// ctypes, the checks of the keys, torch's allocation and the method in Python take 9 of the 13 us of a cold call of 64
// keys; this takes 3. It needs Python's stable ABI and DLPack's, so it is linked to neither and outlives both; without
// Python's headers it is compiled to nothing, and Python goes through ctypes.

#include "python_call.h"
#include "table.h"

#define NONET_API extern "C" __attribute__((visibility("default")))

#if __has_include(<Python.h>)

#define Py_LIMITED_API 0x030B0000
#include <Python.h>

#include <atomic>
#include <cstdlib>
#include <new>

#include "dlpack.h"

namespace {

constexpr const char* kExchange = "dlpack_exchange_api";
constexpr int64_t kBrief = 256;  // keys looked up without giving up Python's lock: 5 us, and getting it back may take 5 ms

constexpr const char* kDoc =
    "lookup($self, keys, *, train, step=None, out=None)\n--\n\n"
    "A copy of the rows [N, D] of keys [N]; absent keys are made if `train` and admitted, else read the default.";

const dlpack::Exchange* torch;
PyTypeObject* tensor_type;
PyObject *train_name, *handle_name, *general_name;

struct alignas(64) Rows {  // what DLPack asks to be told of them; they follow
  dlpack::Managed managed;
  int64_t shape[2], strides[2];

  float* data() { return reinterpret_cast<float*>(this + 1); }
  int64_t bytes() const { return shape[0] * shape[1] * static_cast<int64_t>(sizeof(float)); }
};

// The brief rows freed last, for the next call: malloc and free take 1 us on cold caches. Any thread may free.
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

// Whether the core can read these keys where they lie.
bool plain(PyObject* keys, dlpack::Tensor* out) {
  if (Py_TYPE(keys) != tensor_type) return false;
  if (torch->view(keys, out)) {
    PyErr_Clear();
    return false;
  }
  return out->ndim == 1 && out->dtype.code == dlpack::kInt && out->dtype.bits == 64 &&
         out->device.type == dlpack::kCpu && (out->shape[0] < 2 || out->strides[0] == 1);
}

// The rows float32 [N, D] of keys int64 [N]; null with no error where memory is short.
PyObject* look(nonet::Table* table, const dlpack::Tensor& keys) {
  const int64_t count = keys.shape[0];
  const auto* first = reinterpret_cast<const int64_t*>(static_cast<char*>(keys.data) + keys.byte_offset);
  Rows* rows = make(count, table->width());
  if (!rows) return nullptr;
  if (count > kBrief || !table->look_now(first, count, rows->data())) {
    PyThreadState* thread = PyEval_SaveThread();
    table->look(first, count, rows->data());
    PyEval_RestoreThread(thread);
  }
  void* object;
  return torch->give(&rows->managed, &object) ? nullptr : static_cast<PyObject*>(object);
}

// Whether a call says train=False and names nothing else.
bool reads(PyObject* const* arguments, Py_ssize_t given, PyObject* names) {
  return given == 1 && names && PyTuple_Size(names) == 1 && PyTuple_GetItem(names, 0) == train_name &&
         arguments[1] == Py_False;
}

// The method in Python, `_general`, given what this one was given.
PyObject* in_python(PyObject* self, PyObject* const* arguments, Py_ssize_t given, PyObject* names) {
  PyObject *general = PyObject_GetAttr(self, general_name), *found = nullptr;
  PyObject *positional = PyTuple_New(given), *named = PyDict_New();
  bool whole = general && positional && named;
  for (Py_ssize_t at = 0; whole && at < given; ++at) {
    Py_INCREF(arguments[at]);
    whole = !PyTuple_SetItem(positional, at, arguments[at]);
  }
  for (Py_ssize_t at = 0; whole && names && at < PyTuple_Size(names); ++at)
    whole = !PyDict_SetItem(named, PyTuple_GetItem(names, at), arguments[given + at]);
  if (whole) found = PyObject_Call(general, positional, named);
  Py_XDECREF(general);
  Py_XDECREF(positional);
  Py_XDECREF(named);
  return found;
}

// The table asked last, so that most calls look no attribute up (5 % of a cold call). Python's lock guards it, but for its end.
std::atomic<PyObject*> last_asked;
nonet::Table* last_table;

nonet::Table* table_of(PyObject* self) {
  if (last_asked == self) return last_table;
  PyObject* handle = PyObject_GetAttr(self, handle_name);
  if (!handle) return nullptr;
  last_table = static_cast<nonet::Table*>(PyLong_AsVoidPtr(handle));
  last_asked = last_table ? self : nullptr;
  Py_DECREF(handle);
  return last_table;
}

PyObject* lookup(PyObject* self, PyObject* const* arguments, Py_ssize_t given, PyObject* names) {
  dlpack::Tensor keys;
  if (!reads(arguments, given, names) || !plain(arguments[0], &keys)) return in_python(self, arguments, given, names);
  nonet::Table* table = table_of(self);
  PyObject* rows = table ? look(table, keys) : nullptr;
  return rows || PyErr_Occurred() ? rows : in_python(self, arguments, given, names);
}

const dlpack::Exchange* exchange_of(PyObject* type) {
  PyObject* capsule = PyObject_GetAttrString(type, "__dlpack_c_exchange_api__");
  void* found = capsule ? PyCapsule_GetPointer(capsule, kExchange) : nullptr;
  Py_XDECREF(capsule);
  PyErr_Clear();
  auto* exchange = static_cast<const dlpack::Exchange*>(found);
  while (exchange && exchange->version.major > dlpack::kMajor) exchange = exchange->before;
  return exchange && exchange->version.major == dlpack::kMajor && exchange->view ? exchange : nullptr;
}

}  // namespace

// Called before a table ends, hence before its object does and another takes that object's place.
void nonet::forget_asked() { last_asked = nullptr; }

// The method `lookup` for `table`, a class in Python: reads of tensors of exactly the type `tensor` (torch.Tensor) are
// done here, all else by the class's `_general`. Null where this torch lacks DLPack's C functions.
NONET_API void* nonet_python_lookup(PyObject* tensor, PyTypeObject* table) {
  static PyMethodDef definition = {"lookup", reinterpret_cast<PyCFunction>(reinterpret_cast<void*>(lookup)),
                                   METH_FASTCALL | METH_KEYWORDS, kDoc};
  torch = exchange_of(tensor);
  train_name = PyUnicode_InternFromString("train");
  handle_name = PyUnicode_InternFromString("_handle");
  general_name = PyUnicode_InternFromString("_general");
  if (!torch || !train_name || !handle_name || !general_name) return nullptr;
  Py_INCREF(tensor);
  tensor_type = reinterpret_cast<PyTypeObject*>(tensor);
  return PyDescr_NewMethod(table, &definition);
}

#else

void nonet::forget_asked() {}
NONET_API void* nonet_python_lookup(void*, void*) { return nullptr; }

#endif
