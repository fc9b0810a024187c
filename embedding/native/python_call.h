// Notification of the Python methods by the rest of the core.
#pragma once

namespace nonet {

// Called when a table is destroyed, so that no later call uses it as the table of the last call.
void forget_asked();

}  // namespace nonet
