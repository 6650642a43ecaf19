"""Toolchains with the real cmake, ninja and compilers on a small project shaped like the engine: minutes when zig's cache is cold.

The project has the names that ``components`` expects (target ``llama-app``, ``bin/llama``, a library per variant, the ABI header), so
the builder itself is run, not a part of it.
"""

from __future__ import annotations

import dataclasses
import io
import os
import re
import shutil
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path

import lief
import pytest

from opencoti_build import components, toolchains
from opencoti_build.cache import Cache, default_root
from opencoti_build.components import Component
from opencoti_build.console import Console, Mode
from opencoti_build.errors import BuildError, DownloadError, OfflineError
from opencoti_build.project import Identity, find_project
from opencoti_build.runner import SystemRunner
from opencoti_build.toolchains.base import Target, Toolchain
from opencoti_build.vendors import Fetcher, load_pins

CMAKE_LISTS = """
cmake_minimum_required(VERSION 3.14)
project(small C CXX)
set(CMAKE_CXX_STANDARD 17)
set(CMAKE_RUNTIME_OUTPUT_DIRECTORY ${CMAKE_BINARY_DIR}/bin)
file(WRITE ${CMAKE_BINARY_DIR}/ggml/src/opencoti/include/opencoti-abi.h "#define OPENCOTI_ABI \\"00112233445566778899aabbccddeeff\\"\\n")
include_directories(${CMAKE_BINARY_DIR}/ggml/src/opencoti/include)
find_package(Threads REQUIRED)
find_package(OpenSSL)
find_program(HOST_PYTHON python3)
find_program(HOST_GIT git)
if (NOT HOST_TOOLS_EXPECTED AND (OPENSSL_FOUND OR HOST_PYTHON OR HOST_GIT))
    message(FATAL_ERROR "leak: ${OPENSSL_INCLUDE_DIR} ${HOST_PYTHON} ${HOST_GIT}")
endif()
add_library(part STATIC part.c)
add_executable(llama-app main.cpp)
target_link_libraries(llama-app PRIVATE part Threads::Threads)
set_target_properties(llama-app PROPERTIES OUTPUT_NAME llama)
foreach (variant IN LISTS OPENCOTI_CPU_VARIANTS)
    add_library(${variant} MODULE variant.c)
    target_compile_definitions(${variant} PRIVATE VARIANT_${variant})
    target_compile_options(${variant} PRIVATE ${FLAGS_${variant}})
    set_target_properties(${variant} PROPERTIES PREFIX "" OUTPUT_NAME ggml-cpu-${variant}-${LIBRARY_TAIL}
        LIBRARY_OUTPUT_DIRECTORY ${CMAKE_BINARY_DIR}/bin C_VISIBILITY_PRESET hidden)
endforeach()
"""

MAIN = """
#include <cstdio>
#include <set>
#include <stdexcept>
#include <string>
#include <thread>
#ifndef NDEBUG
#    error "not a release build"
#endif
extern "C" int part(int);
static size_t count(const char * word) {
    thread_local std::set<std::string> words;
    words.insert(word);
    return words.size();
}
int main() {
    int caught = 0;
    count("a");
    std::thread other([&] {
        count("b");
        try {
            throw std::runtime_error("y");
        } catch (const std::exception & e) {
            caught = e.what()[0];
        }
    });
    other.join();
    std::printf("%s %d %c %zu\\n", __FILE__ + (__FILE__[0] == 0x2e ? 2 : 0), part(20), caught, count("c"));
    return 0;
}
"""

PART = """
#include <stdio.h>
int part(int x) { return x + 1; }
const char * where(void) { return __FILE__; }
"""

VARIANT = """
#include "opencoti-abi.h"
#if defined(VARIANT_avx2) && !(defined(__AVX2__) && defined(__FMA__))
#    error "no AVX2"
#endif
#if defined(VARIANT_avx512) && !(defined(__AVX512F__) && defined(__AVX512BW__))
#    error "no AVX-512"
#endif
#if defined(VARIANT_dot) && !(defined(__ARM_FEATURE_DOTPROD) && defined(__ARM_FEATURE_FP16_VECTOR_ARITHMETIC))
#    error "no dot product"
#endif
#if defined(_WIN32)
__declspec(dllexport)
#else
__attribute__((visibility("default")))
#endif
const char * opencoti_library_abi(void) { return OPENCOTI_ABI; }
"""


