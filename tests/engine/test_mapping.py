"""The loader that maps a program out of the universal file: what it refuses, when it lets the launcher copy, what it leaves behind."""

from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

import binary_fixtures
import pytest
from server_process import ServerProcess
from universal_lab import LOADER, MACHINE, PROGRAM, SHELLS, Started, build_loaders, cache_of, content, in_namespace, interpreter, left_overs, make, member, own_processes, parse, replace_tool, skip_elsewhere, start

from opencoti_build import loader, universal
from opencoti_build.cli.common import CommandContext

pytestmark = skip_elsewhere

DONE = binary_fixtures.ECHO_EXIT_CODE


@pytest.fixture(scope="session")
def loaders(workshop: CommandContext) -> dict[str, bytes]:
    return build_loaders(workshop)


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory, loaders: Mapping[str, bytes]) -> Path:
    return make(tmp_path_factory.mktemp("mapped"), loaders=loaders)


@pytest.fixture(params=[name for name in SHELLS if name != "zsh"])
def shell(request: pytest.FixtureRequest) -> list[str]:
    words = SHELLS[request.param]
    if shutil.which(words[0]) is None:
        pytest.skip(f"the shell {words[0]} is not installed (.ci/run installs it)")
    return words


@pytest.fixture
def env(tmp_path: Path) -> Iterator[dict[str, str]]:
    home = tmp_path / "home"
    (home / ".cache").mkdir(parents=True)
    yield {"PATH": os.environ["PATH"], "HOME": str(home), "TMPDIR": str(tmp_path)}


def again(program: Path, file: Path | str, env: Mapping[str, str], *arguments: str) -> Started:
    """What a program does that starts its own /proc/self/exe: no launcher in between."""
    return start([program, *arguments], {**env, "OPENCOTI_SELF": str(file), "OPENCOTI_SELF_EXE": str(program)})


def turned(value: int, bits: int) -> int:
    return int(f"{value:0{bits}b}"[::-1], 2)


def test_the_numbers_of_the_checksum_are_what_its_comment_says() -> None:
    source = (Path(loader.__file__).parent / "resources" / "loader.c").read_text()
    for name, distance in (("far", 512), ("near", 128)):
        factors = []
        for power in (distance + 32, distance - 32):
            rest = 1
            for _ in range(power):
                rest <<= 1
                rest ^= 0x104C11DB7 if rest >> 32 else 0
            factors.append(turned(rest, 33))
        high, low = factors[1], factors[0]
        assert f"{name}  = _mm_set_epi64x(0x{high:09x}, 0x{low:09x})".replace("  ", " ") in source.replace("  ", " ")


def test_every_length_of_program_has_its_checksum(tmp_path: Path, env: dict[str, str], loaders: Mapping[str, bytes]) -> None:
    """Ends of one to sixteen bytes behind the blocks that the fast way takes."""
    for extra in (0, 1, 7, 8, 15, 16, 63):
        program = binary_fixtures.elf(MACHINE, pie=True, interpreter=str(interpreter(MACHINE)), padding=os.urandom(70_000 + extra))
        file = make(tmp_path / str(extra), programs={f"linux-{MACHINE}": program}, loaders=loaders)
        got = start(["sh", file, "x"], env)
        assert (got.code, got.arguments[1:], got.errors) == (DONE, ["x"], "")
        assert got.program.read_bytes() == content(file, LOADER)


def test_the_second_start_is_warm_and_the_file_the_same(file: Path, shell: list[str], env: dict[str, str]) -> None:
    first = start([*shell, file], env)
    before = first.program.stat()
    again = start([*shell, file, "x"], env)
    assert (again.code, again.program, again.errors) == (DONE, first.program, "")
    assert again.program.stat().st_ino == before.st_ino and again.program.stat().st_mtime == before.st_mtime == 315532800
    assert again.program.with_name("opencoti-llamafile.ok").stat().st_mtime == 315532800
    assert left_overs(env) == []


def test_good_loader_whose_stamp_is_gone_keeps_its_place(file: Path, shell: list[str], env: dict[str, str]) -> None:
    """Programs that run from it look at its inode to see whether they were started by this launcher."""
    program = start([*shell, file], env).program
    inode = program.stat().st_ino
    program.with_suffix(".ok").unlink()
    got = start([*shell, file, "x"], env)
    assert (got.code, got.program, got.arguments[1:], got.errors) == (DONE, program, ["x"], "")
    assert program.stat().st_ino == inode and program.with_suffix(".ok").exists()
    assert left_overs(env) == []


