"""Pin files: the vectors of the specification, round trips, what sha256sum makes of them, and anything at all."""

from __future__ import annotations

import hashlib
import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from opencoti_build import pins
from opencoti_build.errors import ManifestError
from opencoti_build.pins import File, PinFile, Sidecar

ROOT = Path(__file__).parents[2]
VECTORS = ROOT / "pin" / "vectors"
LISTED: list[dict[str, Any]] = json.loads((VECTORS / "vectors.json").read_text("utf-8"))["vectors"]

A, B, C = "a" * 64, "b" * 64, "0123456789abcdef" * 4
LINUX = File("cuda", "linux-x86_64", "components/cuda/1/ggml-cuda-x86_64.so", A, 10, "1", entry="ggml-cuda.so")
WINDOWS = File("cuda", "win-x86_64", "components/cuda/1/ggml-cuda-win-x86_64.dll", B, 20, "1")
CODEC = Sidecar("cuda", "codec-x86_64.so", C, 5, {"license": "LGPL-2.1-or-later"})


# The vectors


def test_vectors_are_all_listed() -> None:
    assert sorted(path.name for path in VECTORS.glob("*.txt")) == sorted(row["file"] for row in LISTED)
    assert {row["outcome"] for row in LISTED} == {"accept", "refuse"}


@pytest.mark.parametrize("row", [row for row in LISTED if row["outcome"] == "accept"], ids=lambda row: row["file"])
def test_vector_that_is_read(row: dict[str, Any]) -> None:
    data = (VECTORS / row["file"]).read_bytes()
    pin = pins.parse(data, row["file"])
    assert pin.component == row["component"]
    assert [item.to_dict() for item in pin.files] == row["files"]
    assert [item.to_dict() for item in pin.sidecars] == row["sidecars"]
    assert list(pin.unknown) == row["unknown"]
    assert pin.render().encode("utf-8") == data
    assert pin.edited(pin.rows).render().encode("utf-8") == data
    comments = [line.removeprefix("#").removeprefix(" ") for line in data.decode("utf-8").split("\n") if line.startswith("#") and not line.startswith("#!")]
    assert (pins.make(pin.component, pin.rows, comments).render().encode("utf-8") == data) == row["canonical"]


@pytest.mark.parametrize("row", [row for row in LISTED if row["outcome"] == "refuse"], ids=lambda row: row["file"])
def test_vector_that_is_refused(row: dict[str, Any]) -> None:
    with pytest.raises(ManifestError) as caught:
        pins.parse((VECTORS / row["file"]).read_bytes(), row["file"])
    if (said := re.search(r" line (\d+): ", caught.value.message)) is not None:
        assert int(said[1]) == row["line"]
    else:
        assert "byte" in caught.value.message


# Writing


def test_same_rows_give_the_same_bytes() -> None:
    text = pins.make("cuda", [CODEC, LINUX, WINDOWS], ["One.", "Two\nthree"]).render()
    assert text == pins.make("cuda", [WINDOWS, CODEC, LINUX], ["One.\nTwo", "three"]).render()
    assert text.splitlines() == [
        "#! pin 1 cuda",
        "# One.",
        "# Two",
        "# three",
        "#! file win-x86_64 size=20 build=1",
        f"{B}  components/cuda/1/ggml-cuda-win-x86_64.dll",
        "#! file linux-x86_64 size=10 build=1 entry=ggml-cuda.so",
        f"{A}  components/cuda/1/ggml-cuda-x86_64.so",
        f"#! sidecar codec-x86_64.so {C} size=5 license=LGPL-2.1-or-later",
    ]


