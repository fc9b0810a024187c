// What the rest of the core tells Python's way in.
#pragma once

namespace nonet {

// A table ends: no call may go on to it because it was asked last.
void forget_asked();

}  // namespace nonet
