"""The shell side of a universal file, in real shells, around a tiny hand-made program that prints what it was given."""

from __future__ import annotations

import ctypes
import os
import re
import shutil
import subprocess
import time
from collections.abc import Mapping
from pathlib import Path

import binary_fixtures
import pytest
from universal_lab import LOADER, MACHINE, PROGRAM, SHELLS, build_loaders, cache_of, content, in_namespace, left_overs, make, member, own_processes, parse, replace_tool, skip_elsewhere, start

from opencoti_build import universal
from opencoti_build.cli.common import CommandContext

pytestmark = skip_elsewhere


@pytest.fixture(scope="session")
def loaders(workshop: CommandContext) -> dict[str, bytes]:
    return build_loaders(workshop)


@pytest.fixture(scope="module", params=["copied", "mapped"])
def file(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, loaders: Mapping[str, bytes]) -> Path:
    """Its programs are copied into the cache, or only their loaders are."""
    return make(tmp_path_factory.mktemp("universal"), loaders=loaders if request.param == "mapped" else None)


def is_mapped(file: Path) -> bool:
    return any(row.name == LOADER for row in universal.read_host(file.parent / "parts" / "host").members)


def cached(file: Path, shell: list[str]) -> bytes:
    """What a first start of ``file`` leaves in the cache when nothing is in the way. zsh always copies."""
    return content(file, LOADER if is_mapped(file) and shell != ["zsh"] else PROGRAM)


@pytest.fixture(params=list(SHELLS))
def shell(request: pytest.FixtureRequest) -> list[str]:
    words = SHELLS[request.param]
    if shutil.which(words[0]) is None:
        pytest.skip(f"the shell {words[0]} is not installed (.ci/run installs it)")
    return words


@pytest.fixture
def env(tmp_path: Path) -> dict[str, str]:
    home = tmp_path / "home"
    (home / ".cache").mkdir(parents=True)
    return {"PATH": os.environ["PATH"], "HOME": str(home), "TMPDIR": str(tmp_path)}


ARGUMENTS = ["a  b", "", "*", "$HOME", "q'q", 'd"d', "new\nline", "ü", "--", "-x", "\\n"]


def test_arguments_exit_code_and_environment_arrive_unchanged(file: Path, shell: list[str], env: dict[str, str]) -> None:
    given = env | {"p": "1", "d": "2", "m": "3", "s": "4", "PATH": env["PATH"] + ":/odd place"}
    for _ in range(2):  # first start, warm start
        got = start([*shell, file, *ARGUMENTS], given)
        assert (got.code, got.errors) == (binary_fixtures.ECHO_EXIT_CODE, "")
        assert got.arguments[1:] == ARGUMENTS
        ours = {"OPENCOTI_SELF": str(file), "OPENCOTI_SELF_EXE": str(got.program)}
        assert {key: got.environment.get(key) for key in given | ours} == given | ours
        # Nothing leaks but what shells themselves export.
        assert set(got.environment) - set(given) - set(ours) <= {"_", "PWD", "OLDPWD", "SHLVL", "LOGNAME"}


def test_program_lies_in_a_private_folder_of_the_cache(file: Path, shell: list[str], env: dict[str, str]) -> None:
    got = start([*shell, file], env)
    assert got.program.parent.parent == cache_of(env)
    assert cache_of(env).stat().st_mode & 0o777 == 0o700
    assert got.program.read_bytes() == cached(file, shell)
    assert got.program.stat().st_mode & 0o777 == 0o700
    assert left_overs(env) == []


def test_home_without_a_cache_folder_gets_one(file: Path, shell: list[str], env: dict[str, str]) -> None:
    cache_of(env).parent.rmdir()
    assert start([*shell, file], env).program.is_relative_to(cache_of(env))
    assert left_overs(env) == []


