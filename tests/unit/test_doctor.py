"""``invoke doctor`` on machines described by folders: what it finds, what it calls missing, what it advises."""

from __future__ import annotations

import io
import json
import os
import sys
from pathlib import Path

import pytest

from opencoti_build import doctor, vendors
from opencoti_build.cache import Cache
from opencoti_build.console import Console, Mode
from opencoti_build.doctor import Check, Status, Surroundings
from opencoti_build.project import Project, find_project
from opencoti_build.runner import SystemRunner

linux_only = pytest.mark.skipif(sys.platform != "linux", reason="of Linux")


def script(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("#!/bin/sh\n" + text)
    path.chmod(0o755)
    return path


def machine(tmp_path: Path, *, offline: bool = False, cache: Path | None = None, environment: dict[str, str] | None = None) -> Surroundings:
    """A machine with nothing on PATH but what lies in ``tmp_path/bin``, and the project's real pins."""
    store = Cache(cache or tmp_path / "cache")
    console = Console(io.StringIO(), mode=Mode.QUIET)
    runner = SystemRunner()
    fetcher = vendors.Fetcher(store, console, runner, offline=True)
    return Surroundings(find_project(), store, runner, fetcher, offline, {"PATH": str(tmp_path / "bin"), **(environment or {})}, tmp_path / "binfmt")


def named(checks: list[Check], name: str) -> Check:
    (found,) = [check for check in checks if check.name == name]
    return found


def test_a_machine_with_git_can_build_and_the_pins_are_fetched_later(tmp_path: Path) -> None:
    script(tmp_path / "bin" / "git", "echo git version 2.50.1")
    checks = doctor.examine(machine(tmp_path))
    assert doctor.possible(checks), [check for check in checks if check.status.blocks]
    assert named(checks, "git").detail.startswith("2.50.1,")
    for name in ("ziglang", "cmake", "ninja", "llama.cpp"):
        check = named(checks, f"pin {name}")
        assert (check.status, check.remedy) == (Status.FETCHED_LATER, f"invoke vendor fetch {name}")
    for name in ("nvcc", "glslc", "native compiler"):
        assert named(checks, name).status is Status.OPTIONAL and named(checks, name).remedy
    assert not (tmp_path / "cache").exists(), "looking changes nothing"


def test_without_git_the_build_is_not_possible(tmp_path: Path) -> None:
    checks = doctor.examine(machine(tmp_path))
    assert named(checks, "git").status is Status.MISSING
    assert not doctor.possible(checks)


def test_offline_with_an_empty_cache_is_not_possible(tmp_path: Path) -> None:
    script(tmp_path / "bin" / "git", "echo git version 2.50.1")
    checks = doctor.examine(machine(tmp_path, offline=True))
    zig = named(checks, "pin ziglang")
    assert zig.status is Status.MISSING and "OPENCOTI_OFFLINE" in zig.detail
    assert not doctor.possible(checks)
    assert named(checks, "pin llama.cpp-b9859").status is Status.OPTIONAL, "no build needs it"


def test_a_fetched_pin_is_here(tmp_path: Path) -> None:
    looked_at = machine(tmp_path, offline=True)
    pin = vendors.load_pins(looked_at.project.vendors)["ninja"]
    archive = pin.package(looked_at.fetcher.platform).archives[0]
    blob = looked_at.cache.blob(archive.sha256)
    blob.parent.mkdir(parents=True)
    with blob.open("wb") as stream:
        stream.truncate(archive.size or 0)
    assert named(doctor.pins(looked_at), "pin ninja").status is Status.OK


def test_a_cache_below_a_file_is_missing_with_the_variable_that_moves_it(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    check = named(doctor.machine_room(machine(tmp_path, cache=tmp_path / "file" / "cache")), "cache")
    assert check.status is Status.MISSING and "OPENCOTI_CACHE" in check.remedy


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() == 0, reason="root may write anywhere")
def test_a_cache_that_may_not_be_written_to_is_missing(tmp_path: Path) -> None:
    folder = tmp_path / "locked"
    folder.mkdir()
    folder.chmod(0o500)
    assert named(doctor.machine_room(machine(tmp_path, cache=folder / "cache")), "cache").status is Status.MISSING


def test_a_full_disk_stops_a_first_build_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor.shutil, "disk_usage", lambda path: type("Usage", (), {"free": 1 << 30})())
    assert named(doctor.machine_room(machine(tmp_path)), "disk, cache").status is Status.MISSING
    (tmp_path / "cache").mkdir()
    check = named(doctor.machine_room(machine(tmp_path)), "disk, cache")
    assert check.status is Status.NOTICE and "1.00 GiB" in check.detail


