"""The papers that lie beside the artifacts, made from real manifests of real (small) files."""

from __future__ import annotations

import hashlib
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from opencoti_build import checksums, manifest, report, variants
from opencoti_build.container import Assembled, AssembledEntry
from opencoti_build.manifest import Base, Missing, Patch
from opencoti_build.project import Identity, Project

IDENTITY = Identity("0.10.7", "c1")
FACTS = report.Facts(
    repository=report.Repository("a" * 40, False, 1790000000),
    bases=(Base("llama.cpp", "b11434", "", "b" * 40), Base("llamafile", "0.10.7", "c" * 40)),
    patches=(Patch("0001", "identity: say which engine this is", "d" * 64),),
    tree="e" * 40,
    toolchains={"ziglang": "0.17.1"},
    missing=(),
)


def make(out: Path, name: str, data: bytes, facts: report.Facts = FACTS) -> manifest.Manifest:
    """An artifact in ``out`` with its papers."""
    variant = variants.load(Path(__file__).parents[2] / "variants")[name]
    path = out / IDENTITY.artifact(variant.suffix)
    path.write_bytes(data)
    sha256 = hashlib.sha256(data).hexdigest()
    entry = AssembledEntry("ggml-cpu-avx2-x86_64.so", 0, 3, 3, 1, 2, 7, "f" * 64, "engine/linux-x86_64", "2611301800123")
    assembled = Assembled(path, len(data), sha256, 2, "9" * 64, (entry,), None)
    document = report.manifest_of(assembled, facts, variant, IDENTITY.engine, "inputs")
    report.write_papers(out, path, document, facts, IDENTITY, variants.load(Path(__file__).parents[2] / "variants"))
    return document


def test_the_manifest_reads_back_equal(tmp_path):
    document = make(tmp_path, "universal", b"abc")
    read = manifest.read(manifest.beside(tmp_path / document.file))
    assert read == document
    assert (read.engine, read.complete, read.entries[0].method, read.entries[0].crc32) == ("opencoti-0.10.7-c1", True, "stored", "00000007")


def test_checksums_cover_all_artifacts_and_papers(tmp_path):
    first = make(tmp_path, "universal", b"abc")
    second = make(tmp_path, "bare", b"xyz1")
    done = subprocess.run(["sha256sum", "-c", "SHA256SUMS"], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    names = {row.name for row in checksums.read(tmp_path / "SHA256SUMS")}
    assert names == {first.file, second.file, f"{first.file}.MANIFEST.json", f"{second.file}.MANIFEST.json", "BUILD_INFO.md", "RELEASE_NOTES.md"}


def test_an_incomplete_artifact_says_so_everywhere(tmp_path):
    facts = replace(FACTS, missing=(Missing("ggml-cuda.so (linux)", "no such file"),))
    document = make(tmp_path, "universal", b"abc", facts)
    assert not document.complete
    assert "no such file" in (tmp_path / "BUILD_INFO.md").read_text()
    notes = (tmp_path / "RELEASE_NOTES.md").read_text()
    assert "incomplete" in notes and "lacks ggml-cuda.so (linux)" in notes


def test_an_artifact_of_another_engine_is_not_in_the_papers(tmp_path):
    make(tmp_path, "bare", b"old", replace(FACTS, tree="0" * 40))
    document = make(tmp_path, "universal", b"new")
    assert [row.name for row in checksums.read(tmp_path / "SHA256SUMS") if "MANIFEST" not in row.name and not row.name.endswith(".md")] == [document.file]


def test_the_papers_depend_on_inputs_alone(tmp_path, monkeypatch):
    texts = []
    for zone in ("UTC", "Pacific/Kiritimati"):
        monkeypatch.setenv("TZ", zone)
        folder = tmp_path / zone.replace("/", "-")
        folder.mkdir()
        make(folder, "universal", b"abc")
        texts.append({path.name: path.read_bytes() for path in folder.iterdir()})
    assert texts[0] == texts[1]


def test_markdown_tables_are_not_torn(tmp_path):
    make(tmp_path, "universal", b"abc")
    for name in ("BUILD_INFO.md", "RELEASE_NOTES.md"):
        lines = (tmp_path / name).read_text().splitlines()
        for number, line in enumerate(lines):
            if line.startswith("|---"):
                columns = lines[number - 1].count("|")
                rows = [row for row in lines[number + 1 :]][: next((i for i, row in enumerate(lines[number + 1 :]) if not row.startswith("|")), None)]
                assert rows and all(row.count("|") == columns for row in rows), (name, number)


@pytest.fixture
def checkout(tmp_path):
    def git(*words: str) -> None:
        subprocess.run(["git", "-C", str(tmp_path), "-c", "user.name=n", "-c", "user.email=e@example.invalid", *words], check=True, capture_output=True)

    git("init", "-q")
    (tmp_path / "file").write_text("1")
    git("add", "file")
    git("commit", "-qm", "one")
    return tmp_path


def test_the_repository_is_clean_dirty_or_none(checkout, tmp_path_factory):
    clean = report.Repository.read(Project(checkout))
    assert len(clean.commit) == 40 and not clean.dirty
    (checkout / "file").write_text("2")
    assert report.Repository.read(Project(checkout)) == replace(clean, dirty=True)
    outside = tmp_path_factory.mktemp("outside")
    assert report.Repository.read(Project(outside)) == report.Repository("", True)
