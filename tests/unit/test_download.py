"""Downloads from a server that behaves in all the ways servers do."""

from __future__ import annotations

import gzip
import hashlib
import io
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from scripted_server import Reply, Script, running

from opencoti_build.cache import Cache
from opencoti_build.console import Console, Mode
from opencoti_build.download import Address, Downloader, Policy, Wanted
from opencoti_build.errors import ChecksumError, DiskError, DownloadError, OfflineError

BODY = random.Random(11).randbytes(300_000)
OTHER = random.Random(12).randbytes(300_000)
PROJECT = Path(__file__).resolve().parents[2]


def sha(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


WANTED = Wanted("thing-1.0.tar.gz", len(BODY), sha(BODY))


@pytest.fixture
def server() -> Iterator[Script]:
    with running() as script:
        yield script


class Rig:
    """A downloader whose pauses take no time and are noted."""

    def __init__(self, root: Path, **policy: float) -> None:
        self.cache = Cache(root)
        self.said = io.StringIO()
        self.pauses: list[float] = []
        self.downloader = Downloader(self.cache, Console(self.said, mode=Mode.PLAIN), policy=Policy(**policy), sleep=self.pauses.append)  # type: ignore[arg-type]

    def get(self, *urls: str, wanted: Wanted = WANTED) -> bytes:
        path = self.downloader.fetch(wanted, [Address(url) for url in urls])
        assert path == self.cache.blob(wanted.sha256)
        return path.read_bytes()

    def part(self, data: bytes | None = None) -> Path:
        path = self.cache.part(WANTED.sha256)
        if data is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data)
        return path

    def rejected(self) -> list[bytes]:
        folder = self.cache.root / "rejected"
        return [path.read_bytes() for path in sorted(folder.iterdir())] if folder.exists() else []

    def left_over(self) -> list[str]:
        return sorted(path.name for path in (self.cache.root / "parts").iterdir())


@pytest.fixture
def rig(tmp_path: Path) -> Rig:
    return Rig(tmp_path / "cache")


def test_a_file_arrives_whole_and_leaves_no_part(rig: Rig, server: Script) -> None:
    assert rig.get(server.on("/f", Reply(BODY))) == BODY
    assert rig.left_over() == []
    assert rig.rejected() == []


def test_a_cached_file_is_not_asked_for_again(rig: Rig, server: Script) -> None:
    url = server.on("/f", Reply(BODY))
    rig.get(url)
    rig.get(url)
    assert len(server.requests) == 1


# ---- resume ------------------------------------------------------------------------------------------------------------------------


def test_a_part_is_continued_where_it_ends(rig: Rig, server: Script) -> None:
    rig.part(BODY[:100_000])
    assert rig.get(server.on("/f", Reply(BODY))) == BODY
    assert server.requests[0].headers["Range"] == "bytes=100000-"
    assert server.requests[0].sent == 200_000


def test_a_dropped_connection_is_continued_and_every_byte_comes_once(rig: Rig, server: Script) -> None:
    url = server.on("/f", *[Reply(BODY, headers={"ETag": '"v1"'}, drop_after=90_000)] * 3, Reply(BODY, headers={"ETag": '"v1"'}))
    assert rig.get(url) == BODY
    assert [request.headers.get("Range") for request in server.requests] == [None, "bytes=90000-", "bytes=180000-", "bytes=270000-"]
    assert [request.headers.get("If-Range") for request in server.requests] == [None, '"v1"', '"v1"', '"v1"']
    assert sum(request.sent for request in server.requests) == len(BODY)


def test_content_that_changed_in_between_starts_anew(rig: Rig, server: Script) -> None:
    url = server.on("/f", Reply(OTHER, headers={"ETag": '"old"'}, drop_after=90_000), Reply(BODY, headers={"ETag": '"new"'}))
    assert rig.get(url) == BODY
    assert server.requests[1].headers["If-Range"] == '"old"'
    assert rig.rejected() == []


