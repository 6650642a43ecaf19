"""``invoke pin``: show, check and diff on a small release, as commands and as calls."""

from __future__ import annotations

import hashlib
import io
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from opencoti_build import pin_check, pin_diff, pins
from opencoti_build.console import Console, Mode
from opencoti_build.errors import ChecksumError, HashMismatch, IncompleteError, ManifestError, UsageError, VerifyError
from opencoti_build.pin_check import State
from opencoti_build.pin_diff import Kind
from opencoti_build.pins import File, Sidecar

ROOT = Path(__file__).parents[2]
DATA = {
    "components/cuda/1/ggml-cuda-x86_64.so": b"one",
    "components/cuda/1/ggml-cuda-win-x86_64.dll": b"two",
    "components/cuda/0/ggml-cuda-x86_64.so": b"old",
    "components/media/7/opencoti-media-x86_64.so": b"three",
}
LINUX, WINDOWS, OLD, MEDIA = DATA


def row(path: str) -> File:
    _, component, build, name = path.split("/")
    return File(component, "win-x86_64" if "win" in name else "linux-x86_64", path, hashlib.sha256(DATA[path]).hexdigest(), len(DATA[path]), build)


CODEC = Sidecar("media", "codec-x86_64.so", hashlib.sha256(b"codec").hexdigest())


@pytest.fixture
def release(tmp_path: Path) -> Path:
    """Two components, two builds of one, a sidecar; the older build is not there any more."""
    root = tmp_path / "release"
    for path, data in DATA.items():
        if path != OLD:
            (root / path).parent.mkdir(parents=True, exist_ok=True)
            (root / path).write_bytes(data)
    (root / "components/media/7/codec-x86_64.so").write_bytes(b"codec")
    pins.write(root / "pin/cuda.txt", pins.make("cuda", map(row, (LINUX, WINDOWS, OLD)), ["CUDA."]))
    pins.write(root / "pin/media.txt", pins.make("media", [row(MEDIA), CODEC]))
    pins.write(root / "pin/index.txt", pins.make("index", map(row, (LINUX, WINDOWS, MEDIA))))
    return root


def states(report: pin_check.Report) -> dict[str, State]:
    return {finding.path.name if finding.state is not State.ABSENT else str(finding.path): finding.state for finding in report.findings}


def check(root: Path, *, strict: bool = False) -> pin_check.Report:
    return pin_check.folder(root, pins.read_folder((root if (root / "pin").is_dir() else root.parent / "release") / "pin"), strict=strict)


def test_release_as_published(release: Path) -> None:
    report = check(release, strict=True)
    assert report.error is None
    assert (report.count(State.PINNED), report.count(State.ABSENT), len(report.findings)) == (4, 1, 5)
    (absent,) = [finding for finding in report.findings if finding.state is State.ABSENT]
    assert absent.path == release / OLD and not absent.wanted


@pytest.mark.parametrize("path", [LINUX, MEDIA, "components/media/7/codec-x86_64.so"])
@pytest.mark.parametrize("data", [b"ONE", b"other size", b""])
def test_changed_file(path: str, data: bytes, release: Path) -> None:
    (release / path).write_bytes(data)
    report = check(release)
    assert isinstance(report.error, HashMismatch)
    assert states(report)[Path(path).name] is State.CHANGED
    assert str(release / path) in report.error.message


def test_files_in_one_folder(release: Path, tmp_path: Path) -> None:
    """The name is enough, and any build whose sha256 it has."""
    flat = tmp_path / "flat"
    flat.mkdir()
    (flat / "ggml-cuda-x86_64.so").write_bytes(DATA[OLD])
    (flat / "codec-x86_64.so").write_bytes(b"codec")
    report = check(flat)
    assert report.error is None
    found = [finding for finding in report.findings if finding.state is State.PINNED]
    assert {finding.path.name for finding in found} == {"ggml-cuda-x86_64.so", "codec-x86_64.so"}
    assert row(OLD) in [finding.row for finding in found]
    (flat / "ggml-cuda-x86_64.so").write_bytes(b"new")
    assert isinstance(check(flat).error, HashMismatch)


def test_what_is_not_there_is_said_and_fails_when_asked(release: Path) -> None:
    (release / WINDOWS).unlink()
    assert check(release).error is None
    assert isinstance(check(release, strict=True).error, IncompleteError)
    for path in (LINUX, MEDIA, "components/media/7/codec-x86_64.so"):
        (release / path).unlink()
    assert type(check(release).error) is VerifyError


@pytest.mark.parametrize("what", ["folder", "pipe", "link"])
def test_what_is_no_file(what: str, release: Path) -> None:
    path = release / LINUX
    path.unlink()
    {"folder": path.mkdir, "pipe": lambda: os.mkfifo(path), "link": lambda: path.symlink_to("nowhere")}[what]()
    report = check(release)
    assert states(report)[path.name] is State.CHANGED and isinstance(report.error, HashMismatch)
    with pytest.raises(UsageError):
        pin_check.named([path], pins.read_folder(release / "pin"))


def test_contradicting_index_fails(release: Path) -> None:
    pins.write(release / "pin/index.txt", pins.make("index", [File("cuda", "any", "components/cuda/9/x", "a" * 64, 1, "9")]))
    assert isinstance(check(release).error, ManifestError)
    (release / LINUX).write_bytes(b"ONE")
    assert isinstance(check(release).error, HashMismatch)