def test_edit_touches_nothing_else() -> None:
    text = (
        f"#! pin 1 cuda\r\n# first\r\n\r\n#! file win-x86_64 build=1 size=20\r\n{B}  {WINDOWS.path}\r\n"
        f"# above the second\r\n#! later words\r\n#! file linux-x86_64 size=10 build=1\r\n{A}  {LINUX.path}\r\nrevoked 7\r\n"
    )
    pin = pins.parse(text.encode())
    changed = File("cuda", "linux-x86_64", LINUX.path, C, 11, "1")
    new = File("cuda", "any", "components/cuda/1/ggml-cuda-x.txt", A, 1, "1")
    edited = pin.edited([WINDOWS, changed, new]).render()
    assert edited == text.replace(f"size=10 build=1\r\n{A}", f"size=11 build=1\r\n{C}").replace(
        "#! file linux", f"#! file any size=1 build=1\r\n{A}  components/cuda/1/ggml-cuda-x.txt\r\n#! file linux"
    )
    gone = pin.edited([]).render()
    assert gone == "#! pin 1 cuda\r\n# first\r\n\r\n# above the second\r\n#! later words\r\nrevoked 7\r\n"
    assert pins.parse(gone.encode()).edited([LINUX]).files == (LINUX,)


def test_index_names_the_component_of_each_row() -> None:
    text = pins.make("index", [LINUX]).render()
    assert "#! file linux-x86_64 component=cuda size=10 build=1 entry=ggml-cuda.so\n" in text
    assert pins.parse(text.encode()).files == (LINUX,)


@pytest.mark.parametrize(
    "rows",
    [
        [LINUX, LINUX],
        [LINUX, File("cuda", "any", LINUX.path.upper(), A, 1, "1")],
        [File("vulkan", "any", "a", A, 1, "1")],
        [File("cuda", "any size=5", "a", A, 1, "1")],
        [File("cuda", "any", "a", A, 1, "1", extra={"size": "5"})],
        [File("cuda", "any", "a", A, 1, "1", extra={"component": "cuda"})],
        [File("cuda", "any", "a", A, 1, "1", extra={"Key": "x"})],
        [File("cuda", "any", "a", A, 1, "1", extra={"note": ""})],
        [File("cuda", "any", f"a\n#! sidecar x {B}", A, 1, "1")],
        [File("cuda", "any", "../a", A, 1, "1")],
        [File("cuda", "any", "a", A.upper(), 1, "1")],
        [File("cuda", "any", "a", A, -1, "1")],
        [File("cuda", "any", "a", A, 1, "")],
        [Sidecar("cuda", "a/b", A)],
        [Sidecar("media", "a", A)],
        [Sidecar("cuda", "a\0b", A)],
    ],
)
def test_rows_that_no_pin_file_can_hold(rows: list[pins.Row]) -> None:
    with pytest.raises(ManifestError):
        pins.make("cuda", rows)


@pytest.mark.parametrize(("component", "comment"), [("CUDA", "x"), ("", "x"), ("a b", "x"), ("cuda", "\x1b[2J"), ("cuda", "x" * 5000), ("cuda", "a\rb")])
def test_heads_and_comments_that_no_pin_file_can_hold(component: str, comment: str) -> None:
    with pytest.raises(ManifestError):
        pins.make(component, [LINUX] if component == "cuda" else [], [comment])


# Other programs


@pytest.fixture
def release(tmp_path: Path) -> tuple[Path, PinFile]:
    """A release with two files of cuda and its pin file."""
    rows = []
    for platform, name, data in (("linux-x86_64", "ggml-cuda-x86_64.so", b"one"), ("win-x86_64", "ggml cuda-win.dll", b"two")):
        path = tmp_path / "components/cuda/1" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
        rows.append(File("cuda", platform, f"components/cuda/1/{name}", hashlib.sha256(data).hexdigest(), len(data), "1"))
    codec = b"codec"
    (tmp_path / "components/cuda/1/codec.so").write_bytes(codec)
    pin = pins.make("cuda", [*rows, Sidecar("cuda", "codec.so", hashlib.sha256(codec).hexdigest())], ["Comments, and 3 > 2."])
    pins.write(tmp_path / "pin" / "cuda.txt", pin)
    return tmp_path, pin