def test_programs_are_found_with_their_versions_and_a_broken_one_is_a_finding(tmp_path: Path) -> None:
    folder = tmp_path / "bin"
    script(folder / "gcc", "echo 'gcc (Debian 12.2.0-14) 12.2.0'")
    script(folder / "g++", "echo g++")
    script(folder / "nvcc", "echo 'Cuda compilation tools, release 12.8, V12.8.93'")
    (folder / "glslc").write_bytes(b"\x7fELFnonsense")
    (folder / "glslc").chmod(0o755)
    checks = doctor.compilers(machine(tmp_path))
    assert "12.2.0" in named(checks, "native compiler").detail and named(checks, "native compiler").status is Status.OK
    assert named(checks, "nvcc").detail.startswith("12.8,")
    assert "does not run" in named(checks, "glslc").detail


def test_ccache_asked_for_and_absent_is_missing(tmp_path: Path) -> None:
    check = named(doctor.compilers(machine(tmp_path, environment={"OPENCOTI_CCACHE": "1"})), "ccache")
    assert check.status is Status.MISSING and "unset OPENCOTI_CCACHE" in check.remedy
    script(tmp_path / "bin" / "ccache", "echo ccache version 4.9")
    assert "not in use" in named(doctor.compilers(machine(tmp_path)), "ccache").detail
    assert "in use" in named(doctor.compilers(machine(tmp_path, environment={"OPENCOTI_CCACHE": "1"})), "ccache").detail


def test_a_wrong_compiler_variable_is_a_finding(tmp_path: Path) -> None:
    check = named(doctor.compilers(machine(tmp_path, environment={"CC": "nothing"})), "native compiler")
    assert check.status is Status.OPTIONAL and "'nothing'" in check.detail


def test_cosmocc_is_optional_and_a_wrong_folder_is_said(tmp_path: Path) -> None:
    assert named(doctor.compilers(machine(tmp_path)), "cosmocc").status is Status.OPTIONAL
    check = named(doctor.compilers(machine(tmp_path, environment={"OPENCOTI_COSMOCC": str(tmp_path)})), "cosmocc")
    assert check.status is Status.OPTIONAL and "lacks bin/apelink" in check.detail


def test_variables_in_effect_are_listed(tmp_path: Path) -> None:
    checks = doctor.variables(machine(tmp_path, environment={"OPENCOTI_JOBS": "3", "OTHER": "x"}))
    assert [(check.name, check.detail) for check in checks] == [("OPENCOTI_JOBS", "3")]


def test_unreadable_pins_are_one_finding(tmp_path: Path) -> None:
    (tmp_path / "project" / "vendors").mkdir(parents=True)
    (tmp_path / "project" / "vendors" / "x.yaml").write_text(": [")
    here = machine(tmp_path)
    broken = Surroundings(Project(tmp_path / "project"), here.cache, here.runner, here.fetcher, environment=here.environment, binfmt=here.binfmt)
    checks = doctor.examine(broken)
    assert named(checks, "pins").status is Status.MISSING and "x.yaml" in named(checks, "pins").detail


# ---- binfmt_misc ------------------------------------------------------------------------------------------------------------------