def test_a_weak_tag_is_no_ground_for_resuming_but_the_hash_catches_a_mixture(rig: Rig, server: Script) -> None:
    url = server.on("/f", Reply(OTHER, headers={"ETag": 'W/"v"'}, drop_after=90_000), Reply(BODY, headers={"ETag": 'W/"v"'}))
    assert rig.get(url) == BODY
    assert "If-Range" not in server.requests[1].headers
    assert [request.headers.get("Range") for request in server.requests] == [None, "bytes=90000-", None]
    assert rig.rejected() == []


def test_a_damaged_part_costs_one_more_download_and_is_no_evidence_against_the_server(rig: Rig, server: Script) -> None:
    rig.part(b"\0" * 100_000)
    assert rig.get(server.on("/f", Reply(BODY))) == BODY
    assert len(server.requests) == 2
    assert rig.rejected() == []


def test_a_server_without_ranges_sends_it_all(rig: Rig, server: Script) -> None:
    rig.part(BODY[:100_000])
    assert rig.get(server.on("/f", Reply(BODY, ranges=False))) == BODY
    assert len(server.requests) == 1


def test_range_not_satisfiable_starts_anew(rig: Rig, server: Script) -> None:
    rig.part(BODY[:100_000])
    assert rig.get(server.on("/f", Reply(status=416), Reply(BODY))) == BODY
    assert [request.headers.get("Range") for request in server.requests] == ["bytes=100000-", None]


def test_another_range_than_asked_for_starts_anew(rig: Rig, server: Script) -> None:
    rig.part(BODY[:100_000])
    wrong = Reply(BODY[50_000:], status=206, ranges=False, headers={"Content-Range": f"bytes 50000-{len(BODY) - 1}/{len(BODY)}"})
    assert rig.get(server.on("/f", wrong, Reply(BODY))) == BODY


@pytest.mark.parametrize("header", ["", "bytes", "bytes 100000-", "bytes x-y/z"])
def test_a_senseless_content_range_starts_anew(rig: Rig, server: Script, header: str) -> None:
    rig.part(BODY[:100_000])
    wrong = Reply(BODY[100_000:], status=206, ranges=False, headers={"Content-Range": header} if header else {})
    assert rig.get(server.on("/f", wrong, Reply(BODY))) == BODY


def test_a_range_of_a_file_of_another_size_is_refused(rig: Rig, server: Script) -> None:
    rig.part(BODY[:100_000])
    wrong = Reply(BODY[100_000:], status=206, ranges=False, headers={"Content-Range": "bytes 100000-399999/400000"})
    with pytest.raises(ChecksumError) as caught:
        rig.get(server.on("/f", wrong))
    assert "400000" in caught.value.details


def test_a_whole_part_of_a_killed_run_needs_no_network(rig: Rig) -> None:
    rig.part(BODY)
    assert rig.get("http://127.0.0.1:9/never-asked") == BODY


def test_a_part_longer_than_the_file_is_dropped(rig: Rig, server: Script) -> None:
    rig.part(BODY + b"more")
    assert rig.get(server.on("/f", Reply(BODY))) == BODY
    assert "Range" not in server.requests[0].headers


def test_resuming_works_across_sources(rig: Rig, server: Script) -> None:
    first = server.on("/a", Reply(BODY, drop_after=100_000), Reply(status=404))
    assert rig.get(first, server.on("/b", Reply(BODY))) == BODY
    assert server.asked("/b")[0].headers["Range"] == "bytes=100000-"


# ---- lengths and encodings ---------------------------------------------------------------------------------------------------------


def test_no_content_length(rig: Rig, server: Script) -> None:
    assert rig.get(server.on("/f", Reply(BODY, length=None))) == BODY


def test_chunked(rig: Rig, server: Script) -> None:
    assert rig.get(server.on("/f", Reply(BODY, chunked=True))) == BODY


