// Python methods for a table's lookup and push, without Python code or ctypes in between.
//
// ctypes, the checks of the keys, torch's allocation and the method in Python take 9 of the 13 us of a reader's cold call of
// 64 keys; these methods take 3. They use the stable ABIs of Python and DLPack, so the library is not linked to a version of
// either. Without Python's headers this file is empty, and Python uses ctypes.

#include "python_call.h"
#include "table.h"

#define NONET_API extern "C" __attribute__((visibility("default")))

#if __has_include(<Python.h>) && !defined(NONET_WITHOUT_PYTHON)

#define Py_LIMITED_API 0x030B0000
#include <Python.h>

#include "python_tensors.h"

namespace {

constexpr const char* kExchange = "dlpack_exchange_api";
constexpr int64_t kBrief = 256;  // Up to this many keys the GIL is kept: they take 5 us, and reacquiring it may take 5 ms.

PyObject *train_name, *step_name, *out_name, *handle_name, *lookup_name, *push_name;

// Releases the GIL for the lifetime of this object.
class Apart {
 public:
  Apart() : thread_(PyEval_SaveThread()) {}
  ~Apart() { PyEval_RestoreThread(thread_); }

 private:
  PyThreadState* thread_;
};

// Calls a method in Python with the arguments of this one.
PyObject* in_python(PyObject* method, PyObject* self, PyObject* const* arguments, Py_ssize_t given, PyObject* names) {
  PyObject *general = PyObject_GetAttr(self, method), *found = nullptr;
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

// The table of the last call, so that most calls need no attribute lookup (5 % of a cold call). The GIL guards it, except at
// its end.
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

bool number_of(PyObject* object, int64_t* out) {
  if (!PyLong_Check(object)) return false;
  *out = PyLong_AsLongLong(object);
  return *out != -1 || !PyErr_Occurred();
}

// The arguments of a lookup after its keys.
struct Wanted {
  PyObject *train = nullptr, *step = Py_None, *out = Py_None;

  bool read(PyObject* const* named, PyObject* names) {
    for (Py_ssize_t at = 0; names && at < PyTuple_Size(names); ++at) {
      PyObject* name = PyTuple_GetItem(names, at);
      if (name == train_name) train = named[at];
      else if (name == step_name) step = named[at];
      else if (name == out_name) out = named[at];
      else return false;
    }
    return train == Py_True || train == Py_False;
  }

  // The step in which rows are created: the given one, else the one after the table's last.
  bool number(PyObject* self, int64_t* out) const {
    if (step != Py_None) return number_of(step, out);
    PyObject* last = PyObject_GetAttr(self, step_name);
    const bool known = last && number_of(last, out) && *out < INT64_MAX;
    Py_XDECREF(last);
    *out += known;
    return known;
  }
};

// Reads the rows float32 [N, D] of keys [N] into `out`; returns false without memory.
bool fill(nonet::Table* table, const Keys& keys, float* out, bool trains, int64_t step) {
  if (!trains && keys.count <= kBrief && table->look_now(keys.first, keys.count, out)) return true;
  Apart apart;
  return (trains ? table->lookup(keys.first, keys.count, out, step) : table->look(keys.first, keys.count, out)) >= 0;
}

// Returns the tensor of the rows; null, perhaps without an error, if the Python method has to report what is wrong.
PyObject* answer(nonet::Table* table, const Keys& keys, const Wanted& wanted, int64_t step) {
  const bool trains = wanted.train == Py_True;
  if (wanted.out != Py_None) {
    float* out;
    if (!numbers(wanted.out, keys.count, table->width(), &out)) return nullptr;
    const char *rows = reinterpret_cast<char*>(out), *first = reinterpret_cast<const char*>(keys.first);
    if (rows < first + 8 * keys.count && first < rows + 4 * keys.count * table->width()) return nullptr;
    if (!fill(table, keys, out, trains, step)) return nullptr;
    Py_INCREF(wanted.out);
    return wanted.out;
  }
  Rows* rows = make(keys.count, table->width());
  if (!rows) return nullptr;
  void* object = nullptr;
  if (!fill(table, keys, rows->data(), trains, step)) put_away(&rows->managed);
  else if (torch->give(&rows->managed, &object)) return nullptr;
  return static_cast<PyObject*>(object);
}

PyObject* lookup(PyObject* self, PyObject* const* arguments, Py_ssize_t given, PyObject* names) {
  Keys keys;  // Read last, because the code before may run Python code that changes them.
  Wanted wanted;
  int64_t step = 0;
  PyObject* rows = nullptr;
  if (given == 1 && wanted.read(arguments + 1, names) && (wanted.train == Py_False || wanted.number(self, &step)))
    if (nonet::Table* table = table_of(self))
      if (keys.read(arguments[0])) rows = answer(table, keys, wanted, step);
  return rows || PyErr_Occurred() ? rows : in_python(lookup_name, self, arguments, given, names);
}

// Pushes keys, grads, before, step and lr; returns null if the Python method has to do it.
PyObject* pushed(nonet::Table* table, PyObject* const* arguments) {
  Keys keys;
  int64_t before, step;
  const double lr = PyFloat_AsDouble(arguments[4]);
  if (PyErr_Occurred() || !number_of(arguments[2], &before) || !number_of(arguments[3], &step)) return nullptr;
  float* grads;
  if (!keys.read(arguments[0]) || !numbers(arguments[1], keys.count, table->width(), &grads)) return nullptr;
  int64_t code;
  {
    Apart apart;
    code = table->apply(keys.first, keys.count, grads, before, step, lr);
  }
  return PyLong_FromLongLong(code);
}

PyObject* push(PyObject* self, PyObject* const* arguments, Py_ssize_t given, PyObject* names) {
  nonet::Table* table = given == 5 && !names ? table_of(self) : nullptr;
  PyObject* code = table ? pushed(table, arguments) : nullptr;
  return code || PyErr_Occurred() ? code : in_python(push_name, self, arguments, given, names);
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

bool intern(PyObject** name, const char* text) { return *name || (*name = PyUnicode_InternFromString(text)); }

template <class Function>
constexpr PyCFunction method(Function* function) {
  return reinterpret_cast<PyCFunction>(reinterpret_cast<void*>(function));
}

PyMethodDef methods[] = {
    {"lookup", method(lookup), METH_FASTCALL | METH_KEYWORDS,
     "lookup($self, keys, *, train, step=None, out=None)\n--\n\n"
     "Read the rows of keys. With `train`, rows are created for absent keys that the admission policy admits."},
    {"_push", method(push), METH_FASTCALL | METH_KEYWORDS,
     "_push($self, keys, grads, before, step, lr)\n--\n\nApply gradients; the core's code, negative where it could not."},
};

}  // namespace

// Called before a table is destroyed, hence before its object is and another can get the same address.
void nonet::forget_asked() { last_asked = nullptr; }

// Returns method `number`, 0 or 1, for `table`, a class in Python. It handles keys of exactly the types `tensor` (torch.Tensor)
// and `array` (numpy.ndarray), and calls the class's method `general` for others. Null if torch lacks DLPack's C functions.
NONET_API void* nonet_python_method(int32_t number, PyTypeObject* table, PyObject* general, PyObject* tensor, PyObject* array) {
  const dlpack::Exchange* exchange = exchange_of(tensor);
  if (!exchange || !intern(&train_name, "train") || !intern(&step_name, "step") || !intern(&out_name, "out") ||
      !intern(&handle_name, "_handle"))
    return nullptr;
  torch = exchange;
  for (PyObject* kept : {general, tensor, array}) Py_INCREF(kept);
  (number ? push_name : lookup_name) = general;
  tensor_type = reinterpret_cast<PyTypeObject*>(tensor);
  array_type = reinterpret_cast<PyTypeObject*>(array);
  return PyDescr_NewMethod(table, &methods[number]);
}

#else

void nonet::forget_asked() {}
NONET_API void* nonet_python_method(int32_t, void*, void*, void*, void*) { return nullptr; }

#endif
