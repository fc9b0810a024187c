// The C ABI: opaque tables, plain pointers, 64-bit counts; a negative result is an error code.

#include <cstdlib>
#include <new>

#include "dispatch.h"
#include "python_call.h"
#include "table.h"

#define NONET_API extern "C" __attribute__((visibility("default")))

using nonet::Table;

static Table* of(void* table) { return static_cast<Table*>(table); }

NONET_API int32_t nonet_abi() { return 9; }

NONET_API int32_t nonet_config_bytes() { return static_cast<int32_t>(sizeof(nonet::Config)); }

NONET_API const char* nonet_isa(const char* wanted) {
  const nonet::Kernels* chosen = nonet::choose(wanted);
#if defined(__x86_64__)
  if (chosen == &nonet::avx512::kernels) return "avx512";
  if (chosen == &nonet::avx2::kernels) return "avx2";
#endif
  return chosen == &nonet::baseline::kernels ? "baseline" : "unknown";
}

NONET_API void* nonet_table_new(const nonet::Config* config, const char* isa) {
  void* room = malloc(sizeof(Table));
  if (!room) return nullptr;
  Table* table = new (room) Table(*config, nonet::choose(isa));
  if (table->clear()) return table;
  table->~Table();
  free(room);
  return nullptr;
}

NONET_API void nonet_table_free(void* table) {
  nonet::forget_asked();
  of(table)->~Table();
  free(table);
}

NONET_API int32_t nonet_table_clear(void* table) { return of(table)->clear() ? 0 : -1; }

NONET_API int64_t nonet_table_lookup(void* table, const int64_t* keys, int64_t count, float* out, int64_t step) {
  return of(table)->lookup(keys, count, out, step);
}

NONET_API int64_t nonet_table_look(void* table, const int64_t* keys, int64_t count, float* out) {
  return of(table)->look(keys, count, out);
}

NONET_API int64_t nonet_table_apply(void* table, const int64_t* keys, int64_t count, const float* grads,
                                    int64_t before, int64_t step, double lr) {
  return of(table)->apply(keys, count, grads, before, step, lr);
}

NONET_API int64_t nonet_table_find(void* table, const int64_t* keys, int64_t count, int64_t* found) {
  nonet::ReadLock lock = of(table)->reading();
  return of(table)->find(keys, count, found);
}

NONET_API int64_t nonet_table_upsert(void* table, const int64_t* keys, int64_t count, const float* rows,
                                     const float* state, const int64_t* step, const int64_t* seen,
                                     const int64_t* uses) {
  return of(table)->upsert(keys, count, rows, state, step, seen, uses);
}

NONET_API int64_t nonet_table_forget(void* table, const int64_t* keys, int64_t count) {
  return of(table)->forget(keys, count);
}

NONET_API int64_t nonet_table_choose(void* table, uint64_t low, uint64_t high, int64_t since,
                                     nonet::Chosen** chosen) {
  nonet::ReadLock lock = of(table)->reading();
  return of(table)->choose(low, high, since, chosen);
}

NONET_API void nonet_table_read(void* table, const nonet::Chosen* chosen, int64_t count, float* rows, float* state,
                                int64_t* step, int64_t* seen, int64_t* uses) {
  nonet::ReadLock lock = of(table)->reading();
  of(table)->read(chosen, count, rows, state, step, seen, uses);
}

NONET_API void nonet_chosen_free(nonet::Chosen* chosen) { free(chosen); }

NONET_API int64_t nonet_table_score(void* table, const int64_t* keys, const float* scores, int64_t count) {
  return of(table)->score(keys, scores, count);
}

NONET_API void nonet_table_take_evicted(void* table, int64_t* out) { of(table)->take_evicted(out); }

NONET_API int64_t nonet_table_waiting(void* table, int64_t* keys, int64_t* packed) {
  return of(table)->waiting(keys, packed);
}

NONET_API int64_t nonet_table_wait(void* table, const int64_t* keys, const int64_t* packed, int64_t count) {
  return of(table)->wait(keys, packed, count);
}
