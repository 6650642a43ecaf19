from __future__ import annotations

from pathlib import Path

import pytest

from opencoti_build import variants
from opencoti_build.errors import DataError, UsageError

REPOSITORY = Path(__file__).parents[2]


def write(directory: Path, name: str, text: str) -> Path:
    (directory / f"{name}.yaml").write_text(text, "utf-8")
    return directory


GOOD = """
name: small
suffix: small.llamafile
title: A small one
host: universal
runs_on: [linux-x86_64]
libraries:
  - {engine: linux-x86_64, kind: cpu}
"""


def test_the_variants_of_this_repository_are_the_five_artifacts_and_native():
    loaded = variants.load(REPOSITORY / "variants")
    assert set(loaded) == {"universal", "win-x86_64-gpu", "x86_64", "aarch64", "bare", "native"}
    assert loaded["bare"].libraries == ()
    assert {name for name, variant in loaded.items() if variant.windows_limit} == {"universal", "win-x86_64-gpu", "bare"}


def test_every_gpu_library_has_one_published_name_per_system():
    """One file name must mean one library, whichever artifact it is embedded in."""
    meanings: dict[str, set[tuple[str, str, str]]] = {}
    for variant in variants.load(REPOSITORY / "variants").values():
        for library in variant.libraries:
            if isinstance(library, variants.ComponentLibrary):
                meanings.setdefault(library.file, set()).add((library.component, library.os, library.arch))
    assert meanings and all(len(meaning) == 1 for meaning in meanings.values())


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (("host: universal", "host: ape"), "host: 'ape' is not known; known are universal, program"),
        (("title: A small one\n", ""), "the field 'title' is missing"),
        (("suffix:", "sufix:"), "the field 'suffix' is missing; 'sufix' looks like it, misspelled"),
        (("title: A small one", "title: A small one\ntoolchian: zig"), "unknown field 'toolchian'; did you mean 'toolchain'"),
        (("title: A small one", "title: A small one\ntitle: Another"), "the key 'title' stands twice"),
        (("name: small", "name: other"), "file and name must agree"),
        (("{engine: linux-x86_64, kind: cpu}", "{component: cuda}"), "libraries.0: the field 'kind' is missing"),
        (("runs_on: [linux-x86_64]", "runs_on: linux"), "runs_on: expected a list, found text"),
        (("runs_on: [linux-x86_64]", "runs_on: []"), "runs_on: the list is empty"),
        (("host: universal", "host: [universal"), "is not YAML as expected"),
        ((GOOD, "just text"), "expected a mapping"),
        ((GOOD, ""), "expected a mapping"),
    ],
)
def test_bad_data_is_one_clear_sentence(tmp_path, change, sentence):
    assert change[0] in GOOD
    with pytest.raises(DataError) as caught:
        variants.load(write(tmp_path, "small", GOOD.replace(*change)))
    assert sentence in caught.value.message and "small.yaml" in caught.value.message


def test_an_entry_listed_twice_is_refused(tmp_path):
    row = "  - {component: a, kind: cuda, variant: v, os: linux, arch: x86_64, entry: e.so, file: f.so}\n"
    with pytest.raises(DataError, match="the entry 'e.so' is listed twice"):
        variants.load(write(tmp_path, "small", GOOD + row + row))


def test_an_unknown_name_gets_the_nearest(tmp_path):
    loaded = variants.load(write(tmp_path, "small", GOOD))
    with pytest.raises(UsageError, match="Did you mean 'small'"):
        variants.choose(loaded, "smal")
    assert variants.choose(loaded, "small").name == "small"
