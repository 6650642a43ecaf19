"""Appending a payload: the host stays as it is, the result is one archive, and everything doubtful is refused."""

from __future__ import annotations

import hashlib
import io
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import textwrap
import time
import zipfile
import zlib
from pathlib import Path
from typing import Any

import binary_fixtures
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from opencoti_build import container, universal, zipformat
from opencoti_build.container import PayloadEntry
from opencoti_build.errors import ContainerError, DiskError, HeadroomError, ManifestError, OpencotiError
from opencoti_build.zipformat import Method

ENGINE = "opencoti-1.2.3-c4"
LIBRARY = {"file": "ggml-cpu-avx2-x86_64.so", "kind": "cpu", "variant": "avx2", "os": "linux", "arch": "x86_64", "abi": "00ff", "build": "2611301800123", "later": [1]}


@pytest.fixture
def host(tmp_path: Path) -> Path:
    folder = tmp_path / "host"
    folder.mkdir()
    (folder / "win.exe").write_bytes(binary_fixtures.pe())
    for machine in ("x86_64", "aarch64"):
        (folder / machine).write_bytes(binary_fixtures.elf(machine, padding=machine.encode() * 500))
    universal.build_host(folder / "host", folder / "win.exe", {f"linux-{machine}": folder / machine for machine in ("x86_64", "aarch64")}, ENGINE)
    return folder / "host"


@pytest.fixture
def payload(tmp_path: Path) -> list[PayloadEntry]:
    folder = tmp_path / "payload"
    folder.mkdir()
    (folder / "lib").write_bytes(os.urandom(300_000))
    (folder / "text").write_text("licence\n" * 1000)
    (folder / "empty").write_bytes(b"")
    return [
        PayloadEntry("ggml-cpu-avx2-x86_64.so", folder / "lib", library=LIBRARY, component="engine/linux-x86_64", build="2611301800123"),
        PayloadEntry("LICENSE.txt", folder / "text", Method.DEFLATED),
        PayloadEntry("empty", folder / "empty"),
    ]


def ape(path: Path, members: dict[str, bytes]) -> Path:
    """An executable with a ZIP of its own at its end, as Actually Portable Executables have."""
    path.write_bytes(b"MZqFpD='\n" + binary_fixtures.elf()[64:] + bytes(1000))
    with zipfile.ZipFile(path, "a", zipfile.ZIP_DEFLATED) as writer:
        for name, data in members.items():
            writer.writestr(zipfile.ZipInfo(name, (2024, 5, 6, 7, 8, 10)), data, zipfile.ZIP_DEFLATED)
    return path


def judge(path: Path) -> dict[str, bytes]:
    """All members, as zipfile reads them."""
    with zipfile.ZipFile(path) as archive:
        assert archive.testzip() is None
        return {info.filename: archive.read(info) for info in archive.infolist()}


def test_universal_host_with_payload(host: Path, payload: list[PayloadEntry], tmp_path: Path) -> None:
    out = tmp_path / "out" / "file.llamafile.exe"
    got = container.append(host, out, payload, engine=ENGINE)
    data = out.read_bytes()
    assert data.startswith(host.read_bytes())
    assert (got.size, got.sha256) == (len(data), hashlib.sha256(data).hexdigest())
    assert (got.host_size, got.host_sha256) == (host.stat().st_size, hashlib.sha256(host.read_bytes()).hexdigest())
    assert out.stat().st_mode & 0o777 == 0o755
    members = judge(out)
    assert list(members) == ["bin/launcher.sh", "bin/linux-x86_64", "bin/linux-aarch64", "payload.json", *(entry.name for entry in payload)]
    for entry in payload:
        assert members[entry.name] == entry.path.read_bytes()
    assert members["bin/linux-aarch64"] == (host.parent / "aarch64").read_bytes()
    for row in got.entries:
        assert (row.size, row.sha256, row.crc32) == (len(members[row.name]), hashlib.sha256(members[row.name]).hexdigest(), zipformat.crc32(members[row.name]))
        assert row.in_host == row.name.startswith("bin/")
        if row.method == 0:
            assert data[row.data_offset : row.data_offset + row.size] == members[row.name]
    assert [path.name for path in out.parent.iterdir()] == [out.name]
    with zipfile.ZipFile(out) as archive:
        assert archive.comment == ENGINE.encode()
    if shutil.which("file"):
        assert "PE32+ executable" in subprocess.run(["file", "-b", str(out)], capture_output=True, text=True, check=True).stdout


