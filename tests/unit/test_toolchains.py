"""Targets as data, the wrappers zig is called through, the native compiler, cosmocc's contract (against a stand-in), the probe."""

from __future__ import annotations

import dataclasses
import io
import os
import shlex
import shutil
import stat
import subprocess
from collections.abc import Mapping
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from opencoti_build import toolchains
from opencoti_build.cache import Cache
from opencoti_build.console import Console, Mode
from opencoti_build.errors import DataError, ToolchainError, UsageError
from opencoti_build.project import find_project
from opencoti_build.runner import SystemRunner
from opencoti_build.toolchains import base, cosmocc, native, probe, zig
from opencoti_build.vendors import Fetcher, load_pins

posix_only = pytest.mark.skipif(os.name == "nt", reason="the wrappers are shell scripts")

RECORDER = """#!/bin/sh
printf '%s\\n' "cache=$ZIG_GLOBAL_CACHE_DIR" "local=$ZIG_LOCAL_CACHE_DIR" "$@" >{record}
exit {code}
"""


def script(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)
    return path


@pytest.fixture
def cache(tmp_path: Path) -> Cache:
    return Cache(tmp_path / "cache")


def tools(tmp_path: Path) -> base.BuildTools:
    return base.BuildTools(tmp_path / "cmake", tmp_path / "ninja")


# ---- data -------------------------------------------------------------------------------------------------------------------------


def test_the_targets_of_the_universal_file_are_there_with_their_floor_and_variants() -> None:
    targets = toolchains.load_targets()
    for name in ("linux-x86_64", "linux-aarch64"):
        assert targets[name].glibc == "2.28"
        assert targets[name].zig_triple == f"{targets[name].arch}-linux-gnu.2.28"
    assert targets["windows-x86_64"].zig_triple == "x86_64-windows-gnu"
    assert targets["windows-x86_64"].library_name("avx2") == "ggml-cpu-avx2-win-x86_64.dll"
    assert targets["linux-x86_64"].variants == ("avx2", "avx512", "avx512vnni", "avx512bf16", "amx")
    assert targets["linux-aarch64"].library_name("armv8.6") == "ggml-cpu-armv8.6-aarch64.so"
    for target in targets.values():
        assert f"{target.os}-{target.arch}" == target.name


def test_the_baseline_of_x86_has_no_tuning_that_splits_wide_loads() -> None:
    # zig's level names bring it: -mcpu=x86_64_v2 adds slow-unaligned-mem-32 to the AVX2 library's code as well
    for target in toolchains.load_targets().values():
        assert "_v" not in target.cpu, target.name


def test_an_unknown_target_is_refused_with_the_known_ones() -> None:
    with pytest.raises(UsageError, match="linux-x86_64"):
        toolchains.target_named("linux-sparc")


ENTRY = "targets: {a-b: {os: a, arch: b, triple: b-a, cpu: x, system: {name: N, processor: b}, program: p, library: l%s}}"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("schema: 2\ntargets: {}", "schema"),
        ("- 1", "schema"),
        ("schema: 1\ntargets: {x: {os: linux}}", "arch"),
        ("schema: 1\ntargets: {x: 3}", "x"),
        ("schema: 1\n" + ENTRY % ", cmake: {GGML_AVX: ON}", "quote"),
        ("schema: 1\n" + ENTRY % ", glibc: 2.30", "2.30"),
        ("schema: 1\n: [", "cannot be read"),
    ],
)
def test_a_wrong_data_file_is_one_sentence(text: str, words: str) -> None:
    with pytest.raises(DataError) as caught:
        base.load_targets(text)
    assert words in str(caught.value)


