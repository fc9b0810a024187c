"""The shipped baselines, one file each, with the keys that a scenario may give."""