def test_index_is_the_first_entry_behind_the_host(host: Path, payload: list[PayloadEntry], tmp_path: Path) -> None:
    got = container.append(host, tmp_path / "out", payload, engine=ENGINE)
    index = json.loads(judge(tmp_path / "out")["payload.json"])
    assert next(row for row in got.entries if row.name == "payload.json").offset == got.host_size
    library = payload[0].path.read_bytes()
    assert index == {
        "schema": 1,
        "engine": ENGINE,
        "host": {"size": got.host_size, "sha256": got.host_sha256},
        "libraries": [{"name": payload[0].name, **LIBRARY, "size": len(library), "sha256": hashlib.sha256(library).hexdigest()}],
    }


def test_bare_is_the_host_and_its_index(host: Path, tmp_path: Path) -> None:
    container.append(host, tmp_path / "bare", [], engine=ENGINE)
    assert list(judge(tmp_path / "bare")) == ["bin/launcher.sh", "bin/linux-x86_64", "bin/linux-aarch64", "payload.json"]


@pytest.mark.parametrize("kind", ["elf", "pe"])
def test_plain_programs_as_hosts(kind: str, payload: list[PayloadEntry], tmp_path: Path) -> None:
    program = tmp_path / "program"
    program.write_bytes(binary_fixtures.elf() if kind == "elf" else binary_fixtures.pe())
    got = container.append(program, tmp_path / "out", payload, engine=ENGINE)
    assert (tmp_path / "out").read_bytes()[: got.host_size] == program.read_bytes()
    assert list(judge(tmp_path / "out")) == ["payload.json", *(entry.name for entry in payload)]


def test_own_entries_of_an_ape_stay_listed(payload: list[PayloadEntry], tmp_path: Path) -> None:
    own = {".cosmo": b"x" * 50, "usr/share/zoneinfo/UTC": b"TZif" * 20}
    program = ape(tmp_path / "program", own)
    got = container.append(program, tmp_path / "out", payload, engine=ENGINE)
    assert (tmp_path / "out").read_bytes()[: got.host_size] == program.read_bytes()
    members = judge(tmp_path / "out")
    assert {name: members[name] for name in own} == own
    assert list(members) == [*own, "payload.json", *(entry.name for entry in payload)]
    with zipfile.ZipFile(tmp_path / "out") as archive:
        assert archive.getinfo(".cosmo").date_time == (2024, 5, 6, 7, 8, 10)


