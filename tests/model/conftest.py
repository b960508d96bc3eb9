from collections.abc import Iterator

import pytest
import torch


@pytest.fixture
def threads() -> Iterator[None]:
    """Restore the number of threads of torch after a test that changes it."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)