def test_every_difference_of_a_target_is_in_the_data_of_its_key() -> None:
    target = toolchains.target_named("linux-aarch64")
    changed = {
        "triple": "aarch64-linux-musl",
        "glibc": "2.31",
        "cpu": "cortex_a76",
        "system_name": "FreeBSD",
        "system_processor": "arm64",
        "program": "other",
        "library": "other-{variant}",
        "cmake": {"A": "B"},
        "compile": ("-x",),
        "link": ("-y",),
        "link_program": ("-z",),
        "rewrite": {},
        "presets": {},
    }
    for field, value in changed.items():
        assert dataclasses.replace(target, **{field: value}).data() != target.data(), field


# ---- zig's wrappers ---------------------------------------------------------------------------------------------------------------


def written(tmp_path: Path, cache: Cache, target: str, code: int = 0) -> tuple[Path, Path]:
    """A toolchain folder around a stand-in that records how it is called."""
    record = tmp_path / "record"
    program = script(tmp_path / "a folder $x" / "zig", RECORDER.format(record=shlex.quote(str(record)), code=code))
    folder = zig.write_toolchain(toolchains.target_named(target), base.load_recipe(), program, tools(tmp_path), tmp_path / "zig cache", cache)
    return folder, record


@posix_only
def test_a_wrapper_hands_every_word_on_unchanged_and_returns_the_exit_code(tmp_path: Path, cache: Cache) -> None:
    folder, record = written(tmp_path, cache, "linux-x86_64", code=7)
    words = ["-c", "a  b.c", "-DX=\"q\"", "-DY='$HOME'", "", "*", "-o", "ü.o", "-march=native"]
    outcome = subprocess.run([folder / "cc", *words], env={"PATH": "/nonexistent"}, check=False)
    assert outcome.returncode == 7
    lines = record.read_text().split("\n")[:-1]
    assert lines[:2] == [f"cache={tmp_path / 'zig cache'}", f"local={tmp_path / 'zig cache'}"]
    assert lines[2:5] == ["cc", "-target", "x86_64-linux-gnu.2.28"]
    assert lines[-len(words) :] == words


@posix_only
@pytest.mark.parametrize(
    ("word", "becomes"),
    [
        ("-march=armv8.2-a+dotprod+fp16", "-mcpu=generic+v8_2a+dotprod+fullfp16"),
        ("-march=armv8.2-a+dotprod+fp16+i8mm+bf16", "-mcpu=generic+v8_2a+dotprod+fullfp16+i8mm+bf16"),
        ("-march=armv8-a", "-mcpu=generic"),
        ("-march=armv9-a", "-march=armv9-a"),
    ],
)
def test_words_that_zig_refuses_are_rewritten_where_they_stand(tmp_path: Path, cache: Cache, word: str, becomes: str) -> None:
    folder, record = written(tmp_path, cache, "linux-aarch64")
    subprocess.run([folder / "c++", "a b", word, "", "last"], check=True)
    assert record.read_text().split("\n")[-5:-1] == ["a b", becomes, "", "last"]


@posix_only
def test_the_archiver_gets_no_compiler_flags(tmp_path: Path, cache: Cache) -> None:
    folder, record = written(tmp_path, cache, "linux-x86_64")
    subprocess.run([folder / "ar", "qcsD", "x.a", "y.o"], check=True)
    assert record.read_text().split("\n")[2:-1] == ["ar", "qcsD", "x.a", "y.o"]


def test_a_toolchain_folder_is_named_by_its_content(tmp_path: Path, cache: Cache) -> None:
    target, recipe = toolchains.target_named("linux-x86_64"), base.load_recipe()
    one = zig.write_toolchain(target, recipe, tmp_path / "zig", tools(tmp_path), tmp_path / "z", cache)
    before = (one / "cc").stat().st_mtime_ns
    assert zig.write_toolchain(target, recipe, tmp_path / "zig", tools(tmp_path), tmp_path / "z", cache) == one
    assert (one / "cc").stat().st_mtime_ns == before
    assert zig.write_toolchain(target, recipe, tmp_path / "zig2", tools(tmp_path), tmp_path / "z", cache) != one
    assert zig.write_toolchain(toolchains.target_named("linux-aarch64"), recipe, tmp_path / "zig", tools(tmp_path), tmp_path / "z", cache) != one
    assert not any(stat.S_IMODE(path.stat().st_mode) & stat.S_IWOTH for path in one.iterdir())