def test_an_early_end_without_content_length_is_continued(rig: Rig, server: Script) -> None:
    assert rig.get(server.on("/f", Reply(BODY, length=None, drop_after=100_000), Reply(BODY))) == BODY
    assert server.requests[1].headers["Range"] == "bytes=100000-"


def test_a_body_compressed_on_the_way_is_unpacked(rig: Rig, server: Script) -> None:
    text = b"many words " * 30_000
    wanted = Wanted("words.txt", len(text), sha(text))
    assert rig.get(server.on("/f", Reply(gzip.compress(text), headers={"Content-Encoding": "gzip"})), wanted=wanted) == text


def test_a_gz_file_labelled_as_encoded_is_kept_as_it_is(rig: Rig, server: Script) -> None:
    packed = gzip.compress(b"many words " * 30_000, mtime=0)
    wanted = Wanted("words.tar.gz", len(packed), sha(packed))
    assert rig.get(server.on("/f", Reply(packed, headers={"Content-Encoding": "x-gzip"})), wanted=wanted) == packed


def test_an_encoding_that_unpacks_without_end_is_stopped(rig: Rig, server: Script) -> None:
    bomb = gzip.compress(b"\0" * 50_000_000)
    with pytest.raises(ChecksumError) as caught:
        rig.get(server.on("/f", Reply(bomb, headers={"Content-Encoding": "gzip"})))
    assert "more than 300000 bytes" in caught.value.details
    assert rig.left_over() == []


def test_an_encoding_that_is_none_is_wrong_bytes(rig: Rig, server: Script) -> None:
    with pytest.raises(ChecksumError):
        rig.get(server.on("/f", Reply(OTHER, headers={"Content-Encoding": "gzip"})))
    assert OTHER in rig.rejected()


def test_an_unknown_encoding_is_refused(rig: Rig, server: Script) -> None:
    with pytest.raises(DownloadError) as caught:
        rig.get(server.on("/f", Reply(BODY, headers={"Content-Encoding": "br"})))
    assert "Content-Encoding br" in caught.value.details


def test_a_content_length_beyond_the_body_is_a_dropped_connection(rig: Rig, server: Script) -> None:
    assert rig.get(server.on("/f", Reply(BODY[:100_000], length=len(BODY)), Reply(BODY))) == BODY


def test_a_body_without_end_is_cut_off_as_soon_as_it_is_too_long(rig: Rig, server: Script) -> None:
    endless = BODY + bytes(60_000_000)
    with pytest.raises(ChecksumError) as caught:
        rig.get(server.on("/f", Reply(endless, length=None)))
    assert "more than 300000 bytes" in caught.value.details
    assert max(request.sent for request in server.requests) < 20_000_000  # what socket buffers took, not the whole
    assert all(len(kept) == len(BODY) + 1 for kept in rig.rejected())


def test_an_announced_length_that_is_too_large_keeps_only_a_beginning(rig: Rig, server: Script) -> None:
    wanted = Wanted("big", 5_000_000, sha(bytes(5_000_000)))
    with pytest.raises(ChecksumError) as caught:
        rig.get(server.on("/f", Reply(bytes(9_000_000))), wanted=wanted)
    assert "announces 9000000 bytes instead of 5000000" in caught.value.details
    assert [len(kept) for kept in rig.rejected()] == [(1 << 20) + 1]


# ---- troubles ----------------------------------------------------------------------------------------------------------------------


def test_busy_servers_are_asked_again_later_and_retry_after_is_kept(rig: Rig, server: Script) -> None:
    url = server.on("/f", Reply(status=503), Reply(status=429, headers={"Retry-After": "7"}), Reply(status=500), Reply(BODY))
    assert rig.get(url) == BODY
    assert rig.pauses == [1.0, 7.0, 4.0]