def test_another_release_is_mapped_too(file: Path, shell: list[str], env: dict[str, str], tmp_path: Path, loaders: Mapping[str, bytes]) -> None:
    first = start([*shell, file], env).program
    program = binary_fixtures.elf(MACHINE, pie=True, interpreter=str(interpreter(MACHINE)), padding=b"newer" * 20_000)
    newer = make(tmp_path / "newer", programs={f"linux-{MACHINE}": program}, loaders=loaders)
    got = start([*shell, newer], env)
    assert got.program != first and got.program.read_bytes() == content(newer, LOADER)


def test_asked_to_copy_it_copies(file: Path, shell: list[str], env: dict[str, str]) -> None:
    mapped = start([*shell, file], env).program
    got = start([*shell, file], env | {"OPENCOTI_LLAMAFILE_COPY": "1"})
    assert (got.code, got.program, got.errors) == (DONE, mapped, "")
    assert got.environment["OPENCOTI_LLAMAFILE_COPY"] == "1"
    assert mapped.read_bytes() == content(file, PROGRAM)
    # What was copied is as good as what would be mapped.
    inode = mapped.stat().st_ino
    assert start([*shell, file], env | {"OPENCOTI_LLAMAFILE_COPY": "0"}).code == DONE
    assert mapped.stat().st_ino == inode


def test_file_that_may_not_be_mapped_is_copied(file: Path, shell: list[str], env: dict[str, str], tmp_path: Path) -> None:
    """Its file system is mounted noexec. The word to the launcher does not reach the program."""
    place = tmp_path / "noexec"
    place.mkdir()
    for argument in ("first", "warm"):
        got = in_namespace(f'mount -t tmpfs -o noexec tmpfs "{place}" && cp "{file}" "{place}/engine of mine"', [*shell, place / "engine of mine", argument], env)
        assert (got.code, got.arguments[1:], got.errors) == (DONE, [argument], "")
        assert "OPENCOTI_LLAMAFILE_COPY" not in got.environment
        assert got.program.read_bytes() == content(file, PROGRAM)
        assert left_overs(env) == []


def test_file_that_may_not_be_mapped_any_more_is_copied(file: Path, shell: list[str], env: dict[str, str], tmp_path: Path) -> None:
    assert start([*shell, file], env).program.read_bytes() == content(file, LOADER)
    place = tmp_path / "noexec"
    place.mkdir()
    got = in_namespace(f'mount -t tmpfs -o noexec tmpfs "{place}" && cp "{file}" "{place}/"', [*shell, place / file.name, "", "a b"], env | {"OPENCOTI_LLAMAFILE_COPY": "0"})
    assert (got.code, got.arguments[1:], got.errors) == (DONE, ["", "a b"], "")
    assert got.program.read_bytes() == content(file, PROGRAM)


def test_no_loop_where_copying_did_not_help(file: Path, env: dict[str, str], tmp_path: Path) -> None:
    program = start(["sh", file], env).program
    place = tmp_path / "noexec"
    place.mkdir()
    given = env | {"OPENCOTI_SELF": f"{place}/{file.name}", "OPENCOTI_SELF_EXE": str(program), "OPENCOTI_LLAMAFILE_COPY": "1"}
    got = in_namespace(f'mount -t tmpfs -o noexec tmpfs "{place}" && cp "{file}" "{place}/"', [program], given)
    assert (got.code, got.arguments) == (126, [])
    assert got.errors == f"opencoti-llamafile: cannot map the program inside {place}/{file.name}, and copying it was tried: unset OPENCOTI_LLAMAFILE_COPY\n"


@pytest.mark.parametrize("tool", ["install", "dd"])
def test_tools_that_fail_lead_to_a_copy_or_to_a_sentence(tool: str, file: Path, env: dict[str, str], tmp_path: Path) -> None:
    got = start(["sh", file], replace_tool(tmp_path, env, tool, "exit 1"))
    assert left_overs(env) == []
    if tool == "dd":
        assert got.code == 126 and "is cut off or cannot be read; download it again" in got.errors
    else:
        assert (got.code, got.errors) == (DONE, "") and got.program.read_bytes() == content(file, PROGRAM)


