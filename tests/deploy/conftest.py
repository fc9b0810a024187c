"""The small world of tests_ring.py as fixtures."""

from __future__ import annotations

import pytest
from tests_ring import make_ring


@pytest.fixture
def ring(tmp_path):
    """A folder with tables, ring.yaml and its reward file."""
    return make_ring(tmp_path)
