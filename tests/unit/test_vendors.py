"""Pins: reading them, and bringing what they name from every kind of source."""

from __future__ import annotations

import copy
import dataclasses
import functools
import gzip
import hashlib
import io
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tarfile
import time
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import requests
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from invoke import Collection, Program
from scripted_server import Reply, Script, running

from opencoti_build.bump import bump, rewrite
from opencoti_build.cache import Cache
from opencoti_build.cli.common import CommandContext
from opencoti_build.cli.spaced import add_group, install
from opencoti_build.cli.vendor import ns
from opencoti_build.console import Console, Mode
from opencoti_build.download import Policy
from opencoti_build.errors import ArchiveError, ChecksumError, DataError, DownloadError, GitError, OfflineError, OpencotiError, UsageError
from opencoti_build.project import Project
from opencoti_build.pypi import Index, Settings
from opencoti_build.runner import SystemRunner
from opencoti_build.schema import parse_yaml
from opencoti_build.vendors import PLATFORMS, Fetcher, Kind, Outcome, Pin, Role, State, ensure, find_pin, host_platform, load_pin, load_pins

PROJECT = Path(__file__).resolve().parents[2]
HOST = "linux-x86_64"

FILES = {"LICENSE": b"Do as you like.\n", "src/main.c": b"int main(void){return 0;}\n", "tool.sh": b"#!/bin/sh\n", "data.bin": random.Random(5).randbytes(200_000)}


# ---- the format --------------------------------------------------------------------------------------------------------------------

GOOD: dict[str, Any] = {
    "schema": 1,
    "name": "thing",
    "version": "b12",
    "kind": "source",
    "role": "build",
    "licence": "MIT AND (Apache-2.0 WITH LLVM-exception OR BSD-3-Clause)",
    "licence_file": {"path": "LICENSE", "sha256": "1" * 64},
    "note": "What it is.",
    "commit": "2" * 40,
    "tree": "3" * 40,
    "files": 4,
    "unpacked": 500,
    "tools": {"run": "bin/run"},
    "sources": [
        {"pypi": "thing-bin", "release": "12.0.0", "file": "thing_bin-12.0.0.tar.gz", "size": 100, "sha256": "4" * 64, "folder": "thing_bin-12.0.0/thing"},
        {"git": "https://example.org/thing", "tag": "b12"},
        {"url": "https://example.org/thing-b12.tar.gz", "file": "thing-b12.tar.gz", "size": 90, "sha256": "5" * 64},
    ],
}
PLATFORMED: dict[str, Any] = {
    **{key: value for key, value in GOOD.items() if key not in ("tree", "files", "unpacked", "tools", "sources")},
    "platforms": {platform: {key: GOOD[key] for key in ("tree", "files", "unpacked", "tools", "sources")} for platform in ("linux-x86_64", "windows-x86_64")},
}


def changed(data: dict[str, Any], path: str, value: Any) -> dict[str, Any]:
    """A copy with the value at a dotted path set, or removed where the value is ``...``."""
    result = copy.deepcopy(data)
    *parents, last = [int(part) if part.isdigit() else part for part in path.split(".")]
    place: Any = result
    for part in parents:
        place = place[part]
    if value is ...:
        del place[last]
    else:
        place[last] = value
    return result


@pytest.mark.parametrize("data", [GOOD, PLATFORMED])
def test_a_pin_survives_the_round_trip(data: dict[str, Any]) -> None:
    pin = Pin.from_dict(data)
    assert pin.to_dict() == data
    assert Pin.from_dict(yaml.safe_load(yaml.safe_dump(pin.to_dict()))) == pin
    assert pin.kind is Kind.SOURCE and pin.role is Role.BUILD
    assert pin.complete
    assert pin.package("linux-x86_64").tools == {"run": "bin/run"}


def test_a_platform_that_is_not_pinned() -> None:
    pin = Pin.from_dict(PLATFORMED)
    assert not pin.covers("macos-aarch64")
    with pytest.raises(UsageError, match="not pinned for macos-aarch64, only for linux-x86_64, windows-x86_64"):
        pin.package("macos-aarch64")


WRONG = [
    ("name", ..., "the field 'name' is missing"),
    ("name", "../x", "name: '../x' is not a name"),
    ("name", "Thing", "name: 'Thing' is not a name"),
    ("version", 12, "version: expected text, found a number; put it in quotes"),
    ("version", 1.5, "put it in quotes"),
    ("version", "1 2", "version: '1 2' is not a version"),
    ("schema", 2, "schema: this toolkit reads schema 1"),
    ("schema", "1", "schema: expected a whole number"),
    ("schema", True, "schema: expected a whole number"),
    ("kind", "sorce", "kind: 'sorce' is not known; did you mean 'source'"),
    ("role", "x", "role: 'x' is not known; known are build, reference, test, optional"),
    ("licence", "MIT AND", "is not an SPDX licence expression"),
    ("licence", "MIT License", "is not an SPDX licence expression"),
    ("licence", "(MIT", "is not an SPDX licence expression"),
    ("licence", "MIT; Apache-2.0", "is not an SPDX licence expression"),
    ("licence", "and", "is not an SPDX licence expression"),
    ("licence_file.sha256", None, "licence_file.sha256 is missing although the tree is known"),
    ("licence_file.path", "/etc/passwd", "licence_file.path: '/etc/passwd' is not a plain relative path"),
    ("commit", "2" * 39, "commit: expected 40 hex digits"),
    ("commit", "A" * 40, "commit: expected 40 hex digits"),
    ("commit", int("2" * 40), "put it in quotes"),
    ("tree", "g" * 40, "tree: expected 40 hex digits"),
    ("tree", None, "go together"),
    ("files", 0, "files: 0 is not between 1 and"),
    ("unpacked", -1, "unpacked: -1 is not between 0 and"),
    ("unpacked", 1 << 60, "unpacked: 1152921504606846976 is not between"),
    ("tools", {}, None),
    ("tools", {"run": "../run"}, "tools.run: '../run' is not a plain relative path"),
    ("tools", {3: "run"}, "expected names as keys"),
    ("tools", [], "tools: expected a mapping, found a list"),
    ("treee", "3" * 40, "unknown field 'treee'; did you mean 'tree'"),
    ("zzz", 1, "unknown field 'zzz'; known are"),
    ("sources", [], "sources: the list is empty"),
    ("sources", "x", "sources: expected a list, found text"),
    ("sources", None, "sources: expected a list, found nothing"),
    ("sources.0", "x", "sources.0: expected a mapping, found text"),
    ("sources.0.size", ..., "a 'size' is missing although the tree is known"),
    ("sources.0.size", "100", "sources.0.size: expected a whole number, found text"),
    ("sources.0.sha256", ..., "sources.0: the field 'sha256' is missing"),
    ("sources.0.sha256", "4" * 63, "sources.0.sha256: expected 64 hex digits (0-9, a-f), found"),
    ("sources.0.sha255", "4" * 64, "sources.0: unknown field 'sha255'; did you mean 'sha256'"),
    ("sources.0.file", "../x.tar.gz", "sources.0.file: '../x.tar.gz' is not a plain file name"),
    ("sources.0.file", "a/b.tar.gz", "is not a plain file name"),
    ("sources.0.folder", "../up", "sources.0.folder: '../up' is not a plain relative path"),
    ("sources.0.folder", "/", "is not a plain relative path"),
    ("sources.0.folder", "a\\b", "is not a plain relative path"),
    ("sources.0.pypi", "no such/name", "is not a PyPI project's name"),
    ("sources.0.git", "https://example.org/x", "a source names exactly one of"),
    ("sources.1.git", ..., "a source names exactly one of 'git', 'pypi' and 'url'"),
    ("sources.1.git", "ext::sh -c id", "is not an address beginning with https:// or file://"),
    ("sources.1.git", "--upload-pack=x", "is not an address"),
    ("sources.1.tag", "--all", "is not a git tag"),
    ("sources.1.tag", "a..b", "is not a git tag"),
    ("sources.2.url", "https://me:secret@example.org/x", "a user name or password does not belong into a pin"),
    ("sources.2.url", "example.org/x", "is not an address"),
    ("sources.2.url", "https://[", "is not an address"),
]


