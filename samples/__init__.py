"""From files to batches: tables, per-user sequences, splits, conditions and the batches models train on."""