def test_a_windows_command_file_refuses_what_cmd_cannot_quote() -> None:
    for bad in ("a%b", 'a"b', "a!b"):
        with pytest.raises(ToolchainError):
            zig._cmd_script(Path(bad) / "zig.exe", Path("cache"), ("cc",), {})
    text = zig._cmd_script(Path("a b") / "zig.exe", Path("cache"), ("cc", "-g0"), {})
    assert text.splitlines()[-1] == f'"{Path("a b") / "zig.exe"}" cc -g0 %*'
    with pytest.raises(ToolchainError):
        zig._cmd_script(Path("zig.exe"), Path("cache"), ("cc",), {"-march=a": "-mcpu=a"})


def test_identity_and_versions_fetch_nothing() -> None:
    def never() -> Path:
        raise AssertionError("fetched")

    source = base.ToolSource("t", "1", "ab", never)
    toolchain = zig.ZigToolchain(source, source, source)
    target = toolchains.target_named("linux-x86_64")
    assert toolchain.identity(target)["tools"] == {"t": ["1", "ab"]}
    assert toolchain.versions() == {"t": "1"}
    other = zig.ZigToolchain(base.ToolSource("t", "1", "cd", never), base.ToolSource("c", "1", "ab", never), source)
    assert other.identity(target) != toolchain.identity(target)


@posix_only
def test_warming_links_a_program_for_each_cold_target_once(tmp_path: Path, cache: Cache) -> None:
    record = tmp_path / "record"
    program = script(tmp_path / "zig", 'echo "$@" >>' + shlex.quote(str(record)) + "\nprintf x >main.exe\n")
    script(program, "#!/bin/sh\n" + program.read_text())
    toolchain = zig.ZigToolchain(*(base.ToolSource(name, "1", "ab", lambda: program) for name in ("zig", "cmake", "ninja")))
    targets = [toolchains.target_named(name) for name in ("linux-x86_64", "windows-x86_64")]
    quiet = Console(io.StringIO(), mode=Mode.QUIET)
    toolchain.warm(targets[:1], cache, SystemRunner(), quiet, scratch=tmp_path / "scratch")
    toolchain.warm(targets, cache, SystemRunner(), quiet, scratch=tmp_path / "scratch")
    toolchain.warm(targets, cache, SystemRunner(), quiet, scratch=tmp_path / "scratch")
    lines = record.read_text().splitlines()
    assert [line.split()[2] for line in lines] == ["x86_64-linux-gnu.2.28", "x86_64-windows-gnu"]
    assert all(line.endswith("main.cpp -o main.exe") for line in lines)
    assert "-pie" in lines[0].split() and "-pie" not in lines[1].split()
    script(program, "#!/bin/sh\necho 'error: no'\nexit 1\n")
    with pytest.raises(ToolchainError):
        toolchain.warm([toolchains.target_named("linux-aarch64")], cache, SystemRunner(), quiet, scratch=tmp_path / "scratch")


# ---- the environment of a build ---------------------------------------------------------------------------------------------------


def test_a_clean_environment_has_no_flag_of_the_user(tmp_path: Path) -> None:
    inherited = {"PATH": "/usr/bin", "CFLAGS": "-O0", "CPATH": "/x", "LD_PRELOAD": "y", "CXX": "z", "LANG": "de_DE", "CCACHE_DIR": "/c", "SOURCE_DATE_EPOCH": "5", "TMPDIR": "/t"}
    environment = base.clean_environment((tmp_path,), tmp_path / "home", inherited)
    assert environment == {
        "TMPDIR": "/t",
        "CCACHE_DIR": "/c",
        "PATH": str(tmp_path),
        "HOME": str(tmp_path / "home"),
        "LC_ALL": "C",
        "TZ": "UTC",
        "SOURCE_DATE_EPOCH": "315532800",
    }


