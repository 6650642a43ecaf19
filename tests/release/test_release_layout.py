"""Where the files of a cut lie."""

from __future__ import annotations

import pytest
from cut_builder import C1, C2
from hypothesis import given, settings
from hypothesis import strategies as st

from opencoti_build import release_layout
from opencoti_build.errors import PublishError
from opencoti_build.project import Identity

LAYOUT = release_layout.load()
PAPERS = f"releases/{C1.full_tag}"


@pytest.mark.parametrize(
    ("name", "place"),
    [
        ("opencoti-llamafile-0.10.7-c1-universal.llamafile.exe", "opencoti-llamafile-0.10.7-c1-universal.llamafile.exe"),
        ("opencoti-llamafile-0.10.7-c1-aarch64.llamafile", "opencoti-llamafile-0.10.7-c1-aarch64.llamafile"),
        ("opencoti-llamafile-0.10.7-c1-aarch64.llamafile.MANIFEST.json", f"{PAPERS}/opencoti-llamafile-0.10.7-c1-aarch64.llamafile.MANIFEST.json"),
        ("SHA256SUMS", f"{PAPERS}/SHA256SUMS"),
        ("licenses/gpl.txt", f"{PAPERS}/licenses/gpl.txt"),
        ("components/cuda/b1/ggml-cuda-x86_64.so", "components/cuda/b1/ggml-cuda-x86_64.so"),
        ("components/engine/b1/opencoti-llamafile-0.10.7-c1-bare.llamafile", "components/engine/b1/opencoti-llamafile-0.10.7-c1-bare.llamafile"),
    ],
)
def test_places_of_a_cut_and_of_the_archive(name: str, place: str) -> None:
    assert LAYOUT.place(name, C1) == place
    # The archive has the shape of the cut's folder again, so that its SHA256SUMS can be checked there.
    assert release_layout.archived(place, C1) == f"releases/archived/{C1.full_tag}/{name}"


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("opencoti-llamafile-0.10.7-c2-universal.llamafile.exe", "belongs to another cut"),
        ("opencoti-llamafile-0.10.8-c1-universal.llamafile.exe", "belongs to another cut"),
        ("opencoti-llamafile-0.10.7-c1-bare.llamafile", "belongs into components/engine"),
        ("components/cuda.so", "does not lie in components/NAME/BUILD"),
        ("components/cuda/ggml-cuda.so", "does not lie in components/NAME/BUILD"),
    ],
)
def test_files_that_lie_wrong(name: str, problem: str) -> None:
    with pytest.raises(PublishError, match=problem):
        LAYOUT.place(name, C1)


def test_whose_a_published_path_is() -> None:
    assert LAYOUT.cut_of_root_file("opencoti-llamafile-0.10.7-c2-x86_64.llamafile") == C2
    assert LAYOUT.cut_of_root_file("opencoti-llamafile-0.10.7-c2-bare.llamafile") is None
    assert LAYOUT.cut_of_root_file("README.md") is None
    assert release_layout.release_of(f"releases/{C2.full_tag}/SHA256SUMS") == C2
    assert release_layout.release_of(f"releases/archived/{C2.full_tag}/SHA256SUMS") is None
    assert release_layout.release_of("releases/README.md") is None


@settings(max_examples=60, deadline=None)
@given(st.from_regex(r"[0-9][0-9A-Za-z.]{0,6}", fullmatch=True), st.from_regex(r"[0-9A-Za-z][0-9A-Za-z._]{0,6}", fullmatch=True))
def test_a_full_tag_names_its_cut(version: str, tag: str) -> None:
    assert release_layout.identity_of(Identity(version, tag).full_tag) == Identity(version, tag)


@settings(max_examples=60, deadline=None)
@given(st.text(max_size=40))
def test_other_words_name_no_cut(text: str) -> None:
    found = release_layout.identity_of(text)
    assert found is None or found.full_tag == text


def test_what_needs_a_checksum() -> None:
    assert LAYOUT.needs_sum("RELEASE_NOTES.md")
    assert not LAYOUT.needs_sum("SHA256SUMS")
    assert not LAYOUT.needs_sum("SHA256SUMS.minisig")