SHELL_LINES = {
    "sha256sum": "sha256sum --strict --warn -c pin/cuda.txt",
    "ignore missing": "sha256sum -c --ignore-missing pin/cuda.txt",
    "busybox": "grep -E '^[0-9a-f]{64} ' pin/cuda.txt | busybox sha256sum -c -",
    "shasum": "grep -E '^[0-9a-f]{64} ' pin/cuda.txt | shasum -a 256 -c -",
    "shasum alone": "shasum -a 256 --strict -c pin/cuda.txt",
    "flat": "cd components/cuda/1 && sed -n -E 's|^([0-9a-f]{64}  ).*/|\\1|p' ../../../pin/cuda.txt | sha256sum -c --ignore-missing -",
}


@pytest.mark.parametrize("name", list(SHELL_LINES))
def test_lines_of_the_specification(name: str, release: tuple[Path, PinFile]) -> None:
    line, root = SHELL_LINES[name], release[0]
    program = re.search(r"(busybox|shasum|sha256sum)", line.rpartition("|")[2] or line)
    assert program is not None
    if shutil.which(program[1]) is None:
        pytest.skip(f"{program[1]} is not installed")
    good = subprocess.run(["sh", "-c", line], cwd=root, capture_output=True, text=True, check=False)
    assert (good.returncode, good.stderr) == (0, ""), good
    assert good.stdout.count(": OK") == 2
    (root / "components/cuda/1/ggml cuda-win.dll").write_bytes(b"TWO")
    assert subprocess.run(["sh", "-c", line], cwd=root, capture_output=True, check=False).returncode != 0


def test_lines_of_the_specification_that_take_one_row(release: tuple[Path, PinFile]) -> None:
    root, pin = release
    line = "awk '/^#! file win-x86_64 /{getline; print $1}' pin/cuda.txt"
    assert subprocess.check_output(["sh", "-c", line], cwd=root, text=True).strip() == next(row.sha256 for row in pin.files if row.platform == "win-x86_64")
    sidecars = 'cd components/cuda/1 && awk \'/^#! sidecar /{print $4 "  " $3}\' ../../../pin/cuda.txt | sha256sum -c -'
    assert "codec.so: OK" in subprocess.check_output(["sh", "-c", sidecars], cwd=root, text=True)


def test_specification_shows_the_lines_that_are_tested() -> None:
    text = (ROOT / "pin" / "PIN_FORMAT.md").read_text("utf-8")
    for piece in ("awk '/^#! file win-x86_64 /{getline; print $1}' pin/cuda.txt", "sed -n -E 's|^([0-9a-f]{64}  ).*/|\\1|p' pin/cuda.txt", "grep -E '^[0-9a-f]{64} ' pin/cuda.txt"):
        assert piece in text


# A folder


def test_folder(release: tuple[Path, PinFile]) -> None:
    root, pin = release
    made = pins.read_folder(root / "pin")
    assert (list(made.components), made.index, made.current, made.problems()) == (["cuda"], None, pin.files, ())
    pins.write(root / "pin" / "index.txt", pins.make("index", pin.files[:1]))
    assert pins.read_folder(root / "pin").current == pin.files[:1]


def test_index_that_contradicts_its_components(release: tuple[Path, PinFile]) -> None:
    root, pin = release
    row = pin.files[0]
    for other, words in (
        (File("vulkan", "any", "x", A, 1, "1"), "there is no vulkan.txt"),
        (File("cuda", "any", "x", A, 1, "1"), "cuda.txt does not list"),
        (File("cuda", row.platform, row.path, A, row.size, row.build), "differ about"),
    ):
        pins.write(root / "pin" / "index.txt", pins.make("index", [other]))
        (problem,) = pins.read_folder(root / "pin").problems()
        assert words in problem


def test_folders_and_files_that_cannot_be_read(release: tuple[Path, PinFile], tmp_path: Path) -> None:
    root, _ = release
    (root / "pin" / "cuda.txt").rename(root / "pin" / "vulkan.txt")
    with pytest.raises(ManifestError, match="says that it is cuda.txt"):
        pins.read_folder(root / "pin")
    for folder in (tmp_path / "absent", root / "components"):
        with pytest.raises(ManifestError):
            pins.read_folder(folder)
    (root / "pin" / "vulkan.txt").write_bytes(b"#! pin 1 vulkan\n" + b"# x\n" * (1 << 18))
    with pytest.raises(ManifestError, match="larger than"):
        pins.read_folder(root / "pin")