@pytest.mark.parametrize(("path", "value", "message"), WRONG, ids=[f"{path}={str(value)[:20]}" for path, value, _ in WRONG])
def test_what_is_wrong_is_named(path: str, value: Any, message: str | None) -> None:
    data = changed(GOOD, path, value)
    if message is None:
        Pin.from_dict(data, "thing.yaml")
        return
    with pytest.raises(DataError) as caught:
        Pin.from_dict(data, "thing.yaml")
    assert str(caught.value).startswith("thing.yaml: ")
    assert message in str(caught.value)
    assert caught.value.exit_code == 3


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        ("platforms.linux-x86", PLATFORMED["platforms"]["linux-x86_64"], "no such platform; did you mean 'linux-x86_64'"),
        ("platforms", {}, "names no platform"),
        ("sources", GOOD["sources"], "has both 'platforms' and 'sources'"),
        ("platforms.linux-x86_64.tre", "3" * 40, "platforms.linux-x86_64: unknown field 'tre'; did you mean 'tree'"),
        ("tree", "3" * 40, "unknown field 'tree'"),
    ],
)
def test_what_is_wrong_with_platforms_is_named(path: str, value: Any, message: str) -> None:
    with pytest.raises(DataError) as caught:
        Pin.from_dict(changed(PLATFORMED, path, value))
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("name: a\nname: b\n", "line 2 is not YAML as expected: the key 'name' stands twice"),
        ("a: &x 1\nb: *x\n", "aliases are not used"),
        ("a: [1\n", "is not YAML as expected"),
        ("a: !!python/object/apply:os.getcwd []\n", "is not YAML as expected"),
        ("\t- x", "is not YAML as expected"),
        ("a: 2020-99-99\n", "is not YAML as expected"),
        ("[" * 5000, "is not YAML as expected"),
        ("a: \x00", "is not YAML as expected"),
        ("- a\n", "expected a mapping, found a list"),
        ("", "expected a mapping, found nothing"),
        ("? [a]\n: b\n", "YAML|names as keys"),
    ],
)
def test_files_that_are_no_pin(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "thing.yaml"
    path.write_text(text, "utf-8")
    with pytest.raises(DataError, match=message) as caught:
        load_pin(path)
    assert "thing.yaml" in str(caught.value)


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="Cannot read"):
        load_pin(tmp_path / "absent.yaml")
    (tmp_path / "latin.yaml").write_bytes(b"name: \xe9\n")
    with pytest.raises(DataError, match="not UTF-8"):
        load_pin(tmp_path / "latin.yaml")
    (tmp_path / "huge.yaml").write_bytes(b"# " + b"x" * (2 << 20))
    with pytest.raises(DataError, match="larger than"):
        load_pin(tmp_path / "huge.yaml")
    with pytest.raises(DataError, match="no folder"):
        load_pins(tmp_path / "nowhere")


def test_a_pin_in_a_file_of_another_name(tmp_path: Path) -> None:
    (tmp_path / "other.yaml").write_text(yaml.safe_dump(GOOD))
    with pytest.raises(DataError, match=r"'thing' belongs into thing\.yaml"):
        load_pins(tmp_path)


def test_names_are_suggested() -> None:
    pins = {"ziglang": Pin.from_dict(GOOD)}
    with pytest.raises(UsageError, match="did you mean ziglang"):
        find_pin(pins, "zig-lang")


_scalars = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8) | st.sampled_from(["4" * 64, "any", "https://x.org/y"])
_values = st.recursive(_scalars, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3), max_leaves=6)


def _paths(value: Any, prefix: str = "") -> list[str]:
    pairs = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [found for key, inner in pairs for found in (f"{prefix}{key}", *_paths(inner, f"{prefix}{key}."))]


@settings(max_examples=100, deadline=None)
@given(path=st.sampled_from(_paths(GOOD)), value=_values)
def test_any_value_anywhere_is_accepted_or_named(path: str, value: Any) -> None:
    try:
        pin = Pin.from_dict(changed(GOOD, path, value), "thing.yaml")
    except DataError as error:
        assert str(error).startswith("thing.yaml: ")
    else:
        assert Pin.from_dict(pin.to_dict()) == pin


@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_any_damage_to_the_text_is_accepted_or_named(data: st.DataObject) -> None:
    text = yaml.safe_dump(GOOD, sort_keys=False)
    at = data.draw(st.integers(0, len(text)))
    text = text[:at] + data.draw(st.text(max_size=4)) + text[at + data.draw(st.integers(0, 5)) :]
    try:
        Pin.from_dict(parse_yaml(text, "thing.yaml"), "thing.yaml")
    except DataError as error:
        assert "thing.yaml" in str(error)


# ---- the pins of this repository ---------------------------------------------------------------------------------------------------


def test_the_pins_of_this_repository() -> None:
    pins = load_pins(PROJECT / "vendors")
    assert {"llama.cpp", "llama.cpp-b9859", "llamafile", "cosmocc", "ziglang", "cmake", "ninja"} <= set(pins)
    for pin in pins.values():
        assert Pin.from_dict(pin.to_dict()) == pin
        if pin.role in (Role.BUILD, Role.REFERENCE, Role.TEST):
            assert pin.complete, pin.name
    for name, tool in (("ziglang", "zig"), ("cmake", "cmake"), ("ninja", "ninja")):
        assert set(pins[name].packages) == set(PLATFORMS)
        for platform, package in pins[name].packages.items():
            assert package.tools[tool].endswith(".exe") == platform.startswith("windows")


# ---- fetching ----------------------------------------------------------------------------------------------------------------------


def sdist(files: dict[str, bytes] = FILES, top: str = "thing_bin-12.0.0", level: int = 9) -> bytes:
    """A tar.gz like PyPI's: one top folder, the engine in a folder inside it, a setup.py beside it that must never run."""
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w") as tar:
        for name, data in {f"{top}/setup.py": b"raise SystemExit('must not run')", **{f"{top}/thing/{name}": data for name, data in files.items()}}.items():
            info = tarfile.TarInfo(name)
            info.size, info.mode = len(data), 0o755 if name.endswith(".sh") else 0o644
            tar.addfile(info, io.BytesIO(data))
    return gzip.compress(stream.getvalue(), level, mtime=level)