DOSWIN = "enabled\ninterpreter /usr/bin/wine\nflags: \noffset 0\nmagic 4d5a\n"
APE = "enabled\ninterpreter /usr/bin/ape\nflags: F\noffset 0\nmagic 4d5a714670440a\n"
QEMU = "enabled\ninterpreter /usr/libexec/qemu-binfmt/aarch64-binfmt-P\nflags: POCF\noffset 0\nmagic 7f454c460201010000000000000000000200b700\nmask ffffffffffffff00\n"


def binfmt(tmp_path: Path, status: str = "enabled\n", **entries: str) -> None:
    folder = tmp_path / "binfmt"
    folder.mkdir()
    (folder / "status").write_text(status)
    (folder / "register").write_text("")
    for name, text in entries.items():
        (folder / name).write_text(text)


@linux_only
def test_an_entry_for_mz_is_a_notice_with_two_ways_out(tmp_path: Path) -> None:
    binfmt(tmp_path, DOSWin=DOSWIN, qemu=QEMU)
    (check,) = doctor.binfmt_misc(machine(tmp_path))
    assert check.status is Status.NOTICE and not check.status.blocks
    assert "DOSWin (/usr/bin/wine)" in check.detail and "qemu" not in check.detail
    assert "sh FILE" in check.remedy and str(tmp_path / "binfmt" / "DOSWin") in check.remedy


@linux_only
@pytest.mark.parametrize(
    ("status", "entry"),
    [
        ("enabled\n", QEMU),
        ("enabled\n", DOSWIN.replace("enabled", "disabled")),
        ("enabled\n", DOSWIN.replace("offset 0", "offset 2")),
        ("enabled\n", "enabled\ninterpreter /usr/bin/x\nflags: \nextension .exe\n"),
        ("enabled\n", ""),
        ("enabled\n", "enabled\ninterpreter x\noffset x\nmagic 4d5a\n"),
        ("enabled\n", "enabled\ninterpreter x\noffset 0\nmagic zz\n"),
        ("enabled\n", "enabled\nmagic\n"),
        ("disabled\n", DOSWIN),
    ],
)
def test_other_entries_do_no_harm(tmp_path: Path, status: str, entry: str) -> None:
    binfmt(tmp_path, status, entry=entry)
    (check,) = doctor.binfmt_misc(machine(tmp_path))
    assert check.status is Status.OK


@linux_only
def test_an_entry_for_another_mz_program_is_no_hijacker(tmp_path: Path) -> None:
    binfmt(tmp_path, APE=APE)
    (check,) = doctor.binfmt_misc(machine(tmp_path))
    assert check.status is Status.OK, "its magic MZqFpD is not how a universal file begins"


@linux_only
def test_a_mask_is_honoured(tmp_path: Path) -> None:
    binfmt(tmp_path, cli="enabled\ninterpreter /usr/bin/cli\nflags: \noffset 0\nmagic 4d00\nmask ff00\n", no="enabled\ninterpreter n\noffset 0\nmagic 4d00\nmask ffff\n")
    assert doctor.mz_entries(tmp_path / "binfmt") == [("cli", "/usr/bin/cli")]


@linux_only
def test_no_binfmt_misc_at_all(tmp_path: Path) -> None:
    (check,) = doctor.binfmt_misc(machine(tmp_path))
    assert check.status is Status.OK


# ---- output -----------------------------------------------------------------------------------------------------------------------


def test_the_plain_data_of_every_check_is_json(tmp_path: Path) -> None:
    for check in doctor.examine(machine(tmp_path)):
        data = json.loads(json.dumps(check.to_dict()))
        assert data["status"] in {status.name.lower() for status in Status} and set(data) == {"name", "status", "detail", "remedy", "purpose"}


def test_a_status_that_blocks_is_only_missing() -> None:
    assert [status for status in Status if status.blocks] == [Status.MISSING]
    assert doctor.possible([Check("a", Status.OPTIONAL, ""), Check("b", Status.NOTICE, "")])
    assert not doctor.possible([Check("a", Status.OK, ""), Check("b", Status.MISSING, "")])