@pytest.mark.parametrize("name", ["with space", "ünïcode", "q'uote\"s", "$x`y`", "new\nline", "-n", "--", "a;b&c", "*", "back\\slash"])
def test_odd_names_of_file_and_folder(name: str, shell: list[str], env: dict[str, str], tmp_path: Path) -> None:
    folder = tmp_path / f"in {name}"
    file = make(folder, name)
    for argv, options in (
        ([*shell, file], {}),
        ([*shell, *([] if shell[0] == "mksh" and not name.startswith("-") else ["--"]), name], {"cwd": folder}),
        ([*shell, f"./{name}"], {"cwd": folder}),
        ([*shell, f"../in {name}/{name}"], {"cwd": folder}),
    ):
        got = start([*argv, "argument"] if argv else argv, env, **options)
        assert got.code == binary_fixtures.ECHO_EXIT_CODE, (argv, got)
        assert got.arguments[1:] == ["argument"]
        assert os.path.samefile(got.environment["OPENCOTI_SELF"], file)
        assert os.path.isabs(got.environment["OPENCOTI_SELF"])


def test_started_by_name_through_path(shell: list[str], env: dict[str, str], tmp_path: Path) -> None:
    if shell[0] == "mksh":
        pytest.skip("mksh starts nothing that begins with MZ; 'mksh FILE' works")
    file = make(tmp_path / "bin", "engine of mine")
    decoy = tmp_path / "here"
    decoy.mkdir()
    (decoy / "engine of mine").write_text("something else\n")
    for folder in (tmp_path, decoy):
        got = start([*shell, "-c", '"$0" x', "engine of mine"], env | {"PATH": f"{file.parent}:{env['PATH']}"}, cwd=folder)
        assert got.code == binary_fixtures.ECHO_EXIT_CODE, got
        assert got.environment["OPENCOTI_SELF"] == str(file)