@posix_only
def test_ccache_is_opt_in_and_its_absence_is_said(tmp_path: Path) -> None:
    ccache = script(tmp_path / "bin" / "ccache", "#!/bin/sh\n")
    path = {"PATH": str(tmp_path / "bin")}
    assert base.ccache_program(path) is None
    assert base.ccache_program({**path, "OPENCOTI_CCACHE": "0"}) is None
    assert base.ccache_program({**path, "OPENCOTI_CCACHE": "1"}) == ccache
    assert base.ccache_program({"PATH": "", "OPENCOTI_CCACHE": str(ccache)}) == ccache
    with pytest.raises(ToolchainError, match="OPENCOTI_CCACHE"):
        base.ccache_program({"PATH": str(tmp_path), "OPENCOTI_CCACHE": "1"})


def test_text_for_cmake_comes_back_as_it_went_in(tmp_path: Path) -> None:
    cmake = shutil.which("cmake")
    if cmake is None:
        pytest.skip("no cmake on PATH")
    texts = ["a b", 'q"q', "back\\slash", "$ENV{HOME} ${x}", "semi\\;colon", "a;b", "#no comment", "ü"]
    lines = [f"file(WRITE {base.cmake_quote(tmp_path / str(index))} {base.cmake_quote(text)})" for index, text in enumerate(texts)]
    (tmp_path / "script.cmake").write_text("\n".join(lines) + "\n", encoding="utf-8")
    subprocess.run([cmake, "-P", tmp_path / "script.cmake"], check=True, capture_output=True)
    assert [(tmp_path / str(index)).read_text(encoding="utf-8") for index in range(len(texts))] == texts


# ---- native -----------------------------------------------------------------------------------------------------------------------


@given(st.booleans(), st.booleans())
def test_a_native_toolchain_is_found_again_by_its_name(own_isa: bool, openmp: bool) -> None:
    name = native.NativeToolchain(SystemRunner(), None, None, own_isa, openmp).name
    assert native.parse_name(name) == {"own_isa": own_isa, "openmp": openmp}
    assert name in toolchains.NAMES


@pytest.mark.parametrize("name", ["", "nativ", "native-", "native-x", "native-portable-portable", "native-native", "zig"])
def test_no_other_name_is_a_native_toolchain(name: str) -> None:
    assert native.parse_name(name) is None


@posix_only
def test_compilers_are_the_users_else_the_first_pair_that_is_whole(tmp_path: Path) -> None:
    folder = tmp_path / "bin"
    for name in ("gcc", "clang", "clang++", "mine", "mine++"):
        script(folder / name, f"#!/bin/sh\necho {name} 1.2.3\necho more\n")
    runner = SystemRunner()
    assert native.find_compilers(runner, {"PATH": str(tmp_path)}) is None
    found = native.find_compilers(runner, {"PATH": str(folder)})
    assert found == native.Compilers(folder / "clang", folder / "clang++", "clang 1.2.3"), "gcc has no g++ beside it"
    found = native.find_compilers(runner, {"PATH": str(folder), "CC": "mine", "CXX": str(folder / "mine++")})
    assert found is not None and (found.c, found.cxx) == (folder / "mine", folder / "mine++")
    with pytest.raises(ToolchainError, match="'absent'"):
        native.find_compilers(runner, {"PATH": str(folder), "CC": "absent", "CXX": "mine++"})


def test_the_native_compiler_builds_for_this_machine_alone() -> None:
    toolchain = native.NativeToolchain(SystemRunner(), None, None)
    own = toolchains.machine_target()
    assert toolchain.supports(own) is None
    other = next(target for target in toolchains.load_targets().values() if target.name != own.name)
    assert other.name in (toolchain.supports(other) or "")