def test_retry_after_may_be_a_date(rig: Rig, server: Script) -> None:
    when = time.strftime("%a, %d %b %Y %H:%M:%S GMT", time.gmtime(time.time() + 30))
    assert rig.get(server.on("/f", Reply(status=503, headers={"Retry-After": when}), Reply(BODY))) == BODY
    assert 20 < rig.pauses[0] <= 30


def test_a_long_retry_after_goes_to_the_next_source_at_once(rig: Rig, server: Script) -> None:
    url = server.on("/a", Reply(status=429, headers={"Retry-After": "9999"}))
    assert rig.get(url, server.on("/b", Reply(BODY))) == BODY
    assert rig.pauses == []


@pytest.mark.parametrize("status", [400, 401, 403, 404, 410, 451])
def test_a_plain_refusal_is_final_for_the_source(rig: Rig, server: Script, status: int) -> None:
    assert rig.get(server.on("/a", Reply(status=status)), server.on("/b", Reply(BODY))) == BODY
    assert len(server.asked("/a")) == 1
    assert rig.pauses == []


def test_the_number_of_tries_is_bounded(rig: Rig, server: Script) -> None:
    with pytest.raises(DownloadError) as caught:
        rig.get(server.on("/f", Reply(status=503)))
    assert len(server.requests) == Policy().attempts
    assert "503" in caught.value.details
    assert caught.value.exit_code == 10


def test_tries_that_bring_bytes_do_not_count(rig: Rig, server: Script) -> None:
    url = server.on("/f", *[Reply(BODY, drop_after=20_000)] * 14, Reply(BODY))
    assert rig.get(url) == BODY
    assert len(server.requests) == 15


def test_a_server_that_always_drops_at_the_same_byte_ends(rig: Rig, server: Script) -> None:
    with pytest.raises(DownloadError):
        rig.get(server.on("/f", Reply(BODY, ranges=False, drop_after=50_000)))
    assert len(server.requests) <= Policy().attempts + 1


def test_nobody_listens(rig: Rig) -> None:
    with pytest.raises(DownloadError) as caught:
        rig.get("http://127.0.0.1:9/f")
    assert "refused" in caught.value.details


@pytest.mark.parametrize("url", ["ftp://127.0.0.1/f", "http://", "nonsense"])
def test_addresses_that_are_none(rig: Rig, url: str) -> None:
    with pytest.raises(DownloadError):
        rig.get(url)
    assert rig.pauses == []


# ---- wrong bytes -------------------------------------------------------------------------------------------------------------------


def test_wrong_bytes_are_kept_aside_and_the_next_source_is_used(rig: Rig, server: Script) -> None:
    assert rig.get(server.on("/a", Reply(OTHER)), server.on("/b", Reply(BODY))) == BODY
    assert rig.rejected() == [OTHER]
    warning = rig.said.getvalue()
    assert "/a" in warning and sha(OTHER) in warning and str(rig.cache.rejected(WANTED.name, sha(OTHER))) in warning


def test_an_intermittent_wrong_file_gets_a_second_chance(rig: Rig, server: Script) -> None:
    assert rig.get(server.on("/f", Reply(OTHER), Reply(BODY))) == BODY
    assert rig.rejected() == [OTHER]


def test_when_all_fail_each_source_is_listed_with_what_it_gave(rig: Rig, server: Script) -> None:
    page = b"<html>log in first</html>"
    urls = [server.on("/a", Reply(OTHER)), server.on("/b", Reply(status=404)), server.on("/c", Reply(page))]
    with pytest.raises(ChecksumError) as caught:
        rig.get(*urls)
    details = caught.value.details
    assert [details.index(url) for url in urls] == sorted(details.index(url) for url in urls)
    for text in (f"expected: {len(BODY)} bytes, sha256 {WANTED.sha256}", sha(OTHER), f"got {len(page)} bytes", sha(page), "404"):
        assert text in details
    assert sorted(rig.rejected()) == sorted([OTHER, page])
    assert not rig.cache.blob(WANTED.sha256).exists()
    assert rig.left_over() == []


