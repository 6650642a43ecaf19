from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest

from opencoti_build.errors import ChecksumError, ManifestError
from opencoti_build.store import Store
from opencoti_build.variants import ComponentLibrary

LIBRARY = ComponentLibrary("cuda", "cuda", "cuda13", "linux", "x86_64", "ggml-cuda.so", "ggml-cuda-x86_64.so")


def put(root: Path, build: str, data: bytes, **changes: object) -> Path:
    folder = root / "cuda" / build
    folder.mkdir(parents=True)
    path = folder / LIBRARY.file
    path.write_bytes(data)
    facts = {"schema": 1, "file": path.name, "size": len(data), "sha256": hashlib.sha256(data).hexdigest(), "crc32": 1, "abi": "ab", "build": build}
    (folder / f"{path.name}.json").write_text(json.dumps({key: value for key, value in (facts | changes).items() if value is not None}))
    return path


def test_the_newest_build_wins_and_none_is_no_error(tmp_path):
    store = Store(tmp_path)
    assert store.find(LIBRARY) is None
    put(tmp_path, "2611290900001", b"old")
    newest = put(tmp_path, "2611301800123", b"new")
    put(tmp_path, "2611301759999", b"middle")
    found = store.find(LIBRARY)
    assert found is not None and (found.path, found.build, found.size) == (newest, "2611301800123", 3)


def test_changed_bytes_are_refused(tmp_path):
    put(tmp_path, "2611290900001", b"good").write_bytes(b"evil")
    with pytest.raises(ChecksumError, match="is not what"):
        Store(tmp_path).find(LIBRARY)


@pytest.mark.parametrize("changes", [{"schema": 2}, {"sha256": None}, {"size": "many"}])
def test_a_damaged_description_is_one_sentence(tmp_path, changes):
    put(tmp_path, "2611290900001", b"good", **changes)
    with pytest.raises(ManifestError, match="cannot be read"):
        Store(tmp_path).find(LIBRARY)
