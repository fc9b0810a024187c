// Memory made ready by another thread before a step needs it.
//
// The first touch of a huge page costs 0.2 ms on bare metal and 6 ms in a virtual machine whose host must find the
// memory first. MADV_POPULATE_WRITE (Linux 5.14) makes pages ready and leaves what they hold alone, so no lock is
// needed; where it isn't there, or the thread can't be had, steps pay for their pages themselves.
#pragma once

#include <cstddef>

namespace nonet {

// Asks for [start, start + bytes), `piece` bytes at a time: for as long as one takes, nobody can map or unmap. Forgets the
// request when too many wait already.
void prefault(char* start, size_t bytes, size_t piece);

}  // namespace nonet