def test_started_by_symbolic_link_finds_the_real_file(file: Path, shell: list[str], env: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep" / "link").symlink_to(file)
    (tmp_path / "short").symlink_to("deep/link")
    got = start([*shell, tmp_path / "short"], env)
    assert got.environment["OPENCOTI_SELF"] == str(file)


@pytest.mark.parametrize("caller", [["env"], ["nohup"], ["timeout", "50"], ["nice"], ["fish", "-c", "$argv"], ["xargs", "-I{}"]], ids=lambda words: words[0])
def test_started_directly_by_other_programs(caller: list[str], file: Path, env: dict[str, str]) -> None:
    if shutil.which(caller[0]) is None:
        pytest.skip(f"{caller[0]} is not installed")
    words = ["sh", "-c", f'echo x | xargs -I@ "{file}" @'] if caller[0] == "xargs" else ["fish", "-c", f"'{file}' x"] if caller[0] == "fish" else [*caller, str(file), "x"]
    got = start(words, env)
    expected = 123 if caller[0] == "xargs" else binary_fixtures.ECHO_EXIT_CODE  # xargs reports 123 for any failure below 126
    assert (got.code, got.arguments[1:]) == (expected, ["x"])


def test_no_home_and_no_path(file: Path, shell: list[str], tmp_path: Path) -> None:
    if shell[0] == "zsh":
        pytest.skip("zsh takes HOME from the user database")
    path = shutil.which(shell[0])
    got = start([str(path), *shell[1:], file], {"TMPDIR": str(tmp_path)})
    assert got.code == binary_fixtures.ECHO_EXIT_CODE
    assert got.program.is_relative_to(tmp_path)
    assert "PATH" not in got.environment or got.environment["PATH"]


@pytest.mark.parametrize("home", ["/proc/nonexistent", "", "relative"])
def test_useless_home_falls_back_to_the_temporary_folder(home: str, file: Path, env: dict[str, str], tmp_path: Path) -> None:
    got = start(["sh", file], env | {"HOME": home})
    assert got.program.is_relative_to(tmp_path)
    assert not Path("/proc/nonexistent").exists()


def test_named_cache_folder_is_made_and_wins(file: Path, shell: list[str], env: dict[str, str], tmp_path: Path) -> None:
    start([*shell, file], env)
    named = tmp_path / "my caches" / "deep"
    for _ in range(2):
        got = start([*shell, file], env | {"OPENCOTI_LLAMAFILE_CACHE": str(named)})
        assert got.program.is_relative_to(named)


def test_relative_cache_folder_is_named_and_ignored(file: Path, env: dict[str, str]) -> None:
    got = start(["sh", file], env | {"OPENCOTI_LLAMAFILE_CACHE": "here"})
    assert got.code == binary_fixtures.ECHO_EXIT_CODE
    assert "OPENCOTI_LLAMAFILE_CACHE is not an absolute path" in got.errors
    assert got.program.is_relative_to(cache_of(env))


DAMAGE = {
    "truncated": lambda program: os.truncate(program, 100),
    "empty": lambda program: os.truncate(program, 0),
    "same size, other bytes": lambda program: program.write_bytes(b"\0" * program.stat().st_size),
    "one byte": lambda program: _poke(program, 5000),
    "longer": lambda program: program.write_bytes(program.read_bytes() + b"x"),
    "not executable": lambda program: program.chmod(0o600),
    "another program": lambda program: _put(program, Path("/bin/sh")),
    "link to another program": lambda program: (program.unlink(), program.symlink_to("/bin/sh")),
    "dangling link": lambda program: (program.unlink(), program.symlink_to("/proc/nonexistent/x")),
    "stamp gone": lambda program: program.with_suffix(".ok").unlink(),
    "stamp of another boot": lambda program: program.with_suffix(".ok").write_text("ok another\n"),
    "stamp empty": lambda program: program.with_suffix(".ok").write_text(""),
    "file in the place of its folder": lambda program: (shutil.rmtree(program.parent), program.parent.write_text("x")),
    "link in the place of its folder": lambda program: (shutil.rmtree(program.parent), program.parent.symlink_to("/proc/nonexistent")),
    "link to a foreign folder": lambda program: (shutil.rmtree(program.parent), _foreign(program)),
}


def _poke(program: Path, at: int) -> None:
    with program.open("r+b") as stream:
        stream.seek(at)
        stream.write(b"\x55")


def _put(program: Path, other: Path) -> None:
    program.unlink()
    shutil.copy2(other, program)


def _foreign(program: Path) -> None:
    foreign = program.parent.parent / "foreign"
    foreign.mkdir()
    (foreign / "opencoti-llamafile").write_text("not ours\n")
    program.parent.symlink_to(foreign)


@pytest.mark.parametrize("damage", list(DAMAGE))
def test_anything_wrong_under_the_expected_name_is_replaced(damage: str, file: Path, shell: list[str], env: dict[str, str]) -> None:
    program = start([*shell, file], env).program
    good = program.read_bytes()
    assert good == cached(file, shell)
    DAMAGE[damage](program)
    got = start([*shell, file, "again"], env)
    assert (got.code, got.arguments, got.errors) == (binary_fixtures.ECHO_EXIT_CODE, [str(program), "again"], "")
    # Where the folder itself is in the way, the lane that copies clears it.
    assert program.read_bytes() in (good, content(file, PROGRAM) if "place of its folder" in damage or "foreign" in damage else good)
    assert not program.is_symlink() and os.access(program, os.X_OK)
    if damage == "link to a foreign folder":
        assert (cache_of(env) / "foreign" / "opencoti-llamafile").read_text() == "not ours\n"


def test_damage_that_keeps_the_time_shows_after_a_reboot(file: Path, env: dict[str, str]) -> None:
    """A power cut can leave zeros in a file whose size and time are right; the boot id in the stamp is then an old one."""
    program = start(["sh", file], env).program
    times = program.stat().st_atime_ns, program.stat().st_mtime_ns
    good = program.read_bytes()
    program.write_bytes(b"\0" * len(good))
    os.utime(program, ns=times)
    stamp = program.with_suffix(".ok")
    before = stamp.stat().st_mtime_ns
    stamp.write_text("ok 11111111-2222-3333-4444-555555555555\n")
    os.utime(stamp, ns=(before, before))
    assert start(["sh", file], env).code == binary_fixtures.ECHO_EXIT_CODE
    assert program.read_bytes() == good


def test_warm_start_does_not_read_the_program(file: Path, shell: list[str], env: dict[str, str], tmp_path: Path) -> None:
    """The stamp is what spares the sha256: no tool that reads the program is called on a warm start."""
    first = start([*shell, file], env)
    log = tmp_path / "called"
    tools = env
    for tool in ("dd", "cksum", "sha256sum", "shasum", "openssl", "cmp", "touch", "mv", "install"):
        tools = replace_tool(tmp_path, env, tool, f"echo {tool} >>'{log}'; exit 1")
    got = start([*shell, file], tools)
    assert (got.code, got.program) == (binary_fixtures.ECHO_EXIT_CODE, first.program)
    assert not log.exists()


def test_folder_in_the_place_of_the_program_is_left_alone(file: Path, env: dict[str, str], tmp_path: Path) -> None:
    program = start(["sh", file], env).program
    program.unlink()
    program.mkdir()
    (program / "precious").write_text("x")
    got = start(["sh", file], env | {"OPENCOTI_LLAMAFILE_DEBUG": "1"})
    assert got.code == binary_fixtures.ECHO_EXIT_CODE
    assert got.program.is_relative_to(tmp_path) and not got.program.is_relative_to(cache_of(env))
    assert (program / "precious").read_text() == "x"
    assert "has a folder where the program belongs" in got.errors


@pytest.mark.parametrize("tools", [[], ["cksum"], ["cksum", "sha256sum"], ["cksum", "sha256sum", "shasum"], ["cksum", "sha256sum", "shasum", "openssl", "sha256"]], ids=lambda tools: "without " + " ".join(tools))
def test_every_way_to_check_finds_damage(tools: list[str], file: Path, env: dict[str, str], tmp_path: Path) -> None:
    """Fewer and fewer tools, down to comparing with the original; a damaged copy is found by each."""
    folder = tmp_path / "few"
    folder.mkdir()
    wanted = {"uname", "id", "find", "dd", "mkdir", "chmod", "rm", "mv", "touch", "cmp", "head", "wc", "sh", "cat", "readlink", "cksum", "sha256sum", "shasum", "openssl"}
    for tool in wanted - set(tools):
        if found := shutil.which(tool):
            (folder / tool).symlink_to(found)
    # The launcher adds /usr/bin to PATH, where the tools are: hide them by names that fail to be programs.
    for tool in tools:
        (folder / tool).write_text("#!/bin/sh\nexit 127\n")
        (folder / tool).chmod(0o755)
    poor = env | {"PATH": str(folder)}
    program = start(["/bin/sh", file], poor).program
    good = program.read_bytes()
    _poke(program, 4000)
    assert program.read_bytes() != good
    assert start(["/bin/sh", file], poor).code == binary_fixtures.ECHO_EXIT_CODE
    assert program.read_bytes() == good


def test_sixteen_at_once(file: Path, shell: list[str], env: dict[str, str]) -> None:
    running = [subprocess.Popen([*shell, str(file), str(number)], env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE) for number in range(16)]
    for number, process in enumerate(running):
        output, errors = process.communicate(timeout=120)
        got = parse(process.returncode, output, errors)
        assert (got.code, got.arguments[1:], got.errors) == (binary_fixtures.ECHO_EXIT_CODE, [str(number)], "")
    assert left_overs(env) == []
    assert len(list(cache_of(env).iterdir())) == 1


def test_six_at_once_in_containers_that_share_the_cache(file: Path, shell: list[str], env: dict[str, str]) -> None:
    """Each is process 1 of its own namespace. They wait for the end of a pipe, so that they begin in the same moment."""
    words = [*own_processes(), "sh", "-c", 'read -r _; exec "$@"', "sh", *shell, str(file)]
    # What can be mapped is also asked to copy.
    wishes = [{}, {"OPENCOTI_LLAMAFILE_COPY": "1"}] if is_mapped(file) else [{}]
    for given in [env | wish for wish in wishes for _ in range(12)]:
        shutil.rmtree(cache_of(env), ignore_errors=True)
        gate, opener = os.pipe()
        running = [subprocess.Popen([*words, str(number)], env=given, stdin=gate, stdout=subprocess.PIPE, stderr=subprocess.PIPE) for number in range(6)]
        os.close(gate)
        time.sleep(0.03)
        os.close(opener)
        for number, process in enumerate(running):
            output, errors = process.communicate(timeout=120)
            got = parse(process.returncode, output, errors)
            assert (got.code, got.arguments[1:], got.errors) == (binary_fixtures.ECHO_EXIT_CODE, [str(number)], "")
            assert got.program.is_relative_to(cache_of(env))
        assert left_overs(env) == []


def test_program_that_is_checked_again_is_not_opened_for_writing(file: Path, shell: list[str], env: dict[str, str]) -> None:
    """While it is, another start that has just found it good cannot run it: text file busy. GNU touch does that, unless told -c."""
    program = start([*shell, file], env).program
    inode = program.stat().st_ino
    program.with_suffix(".ok").unlink()
    libc = ctypes.CDLL(None)
    watch = libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC)
    closed_after_writing = 8
    assert libc.inotify_add_watch(watch, os.fsencode(program), closed_after_writing) >= 0
    got = start([*shell, file], env)
    assert (got.code, got.program, program.stat().st_ino) == (binary_fixtures.ECHO_EXIT_CODE, program, inode)
    with pytest.raises(BlockingIOError):
        os.read(watch, 4096)
    os.close(watch)