# ---- cosmocc, against a stand-in --------------------------------------------------------------------------------------------------

DRIVER = """#!/bin/sh
echo "$0 $*" >>{log}
[ "${{FAIL:-}}" ] && exit 1
out=
for word do [ "$previous" = -o ] && out=$word; previous=$word; done
case " $* " in
*" -c "*) echo object >"$out" ;;
*) printf '%s\\n' '#!/bin/sh' 'echo {says}' 'exit {code}' >"$out"; chmod +x "$out" ;;
esac
"""


def stand_in(root: Path, says: str = probe.PASSED, code: int = 0) -> Path:
    """A folder shaped like an unpacked cosmocc: drivers that log their words and 'link' a script, an apelink that logs."""
    log = root.parent / "log"
    for name in cosmocc.required_programs():
        script(root / "bin" / name, DRIVER.format(log=shlex.quote(str(log)), says=says, code=code))
    return log


def cosmocc_toolchain(tmp_path: Path, environment: Mapping[str, str]) -> cosmocc.CosmoccToolchain:
    console = Console(io.StringIO(), mode=Mode.QUIET)
    fetcher = Fetcher(Cache(tmp_path / "cache"), console, SystemRunner(), offline=True)
    here = base.ToolSource("x", "1", "", lambda: tmp_path / "tool")
    return cosmocc.CosmoccToolchain.from_pins(fetcher, load_pins(find_project().vendors), here, here, environment)


def test_an_absent_cosmocc_says_what_to_do(tmp_path: Path) -> None:
    target = toolchains.target_named("cosmo-x86_64")
    absent = cosmocc_toolchain(tmp_path, {})
    if absent.pinned is None:
        assert "OPENCOTI_COSMOCC" in (absent.supports(target) or "") and "invoke vendor bump cosmocc" in (absent.supports(target) or "")
    wrong = cosmocc_toolchain(tmp_path, {"OPENCOTI_COSMOCC": str(tmp_path / "nothing")})
    assert "lacks bin/apelink" in (wrong.supports(target) or "")
    assert "not linux-x86_64" in (wrong.supports(toolchains.target_named("linux-x86_64")) or "")


@posix_only
def test_cosmocc_is_proven_in_two_steps_once_and_never_asked_again(tmp_path: Path, cache: Cache) -> None:
    root = tmp_path / "cosmo"
    log = stand_in(root)
    toolchain = cosmocc_toolchain(tmp_path, {"OPENCOTI_COSMOCC": str(root)})
    target = toolchains.target_named(f"cosmo-{toolchains.machine_target().arch}")
    setup = toolchain.prepare(target, cache, SystemRunner(), scratch=tmp_path / "scratch")
    calls = [shlex.split(line) for line in log.read_text().splitlines()]
    driver = str(root / "bin" / f"{target.arch}-unknown-cosmo-c++")
    assert [call[0] for call in calls] == [driver, driver]
    assert "-c" in calls[0] and "-O2" in calls[0] and "-c" not in calls[1], "compiling and linking are separate calls"
    toolchain.prepare(target, cache, SystemRunner(), scratch=tmp_path / "scratch")
    assert len(log.read_text().splitlines()) == 2
    text = Path(setup.arguments[0].split("=", 1)[1]).read_text()
    assert f'set(CMAKE_C_COMPILER "{root.as_posix()}/bin/{target.arch}-unknown-cosmo-cc")' in text


@posix_only
@pytest.mark.parametrize(("says", "code"), [("wrong: selection", 1), ("nothing", 0)])
def test_a_miscompiling_cosmocc_is_refused_every_time(tmp_path: Path, cache: Cache, says: str, code: int) -> None:
    root = tmp_path / "cosmo"
    stand_in(root, says, code)
    toolchain = cosmocc_toolchain(tmp_path, {"OPENCOTI_COSMOCC": str(root)})
    target = toolchains.target_named(f"cosmo-{toolchains.machine_target().arch}")
    for _ in range(2):
        with pytest.raises(ToolchainError, match="miscompiles") as caught:
            toolchain.prepare(target, cache, SystemRunner(), scratch=tmp_path / "scratch")
        assert says in caught.value.details


