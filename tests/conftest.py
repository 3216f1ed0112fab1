import numpy as np
import pytest
import torch

from talk_fairseq import cpu_backend


def pytest_collection_modifyitems(items):
    if not torch.cuda.is_available():
        skip = pytest.mark.skip(reason="no CUDA GPU")
        for item in items:
            if "cuda" in item.keywords:
                item.add_marker(skip)


@pytest.fixture
def poisoned_memory(monkeypatch):
    """Fresh memory holds NaN, so that an element that nobody wrote shows."""

    def empty(shape, dtype=float):
        return np.full(shape, np.nan, dtype)

    monkeypatch.setattr(cpu_backend.np, "empty", empty)
    torch.use_deterministic_algorithms(True)
    assert torch.utils.deterministic.fill_uninitialized_memory
    yield
    torch.use_deterministic_algorithms(False)