def test_killed_half_way_leaves_nothing_that_is_ever_started(file: Path, shell: list[str], env: dict[str, str], tmp_path: Path) -> None:
    """kill -9 of the whole process group while the program is being copied."""
    env |= {"OPENCOTI_LLAMAFILE_COPY": "1"}
    if shell[0] == "busybox":
        pytest.skip("busybox has its own dd, which cannot be replaced to kill at the right moment")
    real = shutil.which("dd")
    killing = replace_tool(tmp_path, env, "dd", f'case "$*" in *bs=65536*) "{real}" "$@" 2>/dev/null | head -c 70000; kill -9 0;; *) exec "{real}" "$@";; esac')
    killed = subprocess.Popen([*shell, str(file)], env=killing, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True)
    killed.communicate(timeout=60)
    assert killed.returncode == -9
    scratch = list(cache_of(env).glob("new.*"))
    assert len(scratch) == 1, "the kill came before the scratch folder was made: the test proves nothing"
    assert [path for path in cache_of(env).iterdir()] == scratch, "something has a final name already"
    assert start([*shell, file], env).code == binary_fixtures.ECHO_EXIT_CODE
    # A day later an extraction clears it away.
    os.utime(scratch[0], (time.time() - 3 * 86400,) * 2)
    program = next(path for path in cache_of(env).iterdir() if not path.name.startswith("new.")) / "opencoti-llamafile"
    program.unlink()
    assert start([*shell, file], env).code == binary_fixtures.ECHO_EXIT_CODE
    assert left_overs(env) == []