def project(folder: Path) -> Path:
    folder.mkdir(parents=True)
    for name, text in (("CMakeLists.txt", CMAKE_LISTS), ("main.cpp", MAIN), ("part.c", PART), ("variant.c", VARIANT)):
        (folder / name).write_text(text)
    return folder


def target(name: str, **cmake: str) -> Target:
    """The real target with the small project's own variables."""
    found = toolchains.target_named(name)
    tail = re.sub(r".*\{variant\}-|\.\w+$", "", found.library)
    return dataclasses.replace(found, cmake={**found.cmake, "LIBRARY_TAIL": tail, **cmake})


X86 = {"FLAGS_avx2": "-mavx2;-mfma", "FLAGS_avx512": "-mavx512f;-mavx512bw"}
ARM = {"FLAGS_dot": "-march=armv8.2-a+dotprod+fp16"}
OWN = toolchains.machine_target().name
LAUNCHED = f"{shutil.which('ccache')}"
MINE = {"x86_64": X86, "aarch64": ARM}[toolchains.machine_target().arch]


@pytest.fixture(scope="session")
def shared() -> Cache:
    return Cache(default_root())


@pytest.fixture(scope="session")
def fetcher(shared: Cache) -> Fetcher:
    return Fetcher(shared, Console(io.StringIO(), mode=Mode.QUIET), SystemRunner(), offline=bool(os.environ.get("OPENCOTI_OFFLINE")))


def make(name: str, fetcher: Fetcher) -> Toolchain:
    pins = load_pins(find_project().vendors)
    try:
        for pin in ("ziglang", "cmake", "ninja") if name == "zig" else ("cmake", "ninja"):
            fetcher.unpacked(pins[pin])
    except (OfflineError, DownloadError) as error:
        pytest.skip(f"the toolchain cannot be fetched: {error}")
    return toolchains.named(name, fetcher, pins)


@pytest.fixture(scope="session")
def zig(fetcher: Fetcher) -> Toolchain:
    return make("zig", fetcher)


@pytest.fixture
def cache(tmp_path: Path, shared: Cache) -> Iterator[Cache]:
    """A cache of its own for results; zig's runtimes are shared, a minute of work each."""
    (shared.root / "zig").mkdir(parents=True, exist_ok=True)
    own = Cache(tmp_path / "cache")
    own.root.mkdir()
    (own.root / "zig").symlink_to(shared.root / "zig")
    yield own


def build(where: Target, source: Path, toolchain: Toolchain, cache: Cache, root: Path, variants: tuple[str, ...] = (), tree: str = "a" * 40) -> Component:
    return components.build_engine(
        where,
        source,
        tree,
        toolchain,
        identity=Identity("0.10.7", "c1"),
        base_version="b11434",
        base_commit=None,
        variants=variants,
        cache=cache,
        console=Console(io.StringIO(), mode=Mode.PLAIN),
        runner=SystemRunner(),
        build_root=root,
        jobs=2,
    )


def floor(path: Path) -> tuple[int, ...]:
    """The highest glibc symbol version a program needs."""
    versions = re.findall(rb"GLIBC_(\d+(?:\.\d+)+)", path.read_bytes())
    return max(tuple(int(part) for part in version.split(b".")) for version in versions)


def test_a_linux_program_runs_and_keeps_its_promises(tmp_path: Path, cache: Cache, zig: Toolchain) -> None:
    source = project(tmp_path / "s o u r c e (ü)")
    wanted = target(OWN, **MINE)
    variants = tuple(name.removeprefix("FLAGS_") for name in MINE)
    component = build(wanted, source, zig, cache, tmp_path / "b", variants)
    outcome = subprocess.run([component.program_path], capture_output=True, text=True, check=True)
    assert outcome.stdout == "main.cpp 21 y 2\n"
    assert floor(component.program_path) <= (2, 28)
    binary = lief.parse(str(component.program_path))
    assert isinstance(binary, lief.ELF.Binary) and binary.is_pie
    assert {str(name) for name in binary.libraries} <= {"libc.so.6", "libm.so.6", "libpthread.so.0", "libdl.so.2", "librt.so.1", "libutil.so.1", "ld-linux-x86-64.so.2", "ld-linux-aarch64.so.1"}
    assert not any(section.name.startswith((".debug", ".symtab")) for section in binary.sections)
    for library in component.libraries:
        shared_object = lief.parse(str(library.path))
        assert isinstance(shared_object, lief.ELF.Binary)
        assert "opencoti_library_abi" in {symbol.name for symbol in shared_object.exported_symbols}