def wheel(files: dict[str, bytes] = FILES, executable: str = ".sh") -> bytes:
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in files.items():
            info = zipfile.ZipInfo(name)
            info.external_attr, info.create_system = (0o755 if name.endswith(executable) else 0o644) << 16, 3
            archive.writestr(info, data, zipfile.ZIP_DEFLATED)
    return stream.getvalue()


def git(*words: str, cwd: Path) -> str:
    environment = {"PATH": os.environ["PATH"], "HOME": str(cwd), "GIT_CONFIG_NOSYSTEM": "1", "GIT_CONFIG_GLOBAL": os.devnull}
    environment |= {f"GIT_{who}_{what}": value for who in ("AUTHOR", "COMMITTER") for what, value in (("NAME", "t"), ("EMAIL", "t@example.org"), ("DATE", "2001-01-01T00:00:00Z"))}
    return subprocess.run(["git", *words], cwd=cwd, env=environment, check=True, capture_output=True, text=True).stdout.strip()


def repository(place: Path, files: dict[str, bytes] = FILES, tag: str = "b12") -> str:
    """A git repository whose tag holds ``files``; gives the commit."""
    if not place.exists():
        place.mkdir(parents=True)
        git("init", "--quiet", "--template=", cwd=place)
        git("config", "core.autocrlf", "false", cwd=place)
        (place / ".git" / "info").mkdir(exist_ok=True)
        (place / ".git" / "info" / "attributes").write_text("* -text -ident\n")
    else:
        git("rm", "-rqf", "--ignore-unmatch", ".", cwd=place)
    for name, data in files.items():
        path = place / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
        path.chmod(0o755 if name.endswith(".sh") else 0o644)
    git("add", "-A", "-f", cwd=place)
    git("commit", "-qm", "x", cwd=place)
    git("tag", "-f", tag, cwd=place)
    return git("rev-parse", "HEAD", cwd=place)


class World:
    """A package index, a server, a git repository and a cache, with a pin of the same content in each."""

    def __init__(self, tmp_path: Path, server: Script, upstream: Path) -> None:
        self.tmp = tmp_path
        self.server = server
        self.cache = Cache(tmp_path / "cache")
        self.said = io.StringIO()
        self.repository = tmp_path / "upstream"
        shutil.copytree(upstream, self.repository)
        self.commit, self.tree = (upstream / ".git" / "identity").read_text().split()
        self.vendors = tmp_path / "vendors"
        self.vendors.mkdir()
        self.archives: dict[str, bytes] = {}
        self.release("thing-bin", "thing_bin-12.0.0.tar.gz", sdist())
        self.url("/thing-b12.zip", wheel())

    def release(self, project: str, file: str, data: bytes) -> None:
        self.archives[file] = data
        self.server.on(f"/files/{file}", Reply(data))
        offers = [
            {"filename": name, "url": f"/files/{name}", "size": len(content), "hashes": {"sha256": hashlib.sha256(content).hexdigest()}}
            for name, content in self.archives.items()
            if name.startswith(project.replace("-", "_") + "-")
        ]
        self.server.on(f"/simple/{project}/", Reply(json.dumps({"files": offers}).encode(), headers={"Content-Type": "application/vnd.pypi.simple.v1+json"}))

    def url(self, path: str, data: bytes) -> str:
        self.archives[path[1:]] = data
        return self.server.on(path, Reply(data))

    def archive(self, file: str) -> dict[str, Any]:
        data = self.archives[file]
        return {"file": file, "size": len(data), "sha256": hashlib.sha256(data).hexdigest()}

    def pypi_source(self) -> dict[str, Any]:
        return {"pypi": "thing-bin", "release": "12.0.0", **self.archive("thing_bin-12.0.0.tar.gz"), "folder": "thing_bin-12.0.0/thing"}

    def git_source(self) -> dict[str, Any]:
        return {"git": self.repository.as_uri(), "tag": "b12"}

    def url_source(self) -> dict[str, Any]:
        return {"url": f"{self.server.url}/thing-b12.zip", **self.archive("thing-b12.zip")}

    def data(self, *sources: dict[str, Any], **fields: Any) -> dict[str, Any]:
        return {
            **GOOD,
            "licence_file": {"path": "LICENSE", "sha256": hashlib.sha256(FILES["LICENSE"]).hexdigest()},
            "commit": self.commit,
            "tree": self.tree,
            "files": len(FILES),
            "unpacked": sum(map(len, FILES.values())),
            "tools": {"tool": "tool.sh"},
            "sources": list(sources),
            **fields,
        }

    def pin(self, *sources: dict[str, Any], **fields: Any) -> Pin:
        return Pin.from_dict(self.data(*sources, **fields))

    def fetcher(self, offline: bool = False, platform: str = HOST) -> Fetcher:
        session = requests.Session()
        runner = SystemRunner()
        fetcher = Fetcher(
            self.cache, Console(self.said, mode=Mode.PLAIN), runner, offline=offline, platform=platform, session=session,
            index=Index(runner, session, known=Settings((f"{self.server.url}/simple",)), sleep=lambda _: None), policy=Policy(attempts=2),
        )  # fmt: skip
        fetcher.downloader.sleep = lambda _: None
        return fetcher

    def write(self, data: dict[str, Any]) -> Path:
        path = self.vendors / f"{data['name']}.yaml"
        path.write_text(yaml.safe_dump(data, sort_keys=False), "utf-8")
        return path


