"""The local model hub, asked over HTTP, and the cache it stands for."""

from __future__ import annotations

import hashlib
import json
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from opencoti_build.gates import hub

DATA = bytes(range(256)) * 40


@pytest.fixture
def repositories(tmp_path: Path) -> hub.Repositories:
    model = tmp_path / "local.gguf"
    model.write_bytes(DATA)
    picture = tmp_path / "p.png"
    picture.write_bytes(b"png")
    return {"owner/model": {"sub/model-F16.gguf": model, "p.png": picture}}


@pytest.fixture
def address(repositories: hub.Repositories) -> Iterator[str]:
    with hub.serving(repositories) as served:
        yield served


def ask(url: str, method: str = "GET", **headers: str) -> tuple[int, dict[str, str], bytes]:
    request = urllib.request.Request(url, headers=headers, method=method)
    try:
        with urllib.request.urlopen(request, timeout=10) as answer:
            return answer.status, dict(answer.headers), answer.read()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, dict(error.headers), error.read()


def test_a_download_as_the_engine_does_it(address: str) -> None:
    branches = json.loads(ask(f"{address}/api/models/owner/model/refs")[2])["branches"]
    assert branches[0]["name"] == "main"
    commit = branches[0]["targetCommit"]
    entries = json.loads(ask(f"{address}/api/models/owner/model/tree/{commit}?recursive=true")[2])
    entry = next(item for item in entries if item["path"] == "sub/model-F16.gguf")
    assert entry["type"] == "file" and entry["size"] == len(DATA) and entry["lfs"]["oid"] == hashlib.sha256(DATA).hexdigest()
    url = f"{address}/owner/model/resolve/{commit}/sub/model-F16.gguf"
    status, headers, body = ask(url, "HEAD")
    assert (status, body) == (200, b"") and int(headers["Content-Length"]) == len(DATA) and headers["Accept-Ranges"] == "bytes"
    assert ask(url)[2] == DATA


def test_a_download_goes_on_where_it_was(address: str) -> None:
    url = f"{address}/owner/model/resolve/main/sub/model-F16.gguf"
    status, headers, body = ask(url, Range="bytes=1000-")
    assert (status, body) == (206, DATA[1000:])
    assert headers["Content-Range"] == f"bytes 1000-{len(DATA) - 1}/{len(DATA)}"
    assert ask(url, Range="bytes=10-19")[2] == DATA[10:20]
    assert ask(url, Range=f"bytes={len(DATA)}-")[0] == 416


@pytest.mark.parametrize("path", ["/", "/api/models/owner/other/refs", "/owner/model/resolve/main/absent", "/owner/model/resolve/main/../local.gguf", "/owner/model/resolve/" + "0" * 40 + "/p.png"])
def test_anything_else_is_not_there(address: str, path: str) -> None:
    assert ask(address + path)[0] == 404


def test_a_filled_cache_has_the_files_under_their_names(repositories: hub.Repositories, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    for _ in range(2):
        hub.place(cache, repositories)
    folder = cache / "models--owner--model"
    commit = (folder / "refs" / "main").read_text()
    assert (folder / "snapshots" / commit / "sub" / "model-F16.gguf").read_bytes() == DATA
    assert (folder / "blobs" / hashlib.sha256(DATA).hexdigest()).read_bytes() == DATA
    (folder / "snapshots" / commit / "p.png").unlink()
    assert (tmp_path / "p.png").exists()
