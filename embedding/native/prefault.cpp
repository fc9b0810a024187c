// One thread per process, started by the first request, which waits on a queue of 64.

#include "prefault.h"

#include <pthread.h>
#include <sys/mman.h>
#include <unistd.h>

namespace nonet {

#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_WRITE 23
#endif

namespace {

struct Request {
  char* start;
  size_t bytes, piece;
};

constexpr unsigned kQueue = 64;

pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
pthread_cond_t arrived = PTHREAD_COND_INITIALIZER;
Request queue[kQueue];
unsigned first = 0, waiting = 0;
bool running = false, watches_forks = false;

// A forked child does not have the parent's thread, but a copy of its mutex, which may be locked, and of its condition variable.
void begin_anew() {
  pthread_mutex_init(&mutex, nullptr);
  pthread_cond_init(&arrived, nullptr);
  first = waiting = 0;
  running = false;
}

Request next() {
  pthread_mutex_lock(&mutex);
  while (!waiting) pthread_cond_wait(&arrived, &mutex);
  Request request = queue[first];
  first = (first + 1) % kQueue;
  --waiting;
  pthread_mutex_unlock(&mutex);
  return request;
}

void* serve(void*) {
#ifdef __linux__
  if (nice(5)) {}  // Of this thread only, so that steps have priority.
#endif
  for (;;) {
    Request request = next();
    for (size_t done = 0; done < request.bytes; done += request.piece) {
      size_t left = request.bytes - done, piece = left < request.piece ? left : request.piece;
      if (madvise(request.start + done, piece, MADV_POPULATE_WRITE)) break;  // Unmapped, or an older kernel.
    }
  }
  return nullptr;
}

bool started() {
  if (running) return true;
  watches_forks = watches_forks || !pthread_atfork(nullptr, nullptr, begin_anew);
  if (!watches_forks) return false;
  pthread_attr_t attributes;
  pthread_t thread;
  pthread_attr_init(&attributes);
  pthread_attr_setdetachstate(&attributes, PTHREAD_CREATE_DETACHED);
  running = !pthread_create(&thread, &attributes, serve, nullptr);
  pthread_attr_destroy(&attributes);
  return running;
}

}  // namespace

void prefault(char* start, size_t bytes, size_t piece) {
  pthread_mutex_lock(&mutex);
  if (waiting < kQueue && started()) {
    queue[(first + waiting) % kQueue] = {start, bytes, piece};
    ++waiting;
    pthread_cond_signal(&arrived);
  }
  pthread_mutex_unlock(&mutex);
}

}  // namespace nonet