def test_interrupted_start_cleans_up(file: Path, env: dict[str, str], tmp_path: Path) -> None:
    env |= {"OPENCOTI_LLAMAFILE_COPY": "1"}
    real = shutil.which("dd")
    slow = replace_tool(tmp_path, env, "dd", f'case "$*" in *bs=65536*) kill -TERM $(cat "{tmp_path}/pid"); sleep 0.2;; esac; exec "{real}" "$@"')
    process = subprocess.Popen(["sh", "-c", f'echo $$ >"{tmp_path}/pid"; exec sh "$0"', str(file)], env=slow, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    process.communicate(timeout=60)
    assert process.returncode == 143
    assert left_overs(env) == []


def test_truncated_file_says_so(file: Path, shell: list[str], env: dict[str, str], tmp_path: Path) -> None:
    data = file.read_bytes()
    program, script = member(file, PROGRAM), member(file, universal.LAUNCHER_MEMBER)
    cut = tmp_path / "cut.llamafile"
    for length, words in ((program.data_offset + 1000, "is cut off: the file is damaged, download it again"), (script.data_offset + 700, "is cut off or cannot be read")):
        cut.write_bytes(data[:length])
        got = start([*shell, cut], env)
        assert got.code == 126 and words in got.errors and got.arguments == []
    assert left_overs(env) == []


def test_damaged_program_inside_says_so(file: Path, shell: list[str], env: dict[str, str], tmp_path: Path) -> None:
    bad = tmp_path / "bad.llamafile"
    bad.write_bytes(file.read_bytes())
    _poke(bad, member(file, PROGRAM).data_offset + 5000)
    got = start([*shell, bad], env)
    assert got.code == 126 and "has the wrong checksum: the file is damaged" in got.errors
    assert left_overs(env) == []


@pytest.mark.parametrize("system", ["FreeBSD amd64", "Linux i686", "Linux riscv64", "Darwin arm64"])
def test_system_without_a_program_is_told_what_there_is(system: str, file: Path, env: dict[str, str], tmp_path: Path) -> None:
    """uname is asked where the kernel's own names, which cost no process, are not those of a program here."""
    (tmp_path / "arch").write_text("vax\n")
    got = in_namespace(f'mount --bind "{tmp_path}/arch" /proc/sys/kernel/arch', ["sh", file], replace_tool(tmp_path, env, "uname", f"echo {system}"))
    assert got.code == 126
    assert got.errors == f"opencoti-llamafile: no program for {system} in this file; it has: Linux x86_64, Linux aarch64, Windows x86_64\n"


def test_missing_loader_is_explained(shell: list[str], env: dict[str, str], tmp_path: Path) -> None:
    program = binary_fixtures.elf(MACHINE, needed=["libc.so.6"], interpreter="/lib64/ld-of-another-libc.so.2")
    file = make(tmp_path / "musl", programs={f"linux-{MACHINE}": program})
    got = start([*shell, file], env)
    assert got.code == 126
    assert "this system has no /lib64/ld-of-another-libc.so.2; its C library is not glibc" in got.errors


def test_noexec_cache_falls_to_the_next_folder(file: Path, shell: list[str], env: dict[str, str], tmp_path: Path) -> None:
    named = tmp_path / "noexec"
    named.mkdir()
    got = in_namespace(f'mount -t tmpfs -o noexec tmpfs "{named}"', [*shell, file], env | {"OPENCOTI_LLAMAFILE_CACHE": str(named), "OPENCOTI_LLAMAFILE_DEBUG": "1"})
    assert got.code == binary_fixtures.ECHO_EXIT_CODE
    assert got.program.is_relative_to(cache_of(env))
    assert "does not allow programs to run" in got.errors


def test_full_disk_falls_to_the_next_folder(file: Path, shell: list[str], env: dict[str, str], tmp_path: Path) -> None:
    """Full for the program; and full for the loader, which is much smaller, too."""
    named = tmp_path / "full"
    named.mkdir()
    got = in_namespace(f'mount -t tmpfs -o size={"4k" if is_mapped(file) else "96k"} tmpfs "{named}"', [*shell, file], env | {"OPENCOTI_LLAMAFILE_CACHE": str(named), "OPENCOTI_LLAMAFILE_DEBUG": "1"})
    assert got.code == binary_fixtures.ECHO_EXIT_CODE
    assert got.program.is_relative_to(cache_of(env))
    assert re.search(r"cannot take the program \(1 MiB\): No space left on device|has no space left", got.errors)


def test_read_only_cache_falls_to_the_next_folder(file: Path, shell: list[str], env: dict[str, str], tmp_path: Path) -> None:
    named = tmp_path / "readonly"
    named.mkdir()
    got = in_namespace(f'mount -t tmpfs -o ro tmpfs "{named}"', [*shell, file], env | {"OPENCOTI_LLAMAFILE_CACHE": str(named), "OPENCOTI_LLAMAFILE_DEBUG": "1"})
    assert got.code == binary_fixtures.ECHO_EXIT_CODE
    assert got.program.is_relative_to(cache_of(env))
    assert "Read-only file system" in got.errors


def test_read_only_cache_with_a_good_program_is_used(file: Path, shell: list[str], env: dict[str, str]) -> None:
    first = start([*shell, file], env)
    first.program.with_suffix(".ok").write_text("ok another boot\n")
    home = env["HOME"]
    got = in_namespace(f'mount --bind "{home}" "{home}" && mount -o remount,bind,ro "{home}"', [*shell, file], env)
    assert (got.code, got.program, got.errors) == (binary_fixtures.ECHO_EXIT_CODE, first.program, "")


def nothing_writable(own: Path, options: str) -> str:
    """Mounts that leave no writable folder but ``own``, mounted with ``options``; what lies in the folders stays visible."""
    return f"""
read_only() {{ mount -o remount,bind,ro "$1" 2>/dev/null || mount -o remount,bind,ro,nosuid,nodev "$1" || exit 99; }}
mount --bind "{own}" "{own}" || exit 99
case {options} in ro) read_only "{own}";; esac
mount --rbind /tmp /tmp && read_only /tmp
for folder in /var/tmp /dev/shm /run; do mount -t tmpfs -o ro tmpfs $folder || exit 99; done
cd /"""


def test_no_folder_at_all_lists_each_with_its_reason(shell: list[str], env: dict[str, str], tmp_path: Path) -> None:
    """Everything read-only, the file's own folder too: the message names every folder and what to do."""
    file = make(tmp_path / "exe")
    got = in_namespace(nothing_writable(tmp_path, "ro"), [*shell, file], env | {"TMPDIR": "/tmp"})
    assert got.code == 126 and got.arguments == [], got
    for folder in (f"{env['HOME']}/.cache", "/tmp", "/var/tmp", "/dev/shm", f"{tmp_path}/exe/.llamafile"):
        # What another start left in /tmp is there already, and read-only all the same.
        assert re.search(rf"\n  {re.escape(folder)}/opencoti-llamafile-{os.getuid()} cannot be (made|written): Read-only file system", got.errors), folder
    assert "Set OPENCOTI_LLAMAFILE_CACHE to a folder that has 1 MiB free and is not mounted noexec." in got.errors


def test_missing_temporary_folder_is_not_made(shell: list[str], env: dict[str, str], tmp_path: Path) -> None:
    file = make(tmp_path / "exe")
    absent = tmp_path / "absent"
    got = in_namespace(nothing_writable(tmp_path, "rw"), [*shell, file], env | {"HOME": "/proc/nonexistent", "TMPDIR": str(absent), "OPENCOTI_LLAMAFILE_DEBUG": "1"})
    assert got.code == binary_fixtures.ECHO_EXIT_CODE, got
    assert f"cannot be made: {absent} does not exist" in got.errors
    assert not absent.exists()


def test_folder_beside_the_file_is_the_last_resort(env: dict[str, str], tmp_path: Path) -> None:
    file = make(tmp_path / "exe")
    got = in_namespace(nothing_writable(tmp_path, "rw"), ["sh", file], env | {"HOME": "/proc/nonexistent", "TMPDIR": "/tmp"})
    assert got.code == binary_fixtures.ECHO_EXIT_CODE, got
    assert got.program.is_relative_to(tmp_path / "exe" / ".llamafile")


@pytest.mark.skipif(os.getuid() != 0, reason="needs two users")
def test_cache_of_another_user_is_not_touched(env: dict[str, str], tmp_path: Path) -> None:
    """Somebody else made the folder with our name in the shared temporary folder, program and stamp included."""
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(0o1777)
    for folder in (tmp_path, *tmp_path.parents[:3]):
        folder.chmod(folder.stat().st_mode | 0o055)
    file = make(tmp_path / "bin")
    trap = shared / "opencoti-llamafile-65534"
    first = start(["sh", file], {"PATH": env["PATH"], "OPENCOTI_LLAMAFILE_CACHE": str(tmp_path / "mine")})
    shutil.copytree(first.program.parent.parent, trap)
    got = start(["sh", file], {"PATH": env["PATH"], "TMPDIR": str(shared), "OPENCOTI_LLAMAFILE_DEBUG": "1"}, user=65534, group=65534)
    assert got.code == binary_fixtures.ECHO_EXIT_CODE
    assert not got.program.is_relative_to(shared)
    assert f"refused: {trap} belongs to another user" in got.errors
    shutil.rmtree(got.program.parent.parent)


def test_cache_open_to_others_is_closed(file: Path, shell: list[str], env: dict[str, str]) -> None:
    program = start([*shell, file], env).program
    cache_of(env).chmod(0o777)
    assert start([*shell, file], env).program == program
    assert cache_of(env).stat().st_mode & 0o777 == 0o700


def test_shell_options_from_the_environment_do_no_harm(file: Path, env: dict[str, str]) -> None:
    strict = env | {"SHELLOPTS": "errexit:nounset:noclobber:pipefail"}
    for _ in range(2):
        got = start(["bash", file], strict)
        assert (got.code, got.errors) == (binary_fixtures.ECHO_EXIT_CODE, "")


def test_the_windows_side_runs(file: Path, env: dict[str, str]) -> None:
    wine = next((path for name in ("wine64", "wine", "/usr/lib/wine/wine64") if (path := shutil.which(name))), None)
    if wine is None or MACHINE != "x86_64":
        pytest.skip("wine is not installed")
    done = subprocess.run([wine, str(file)], env=env | {"WINEDEBUG": "-all", "WINEPREFIX": env["HOME"] + "/wine"}, capture_output=True, timeout=300, check=False)
    subprocess.run([shutil.which("wineserver") or "/usr/lib/wine/wineserver64", "-k"], env=env | {"WINEPREFIX": env["HOME"] + "/wine"}, check=False, capture_output=True)
    assert done.returncode == binary_fixtures.ECHO_EXIT_CODE, done.stderr
