"""Downloads of the prepare scripts: from a host that stops, and of two runs at once."""

import fcntl
import functools
import os
import subprocess
import threading
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace

import archives
import pytest

from pipeline.data.archives import download


def test_a_download_goes_on_and_is_not_repeated(tmp_path, monkeypatch):
    served = archives.iwslt14_de_en(tmp_path / "host") / "de-en.tgz"
    url, kept = f"file://{served}", tmp_path / "downloads"
    path = download(url, kept)
    assert path.read_bytes() == served.read_bytes()

    partial = path.with_name("de-en.tgz.partial")
    for size in (1000, served.stat().st_size):  # stopped in the middle, and just before the end
        path.unlink()
        partial.write_bytes(served.read_bytes()[:size])
        assert download(url, kept) == path
        assert path.read_bytes() == served.read_bytes()
        assert not partial.exists()

    monkeypatch.setattr(subprocess, "run", lambda *_, **__: pytest.fail("downloaded again"))
    monkeypatch.setattr(fcntl, "flock", lambda *_: pytest.fail("waited for other downloads"))
    assert download(url, kept) == path


def test_a_curl_that_outlives_its_run_keeps_the_lock(tmp_path, monkeypatch):
    held = []

    def run(command, pass_fds, **_):
        held.extend(os.fstat(number).st_ino for number in pass_fds)
        return SimpleNamespace(returncode=22, stdout="404")

    monkeypatch.setattr(subprocess, "run", run)
    with pytest.raises(ValueError, match="could not be downloaded"):
        download("http://host/a.tgz", tmp_path)
    assert held == [(tmp_path / "lock").stat().st_ino]


def test_two_runs_do_not_download_at_once(tmp_path, monkeypatch):
    """The second waits, and finds what the first has got."""
    kept, path = tmp_path / "downloads", tmp_path / "downloads/host/a.tgz"
    path.parent.mkdir(parents=True)
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: pytest.fail("downloaded again"))
    found = []
    with open(kept / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        url = "http://host/a.tgz"
        second = threading.Thread(target=lambda: found.append(download(url, kept)), daemon=True)
        second.start()
        second.join(0.5)
        assert not found
        path.write_bytes(b"whole")
    second.join(30)
    assert found == [path]


def test_a_host_that_cannot_go_on_starts_over(tmp_path):
    """And what is there is kept while the host does not have the file."""
    served = archives.iwslt14_de_en(tmp_path / "host") / "de-en.tgz"
    whole, away = served.read_bytes(), served.rename(tmp_path / "away.tgz")
    handler = functools.partial(SimpleHTTPRequestHandler, directory=served.parent)
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        address = f"127.0.0.1:{server.server_port}"
        kept = tmp_path / "downloads"
        partial = kept / address / "de-en.tgz.partial"
        partial.parent.mkdir(parents=True)
        partial.write_bytes(whole[:1000])
        with pytest.raises(ValueError, match="could not be downloaded .curl: status 22"):
            download(f"http://{address}/de-en.tgz", kept)
        assert partial.read_bytes() == whole[:1000]
        away.rename(served)
        path = download(f"http://{address}/de-en.tgz", kept)
        server.shutdown()
    assert path.read_bytes() == whole


def test_addresses_that_differ_after_the_question_mark(tmp_path, monkeypatch):
    def fetch(url, path, lock):
        path.write_text(url)

    monkeypatch.setattr("pipeline.data.archives.fetch", fetch)
    for query in ("", "?id=/1", "?id=/2", "?signature=" + 300 * "%2F", "?.."):
        url = f"http://host/get/a.tgz{query}"
        assert download(url, tmp_path).read_text() == url
