"""Finding a project's files on package indexes, with pip's own settings."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import requests
from scripted_server import Reply, Script, running

from opencoti_build.errors import DownloadError
from opencoti_build.pypi import Index, IndexFile, Settings, default_index, normalised, pip_settings
from opencoti_build.runner import Outcome, SystemRunner

JSON = {"Content-Type": "application/vnd.pypi.simple.v1+json"}


@pytest.fixture
def server() -> Iterator[Script]:
    with running() as script:
        yield script


def index(*bases: str, links: tuple[Path, ...] = ()) -> tuple[Index, list[float]]:
    pauses: list[float] = []
    return Index(SystemRunner(), requests.Session(), known=Settings(bases, links), sleep=pauses.append), pauses


def page(*files: dict[str, Any]) -> Reply:
    return Reply(json.dumps({"meta": {"api-version": "1.1"}, "name": "thing", "files": list(files)}).encode(), headers=JSON)


def test_json_answers_give_address_size_and_hash(server: Script) -> None:
    server.on("/simple/my-thing/", page({"filename": "my_thing-1.0.tar.gz", "url": "../../files/my_thing-1.0.tar.gz", "size": 7, "hashes": {"sha256": "ab"}}))
    found, _ = index(f"{server.url}/simple")
    assert found.find("My.Thing", "my_thing-1.0.tar.gz") == IndexFile("my_thing-1.0.tar.gz", f"{server.url}/files/my_thing-1.0.tar.gz", 7, "ab")
    assert "application/vnd.pypi.simple.v1+json" in server.requests[0].headers["Accept"]


def test_html_answers_with_a_base_relative_addresses_and_fragments(server: Script) -> None:
    text = '<html><head><base href="/deep/"></head><body><a href="a%20b/thing-1.0.zip#sha256=cd">x</a><a href="thing-2.0.zip">y</a><a>none</a></body>'
    server.on("/simple/thing/", Reply(text.encode(), headers={"Content-Type": "text/html"}))
    found, _ = index(f"{server.url}/simple")
    assert found.files("thing") == [
        IndexFile("thing-1.0.zip", f"{server.url}/deep/a%20b/thing-1.0.zip", None, "cd"),
        IndexFile("thing-2.0.zip", f"{server.url}/deep/thing-2.0.zip", None, None),
    ]


def test_the_first_index_that_has_the_file_wins_and_one_that_fails_is_skipped(server: Script, tmp_path: Path) -> None:
    server.on("/a/thing/", Reply(status=404))
    server.on("/b/thing/", page({"filename": "thing-1.0.zip", "url": "b.zip", "hashes": {}}))
    server.on("/c/thing/", page({"filename": "thing-1.0.zip", "url": "c.zip", "hashes": {}}, {"filename": "thing-2.0.zip", "url": "d.zip", "hashes": {}}))
    (tmp_path / "thing-3.0.zip").write_bytes(b"123")
    found, _ = index(*(f"{server.url}/{name}" for name in "abc"), links=(tmp_path,))
    assert {offer.file: offer.url for offer in found.files("thing")} == {
        "thing-1.0.zip": f"{server.url}/b/thing/b.zip",
        "thing-2.0.zip": f"{server.url}/c/thing/d.zip",
        "thing-3.0.zip": (tmp_path / "thing-3.0.zip").as_uri(),
    }


def test_an_index_in_a_folder(tmp_path: Path) -> None:
    (tmp_path / "thing").mkdir()
    (tmp_path / "thing" / "index.html").write_text('<a href="../../files/thing-1.0.zip#sha256=ab">thing-1.0.zip</a>')
    found, _ = index(tmp_path.as_uri())
    assert found.find("thing", "thing-1.0.zip").sha256 == "ab"


def test_a_project_nobody_has(server: Script) -> None:
    found, _ = index(f"{server.url}/simple")
    with pytest.raises(DownloadError, match="no index knows thing") as caught:
        found.files("thing")
    assert "404" in caught.value.details


def test_a_file_nobody_has(server: Script) -> None:
    server.on("/simple/thing/", page({"filename": "thing-1.0.zip", "url": "b.zip", "hashes": {}}))
    found, _ = index(f"{server.url}/simple")
    with pytest.raises(DownloadError, match=r"no index has thing-2\.0\.zip"):
        found.find("thing", "thing-2.0.zip")


def test_a_busy_index_is_asked_again(server: Script) -> None:
    server.on("/simple/thing/", Reply(status=503), page({"filename": "thing-1.0.zip", "url": "b.zip", "hashes": {}}))
    found, pauses = index(f"{server.url}/simple")
    assert found.find("thing", "thing-1.0.zip")
    assert pauses == [1.0]


@pytest.mark.parametrize("body", [b"", b"[]", b"{}", b'{"files": 3}', b'{"files": [{}]}', b'{"files": [3]}', b"\xff\xfe", b"[" * 5000])
def test_answers_that_make_no_sense(server: Script, body: bytes) -> None:
    server.on("/simple/thing/", Reply(body, headers=JSON))
    found, _ = index(f"{server.url}/simple")
    with pytest.raises(DownloadError, match="no index knows thing"):
        found.files("thing")


def test_names_are_spelled_as_indexes_do() -> None:
    assert normalised("My__Cool.-Thing") == "my-cool-thing"


class Pip:
    """Answers for pip: the settings as ``pip config list`` prints them."""

    def __init__(self, listing: str) -> None:
        self.listing = listing

    def run(self, argv: Sequence[str | Path], *, env: Mapping[str, str] | None = None, **_: Any) -> Outcome:
        if "config" in argv:
            return Outcome(tuple(map(str, argv)), 0, self.listing)
        return Outcome(tuple(map(str, argv)), 0, "  -i, --index-url <url>  Base URL of the Python\n     Package Index (default\n     https://index.example/simple). This should\n")


def test_pip_settings_win_in_pip_s_order(tmp_path: Path) -> None:
    listing = f"global.index-url='https://one.example/simple/'\n:env:.index-url='https://two.example/simple'\nglobal.extra-index-url='https://x.example/a \\nhttps://y.example/b'\nglobal.find-links='{tmp_path}'\nglobal.cert='/etc/c.pem'\nfreeze.index-url='https://not.example'\n"
    assert pip_settings(Pip(listing), {}) == Settings(  # type: ignore[arg-type]
        ("https://two.example/simple", "https://x.example/a", "https://y.example/b"), (tmp_path,), "/etc/c.pem", None
    )


def test_without_settings_pip_s_default_is_used() -> None:
    assert pip_settings(Pip(""), {}).indexes == ("https://index.example/simple",)  # type: ignore[arg-type]


def test_no_index_leaves_the_folders_alone(tmp_path: Path) -> None:
    assert pip_settings(Pip(f"global.no-index='true'\nglobal.find-links='{tmp_path} https://ignored.example'\n"), {}) == Settings((), (tmp_path,))  # type: ignore[arg-type]


def test_an_own_variable_wins() -> None:
    assert pip_settings(Pip("global.index-url='https://one.example'\n"), {"OPENCOTI_INDEX_URL": "https://own.example/s/"}).indexes == ("https://own.example/s",)  # type: ignore[arg-type]


def test_the_real_pip_understands_the_questions(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_INDEX_URL", "https://mirror.example/simple")
    monkeypatch.delenv("PIP_EXTRA_INDEX_URL", raising=False)
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    settings = pip_settings(SystemRunner())
    assert settings.indexes == ("https://mirror.example/simple",)
    assert settings.links == (tmp_path,)
    assert default_index(SystemRunner()).startswith("https://")