# Anything at all

NAMES = st.from_regex(r"[a-z0-9][a-z0-9_-]{0,11}", fullmatch=True)
SEGMENTS = st.from_regex(r"[abAB01_()&%-]([ab .]{0,5}[abAB01_()&%-])?", fullmatch=True)
VALUES = st.text(st.characters(codec="utf-8", exclude_categories=("Cc",)), min_size=1, max_size=10)
DIGESTS = st.binary(min_size=32, max_size=32).map(bytes.hex)
PATHS = st.lists(SEGMENTS, min_size=1, max_size=4).map("/".join)
EXTRA = st.dictionaries(st.text("abcxyz", min_size=1, max_size=5), VALUES, max_size=3)
FILES = st.builds(File, st.just("cuda"), NAMES, PATHS, DIGESTS, st.integers(0, (1 << 63) - 1), NAMES, PATHS | st.just(""), EXTRA)
SIDECARS = st.builds(Sidecar, st.just("cuda"), SEGMENTS, DIGESTS, st.none() | st.integers(0, 99), EXTRA)
ROWS = st.lists(FILES | SIDECARS, max_size=5, unique_by=lambda row: (row.path if isinstance(row, File) else row.name).lower())


def _name(row: pins.Row) -> str:
    return row.path if isinstance(row, File) else row.name


@settings(max_examples=40, deadline=None)
@given(rows=ROWS, comments=st.lists(VALUES, max_size=2))
def test_what_is_written_is_read(rows: list[pins.Row], comments: list[str]) -> None:
    made = pins.make("cuda", rows, comments)
    back = pins.parse(made.render().encode("utf-8"))
    assert back == made
    assert sorted(back.rows, key=_name) == sorted(rows, key=_name)


@settings(max_examples=40, deadline=None)
@given(old=ROWS, new=ROWS, data=st.data())
def test_edit_gives_the_canonical_order(old: list[pins.Row], new: list[pins.Row], data: st.DataObject) -> None:
    kept = data.draw(st.lists(st.sampled_from(old), unique_by=id, max_size=3)) if old else []
    taken = {_name(row).lower() for row in new}
    rows = [*new, *(row for row in kept if _name(row).lower() not in taken)]
    assert pins.make("cuda", old).edited(rows).render() == pins.make("cuda", rows).render()


PIECES = st.sampled_from([b"#! pin 1 cuda\n", b"#! file linux-x86_64 size=1 build=1\n", A.encode() + b"  a/b\n", b"#! sidecar x " + B.encode() + b"\n", b"# c\n", b"\n", b"\r\n", b"#!", b"%", b"  ", b"../", b"\xff", b"row x\n"])


@settings(max_examples=150, deadline=None)
@given(st.lists(PIECES | st.binary(max_size=6), max_size=12).map(b"".join), st.booleans())
def test_anything_is_read_whole_or_refused_in_a_sentence(data: bytes, headed: bool) -> None:
    data = b"#! pin 1 cuda\n" + data if headed else data
    try:
        pin = pins.parse(data)
    except ManifestError as error:
        assert error.message.endswith(".") and "\n" not in error.message
    else:
        assert pin.render().encode("utf-8") == data


@settings(max_examples=100, deadline=None)
@given(at=st.integers(0, 400), value=st.integers(1, 255))
def test_a_changed_byte_never_loses_a_row_in_silence(at: int, value: int) -> None:
    """A changed byte may change a file's row, but never make it something that is merely kept."""
    data = bytearray(pins.make("cuda", [LINUX, WINDOWS, CODEC]).render().encode())
    data[at % len(data)] ^= value
    try:
        pin = pins.parse(bytes(data))
    except ManifestError:
        return
    assert len(pin.files) == 2
