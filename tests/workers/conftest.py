"""What stands beside the tests of this folder, and the small world of tests_ring.py, can be imported."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1] / "deploy")]