def test_a_program_that_starts_itself_again_is_mapped_again(file: Path, env: dict[str, str]) -> None:
    program = start(["sh", file], env).program
    got = again(program, file, env, "router", "child")
    assert (got.code, got.arguments, got.errors) == (DONE, [str(program), "router", "child"], "")


def test_a_program_that_starts_itself_again_when_the_file_is_another_release(file: Path, env: dict[str, str], tmp_path: Path, loaders: Mapping[str, bytes]) -> None:
    program = start(["sh", file], env).program
    other = binary_fixtures.elf(MACHINE, pie=True, interpreter=str(interpreter(MACHINE)), padding=b"newer" * 60_000)
    newer = make(tmp_path / "newer", programs={f"linux-{MACHINE}": other}, loaders=loaders)
    got = again(program, newer, env, "x")
    assert (got.code, got.arguments[1:], got.errors) == (DONE, ["x"], "")
    assert got.program.read_bytes() == other


FOREIGN = {
    "nothing": (None, "this is only the loader, and OPENCOTI_SELF does not name the file it belongs to"),
    "relative": ("engine", "this is only the loader, and OPENCOTI_SELF does not name the file it belongs to"),
    "missing": ("/nonexistent/engine", "cannot open /nonexistent/engine"),
    "a text": ("/etc/passwd", "OPENCOTI_SELF is not an opencoti-llamafile: /etc/passwd"),
    "a folder": ("/etc", "OPENCOTI_SELF is not an opencoti-llamafile: /etc"),
    "a device": ("/dev/zero", "OPENCOTI_SELF is not an opencoti-llamafile: /dev/zero"),
}


@pytest.mark.parametrize("what", list(FOREIGN))
def test_a_loader_without_its_file_says_one_sentence(what: str, file: Path, env: dict[str, str]) -> None:
    program = start(["sh", file], env).program
    path, words = FOREIGN[what]
    got = start([program, "x"], env | ({} if path is None else {"OPENCOTI_SELF": path}))
    assert (got.code, got.arguments) == (126, [])
    assert got.errors.startswith(f"opencoti-llamafile: {words}") and got.errors.count("\n") == 1


def test_a_pipe_in_the_files_place_does_not_hold_it_up(file: Path, env: dict[str, str], tmp_path: Path) -> None:
    program = start(["sh", file], env).program
    os.mkfifo(tmp_path / "pipe")
    assert start([program], env | {"OPENCOTI_SELF": str(tmp_path / "pipe")}).code == 126


def test_damaged_loader_says_so(file: Path, shell: list[str], env: dict[str, str], tmp_path: Path) -> None:
    bad = tmp_path / "bad.llamafile"
    data = bytearray(file.read_bytes())
    data[member(file, LOADER).data_offset + loader.SIZE - 8] ^= 1
    bad.write_bytes(data)
    got = start([*shell, bad], env)
    assert got.code == 126 and f"the loader inside {bad} has the wrong checksum: the file is damaged, download it again" in got.errors
    assert left_overs(env) == []


