"""MANIFEST documents: exact round trips, unknown keys, and one sentence for everything that is not a manifest."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from opencoti_build import manifest
from opencoti_build.errors import ManifestError

HEX = "0123456789abcdef" * 4


def document() -> dict[str, Any]:
    return {
        "schema": 1,
        "file": "opencoti-llamafile-0.10.7-c1-universal.llamafile.exe",
        "size": 1000,
        "sha256": HEX,
        "engine": "opencoti-0.10.7-c1",
        "variant": "universal",
        "commit": HEX[:40],
        "dirty": False,
        "base": [{"name": "llama.cpp", "version": "b11434", "commit": HEX[:40], "tree": HEX[:40]}, {"name": "x", "version": "1"}],
        "patches": [{"number": "0001", "title": "identity: say which engine this is", "sha256": HEX}],
        "tree": HEX[:40],
        "toolchains": {"cmake": "4.4.5", "zig": "0.17.1"},
        "complete": False,
        "missing": [{"name": "ggml-cuda.so (linux)", "reason": "no component"}],
        "host": {"size": 500, "sha256": HEX},
        "entries": [
            {"name": "payload.json", "method": "stored", "size": 3, "compressed_size": 3, "offset": 500, "crc32": "0011aabb", "sha256": HEX, "component": "index"},
            {"name": "x.txt", "method": "deflate", "size": 30, "compressed_size": 9, "offset": 600, "crc32": "ffffffff", "sha256": HEX, "component": "c", "build": "1"},
        ],
        "inputs": HEX,
    }


def test_round_trip_is_exact() -> None:
    value = document()
    assert manifest.Manifest.from_dict(value).to_dict() == value
    again = manifest.parse(manifest.Manifest.from_dict(value).to_bytes())
    assert again == manifest.Manifest.from_dict(value)
    assert list(again.to_dict()) == list(value)


def test_unknown_keys_are_kept_everywhere() -> None:
    value = document()
    for place in (value, value["base"][0], value["patches"][0], value["missing"][0], value["host"], value["entries"][1]):
        place["from_the_future"] = {"x": [1, None]}
    assert manifest.parse(json.dumps(value).encode()).to_dict() == value


def test_file_is_written_whole_and_read_back(tmp_path: Path) -> None:
    artifact = tmp_path / "x.llamafile"
    made = manifest.Manifest.from_dict(document())
    manifest.write(manifest.beside(artifact), made)
    assert manifest.beside(artifact) == tmp_path / "x.llamafile.MANIFEST.json"
    assert manifest.read(manifest.beside(artifact)) == made
    assert made.entry("x.txt") == made.entries[1] and made.entry("y") is None
    with pytest.raises(ManifestError, match="absent"):
        manifest.read(tmp_path / "absent")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"schema": 2}, "schema is 2; this toolkit reads 1"),
        ({"schema": "1"}, "schema is str, not int"),
        ({"schema": True}, "schema is bool, not int"),
        ({"size": -1}, "size is negative"),
        ({"size": 1.5}, "size is float"),
        ({"sha256": "xyz"}, "sha256 is 'xyz'"),
        ({"sha256": HEX.upper()}, "sha256 is"),
        ({"dirty": "no"}, "dirty is str, not bool"),
        ({"commit": "main"}, "commit is 'main'"),
        ({"complete": True}, "complete is true, but ggml-cuda.so"),
        ({"toolchains": {"zig": 1}}, "toolchains holds something that is not text"),
        ({"host": []}, "host is list"),
        ({"host": {"size": 1}}, "MANIFEST: host: sha256 is missing"),
        ({"patches": [{"number": 1, "title": "x", "sha256": HEX}]}, r"patches\[0\]: number is int"),
        ({"entries": [{}]}, r"entries\[0\]: name is missing"),
        ({"entries": [document()["entries"][0]] * 2}, "listed twice"),
        ({"entries": [document()["entries"][0] | {"method": "zstd"}]}, "method is 'zstd'"),
        ({"entries": [document()["entries"][0] | {"crc32": "12"}]}, "crc32 is '12'"),
    ],
)
def test_what_is_wrong_is_named(change: dict[str, Any], words: str) -> None:
    with pytest.raises(ManifestError, match=words):
        manifest.Manifest.from_dict(document() | change)


@pytest.mark.parametrize("key", [key for key in document() if key not in ("variant", "commit", "tree", "inputs")])
def test_every_key_without_a_default_must_be_there(key: str) -> None:
    value = document()
    del value[key]
    with pytest.raises(ManifestError, match=f"{key} is missing"):
        manifest.Manifest.from_dict(value)


@pytest.mark.parametrize(
    "data",
    [b"", b"{", b"[]", b"null", b"1", b"\xff\xfe", b"[" * 100_000, b'{"schema": NaN}', b'{"schema": 1, "schema": 1}', b'{"schema": ' + b"9" * 5000 + b"}", b'{"file": "\\ud800"}'],
    ids=range(11),
)
def test_other_bytes_are_one_sentence(data: bytes) -> None:
    with pytest.raises(ManifestError):
        manifest.parse(data)


def test_huge_files_are_not_read(tmp_path: Path) -> None:
    with (tmp_path / "x").open("wb") as stream:
        stream.truncate(1 << 34)
    with pytest.raises(ManifestError, match="larger than"):
        manifest.read(tmp_path / "x")


JSON = st.recursive(st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=6), lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3), max_leaves=8)


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_any_mutation_is_a_manifest_or_our_error(data: st.DataObject) -> None:
    value = document()
    for _ in range(data.draw(st.integers(1, 3))):
        inner: Any = value
        while True:
            keys = list(inner) if isinstance(inner, dict) else list(range(len(inner)))
            if not keys:
                break
            key = data.draw(st.sampled_from(keys))
            if isinstance(inner[key], dict | list) and data.draw(st.booleans()):
                inner = inner[key]
                continue
            inner[key] = data.draw(JSON)
            break
    raw = bytearray(json.dumps(value).encode())
    if data.draw(st.booleans()):
        raw[data.draw(st.integers(0, len(raw) - 1))] = data.draw(st.integers(0, 255))
    try:
        made = manifest.parse(bytes(raw))
    except ManifestError:
        return
    assert manifest.parse(made.to_bytes()) == made