def test_named_files(release: Path, tmp_path: Path) -> None:
    found = pins.read_folder(release / "pin")
    assert pin_check.named([release / LINUX, release / MEDIA], found).error is None
    other = tmp_path / "notes.txt"
    other.write_text("x")
    report = pin_check.named([release / LINUX, other], found)
    assert type(report.error) is VerifyError and "notes.txt" in report.error.message
    shutil.copy(release / WINDOWS, tmp_path / "ggml-cuda-x86_64.so")
    assert isinstance(pin_check.named([tmp_path / "ggml-cuda-x86_64.so"], found).error, HashMismatch)


def test_unreadable_file(release: Path) -> None:
    if os.geteuid() == 0:
        pytest.skip("no mode keeps root from reading: needs another user")
    (release / LINUX).chmod(0)
    with pytest.raises(ChecksumError):
        check(release)


def test_nearest_pins(release: Path, tmp_path: Path) -> None:
    (release / "components/pin").mkdir()
    assert pin_check.find_pins(release / LINUX) == release / "pin"
    assert pin_check.find_pins(tmp_path) is None


# Differences


def test_differences() -> None:
    newer = File("cuda", "linux-x86_64", "components/cuda/2/ggml-cuda-x86_64.so", "c" * 64, 4, "2", extra={"sm": "75"})
    added = File("vulkan", "any", "components/vulkan/1/x", "d" * 64, 1, "1")
    changes = pin_diff.compare([row(LINUX), row(WINDOWS), CODEC], [added, row(WINDOWS), newer])
    assert [(change.kind, change.row.name) for change in changes] == [(Kind.CHANGED, "ggml-cuda-x86_64.so"), (Kind.GONE, "codec-x86_64.so"), (Kind.ADDED, "x")]
    assert changes[0].fields == {"path": (LINUX, newer.path), "sha256": (row(LINUX).sha256, "c" * 64), "size": (3, 4), "build": ("1", "2"), "sm": (None, "75")}
    assert pin_diff.compare([row(LINUX), row(WINDOWS)], [row(WINDOWS), row(LINUX)]) == ()
    text = io.StringIO()
    pin_diff.show(changes, Console(text, mode=Mode.PLAIN))
    assert "3 rows differ: 1 added, 1 gone, 1 changed" in text.getvalue() and "build: 1 -> 2" in text.getvalue()


def test_same_name_in_two_builds() -> None:
    changes = pin_diff.compare([row(LINUX), row(OLD)], [row(OLD)])
    assert [(change.kind, change.row) for change in changes] == [(Kind.GONE, row(LINUX))]


# The commands


def invoke(*words: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "invoke", *map(str, words)], cwd=ROOT, capture_output=True, text=True, check=False, env=os.environ | {"OPENCOTI_PLAIN": "1"})


def test_show(release: Path) -> None:
    done = invoke("pin", "show", "--dir", release)
    assert done.returncode == 0 and row(MEDIA).sha256 in done.stdout and row(OLD).sha256 not in done.stdout
    value = json.loads(invoke("pin.show", "cuda", "--dir", release / "pin", "--json").stdout)
    assert value["rows"] == [item.to_dict() for item in sorted(map(row, (LINUX, WINDOWS, OLD)), key=lambda item: item.path)]
    wrong = invoke("pin", "show", "nope", "--dir", release)
    assert (wrong.returncode, wrong.stdout) == (UsageError.exit_code, "") and "there are cuda, index, media" in wrong.stderr


def test_check(release: Path) -> None:
    done = invoke("pin", "check", release, release / LINUX, release / MEDIA)
    assert done.returncode == 0, done.stderr
    assert done.stderr.rstrip().endswith("ok  6 files are as pinned; 1 pinned file is not there and not checked")
    (release / LINUX).write_bytes(b"ONE")
    bad = invoke("pin.check", "--json", release)
    value = json.loads(bad.stdout)
    assert bad.returncode == value["exit_code"] == HashMismatch.exit_code
    assert [item["file"] for item in value["files"] if item["state"] == "changed"] == [str(release / LINUX)]


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (["pin", "check"], 2, "needs 'target'"),
        (["pin", "check", "no-such-file"], 2, "There is no file or folder no-such-file."),
        (["pin", "check", "{}/pin/cuda.txt", "--pins", "/nowhere"], 2, "There is no folder /nowhere."),
        (["pin", "check", "{}", "--pins", "{}/components"], 41, "There are no pin files"),
        (["pin", "diff", "{}", "{}/" + LINUX], 41, "line 1"),
    ],
)
def test_bad_calls_end_in_a_sentence(words: list[str], code: int, said: str, release: Path) -> None:
    done = invoke(*(word.replace("{}", str(release)) for word in words))
    assert (done.returncode, done.stdout) == (code, "")
    assert done.stderr.startswith("error: ") and said in done.stderr and "Traceback" not in done.stderr


def test_diff(release: Path, tmp_path: Path) -> None:
    shutil.copy(release / "pin/cuda.txt", tmp_path / "before.txt")
    pin = pins.read(release / "pin/cuda.txt")
    pins.write(release / "pin/cuda.txt", pin.edited([row(LINUX), row(OLD)]))
    done = invoke("pin", "diff", tmp_path / "before.txt", release / "pin/cuda.txt")
    assert done.returncode == 0 and "1 row differs: 0 added, 1 gone, 0 changed" in done.stdout
    value = json.loads(invoke("pin", "diff", release, release, "--json").stdout)
    assert value["changes"] == []