def test_every_cut_is_one_sentence(file: Path, env: dict[str, str], tmp_path: Path) -> None:
    """Within the loader too, whose second page would then not be there to run."""
    data, row = file.read_bytes(), member(file, LOADER)
    cut = tmp_path / "cut.llamafile"
    for length in (row.data_offset, row.data_offset + 1, row.data_offset + 4096, row.data_offset + 5000, row.data_offset + 8192, len(data) // 2):
        cut.write_bytes(data[:length])
        got = start(["sh", cut], env)
        assert (got.code, got.arguments) == (126, []), (length, got)
        assert "cut off" in got.errors and got.errors.count("\n") == 1, got.errors
        assert left_overs(env) == []


def test_killed_at_any_moment_leaves_nothing_that_is_ever_started(file: Path, env: dict[str, str]) -> None:
    chance = random.Random(1)
    for _ in range(60):
        shutil.rmtree(cache_of(env), ignore_errors=True)
        process = subprocess.Popen(["sh", str(file)], env=env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True)
        time.sleep(chance.uniform(0, 0.012))
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        for program in cache_of(env).glob("[!n]*/opencoti-llamafile"):
            assert program.read_bytes() == content(file, LOADER)
        got = start(["sh", file, "x"], env)
        assert (got.code, got.arguments[1:], got.errors) == (DONE, ["x"], "")
        assert got.program.is_relative_to(cache_of(env))


def test_scratch_of_a_killed_start_is_cleared_a_day_later(file: Path, env: dict[str, str]) -> None:
    program = start(["sh", file], env).program
    scratch = cache_of(env) / "new.1"
    scratch.mkdir()
    (scratch / "opencoti-llamafile").write_bytes(program.read_bytes())
    os.utime(scratch, (time.time() - 3 * 86400,) * 2)
    assert start(["sh", file], env | {"OPENCOTI_LLAMAFILE_COPY": "1"}).code == DONE
    assert left_overs(env) == []


def test_scratch_of_another_start_with_the_same_process_number_is_left_alone(file: Path, env: dict[str, str]) -> None:
    """Containers that share a cache count their processes from 1, each for itself."""
    words = own_processes()
    theirs = cache_of(env) / "new.1" / "opencoti-llamafile"
    theirs.parent.mkdir(parents=True)
    cache_of(env).chmod(0o700)
    theirs.write_text("half of another start's loader")
    got = start([*words, "sh", file], env)
    assert (got.code, got.errors) == (DONE, "")
    assert got.program.stat().st_size == loader.SIZE
    assert theirs.read_text() == "half of another start's loader"


def test_folder_that_the_group_may_write_to_is_closed(file: Path, env: dict[str, str]) -> None:
    """The lane that copies makes it so where the user's umask says so."""
    got = start(["sh", "-c", 'umask 002; exec sh "$0"', file], env | {"OPENCOTI_LLAMAFILE_COPY": "1"})
    assert got.program.parent.stat().st_mode & 0o777 == 0o775
    got.program.with_suffix(".ok").unlink()
    got = start(["sh", file, "x"], env)
    assert (got.code, got.arguments[1:], got.errors) == (DONE, ["x"], "")
    assert got.program.read_bytes() == content(file, LOADER)
    assert got.program.parent.stat().st_mode & 0o777 == 0o700


def test_folders_that_a_tool_left_readable_are_closed(file: Path, shell: list[str], env: dict[str, str]) -> None:
    got = start([*shell, file], env)
    assert (got.code, got.errors) == (DONE, "")
    assert [path.stat().st_mode & 0o777 for path in (cache_of(env), got.program.parent)] == [0o700, 0o700]


def test_folder_of_somebody_else_is_not_used(file: Path, env: dict[str, str], tmp_path: Path) -> None:
    """Told to install into a folder that others can write to, the loader does not."""
    open_to_all = tmp_path / "open"
    scratch = open_to_all / "new.1" / "opencoti-llamafile"
    scratch.parent.mkdir(parents=True)
    open_to_all.chmod(0o777)
    scratch.write_bytes(content(file, LOADER))
    scratch.chmod(0o700)
    target = open_to_all / "sum" / "opencoti-llamafile"
    got = start([scratch, "x"], env | {"OPENCOTI_SELF": str(file), "OPENCOTI_SELF_EXE": str(target)})
    assert (got.code, got.arguments[1:], got.errors) == (DONE, ["x"], "")
    assert got.program.is_relative_to(cache_of(env)) and got.program.read_bytes() == content(file, PROGRAM)
    assert list(open_to_all.iterdir()) == []


def test_bss_and_the_rest_of_the_last_page_are_zero(env: dict[str, str], tmp_path: Path, loaders: Mapping[str, bytes]) -> None:
    """The program's exit code tells: it adds up what should be zero, in the page that the stored bytes end in and in those behind it."""
    if MACHINE != "x86_64":
        pytest.skip(f"its program is written in machine code of x86_64, and this machine is {MACHINE}")
    # lea 0x1000(%rip)... the segment begins at 0 and holds 5000 stored bytes of 20000; all beyond 5000 must be zero.
    #   lea -7-START(%rip),%rbx; lea 5000(%rbx),%rsi; lea 20000(%rbx),%rcx; xor %edi,%edi
    # 1: movzbl (%rsi),%eax; or %eax,%edi; inc %rsi; cmp %rcx,%rsi; jb 1b; mov $231,%eax; syscall
    start_at = 64 + 56 * 2
    code = b"\x48\x8d\x1d" + (-7 - start_at).to_bytes(4, "little", signed=True) + bytes.fromhex("488db388130000488d8b204e000031ff0fb60609c748ffc64839ce72f3b8e70000000f05")
    program = bytearray(binary_fixtures.elf(MACHINE, pie=True, interpreter=str(interpreter(MACHINE)), code=code, padding=b"\xff" * 9000))
    at = 64 + 56  # the second segment is the one to be loaded
    assert program[at] == 1
    program[at + 32 : at + 48] = (5000).to_bytes(8, "little") + (20000).to_bytes(8, "little")
    file = make(tmp_path / "bss", programs={f"linux-{MACHINE}": bytes(program)}, loaders=loaders)
    for _ in range(2):
        done = subprocess.run(["sh", str(file)], env=env, capture_output=True, check=False)
        assert (done.returncode, done.stderr) == (0, b"")
    assert list(cache_of(env).glob("*/opencoti-llamafile"))[0].read_bytes() == content(file, LOADER)


def test_the_other_machine_under_emulation(file: Path, env: dict[str, str]) -> None:
    other = "aarch64" if MACHINE == "x86_64" else "x86_64"
    emulator = shutil.which(f"qemu-{other}-static") or shutil.which(f"qemu-{other}")
    if emulator is None:
        pytest.skip(f"runs the loader of the other machine: needs qemu-{other}, which is not installed (.ci/run installs it)")
    name = f"bin/linux-{other}"
    target = Path(env["HOME"]) / "private" / "sum" / "opencoti-llamafile"
    scratch = target.parent.parent / "new.1" / target.name
    scratch.parent.mkdir(parents=True, mode=0o700)
    target.parent.parent.chmod(0o700)
    scratch.write_bytes(content(file, name + universal.LOADER_SUFFIX))
    scratch.chmod(0o700)
    given = env | {"OPENCOTI_SELF": str(file), "OPENCOTI_SELF_EXE": str(target)}
    for program in (scratch, target):  # a first start, a warm one
        got = start([emulator, program, "a", "b c"], given)
        assert (got.code, got.arguments, got.errors) == (DONE, [str(target), "a", "b c"], "")
    assert target.read_bytes() == content(file, name + universal.LOADER_SUFFIX)
    assert target.with_name(target.name + ".ok").read_text().startswith("ok ")
    assert not scratch.parent.exists()


def test_real_file_is_mapped(universal: Path, env: dict[str, str]) -> None:
    """The engine itself: its thread-locals, exceptions and libraries are used by the other tests of the file (test_single_file.py)."""
    for _ in range(2):
        done = subprocess.run(["sh", str(universal), "--version"], env=env, capture_output=True, text=True, timeout=60, check=False)
        assert (done.returncode, done.stderr) == (0, "") and done.stdout.startswith("opencoti-")
    programs = list(cache_of(env).glob("*/opencoti-llamafile"))
    assert [path.stat().st_size for path in programs] == [loader.SIZE]
    # What it throws arrives where it is caught.
    done = subprocess.run(["sh", str(universal), "--no-such-argument"], env=env, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1 and "no-such-argument" in done.stderr


def test_real_program_dies_of_the_signal_it_was_sent(universal: Path, env: dict[str, str]) -> None:
    process = subprocess.Popen(["sh", str(universal), "--server", "--port", "0"], env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    assert process.stdout is not None
    process.stdout.readline()
    process.send_signal(signal.SIGSEGV)
    process.communicate(timeout=60)
    assert process.returncode == -signal.SIGSEGV


def test_real_file_serves_and_its_router_starts_children(universal: Path, model: Path, env: dict[str, str], tmp_path: Path) -> None:
    """Parent and child are mapped, and find the payload of the file."""
    models = tmp_path / "models"
    models.mkdir()
    (models / "tiny.gguf").symlink_to(model)
    engine = tmp_path / universal.name
    shutil.copy(universal, engine)
    with ServerProcess(engine, None, "--models-dir", str(models), "--ctx-size", "256", env=env | {"OPENCOTI_LLAMAFILE_CACHE": env["HOME"] + "/.cache"}) as router:
        assert router.complete("The capital of France is", 4, model="tiny")
        maps = [path.read_text() for path in Path("/proc").glob("[0-9]*/maps") if _is_ours(path, engine)]
    assert len(maps) == 2 and sum("ggml-cpu-" in text for text in maps) >= 1
    programs = list(cache_of(env).glob("*/opencoti-llamafile"))
    assert [path.stat().st_size for path in programs] == [loader.SIZE]


def _is_ours(maps: Path, file: Path) -> bool:
    """A process that has ``file`` in memory."""
    try:
        return f" {file}\n" in maps.read_text()
    except OSError:
        return False