def test_equal_sources_give_equal_bytes_in_any_folder(tmp_path: Path, cache: Cache, zig: Toolchain) -> None:
    wanted = target(OWN, **MINE)
    variants = tuple(name.removeprefix("FLAGS_") for name in MINE)
    one = build(wanted, project(tmp_path / "one"), zig, cache, tmp_path / "b1", variants)
    first = {path.name: path.read_bytes() for path in one.directory.iterdir() if path.suffix != ".log"}
    shutil.rmtree(one.directory)
    two = build(wanted, project(tmp_path / "another" / "two"), zig, cache, tmp_path / "a b" / "b2", variants)
    assert {path.name: path.read_bytes() for path in two.directory.iterdir() if path.suffix != ".log"} == first
    home = os.fsencode(str(tmp_path))
    for name, data in first.items():
        assert home not in data and os.fsencode(str(default_root())) not in data, name


def test_a_windows_program(tmp_path: Path, cache: Cache, zig: Toolchain) -> None:
    component = build(target("windows-x86_64", **X86), project(tmp_path / "s"), zig, cache, tmp_path / "b", ("avx2", "avx512"))
    binary = lief.parse(str(component.program_path))
    assert isinstance(binary, lief.PE.Binary)
    assert binary.optional_header.subsystem == lief.PE.OptionalHeader.SUBSYSTEM.WINDOWS_CUI
    needed = {str(item.name).lower() for item in binary.imports}
    assert all(name.startswith("api-ms-win-crt-") or name in ("kernel32.dll", "ntdll.dll", "ucrtbase.dll") for name in needed), needed
    assert not list(component.directory.glob("*.pdb"))
    for library in component.libraries:
        parsed = lief.parse(str(library.path))
        assert isinstance(parsed, lief.PE.Binary)
        assert {entry.name for entry in parsed.get_export().entries} == {"opencoti_library_abi"}


def test_an_arm_program_whose_flags_zig_would_refuse(tmp_path: Path, cache: Cache, zig: Toolchain) -> None:
    component = build(target("linux-aarch64", **ARM), project(tmp_path / "s"), zig, cache, tmp_path / "b", ("dot",))
    binary = lief.parse(str(component.program_path))
    assert isinstance(binary, lief.ELF.Binary)
    assert binary.header.machine_type == lief.ELF.ARCH.AARCH64
    assert floor(component.program_path) <= (2, 28)


def test_the_machines_own_compiler(tmp_path: Path, cache: Cache, fetcher: Fetcher) -> None:
    if toolchains.native.find_compilers(SystemRunner()) is None:
        pytest.skip("no compiler on this machine")
    wanted = target(OWN, HOST_TOOLS_EXPECTED="ON", **MINE)
    component = build(wanted, project(tmp_path / "s"), make("native", fetcher), cache, tmp_path / "b")
    assert subprocess.run([component.program_path], capture_output=True, text=True, check=True).stdout == "main.cpp 21 y 2\n"


def test_a_changed_source_is_compiled_again_and_only_that(tmp_path: Path, cache: Cache, zig: Toolchain) -> None:
    source, wanted = project(tmp_path / "s"), target(OWN)
    build(wanted, source, zig, cache, tmp_path / "b")
    part = source / "part.c"
    part.write_text(PART.replace("x + 1", "x + 2"))
    os.utime(part, (1_000_000_000, 1_000_000_000))
    component = build(wanted, source, zig, cache, tmp_path / "b", tree="b" * 40)
    assert subprocess.run([component.program_path], capture_output=True, text=True, check=True).stdout == "main.cpp 22 y 2\n"
    log = (component.directory / "build.log").read_text()
    assert "part.c.o" in log and "main.cpp.o" not in log