@pytest.fixture(scope="module")
def upstream(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A repository to copy: making one takes git a dozen starts."""
    place = tmp_path_factory.mktemp("upstream") / "repository"
    commit = repository(place)
    (place / ".git" / "identity").write_text(f"{commit} {git('rev-parse', 'HEAD^{tree}', cwd=place)}")
    return place


@pytest.fixture
def world(tmp_path: Path, upstream: Path) -> Iterator[World]:
    with running() as server:
        yield World(tmp_path, server, upstream)


def content(directory: Path) -> dict[str, bytes]:
    return {path.relative_to(directory).as_posix(): path.read_bytes() for path in directory.rglob("*") if path.is_file()}


SOURCES: dict[str, Callable[[World], dict[str, Any]]] = {"pypi": World.pypi_source, "git": World.git_source, "url": World.url_source}


@pytest.mark.parametrize("kind", SOURCES)
def test_every_source_gives_the_same_tree(world: World, kind: str) -> None:
    pin = world.pin(SOURCES[kind](world))
    folder = world.fetcher().unpacked(pin)
    assert content(folder) == FILES
    if os.name != "nt":
        assert {name for name in FILES if (folder / name).stat().st_mode & 0o100} == {"tool.sh"}
    assert world.fetcher().tool(pin, "tool") == folder / "tool.sh"
    assert not list((world.cache.root / "work").glob("*")) if (world.cache.root / "work").exists() else True


def test_a_second_run_needs_no_network_and_offline_works_from_the_cache(world: World) -> None:
    pin = world.pin(world.pypi_source())
    folder = world.fetcher().unpacked(pin)
    asked = len(world.server.requests)
    assert world.fetcher(offline=True).unpacked(pin) == folder
    shutil.rmtree(folder.parent)
    assert content(world.fetcher(offline=True).unpacked(pin)) == FILES
    assert len(world.server.requests) == asked


def test_offline_without_a_cache_says_what_to_run(world: World) -> None:
    for source in SOURCES.values():
        with pytest.raises(OfflineError, match="run 'invoke vendor fetch thing'"):
            world.fetcher(offline=True).unpacked(world.pin(source(world)))
    assert world.server.requests == []


def test_the_archive_alone(world: World) -> None:
    pin = world.pin(world.git_source(), world.pypi_source())
    assert world.fetcher().archive(pin).read_bytes() == world.archives["thing_bin-12.0.0.tar.gz"]
    with pytest.raises(DataError, match="only git sources"):
        world.fetcher().archive(world.pin(world.git_source()))


def test_sources_are_tried_in_order_until_one_delivers(world: World) -> None:
    world.server.on("/simple/thing-bin/", Reply(status=404))
    missing = {"git": (world.tmp / "nowhere").as_uri(), "tag": "b12"}
    folder = world.fetcher().unpacked(world.pin(world.pypi_source(), missing, world.url_source()))
    assert content(folder) == FILES
    said = world.said.getvalue()
    assert "404" in said or "no index knows" in said
    assert "git cannot fetch b12" in said


def test_when_no_source_delivers_all_are_listed(world: World) -> None:
    world.server.on("/simple/thing-bin/", Reply(status=404))
    world.server.on("/thing-b12.zip", Reply(status=410))
    missing = {"git": (world.tmp / "nowhere").as_uri(), "tag": "b12"}
    with pytest.raises(DownloadError) as caught:
        world.fetcher().unpacked(world.pin(world.pypi_source(), missing, world.url_source()))
    for text in ("no index knows thing-bin", "git cannot fetch b12", "410"):
        assert text in caught.value.details


def test_a_source_with_the_right_hash_and_another_tree_is_refused_with_both_trees(world: World) -> None:
    other = {**FILES, "src/main.c": b"int main(void){return 1;}\n"}
    world.release("thing-bin", "thing_bin-12.0.0.tar.gz", sdist(other))
    with pytest.raises(ChecksumError) as caught:
        world.fetcher().unpacked(world.pin(world.pypi_source()))
    assert f"expected tree {world.tree}, got " in caught.value.message
    assert content(world.fetcher().unpacked(world.pin(world.pypi_source(), world.url_source()))) == FILES


@pytest.mark.parametrize(
    ("files", "executable", "error"),
    [
        (FILES, ".none", "expected tree"),
        ({**FILES, "more": b""}, ".sh", "more than the 4 files"),
        ({name: data for name, data in FILES.items() if name != "src/main.c"}, ".sh", "expected tree"),
        ({name.replace("main", "Main"): data for name, data in FILES.items()}, ".sh", "expected tree"),
    ],
    ids=["mode", "one more", "one fewer", "name"],
)
def test_modes_names_and_the_number_of_files_count(world: World, files: dict[str, bytes], executable: str, error: str) -> None:
    world.url("/thing-b12.zip", wheel(files, executable))
    with pytest.raises((ChecksumError, ArchiveError), match=error):
        world.fetcher().unpacked(world.pin(world.url_source(), tools={}))
    assert not [place for place in (world.cache.root / "results" / "sources").iterdir()]


def test_another_gzip_level_is_another_archive_and_the_same_tree(world: World) -> None:
    folders = set()
    for level in (1, 9):
        world.release("thing-bin", "thing_bin-12.0.0.tar.gz", sdist(level=level))
        folders.add(world.fetcher().unpacked(world.pin(world.pypi_source())))
        shutil.rmtree(world.cache.root / "results")
    assert len({hashlib.sha256(sdist(level=level)).digest() for level in (1, 9)}) == 2
    assert len(folders) == 1


def test_a_bomb_stops_at_the_pinned_size(world: World) -> None:
    world.url("/thing-b12.zip", wheel({**FILES, "bomb": bytes(50_000_000)}))
    with pytest.raises(ArchiveError, match="more than"):
        world.fetcher().unpacked(world.pin(world.url_source(), files=len(FILES) + 1))


def test_a_damaged_blob_is_kept_aside_and_brought_anew(world: World) -> None:
    pin = world.pin(world.url_source())
    fetcher = world.fetcher()
    blob = fetcher.archive(pin)
    good = blob.read_bytes()
    blob.write_bytes(bytes(len(good)))
    assert content(fetcher.unpacked(pin)) == FILES
    assert blob.read_bytes() == good
    assert [path.read_bytes() for path in (world.cache.root / "rejected").iterdir()] == [bytes(len(good))]


@pytest.mark.parametrize("damage", ["shorter", "absent", "extra"])
def test_a_changed_folder_is_unpacked_again(world: World, damage: str) -> None:
    pin = world.pin(world.url_source())
    folder = world.fetcher().unpacked(pin)
    if damage == "shorter":
        (folder / "data.bin").write_bytes(b"")
    elif damage == "absent":
        (folder / "src/main.c").unlink()
    else:
        (folder / "extra").write_bytes(b"x")
    assert content(world.fetcher(offline=True).unpacked(pin)) == FILES
    assert "was changed after it was unpacked" in world.said.getvalue()


def test_states(world: World) -> None:
    pin = world.pin(world.url_source())
    fetcher = world.fetcher()
    assert fetcher.state(pin) is State.ABSENT
    fetcher.archive(pin)
    assert fetcher.state(pin) is State.CACHED
    fetcher.unpacked(pin)
    assert fetcher.state(pin) is State.UNPACKED
    assert fetcher.state(world.pin(world.git_source(), tree=None, files=None, unpacked=None, licence_file=None)) is State.INCOMPLETE
    elsewhere = Pin.from_dict({**{k: v for k, v in PLATFORMED.items() if k != "platforms"}, "platforms": {"windows-x86_64": PLATFORMED["platforms"]["windows-x86_64"]}})
    assert fetcher.state(elsewhere) is State.ELSEWHERE


def test_verify_finds_a_flipped_byte_of_the_same_size_and_the_next_fetch_repairs(world: World) -> None:
    pin = world.pin(world.url_source())
    fetcher = world.fetcher()
    assert [finding.outcome for finding in fetcher.verify(pin)] == [Outcome.ABSENT]
    folder = fetcher.unpacked(pin)
    assert [finding.outcome for finding in fetcher.verify(pin)] == [Outcome.OK, Outcome.OK]
    (folder / "src/main.c").write_bytes(FILES["src/main.c"].replace(b"0", b"1"))
    blob = fetcher.archive(pin)
    data = bytearray(blob.read_bytes())
    data[40] ^= 1
    blob.write_bytes(data)
    findings = fetcher.verify(pin)
    assert [finding.outcome for finding in findings] == [Outcome.WRONG, Outcome.WRONG]
    assert pin.package(HOST).archives[0].sha256 in findings[0].detail and hashlib.sha256(data).hexdigest() in findings[0].detail
    assert f"expected tree {world.tree}, found" in findings[1].detail
    assert content(fetcher.unpacked(pin)) == FILES
    assert [finding.outcome for finding in fetcher.verify(pin)] == [Outcome.OK, Outcome.OK]


OBSTACLES: dict[str, tuple[Callable[[Path], Any], str]] = {
    "folder": (lambda place: (place / "inside").mkdir(parents=True), "a folder"),
    "link": (lambda place: place.symlink_to("nowhere"), "a link to nowhere"),
    "pipe": (os.mkfifo, "a device or a pipe"),
    "device": (lambda place: place.symlink_to("/dev/zero"), "a device or a pipe"),
    "sealed": (lambda place: place.symlink_to("/proc/self/mem"), "a file that cannot be read"),
}
"""What may lie in a file's place, and how it is named; the last is a file that nobody, root included, can read."""


def obstruct(place: Path, what: str) -> str:
    """Put it there instead of whatever is; gives its name."""
    if place.is_dir() and not place.is_symlink():
        shutil.rmtree(place)
    else:
        place.unlink(missing_ok=True)
    make, name = OBSTACLES[what]
    make(place)
    return name


@pytest.mark.skipif(os.name == "nt", reason="links and pipes")
@pytest.mark.parametrize("what", OBSTACLES)
def test_verify_names_what_lies_in_a_files_place_and_goes_on(world: World, what: str) -> None:
    pin = world.pin(world.pypi_source(), world.url_source())
    fetcher = world.fetcher()
    fetcher.unpacked(pin)
    found = obstruct(world.cache.blob(pin.package(HOST).archives[0].sha256), what)
    other = obstruct(world.cache.blob(pin.package(HOST).archives[1].sha256), what)
    first, second, tree = fetcher.verify(pin)
    assert (first.outcome, second.outcome, tree.outcome) == (Outcome.WRONG, Outcome.WRONG, Outcome.OK)
    assert found == other and f"found {found}" in first.detail and "'invoke vendor fetch thing' brings it again" in first.detail
    for finding in (first, second):
        kept = Path(finding.detail.partition("moved to ")[2].partition(";")[0])
        assert os.path.lexists(kept) and kept.parent == world.cache.root / "rejected"
    assert [finding.outcome for finding in fetcher.verify(pin)] == [Outcome.OK]


@pytest.mark.skipif(os.name == "nt", reason="links and pipes")
@pytest.mark.parametrize("what", OBSTACLES)
def test_verify_names_what_lies_in_a_folders_place_and_goes_on(world: World, what: str) -> None:
    pin = world.pin(world.url_source())
    fetcher = world.fetcher()
    for place in (lambda folder: folder.parent, lambda folder: folder):
        obstruct(place(fetcher.unpacked(pin)), what)
        archive, tree = fetcher.verify(pin)
        assert (archive.outcome, tree.outcome) == (Outcome.OK, Outcome.WRONG)
        assert "moved to" in tree.detail and "'invoke vendor fetch thing'" in tree.detail
        assert content(fetcher.unpacked(pin)) == FILES


DAMAGES: dict[str, Callable[[Path], Any]] = {
    "absent": lambda blob: blob.unlink(),
    "same size": lambda blob: blob.write_bytes(bytes(blob.stat().st_size)),
    "shorter": lambda blob: blob.write_bytes(b"x"),
    **{what: (lambda blob, what=what: obstruct(blob, what)) for what in OBSTACLES if os.name != "nt"},
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_fetch_brings_an_archive_anew_although_its_folder_is_there(world: World, damage: str) -> None:
    pin = world.pin(world.url_source())
    fetcher = world.fetcher()
    folder = fetcher.fetch(pin)
    blob = fetcher.archive(pin)
    DAMAGES[damage](blob)
    assert fetcher.fetch(pin) == folder
    assert blob.read_bytes() == world.archives["thing-b12.zip"]
    kept = list((world.cache.root / "rejected").iterdir())
    assert len(kept) == (damage != "absent") and all(str(place) in world.said.getvalue() for place in kept)
    asked = len(world.server.requests)
    assert fetcher.fetch(pin) == folder and len(world.server.requests) == asked


def test_fetch_looks_at_every_archive_of_a_pin_and_brings_only_the_damaged(world: World) -> None:
    pin = world.pin(world.pypi_source(), world.url_source())
    fetcher = world.fetcher()
    fetcher.fetch(pin)
    first, second = (world.cache.blob(archive.sha256) for archive in pin.package(HOST).archives)
    assert first.exists() and not second.exists()
    second.write_bytes(b"x")
    fetcher.fetch(pin)
    assert [blob.read_bytes() for blob in (first, second)] == [world.archives["thing_bin-12.0.0.tar.gz"], world.archives["thing-b12.zip"]]
    first.unlink()
    fetcher.fetch(pin)
    assert not first.exists()


def test_fetch_offline_says_that_an_archive_is_gone(world: World) -> None:
    pin = world.pin(world.url_source())
    world.fetcher().fetch(pin)
    world.cache.blob(pin.package(HOST).archives[0].sha256).unlink()
    with pytest.raises(OfflineError, match="run 'invoke vendor fetch thing' once with a network"):
        world.fetcher(offline=True).fetch(pin)
    assert content(world.fetcher(offline=True).unpacked(pin)) == FILES


def test_fetch_asks_for_no_archive_where_the_folder_came_from_git(world: World) -> None:
    world.server.on("/thing-b12.zip", Reply(status=404))
    pin = world.pin(world.git_source(), world.url_source())
    folder = world.fetcher().fetch(pin)
    asked = len(world.server.requests)
    assert world.fetcher(offline=True).fetch(pin) == folder
    assert len(world.server.requests) == asked


def test_verify_goes_on_where_nothing_can_be_moved_aside(world: World) -> None:
    pin = world.pin(world.url_source())
    fetcher = world.fetcher()
    (fetcher.unpacked(pin) / "extra").write_bytes(b"x")
    blob = fetcher.archive(pin)
    blob.unlink()
    blob.mkdir()
    (world.cache.root / "rejected").rmdir()
    (world.cache.root / "rejected").write_bytes(b"in the way")
    archive, tree = fetcher.verify(pin)
    assert (archive.outcome, tree.outcome) == (Outcome.WRONG, Outcome.WRONG)
    assert "Cannot write" in archive.detail and "Cannot write" in tree.detail and f"expected tree {world.tree}" in tree.detail
    assert blob.is_dir()


def test_verify_says_how_to_bring_what_another_platform_needs(world: World) -> None:
    fields = {key: value for key, value in world.data(world.url_source()).items() if key in ("tree", "files", "unpacked", "tools", "sources")}
    data = {key: value for key, value in world.data().items() if key not in fields}
    pin = Pin.from_dict({**data, "platforms": {"windows-x86_64": fields}})
    world.fetcher(platform="windows-x86_64").archive(pin).write_bytes(b"x")
    assert "'invoke vendor fetch thing --platform windows-x86_64' brings it again" in world.fetcher().verify(pin)[0].detail


def test_a_pin_without_tree_is_not_used_silently(world: World) -> None:
    pin = world.pin(world.git_source(), tree=None, files=None, unpacked=None)
    with pytest.raises(DataError, match=r"no tree digest.*'invoke vendor bump thing b12'"):
        world.fetcher().unpacked(pin)
    assert not (world.cache.root / "results").exists()


def test_a_tool_the_pin_does_not_name(world: World) -> None:
    with pytest.raises(DataError, match="names no tool 'zig'.*only tool"):
        world.fetcher().tool(world.pin(world.url_source()), "zig")


def test_platforms_get_their_own_archive(world: World) -> None:
    packages = {}
    for platform in ("linux-x86_64", "windows-x86_64"):
        files = {**FILES, "data.bin": platform.encode()}
        world.url(f"/thing-{platform}.zip", wheel(files))
        repository(world.repository, files, tag=platform)
        source = {"url": f"{world.server.url}/thing-{platform}.zip", **world.archive(f"thing-{platform}.zip")}
        packages[platform] = {"tree": git("rev-parse", "HEAD^{tree}", cwd=world.repository), "files": len(files), "unpacked": sum(map(len, files.values())), "sources": [source]}
    data = {key: value for key, value in world.data().items() if key not in ("tree", "files", "unpacked", "tools", "sources")}
    pin = Pin.from_dict({**data, "platforms": packages})
    for platform in packages:
        assert (world.fetcher(platform=platform).unpacked(pin) / "data.bin").read_text() == platform
    assert len(world.fetcher().verify(pin)) == 4


def test_ensure_takes_a_command_context(world: World) -> None:
    @dataclasses.dataclass
    class Here:
        cache: Cache
        console: Console
        runner: SystemRunner
        offline: bool

    pin = world.pin(world.url_source())
    assert content(ensure(pin, Here(world.cache, Console(world.said, mode=Mode.QUIET), SystemRunner(), False))) == FILES


def test_this_machine_has_a_name() -> None:
    assert host_platform() in PLATFORMS


# ---- git sources -------------------------------------------------------------------------------------------------------------------


def test_a_tag_that_moved_is_refused(world: World) -> None:
    repository(world.repository, {**FILES, "new": b"x"}, tag="b12")
    git("update-ref", "-d", "HEAD", cwd=world.repository)
    git("reflog", "expire", "--expire=now", "--all", cwd=world.repository)
    pin = world.pin(world.git_source(), commit="9" * 40)
    with pytest.raises(ChecksumError, match=f"names commit .*, the pin says {'9' * 40}"):
        world.fetcher().unpacked(pin)


def test_the_pinned_commit_is_taken_although_the_tag_moved(world: World) -> None:
    repository(world.repository, {**FILES, "new": b"x"}, tag="b12")
    assert content(world.fetcher().unpacked(world.pin(world.git_source()))) == FILES


def test_attributes_of_the_repository_change_no_byte(world: World) -> None:
    files = {**FILES, ".gitattributes": b"* text eol=crlf\nsecret export-ignore\nversion export-subst\n*.c ident\n", "secret": b"kept\n", "version": b"$Format:%H$\n", "src/id.c": b"$Id$\n"}
    commit = repository(world.repository, files)
    tree = git("rev-parse", "HEAD^{tree}", cwd=world.repository)
    pin = world.pin(world.git_source(), commit=commit, tree=tree, files=len(files), unpacked=sum(map(len, files.values())))
    assert content(world.fetcher().unpacked(pin)) == files


def test_what_a_failed_fetch_left_does_not_matter(world: World) -> None:
    moved = world.tmp / "moved"
    world.repository.rename(moved)
    pin = world.pin(world.git_source())
    with pytest.raises(GitError, match="git cannot fetch b12"):
        world.fetcher().unpacked(pin)
    poisoned = world.cache.root / "work" / "thing.poisoned.tmp" / "repository.git"
    poisoned.mkdir(parents=True)
    (poisoned / "HEAD").write_text("nonsense")
    moved.rename(world.repository)
    assert content(world.fetcher().unpacked(pin)) == FILES


def test_a_surrounding_repository_is_never_touched(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    around = world.tmp / "around"
    repository(around, {"mine": b"x"})
    before = git("rev-parse", "HEAD", cwd=around), git("status", "--porcelain", cwd=around), git("for-each-ref", cwd=around)
    monkeypatch.setenv("GIT_DIR", str(around / ".git"))
    monkeypatch.setenv("GIT_WORK_TREE", str(around))
    monkeypatch.chdir(around)
    assert content(world.fetcher().unpacked(world.pin(world.git_source()))) == FILES
    monkeypatch.delenv("GIT_DIR")
    monkeypatch.delenv("GIT_WORK_TREE")
    assert before == (git("rev-parse", "HEAD", cwd=around), git("status", "--porcelain", cwd=around), git("for-each-ref", cwd=around))


def test_objects_the_server_left_out_are_noticed(world: World) -> None:
    data = FILES["data.bin"]
    blob = hashlib.sha1(b"blob %d\0" % len(data) + data, usedforsecurity=False).hexdigest()
    loose = world.repository / ".git" / "objects" / blob[:2] / blob[2:]
    loose.chmod(0o644)
    loose.unlink()
    with pytest.raises(GitError):
        world.fetcher().unpacked(world.pin(world.git_source()))


# ---- killed runs -------------------------------------------------------------------------------------------------------------------

_CHILD = """
import sys, json
from pathlib import Path
from opencoti_build.cache import Cache
from opencoti_build.console import Console, Mode
from opencoti_build.runner import SystemRunner
from opencoti_build.vendors import Fetcher, Pin
print("ready", flush=True)
print(Fetcher(Cache(Path(sys.argv[1])), Console(mode=Mode.QUIET), SystemRunner(), platform="linux-x86_64").unpacked(Pin.from_dict(json.loads(sys.argv[2]))))
"""


def child(world: World, data: dict[str, Any]) -> subprocess.Popen[str]:
    return subprocess.Popen([sys.executable, "-c", _CHILD, str(world.cache.root), json.dumps(data)], cwd=PROJECT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


@pytest.mark.skipif(os.name == "nt", reason="SIGKILL")
def test_killed_at_any_moment_the_next_run_completes(world: World) -> None:
    files = {f"f{number}": random.Random(number).randbytes(3000) for number in range(400)}
    world.url("/thing-b12.zip", wheel(files))
    repository(world.repository, files)
    fields = {"tree": git("rev-parse", "HEAD^{tree}", cwd=world.repository), "files": len(files), "unpacked": sum(map(len, files.values())), "tools": {}, "commit": None, "licence_file": None}
    data = world.data(world.url_source(), **fields)
    world.server.on("/thing-b12.zip", Reply(world.archives["thing-b12.zip"], pause=0.004))
    wait = random.Random(3)
    killed = 0
    for _ in range(5):
        run = child(world, data)
        assert run.stdout is not None and run.stdout.readline() == "ready\n"
        time.sleep(wait.uniform(0.0, 0.25))
        run.send_signal(signal.SIGKILL)
        run.communicate()
        killed += run.returncode == -signal.SIGKILL
        results = world.cache.root / "results" / "sources"
        for place in results.iterdir() if results.exists() else ():
            if not place.name.startswith("."):
                assert content(place / "content") == files
    assert killed
    assert content(world.fetcher().unpacked(Pin.from_dict(data))) == files
    assert [finding.outcome for finding in world.fetcher().verify(Pin.from_dict(data))] == [Outcome.OK, Outcome.OK]


def test_two_runs_unpack_once(world: World) -> None:
    data = world.data(world.url_source())
    runs = [child(world, data) for _ in range(2)]
    results = [run.communicate(timeout=60) for run in runs]
    assert [run.returncode for run in runs] == [0, 0], results
    assert len({out for out, _ in results}) == 1
    assert len(world.server.asked("/thing-b12.zip")) == 1


# ---- bump --------------------------------------------------------------------------------------------------------------------------

NEXT = {**FILES, "src/main.c": b"int main(void){return 13;}\n", "src/new.c": b"int x;\n"}

PIN_TEXT = """\
# Keep this comment.
schema: 1
name: thing
version: b12   # moved by bump
kind: source
licence: MIT
licence_file: {{path: LICENSE, sha256: {licence}}}
commit: {commit}

tree: {tree}
files: {files}
unpacked: {unpacked}
tools:
  tool: tool.sh  # a program
sources:
  # The sdist first: it is the quickest.
  - pypi: thing-bin
    release: 12.0.0
    file: thing_bin-12.0.0.tar.gz
    size: {size}
    sha256: '{sha256}'
    folder: thing_bin-12.0.0/thing
  - git: {git}
    tag: b12
"""


@pytest.fixture
def bumpable(world: World) -> Path:
    archive = world.archive("thing_bin-12.0.0.tar.gz")
    path = world.vendors / "thing.yaml"
    path.write_text(
        PIN_TEXT.format(
            licence=hashlib.sha256(FILES["LICENSE"]).hexdigest(), commit=world.commit, tree=world.tree, files=len(FILES), unpacked=sum(map(len, FILES.values())),
            size=archive["size"], sha256=archive["sha256"], git=world.repository.as_uri(),
        )  # fmt: skip
    )
    return path


def advance(world: World, files: dict[str, bytes] = NEXT, sdist_files: dict[str, bytes] | None = None) -> str:
    """Upstream publishes b13 everywhere; gives the commit."""
    world.release("thing-bin", "thing_bin-13.0.0.tar.gz", sdist(sdist_files or files, "thing_bin-13.0.0"))
    return repository(world.repository, files, tag="b13")


def test_bump_fetches_computes_and_writes_and_keeps_comments(world: World, bumpable: Path) -> None:
    before = bumpable.read_text()
    commit = advance(world)
    result = bump(bumpable, "b13", world.fetcher())
    pin = load_pin(bumpable)
    archive = world.archive("thing_bin-13.0.0.tar.gz")
    assert pin == result.after
    assert (pin.version, pin.commit) == ("b13", commit)
    package = pin.package(HOST)
    assert (package.tree, package.files, package.unpacked) == (git("rev-parse", "b13^{tree}", cwd=world.repository), len(NEXT), sum(map(len, NEXT.values())))
    assert pin.to_dict()["sources"] == [
        {"pypi": "thing-bin", "release": "13.0.0", **archive, "folder": "thing_bin-13.0.0/thing"},
        {"git": world.repository.as_uri(), "tag": "b13"},
    ]
    after = bumpable.read_text()
    assert len(after.splitlines()) == len(before.splitlines())
    for comment in ("# Keep this comment.", "b13   # moved by bump", "tool: tool.sh  # a program", "# The sdist first: it is the quickest."):
        assert comment in after
    assert result.unchecked == ()
    assert "-version: b12   # moved by bump\n+version: b13   # moved by bump\n" in result.diff
    assert content(world.fetcher().unpacked(pin)) == NEXT


def test_bump_rehearsal_writes_nothing(world: World, bumpable: Path) -> None:
    before = bumpable.read_bytes()
    advance(world)
    result = bump(bumpable, "b13", world.fetcher(), write=False)
    assert bumpable.read_bytes() == before
    assert result.after.version == "b13" and result.diff


def test_bump_to_the_same_version_changes_nothing(world: World, bumpable: Path) -> None:
    assert bump(bumpable, "b12", world.fetcher()).diff == ""


def test_bump_names_sources_it_could_not_check(world: World, bumpable: Path) -> None:
    advance(world)
    world.repository.rename(world.tmp / "gone")
    result = bump(bumpable, "b13", world.fetcher())
    assert len(result.unchecked) == 1 and "git file:" in result.unchecked[0]
    assert load_pin(bumpable).commit is None  # the old commit is not the new version's, and nobody told the new one


def test_bump_refuses_sources_that_disagree(world: World, bumpable: Path) -> None:
    before = bumpable.read_bytes()
    advance(world, sdist_files={**NEXT, "src/new.c": b"int y;\n"})
    with pytest.raises(ChecksumError, match="different content"):
        bump(bumpable, "b13", world.fetcher())
    assert bumpable.read_bytes() == before


def test_bump_stops_at_a_changed_licence_and_shows_it(world: World, bumpable: Path) -> None:
    world.fetcher().unpacked(load_pin(bumpable))
    files = {**NEXT, "LICENSE": b"Pay first.\n"}
    advance(world, files)
    with pytest.raises(DataError, match="--accept-licence") as caught:
        bump(bumpable, "b13", world.fetcher())
    assert "-Do as you like." in caught.value.details and "+Pay first." in caught.value.details
    assert load_pin(bumpable).version == "b12"
    bump(bumpable, "b13", world.fetcher(), accept_licence=True)
    licence = load_pin(bumpable).licence_file
    assert licence is not None and licence.sha256 == hashlib.sha256(b"Pay first.\n").hexdigest()


def test_bump_takes_other_line_ends_for_the_same_licence(world: World, bumpable: Path) -> None:
    """Wheels for Windows carry the text with CRLF."""
    before = load_pin(bumpable).licence_file
    advance(world, {**NEXT, "LICENSE": FILES["LICENSE"].replace(b"\n", b"\r\n")})
    assert b"\n" in FILES["LICENSE"]
    bump(bumpable, "b13", world.fetcher())
    assert load_pin(bumpable).licence_file == before


def test_bump_offline_asks_nobody(world: World, bumpable: Path) -> None:
    advance(world)
    with pytest.raises(OfflineError, match="offline was asked for"):
        bump(bumpable, "b13", world.fetcher(offline=True))


def test_bump_stops_when_the_licence_is_gone(world: World, bumpable: Path) -> None:
    advance(world, {name: data for name, data in NEXT.items() if name != "LICENSE"})
    with pytest.raises(DataError, match="LICENSE is not there any more"):
        bump(bumpable, "b13", world.fetcher(), accept_licence=True)


def test_bump_to_a_version_nobody_has(world: World, bumpable: Path) -> None:
    with pytest.raises(OpencotiError, match="13"):
        bump(bumpable, "b13", world.fetcher())
    with pytest.raises(UsageError, match="not spelled like"):
        bump(bumpable, "13.0.0", world.fetcher())


def test_bump_completes_a_pin_that_nobody_had_fetched(world: World) -> None:
    source = {**world.url_source(), "size": None}
    data = world.data(source, tree=None, files=None, unpacked=None, licence_file={"path": "LICENSE", "sha256": None})
    path = world.write(data)
    with pytest.raises(DataError):
        world.fetcher().unpacked(load_pin(path))
    bump(path, "b12", world.fetcher())
    assert load_pin(path) == world.pin(world.url_source())
    assert content(world.fetcher().unpacked(load_pin(path))) == FILES


def test_bump_completes_only_with_the_pinned_hash(world: World) -> None:
    source = {**world.url_source(), "size": None, "sha256": "9" * 64}
    path = world.write(world.data(source, tree=None, files=None, unpacked=None))
    with pytest.raises(ChecksumError, match="expected sha256 9999"):
        bump(path, "b12", world.fetcher())


def test_bump_moves_the_wheels_of_every_platform(world: World) -> None:
    names = {"linux-x86_64": "py3-none-manylinux_2_17_x86_64", "windows-x86_64": "py3-none-win_amd64", "macos-aarch64": "py3-none-macosx_11_0_universal2"}
    renamed = {**names, "linux-x86_64": "py3-none-manylinux_2_28_x86_64"}
    packages = {}
    for version, tags in (("1.2", names), ("1.3", renamed)):
        for tag in {*tags.values(), "py3-none-musllinux_1_2_x86_64", "py3-none-win_arm64"}:
            world.release("tool-kit", f"tool_kit-{version}-{tag}.whl", wheel({f"tool_kit-{version}.data/run.sh": tag.encode(), "LICENSE": b"x"}))
        for platform, tag in tags.items() if version == "1.2" else ():
            source = {"pypi": "tool-kit", "release": version, **world.archive(f"tool_kit-{version}-{tag}.whl")}
            packages[platform] = {"tree": None, "files": None, "unpacked": None, "tools": {"run": f"tool_kit-{version}.data/run.sh"}, "sources": [source]}
    data = {key: value for key, value in world.data(name="toolkit", version="1.2", kind="toolchain", commit=None, licence_file=None).items() if key not in ("tree", "files", "unpacked", "tools", "sources")}
    path = world.write({**data, "platforms": packages})
    bump(path, "1.2", world.fetcher())
    bump(path, "1.3", world.fetcher())
    pin = load_pin(path)
    for platform, tag in renamed.items():
        assert pin.packages[platform].archives[0].file == f"tool_kit-1.3-{tag}.whl"
        tool = world.fetcher(platform=platform).tool(pin, "run")
        assert tool.read_text() == tag
        assert os.access(tool, os.X_OK)


@settings(max_examples=60, deadline=None)
@given(version=st.from_regex(r"[0-9a-e][0-9a-e._]{0,8}", fullmatch=True), sha=st.text("0123456789e", min_size=64, max_size=64))
def test_values_written_into_the_text_read_back_as_they_are(version: str, sha: str) -> None:
    text = "version: b12 # c\ncommit:\nlist:\n  - {sha256: x, size: 1}\n"
    before = {"version": "b12", "commit": None, "list": [{"sha256": "x", "size": 1}]}
    after = {"version": version, "commit": "e" * 40, "list": [{"sha256": sha, "size": 7}]}
    assert yaml.safe_load(rewrite(text, before, after)) == after
    assert "# c" in rewrite(text, before, after)


# ---- the commands ------------------------------------------------------------------------------------------------------------------



@functools.cache
def _commands() -> Collection:
    install()
    root = Collection()
    add_group(root, ns)
    return root


@dataclasses.dataclass(frozen=True)
class Done:
    code: int
    out: str
    errors: str


@pytest.fixture
def command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., Done]:
    """Runs ``invoke vendor ...`` in this process, with an empty cache."""
    monkeypatch.setenv("OPENCOTI_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)

    def run(*words: str) -> Done:
        code = 0
        try:
            Program(namespace=_commands()).run(["invoke", "vendor", *words])
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else 1
        return Done(code, *capsys.readouterr())

    return run


def test_list_shows_every_pin_of_the_repository(command: Callable[..., Done]) -> None:
    listed = command("list", "--json", "--platform", "linux-aarch64")
    assert listed.code == 0, listed.errors
    rows = {row["name"]: row for row in json.loads(listed.out)}
    pins = load_pins(PROJECT / "vendors")
    assert set(rows) == set(pins)
    assert rows["llama.cpp"]["version"] == pins["llama.cpp"].version
    assert rows["ninja"]["bytes"] == pins["ninja"].package("linux-aarch64").archives[0].size
    assert all(row["state"] in ("absent", "no tree digest") for row in rows.values())
    table = command("list")
    assert table.code == 0 and all(name in table.out for name in pins)


def test_fetch_and_bump_of_a_name_that_is_not_there(command: Callable[..., Done]) -> None:
    for words in (("fetch", "ninjja"), ("bump", "ninjja", "1.0"), ("verify", "ninjja")):
        failed = command(*words)
        assert failed.code == 2
        assert "did you mean ninja" in failed.errors
        assert "Traceback" not in failed.errors


def test_fetch_offline_without_a_cache(command: Callable[..., Done], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENCOTI_OFFLINE", "1")
    failed = command("fetch", "ninja")
    assert failed.code == 12
    assert "invoke vendor fetch ninja" in failed.errors and "Traceback" not in failed.errors


def test_fetch_of_everything_goes_on_after_a_failure_and_says_how_many(command: Callable[..., Done]) -> None:
    failed = command("fetch", "--offline")
    assert failed.code == 12
    assert all(f"==> {pin.name} {pin.version}" in failed.errors for pin in load_pins(PROJECT / "vendors").values() if pin.role is Role.BUILD)


def test_fetch_refuses_a_pin_without_tree(command: Callable[..., Done]) -> None:
    failed = command("fetch", "llamafile")
    assert failed.code == 3
    assert "no tree digest" in failed.errors and "invoke vendor bump llamafile" in failed.errors


def test_fetch_mends_the_cache_by_command(world: World, command: Callable[..., Done], monkeypatch: pytest.MonkeyPatch) -> None:
    world.write(world.data(world.url_source()))
    made = CommandContext(Project(world.tmp), Console(world.said, mode=Mode.PLAIN), SystemRunner(), world.cache, offline=False, dry_run=False)
    monkeypatch.setattr("opencoti_build.cli.vendor.context", lambda c: made)
    assert command("fetch", "thing").code == 0
    blob = world.cache.blob(hashlib.sha256(world.archives["thing-b12.zip"]).hexdigest())
    blob.write_bytes(b"damaged")
    done = command("fetch", "thing")
    assert done.code == 0 and content(Path(done.out.strip())) == FILES
    assert blob.read_bytes() == world.archives["thing-b12.zip"]
    assert "thing-b12.zip in the cache is not the pinned file: found 7 bytes" in world.said.getvalue()
    assert command("verify").code == 0


def test_verify_of_a_folder_in_a_files_place_is_a_row_and_damage(command: Callable[..., Done], tmp_path: Path) -> None:
    pins = load_pins(PROJECT / "vendors")
    places = [Cache(tmp_path / "cache").blob(pins[name].package(HOST).archives[0].sha256) for name in ("cmake", "ninja")]
    for place in places:
        place.mkdir(parents=True)
    done = command("verify")
    assert done.code == ChecksumError.exit_code
    assert "2 of " in done.errors and "are not what is pinned" in done.errors and "Traceback" not in done.errors
    assert done.out.count("WRONG") == 2 and done.out.count("found a folder") == 2 and "ziglang" in done.out


def test_verify_of_an_empty_cache_is_no_failure(command: Callable[..., Done]) -> None:
    done = command("verify")
    assert done.code == 0
    assert "absent" in done.out