@posix_only
def test_apelink_gets_loaders_and_programs_in_the_documented_form(tmp_path: Path) -> None:
    root = tmp_path / "cosmo"
    log = stand_in(root)
    toolchain = cosmocc_toolchain(tmp_path, {"OPENCOTI_COSMOCC": str(root)})
    toolchain.join({"aarch64": Path("b.elf"), "x86_64": Path("a.elf")}, tmp_path / "out", SystemRunner())
    words = shlex.split(log.read_text())
    folder = root / "bin"
    assert words == [
        str(folder / "apelink"), "-o", str(tmp_path / "out"), "-l", str(folder / "ape-x86_64.elf"), "-l", str(folder / "ape-aarch64.elf"),
        "-M", str(folder / "ape-m1.c"), "a.elf", "b.elf",
    ]  # fmt: skip
    assert "-M" not in cosmocc.apelink_words(folder, {"x86_64": Path("a.elf")}, tmp_path / "out")


@posix_only
def test_a_changed_cosmocc_has_another_identity(tmp_path: Path) -> None:
    root = tmp_path / "cosmo"
    stand_in(root)
    toolchain = cosmocc_toolchain(tmp_path, {"OPENCOTI_COSMOCC": str(root)})
    target = toolchains.target_named("cosmo-x86_64")
    before = toolchain.identity(target)
    assert toolchain.identity(target) == before
    (root / "bin" / "apelink").write_text("#!/bin/sh\n:\n")
    assert toolchain.identity(target) != before


# ---- the probe on a real compiler -------------------------------------------------------------------------------------------------


def test_the_probe_accepts_this_machines_compiler_and_sees_a_wrong_branch(tmp_path: Path) -> None:
    found = native.find_compilers(SystemRunner())
    if found is None:
        pytest.skip("no compiler on this machine")
    right = probe.Probe((str(found.cxx),), (str(found.cxx), "-pthread"), ())
    assert probe.check(right, tmp_path, SystemRunner(), environment=os.environ, what="this compiler")
    # What the defect does, done by hand: an equality comes out as something else.
    wrong = probe.Probe((str(found.cxx), "-Dcounter=(*(&limit))"), right.link, ())
    with pytest.raises(ToolchainError):
        probe.check(wrong, tmp_path, SystemRunner(), environment=os.environ, what="this compiler")
    assert not probe.check(probe.Probe(right.compile, right.link, None), tmp_path, SystemRunner(), environment=os.environ, what="x")


# ---- by name ----------------------------------------------------------------------------------------------------------------------


def test_toolchains_by_name(tmp_path: Path) -> None:
    fetcher = Fetcher(Cache(tmp_path), Console(io.StringIO(), mode=Mode.QUIET), SystemRunner(), offline=True)
    pins = load_pins(find_project().vendors)
    for name in toolchains.NAMES:
        assert toolchains.named(name, fetcher, pins).name == name
    with pytest.raises(UsageError, match="zig"):
        toolchains.named("msvc", fetcher, pins)
    assert not any(tmp_path.iterdir()), "nothing was fetched"


@pytest.mark.parametrize(
    ("line", "major"),
    [
        ("gcc (Debian 12.2.0-14+deb12u1) 12.2.0", 12),
        ("gcc (GCC) 14.2.1 20240912 (Red Hat 14.2.1-3)", 14),
        ("cc (Ubuntu 11.4.0-1ubuntu1~22.04) 11.4.0", 11),
        ("Debian clang version 14.0.6", None),
        ("unknown", None),
    ],
)
def test_the_major_version_of_gcc_is_read_from_its_first_line(line, major):
    assert native.Compilers(Path("gcc"), Path("g++"), line).gcc_major == major