@pytest.mark.skipif(shutil.which("ccache") is None, reason="no ccache on this machine")
def test_a_compiler_launcher_changes_no_byte_and_can_be_switched_off_again(tmp_path: Path, cache: Cache, zig: Toolchain, monkeypatch: pytest.MonkeyPatch) -> None:
    source, wanted = project(tmp_path / "s"), target(OWN, **MINE)
    variants = tuple(name.removeprefix("FLAGS_") for name in MINE)

    def program() -> tuple[dict[str, bytes], str]:
        component = build(wanted, source, zig, cache, tmp_path / "b", variants)
        content = {path.name: path.read_bytes() for path in component.directory.iterdir() if path.suffix != ".log"}
        shutil.rmtree(component.directory)
        shutil.rmtree(tmp_path / "b" / "components" / f"{OWN}-zig" / "build" / "CMakeFiles" / "llama-app.dir")
        return content, (tmp_path / "b" / "components" / f"{OWN}-zig" / "build" / "build.ninja").read_text()

    plain, rules = program()
    assert LAUNCHED not in rules
    monkeypatch.setenv("OPENCOTI_CCACHE", "1")
    monkeypatch.setenv("CCACHE_DIR", str(tmp_path / "ccache"))
    for _ in range(2):
        content, rules = program()
        assert content == plain and LAUNCHED in rules
    statistics = subprocess.run(["ccache", "--print-stats"], capture_output=True, text=True, check=True).stdout
    counts = dict(line.split("\t") for line in statistics.splitlines())
    assert int(counts["direct_cache_hit"]) + int(counts["preprocessed_cache_hit"]) >= 1, statistics
    monkeypatch.delenv("OPENCOTI_CCACHE")
    content, rules = program()
    assert content == plain and LAUNCHED not in rules


def test_a_syntax_error_is_the_first_thing_shown(tmp_path: Path, cache: Cache, zig: Toolchain) -> None:
    source, wanted = project(tmp_path / "s"), target(OWN)
    (source / "part.c").write_text("int part(int x) { return y; }\n")
    with pytest.raises(BuildError) as caught:
        build(wanted, source, zig, cache, tmp_path / "b")
    assert re.search(r"part\.c:1:26: error: .*'y'", caught.value.details.splitlines()[0])
    (source / "part.c").write_text(PART)
    build(wanted, source, zig, cache, tmp_path / "b", tree="c" * 40).verify()


@pytest.mark.skipif(os.name == "nt", reason="kills with a signal")
@pytest.mark.parametrize("moment", [0.05, 0.3, 0.8, 1.5, 2.5])
def test_a_run_killed_at_any_moment_leaves_nothing_wrong(tmp_path: Path, cache: Cache, zig: Toolchain, moment: float) -> None:
    source, wanted = project(tmp_path / "s"), target(OWN)
    clean = build(wanted, source, zig, cache, tmp_path / "clean")
    expected = clean.program_path.read_bytes()
    shutil.rmtree(clean.directory)
    code = f"""
        import sys
        sys.path[:0] = [{str(Path(__file__).parent)!r}, {str(Path(components.__file__).parents[1])!r}]
        from pathlib import Path
        import test_toolchain_builds as t
        fetcher = t.Fetcher(t.Cache(t.default_root()), t.Console(t.io.StringIO(), mode=t.Mode.QUIET), t.SystemRunner(), offline=True)
        zig = t.toolchains.named("zig", fetcher, t.load_pins(t.find_project().vendors))
        t.build(t.target(t.OWN), Path({str(source)!r}), zig, t.Cache(Path({str(cache.root)!r})), Path({str(tmp_path / "b")!r}))
    """
    process = subprocess.Popen([sys.executable, "-c", textwrap.dedent(code)], stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 60
    while not (tmp_path / "b").is_dir() and process.poll() is None:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    time.sleep(moment)
    process.send_signal(signal.SIGKILL)
    process.wait()
    component = build(wanted, source, zig, cache, tmp_path / "b")
    assert component.program_path.read_bytes() == expected
    component.verify()
