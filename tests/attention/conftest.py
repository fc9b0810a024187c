"""One torch thread: the tensors here are tiny, and threads that wait for a busy core make them a hundred times slower."""

import pytest
import torch


@pytest.fixture(autouse=True, scope="session")
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