def test_same_inputs_same_bytes_anywhere(host: Path, payload: list[PayloadEntry], tmp_path: Path) -> None:
    """In another process, folder, time zone, locale, umask and with other file times."""
    first = container.append(host, tmp_path / "first", payload[:1] + payload[2:], engine=ENGINE)
    other = tmp_path / "ünd wö anders"
    shutil.copytree(host.parent, other / "host")
    shutil.copytree(payload[0].path.parent, other / "payload")
    for path in other.rglob("*"):
        os.utime(path, (1, 1))
    script = textwrap.dedent(f"""
        import os, pathlib
        os.umask(0o077)
        from opencoti_build import container
        got = container.append(
            pathlib.Path("host/host"), pathlib.Path("out"),
            [container.PayloadEntry("ggml-cpu-avx2-x86_64.so", pathlib.Path("payload/lib"), library={LIBRARY!r}, build="2611301800123"), container.PayloadEntry("empty", pathlib.Path("payload/empty"))],
            engine={ENGINE!r})
        print(got.sha256)
    """)
    env = os.environ | {"TZ": "Pacific/Auckland", "LC_ALL": "C", "SOURCE_DATE_EPOCH": "7", "PYTHONHASHSEED": "3", "PYTHONPATH": str(Path(container.__file__).parent.parent)}
    done = subprocess.run([sys.executable, "-c", script], cwd=other, env=env, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == first.sha256
    assert (other / "out").read_bytes() == (tmp_path / "first").read_bytes()
    assert (other / "out").stat().st_mode & 0o777 == 0o755


def test_known_sums_are_taken_and_give_the_same_file(host: Path, payload: list[PayloadEntry], tmp_path: Path) -> None:
    first = container.append(host, tmp_path / "first", payload[:1], engine=ENGINE)
    row = next(row for row in first.entries if row.name == payload[0].name)
    known = PayloadEntry(payload[0].name, payload[0].path, library=LIBRARY, sha256=row.sha256, crc32=row.crc32)
    assert container.append(host, tmp_path / "second", [known], engine=ENGINE).sha256 == first.sha256
    with pytest.raises(ContainerError, match="is not the file that was announced"):
        container.append(host, tmp_path / "third", [PayloadEntry(known.name, known.path, sha256="0" * 64)], engine=ENGINE)
    assert not (tmp_path / "third").exists()


# Replacing


def test_existing_payload_is_refused_and_replaced_on_demand(host: Path, payload: list[PayloadEntry], tmp_path: Path) -> None:
    first = container.append(host, tmp_path / "file", payload, engine=ENGINE)
    with pytest.raises(ContainerError, match="holds a payload already: ask for it to be replaced"):
        container.append(tmp_path / "file", tmp_path / "other", payload[:1], engine=ENGINE)
    replaced = container.append(tmp_path / "file", tmp_path / "file", payload[:1], engine=ENGINE, replace=True)
    fresh = container.append(host, tmp_path / "fresh", payload[:1], engine=ENGINE)
    assert replaced.sha256 == fresh.sha256 != first.sha256
    assert replaced.entries == fresh.entries


def test_replacing_in_an_ape_keeps_its_own_entries(payload: list[PayloadEntry], tmp_path: Path) -> None:
    program = ape(tmp_path / "program", {".args": b"-m x"})
    container.append(program, tmp_path / "file", payload, engine=ENGINE)
    container.append(tmp_path / "file", tmp_path / "file", payload[:1], engine=ENGINE, replace=True)
    assert (tmp_path / "file").read_bytes().startswith(program.read_bytes())
    assert list(judge(tmp_path / "file")) == [".args", "payload.json", payload[0].name]


def test_replacing_keeps_keys_of_the_index_that_are_not_ours(host: Path, tmp_path: Path) -> None:
    made = container.append(host, tmp_path / "file", [], engine=ENGINE)
    data = bytearray((tmp_path / "file").read_bytes())
    index = next(row for row in made.entries if row.name == "payload.json")
    text = json.dumps(json.loads(data[index.data_offset : index.data_offset + index.size]) | {"note": "kept"}).encode()
    out = bytes(data[: index.offset]) + zipformat.local_header("payload.json", len(text), zipformat.crc32(text)) + text
    rows = [universal.Member(row.name, row.offset, row.data_offset, row.size, row.crc32, row.sha256).entry() for row in made.entries if row.in_host]
    rows.append(zipformat.Entry("payload.json", len(text), zipformat.crc32(text), index.offset, index.data_offset))
    (tmp_path / "file").write_bytes(out + zipformat.directory_bytes(rows, len(out)))
    container.append(tmp_path / "file", tmp_path / "file", [], engine=ENGINE, replace=True)
    assert json.loads(judge(tmp_path / "file")["payload.json"])["note"] == "kept"


def test_replacing_checks_that_the_host_is_intact(host: Path, payload: list[PayloadEntry], tmp_path: Path) -> None:
    container.append(host, tmp_path / "file", payload, engine=ENGINE)
    with (tmp_path / "file").open("r+b") as stream:
        stream.seek(0x500)
        stream.write(b"\xff")
    with pytest.raises(ContainerError, match="but it was built with"):
        container.append(tmp_path / "file", tmp_path / "out", payload, engine=ENGINE, replace=True)
    assert not (tmp_path / "out").exists()


# Refusals


def test_hosts_that_nothing_can_be_appended_to(host: Path, tmp_path: Path) -> None:
    cases = {
        "text": (b"hello\n", "is not an executable"),
        "empty": (b"", "is not an executable"),
        "signed": (binary_fixtures.pe(certificate=True), "is signed: append to the unsigned file"),
        "junk": (ape(tmp_path / "a", {"x": b"1"}).read_bytes() + b"junk", "4 bytes beyond the ZIP end record"),
        "lost side file": (host.read_bytes(), "host.json|lost side file.json"),
    }
    for name, (data, words) in cases.items():
        path = tmp_path / name
        path.write_bytes(data)
        with pytest.raises(ContainerError, match=words):
            container.append(path, tmp_path / "out", [], engine=ENGINE)
    with pytest.raises(ContainerError, match="No such file"):
        container.append(tmp_path / "absent", tmp_path / "out", [], engine=ENGINE)
    assert not (tmp_path / "out").exists()


def test_damaged_zip_of_a_host_is_not_carried_on(tmp_path: Path) -> None:
    program = ape(tmp_path / "program", {"x": b"1", "y": b"2"})
    data = bytearray(program.read_bytes())
    data[data.index(b"PK\3\4") + 14] ^= 0xFF
    program.write_bytes(data)
    with pytest.raises(ContainerError, match="contradicts the central directory"):
        container.append(program, tmp_path / "out", [], engine=ENGINE)


@pytest.mark.parametrize(
    "name", ["../x", "/x", "a\\b", "a\nb", "a\0b", "", "x/", "a//b", "e\u0301", "c:d", "a ", "\u202ex", "payload.json", "PAYLOAD.json", "bin/linux-x86_64", "Bin/Linux-X86_64", "x" * 2000]
)
def test_names_that_are_refused(name: str, host: Path, payload: list[PayloadEntry], tmp_path: Path) -> None:
    with pytest.raises(ContainerError, match="cannot be put in as"):
        container.append(host, tmp_path / "out", [PayloadEntry(name, payload[0].path)], engine=ENGINE)
    assert not (tmp_path / "out").exists()


def test_duplicates_are_refused(host: Path, payload: list[PayloadEntry], tmp_path: Path) -> None:
    with pytest.raises(ContainerError, match="that name is taken"):
        container.append(host, tmp_path / "out", [payload[0], PayloadEntry(payload[0].name.upper(), payload[1].path)], engine=ENGINE)


def test_missing_payload_file_is_named_and_nothing_is_written(host: Path, tmp_path: Path) -> None:
    with pytest.raises(ContainerError, match="gone.so"):
        container.append(host, tmp_path / "out", [PayloadEntry("x.so", tmp_path / "gone.so")], engine=ENGINE)
    with pytest.raises(ContainerError, match="gone.so"):
        container.append(host, tmp_path / "out", [PayloadEntry("x.so", tmp_path / "gone.so", sha256="0" * 64, crc32=1)], engine=ENGINE)
    assert not (tmp_path / "out").exists()


def test_changed_host_block_is_noticed(host: Path, tmp_path: Path) -> None:
    with host.open("r+b") as stream:
        stream.seek(0x600)
        stream.write(b"\xff")
    with pytest.raises(ContainerError, match="but it was built with"):
        container.append(host, tmp_path / "out", [], engine=ENGINE)
    assert not (tmp_path / "out").exists()


def test_member_outside_the_host_block_is_refused(host: Path, tmp_path: Path) -> None:
    side = universal.side_file(host)
    document = json.loads(side.read_text())
    for change in ({"size": 1 << 62}, {"offset": -1}, {"data_offset": 1 << 80}):
        side.write_text(json.dumps(document | {"members": [document["members"][0] | change]}))
        with pytest.raises(OpencotiError):
            container.append(host, tmp_path / "out", [], engine=ENGINE)


def sparse(path: Path, size: int) -> Path:
    with path.open("wb") as stream:
        stream.truncate(size)
    if path.stat().st_blocks * 512 > 1 << 20:
        pytest.skip("this file system has no sparse files")
    return path


def test_windows_limit_is_refused_before_anything_is_written(host: Path, tmp_path: Path) -> None:
    big = PayloadEntry("big", sparse(tmp_path / "big", 1 << 32), sha256="0" * 64, crc32=0)
    with pytest.raises(HeadroomError, match="more than Windows starts; its largest entry is big with 4.00 GiB"):
        container.append(host, tmp_path / "out", [big], engine=ENGINE, windows_limit=True)
    assert not (tmp_path / "out").exists()


def test_headroom_is_told(host: Path, tmp_path: Path) -> None:
    got = container.append(host, tmp_path / "out", [], engine=ENGINE, windows_limit=True)
    assert got.headroom == (1 << 32) - 1 - got.size
    assert container.append(host, tmp_path / "out", [], engine=ENGINE).headroom is None


def test_limit_counts_to_the_byte(host: Path, tmp_path: Path) -> None:
    bare = container.append(host, tmp_path / "out", [PayloadEntry("big", sparse(tmp_path / "big", 0), sha256="0" * 64, crc32=0)], engine=ENGINE)
    room = (1 << 32) - 1 - bare.size
    # Just too large; the largest that fits would have to be written, 4 GiB of it.
    with pytest.raises(HeadroomError, match=f"would be {1 << 32} bytes long, 1 more"):
        container.append(host, tmp_path / "out", [PayloadEntry("big", sparse(tmp_path / "big", room + 1), sha256="0" * 64, crc32=0)], engine=ENGINE, windows_limit=True)


def test_full_disk_is_said_before_writing(host: Path, tmp_path: Path) -> None:
    huge = PayloadEntry("huge", sparse(tmp_path / "huge", 1 << 42), sha256="0" * 64, crc32=0)
    with pytest.raises(DiskError, match="needs 4096.00 GiB, and .* free"):
        container.append(host, tmp_path / "out", [huge], engine=ENGINE)


def test_facts_that_are_not_json_are_refused(host: Path, payload: list[PayloadEntry], tmp_path: Path) -> None:
    with pytest.raises(ContainerError, match="cannot be written as JSON"):
        container.append(host, tmp_path / "out", [PayloadEntry("x", payload[0].path, library={"x": object()})], engine=ENGINE)


def test_kill_at_any_moment_leaves_the_old_file_or_the_new(host: Path, tmp_path: Path) -> None:
    lib = tmp_path / "lib"
    lib.write_bytes(os.urandom(24 << 20))
    out = tmp_path / "out" / "file"
    old = container.append(host, out, [], engine=ENGINE)
    new = container.append(host, tmp_path / "new", [PayloadEntry("lib", lib)], engine=ENGINE)
    script = (
        "import sys, pathlib\nfrom opencoti_build import container\nprint('ready', flush=True)\n"
        "container.append(pathlib.Path(sys.argv[1]), pathlib.Path(sys.argv[2]), [container.PayloadEntry('lib', pathlib.Path(sys.argv[3]))], engine=sys.argv[4], sync=False)\n"
    )
    env = os.environ | {"PYTHONPATH": str(Path(container.__file__).parent.parent)}
    states = set()
    moments = random.Random(7)
    for _ in range(4):
        child = subprocess.Popen([sys.executable, "-c", script, str(host), str(out), str(lib), ENGINE], env=env, stdout=subprocess.PIPE)
        assert child.stdout is not None and child.stdout.readline() == b"ready\n"
        time.sleep(moments.uniform(0.0, 0.1))
        child.send_signal(signal.SIGKILL)
        child.wait()
        child.stdout.close()
        states.add(hashlib.sha256(out.read_bytes()).hexdigest())
    assert states <= {old.sha256, new.sha256}
    assert container.append(host, out, [PayloadEntry("lib", lib)], engine=ENGINE).sha256 == new.sha256


@pytest.mark.parametrize("junk", [b"x", b"junk" * 20000, b"PK\1\2" + bytes(50)], ids=["a byte", "more than an end record's reach", "half a directory"])
def test_plain_program_with_something_behind_it_is_refused(junk: bytes, tmp_path: Path) -> None:
    program = binary_fixtures.elf()
    (tmp_path / "program").write_bytes(program + junk)
    with pytest.raises(ContainerError, match="beyond the end of its program|ends in a ZIP"):
        container.append(tmp_path / "program", tmp_path / "out", [], engine=ENGINE)
    assert not (tmp_path / "out").exists()


def test_program_that_lost_a_piece_of_its_payload_is_refused(tmp_path: Path) -> None:
    (tmp_path / "program").write_bytes(binary_fixtures.elf())
    (tmp_path / "lib").write_bytes(os.urandom(200000))
    whole = container.append(tmp_path / "program", tmp_path / "whole", [PayloadEntry("lib", tmp_path / "lib")], engine=ENGINE).path.read_bytes()
    for lost in (1, 30, 100000):
        (tmp_path / "cut").write_bytes(whole[:-lost])
        with pytest.raises(ContainerError):
            container.append(tmp_path / "cut", tmp_path / "out", [], engine=ENGINE)


@pytest.mark.parametrize("head", [b"\x7fELF", b"MZ" + bytes(10), b"\x7fELF" + bytes(200)])
def test_what_only_begins_like_a_program_is_refused(head: bytes, tmp_path: Path) -> None:
    (tmp_path / "program").write_bytes(head)
    with pytest.raises(ContainerError, match="damaged executable|not an executable"):
        container.append(tmp_path / "program", tmp_path / "out", [], engine=ENGINE)


# Fuzzing


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_any_index_is_read_or_refused_with_our_error(data: st.DataObject) -> None:
    value: Any = {"schema": 1, "engine": ENGINE, "host": {"size": 1, "sha256": "x"}, "libraries": [{"name": "a", "size": 1, "sha256": "y"}]}
    junk = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=4) | st.lists(st.integers(), max_size=2) | st.dictionaries(st.text(max_size=3), st.integers(), max_size=2)
    where = data.draw(st.sampled_from([(), ("schema",), ("engine",), ("host",), ("host", "size"), ("host", "sha256"), ("libraries",), ("libraries", 0), ("libraries", 0, "name"), ("libraries", 0, "size")]))
    if where:
        inner = value
        for step in where[:-1]:
            inner = inner[step]
        inner[where[-1]] = data.draw(junk)
    else:
        value = data.draw(junk)
    raw = json.dumps(value).encode() if data.draw(st.booleans()) else data.draw(st.binary(max_size=80))
    entry = zipformat.Entry("payload.json", len(raw), 0, 0, 0)
    try:
        container.read_index(io.BytesIO(raw), entry)
    except ManifestError:
        pass


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_damaged_hosts_are_joined_or_refused_with_our_error(data: st.DataObject, tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.mktemp("fuzz")
    raw = bytearray(ape(folder / "program", {"x": b"1" * 30, "y": b""}).read_bytes())
    for _ in range(data.draw(st.integers(1, 3))):
        raw[data.draw(st.integers(len(raw) - 200, len(raw) - 1))] = data.draw(st.integers(0, 255))
    (folder / "program").write_bytes(raw)
    try:
        container.append(folder / "program", folder / "out", [], engine=ENGINE, sync=False)
    except OpencotiError:
        assert not (folder / "out").exists()
    else:
        with zipfile.ZipFile(folder / "out") as archive:
            assert "payload.json" in archive.namelist()
    assert (folder / "program").read_bytes() == raw


def test_deflate_bombs_and_damage_are_refused() -> None:
    packed = zlib.compress(bytes(1 << 20), 9, wbits=-15)
    entry = zipformat.Entry("x", 100, 0, 0, 0, Method.DEFLATED, len(packed))
    with pytest.raises(ContainerError, match="unpacks to more"):
        list(container.content(io.BytesIO(packed), entry))
    good = zipformat.Entry("x", 1 << 20, 0, 0, 0, Method.DEFLATED, len(packed))
    assert b"".join(container.content(io.BytesIO(packed), good)) == bytes(1 << 20)
    for data in (packed[:-5], packed[:100] + b"\xff" * (len(packed) - 100)):
        with pytest.raises(ContainerError, match="damaged|cut off|does not unpack|more than|behind"):
            list(container.content(io.BytesIO(data), good))
    with pytest.raises(ContainerError, match="behind its deflate data"):
        list(container.content(io.BytesIO(packed + b"zz"), zipformat.Entry("x", 1 << 20, 0, 0, 0, Method.DEFLATED, len(packed) + 2)))