def test_one_byte_too_few_is_a_mismatch(rig: Rig, server: Script) -> None:
    with pytest.raises(ChecksumError):
        rig.get(server.on("/f", Reply(BODY[:-1])))
    assert rig.rejected() == [BODY[:-1]]


# ---- the disk ----------------------------------------------------------------------------------------------------------------------


def test_what_lies_in_the_place_of_the_file_is_kept_aside(rig: Rig, server: Script) -> None:
    blob = rig.cache.blob(WANTED.sha256)
    blob.parent.mkdir(parents=True)
    for make in (lambda: (blob / "inside").mkdir(parents=True), lambda: blob.symlink_to("nowhere"), lambda: os.mkfifo(blob), lambda: blob.write_bytes(b"short")):
        make()
        assert rig.get(server.on("/f", Reply(BODY))) == BODY
        blob.unlink()
    kept = {path.name for path in (rig.cache.root / "rejected").iterdir()}
    assert kept == {f"{WANTED.name}.{kind}" for kind in ("folder", "link", "device", sha(b"short")[:16])}
    assert (rig.cache.root / "rejected" / f"{WANTED.name}.folder" / "inside").is_dir()
    assert all(name in rig.said.getvalue() for name in kept)


def test_a_folder_of_the_pinned_size_is_not_the_file(rig: Rig) -> None:
    blob = rig.cache.blob(WANTED.sha256)
    blob.mkdir(parents=True)
    assert not rig.downloader.have(Wanted(WANTED.name, blob.stat().st_size, WANTED.sha256))


def test_no_room(rig: Rig, server: Script) -> None:
    wanted = Wanted("huge", 1 << 60, "0" * 64)
    with pytest.raises(DiskError, match="make room"):
        rig.get(server.on("/f", Reply(BODY)), wanted=wanted)
    assert server.requests == []


@pytest.mark.parametrize("obstacle", ["", "blobs", "parts", "locks", "rejected"])
def test_a_cache_that_cannot_be_written(rig: Rig, server: Script, obstacle: str) -> None:
    place = rig.cache.root / obstacle
    place.parent.mkdir(parents=True, exist_ok=True)
    place.write_bytes(b"a file where a folder is needed")
    with pytest.raises(DiskError, match=f"Cannot write {rig.cache.root}"):
        rig.get(server.on("/f", Reply(BODY)))
    assert place.read_bytes() == b"a file where a folder is needed"


# ---- offline -----------------------------------------------------------------------------------------------------------------------


def test_offline_uses_the_cache_and_else_says_what_to_run(rig: Rig, server: Script) -> None:
    url = server.on("/f", Reply(BODY))
    rig.downloader.offline = True
    with pytest.raises(OfflineError, match="invoke vendor fetch thing") as caught:
        rig.downloader.fetch(WANTED, [Address(url)], hint="invoke vendor fetch thing")
    assert caught.value.exit_code == 12
    assert server.requests == []
    rig.downloader.offline = False
    rig.get(url)
    rig.downloader.offline = True
    assert rig.get(url) == BODY


# ---- files and unknown hashes ------------------------------------------------------------------------------------------------------


def test_file_addresses(rig: Rig, tmp_path: Path) -> None:
    source = tmp_path / "with space \u00e9.bin"
    source.write_bytes(BODY)
    assert rig.get(source.as_uri()) == BODY
    assert source.read_bytes() == BODY


def test_a_file_address_that_is_not_there_or_wrong(rig: Rig, tmp_path: Path) -> None:
    wrong = tmp_path / "wrong"
    wrong.write_bytes(OTHER + b"tail")
    with pytest.raises(ChecksumError) as caught:
        rig.get((tmp_path / "absent").as_uri(), wrong.as_uri())
    assert "No such file" in caught.value.details
    assert wrong.exists()


