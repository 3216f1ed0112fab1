"""Numba's cache of compiled kernels may fail; the kernels do not."""

import importlib
import warnings

import numba
import pytest
from numba.core.caching import IndexDataCacheFile

SOURCE = """
from talk_fairseq.ops.cpu_kernels import _jit

@_jit
def twice(x):
    return 2 * x
"""


@pytest.fixture
def twice(tmp_path, monkeypatch):
    """Call a kernel as a new process would, with its cache beside its source."""
    (tmp_path / "kernel_of_a_test.py").write_text(SOURCE)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(numba.config, "CACHE_DIR", "")

    def call():
        module = importlib.import_module("kernel_of_a_test")
        assert importlib.reload(module).twice(2) == 4

    return call


@pytest.mark.parametrize("kind", ["nbi", "nbc"])
def test_a_damaged_file_is_written_anew(twice, tmp_path, kind):
    twice()
    (path,) = tmp_path.rglob(f"*.{kind}")
    path.write_bytes(path.read_bytes()[:9])
    with pytest.warns(UserWarning, match="cache is not used: .*NUMBA_CACHE_DIR names another"):
        twice()
    with warnings.catch_warnings(action="error"):
        twice()
    assert len(path.read_bytes()) > 9


def test_a_full_disk_costs_the_time_to_compile(twice, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(IndexDataCacheFile, "_save_index", full)
    with pytest.warns(UserWarning, match="No space left on device"):
        twice()