def test_discover_tells_size_and_hash_and_keeps_the_file(rig: Rig, server: Script) -> None:
    found = rig.downloader.discover("thing", [Address(server.on("/a", Reply(status=404))), Address(server.on("/b", Reply(BODY)))])
    assert found == Wanted("thing", len(BODY), sha(BODY))
    assert rig.cache.blob(found.sha256).read_bytes() == BODY
    assert rig.left_over() == []


def test_discover_does_not_take_a_cut_answer_for_the_file(rig: Rig, server: Script) -> None:
    with pytest.raises(DownloadError):
        rig.downloader.discover("thing", [Address(server.on("/a", Reply(BODY, drop_after=1000)))])
    assert rig.left_over() == []


# ---- several runs, killed runs -----------------------------------------------------------------------------------------------------

_CHILD = """
import sys
from pathlib import Path
from opencoti_build.cache import Cache
from opencoti_build.console import Console, Mode
from opencoti_build.download import Address, Downloader, Wanted
root, url, size, sha256 = sys.argv[1:]
path = Downloader(Cache(Path(root)), Console(mode=Mode.PLAIN)).fetch(Wanted("thing", int(size), sha256), [Address(url)])
print(path)
"""


def child(root: Path, url: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", _CHILD, str(root), url, str(len(BODY)), WANTED.sha256], cwd=PROJECT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def test_two_runs_share_one_download(rig: Rig, server: Script) -> None:
    url = server.on("/f", Reply(BODY, pause=0.3))
    runs = [child(rig.cache.root, url) for _ in range(2)]
    results = [run.communicate(timeout=60) for run in runs]
    assert [run.returncode for run in runs] == [0, 0], results
    assert len(server.requests) == 1
    assert rig.cache.blob(WANTED.sha256).read_bytes() == BODY


def test_a_killed_run_is_continued_by_the_next(rig: Rig, server: Script) -> None:
    url = server.on("/f", Reply(BODY, pause=0.4), Reply(BODY))
    run = child(rig.cache.root, url)
    part = rig.part()
    deadline = time.monotonic() + 30
    while not (part.exists() and part.stat().st_size >= 1) and time.monotonic() < deadline:
        time.sleep(0.01)
    run.send_signal(signal.SIGKILL if hasattr(signal, "SIGKILL") else signal.SIGTERM)
    run.communicate()
    assert not rig.cache.blob(WANTED.sha256).exists()
    present = part.stat().st_size
    assert 0 < present < len(BODY)
    assert rig.get(url) == BODY
    assert server.requests[1].headers["Range"] == f"bytes={present}-"


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    replies=st.lists(
        st.builds(
            Reply,
            body=st.sampled_from([BODY, OTHER, b"", BODY[:5000], BODY + b"x"]),
            status=st.sampled_from([200, 200, 200, 206, 404, 416, 429, 503]),
            ranges=st.booleans(),
            headers=st.sampled_from([{}, {"ETag": '"a"'}, {"Content-Encoding": "gzip"}, {"Content-Range": "bytes 7-9/10"}, {"Retry-After": "soon"}]),
            length=st.sampled_from([-1, None, 5, 400_000]),
            drop_after=st.sampled_from([None, 0, 1, 70_000, 299_999]),
        ),
        max_size=8,
    )
)
def test_whatever_the_server_does_the_cache_holds_the_right_file_or_none(tmp_path: Path, replies: list[Reply]) -> None:
    rig = Rig(tmp_path / hashlib.sha256(repr(replies).encode()).hexdigest()[:16])
    with running() as server:
        url = server.on("/f", *replies, Reply(status=410))
        try:
            data = rig.get(url)
        except (ChecksumError, DownloadError) as error:
            assert error.message and error.details
            assert not rig.cache.blob(WANTED.sha256).exists()
        else:
            assert data == BODY
        assert len(server.requests) < 60
