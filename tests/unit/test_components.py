"""The component builder with small programs in the place of cmake and ninja: what is built, when, and what is left when it fails.

The stand-ins write real files: "ninja" makes the program out of the source's text. tests/engine does the same with the real tools.
"""

from __future__ import annotations

import dataclasses
import io
import json
import os
import shlex
import signal
import subprocess
import sys
import textwrap
import threading
import time
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from opencoti_build import components, files, ninja
from opencoti_build.cache import Cache
from opencoti_build.components import Component
from opencoti_build.console import Console, Mode
from opencoti_build.errors import BuildError, BusyError, ChecksumError, ManifestError, ToolchainError
from opencoti_build.project import Identity
from opencoti_build.runner import Runner, SystemRunner
from opencoti_build.toolchains.base import BuildTools, Setup, Target, target_named

pytestmark = pytest.mark.skipif(os.name == "nt", reason="the stand-ins are shell scripts")

TARGET = target_named("linux-x86_64")
TREE = "ab" * 20
ABI = "0123456789abcdef" * 4

CMAKE = """#!/bin/sh
echo cmake >>{calls}
[ -e {root}/cmake-fails ] && {{ echo 'CMake Error at CMakeLists.txt:1: no'; exit 1; }}
while [ $# -gt 0 ]; do
    case $1 in -B) work=$2 ;; -S) source=$2 ;; esac
    shift
done
mkdir -p "$work/ggml/src/opencoti/include"
echo '#define OPENCOTI_ABI "{abi}"' >"$work/ggml/src/opencoti/include/opencoti-abi.h"
echo "$source" >"$work/build.ninja"
"""

NINJA = """#!/bin/sh
echo ninja >>{calls}
work=$2
shift 4
echo "$@" >"$work/goals"
echo '[1/2] Building CXX object CMakeFiles/x.dir/main.cpp.o'
while [ -e {root}/slow ]; do sleep 0.05; done
if [ -e {root}/ninja-fails ]; then
    echo 'FAILED: main.cpp.o'
    echo 'main.cpp:1:2: error: expected a semicolon'
    echo 'ninja: build stopped: subcommand failed.'
    exit 1
fi
mkdir -p "$work/bin"
for goal do
    case $goal in
    bin/*) echo "library $goal {abi} $(cat "$(cat "$work/build.ninja")/main.cpp")" >"$work/$goal" ;;
    esac
done
[ -e {root}/no-program ] || cat "$(cat "$work/build.ninja")/main.cpp" >"$work/bin/llama"
[ -e {root}/other-abi ] && echo stale >"$work/bin/ggml-cpu-avx2-x86_64.so"
echo '[2/2] Linking CXX executable bin/llama'
"""


@dataclass(frozen=True)
class StandIn:
    """A toolchain whose tools are the scripts above."""

    root: Path
    tag: str = "1"
    name: str = "stand-in"

    def supports(self, target: Target) -> str | None:
        return None if target.arch == "x86_64" else "Only x86_64."

    def identity(self, target: Target) -> Mapping[str, Any]:
        return {"tag": self.tag}

    def cmake_overrides(self) -> Mapping[str, str]:
        return {}

    def versions(self) -> Mapping[str, str]:
        return {"stand-in": "1.0"}

    def warm(self, targets: Sequence[Target], cache: Cache, runner: Runner, console: Console, *, scratch: Path) -> None:
        (scratch / "warm").write_text(" ".join(target.name for target in targets))

    def prepare(self, target: Target, cache: Cache, runner: Runner, *, scratch: Path) -> Setup:
        values = {"calls": shlex.quote(str(self.root / "calls")), "root": shlex.quote(str(self.root)), "abi": ABI}
        for name, text in (("cmake", CMAKE), ("ninja", NINJA)):
            files.write_text(self.root / name, text.format(**values), mode=0o755)
        return Setup(BuildTools(self.root / "cmake", self.root / "ninja"), (), {"PATH": os.environ["PATH"]}, fingerprint=self.tag)


@dataclass
class Lab:
    root: Path

    def __post_init__(self) -> None:
        self.cache = Cache(self.root / "cache")
        self.text = io.StringIO()
        self.source = self.root / "source"
        self.source.mkdir()
        self.write("int main() {}\n")

    def write(self, text: str) -> None:
        (self.source / "main.cpp").write_text(text)

    def build(self, **changes: Any) -> Component:
        words: dict[str, Any] = {
            "target": TARGET,
            "source": self.source,
            "tree_id": TREE,
            "toolchain": StandIn(self.root),
            "identity": Identity("0.10.7", "c1"),
            "base_version": "b11434",
            "base_commit": "c" * 40,
            "variants": ("avx2",),
            "cache": self.cache,
            "console": Console(self.text, mode=Mode.PLAIN),
            "runner": SystemRunner(),
            "build_root": self.root / "build",
            "jobs": 2,
        } | changes
        first = [words.pop(name) for name in ("target", "source", "tree_id", "toolchain")]
        return components.build_engine(*first, **words)

    @property
    def calls(self) -> list[str]:
        path = self.root / "calls"
        return path.read_text().split() if path.exists() else []

    def flag(self, name: str, on: bool = True) -> None:
        if on:
            (self.root / name).touch()
        else:
            (self.root / name).unlink(missing_ok=True)

    def stored(self) -> list[str]:
        folder = self.cache.root / "results" / components.KIND
        return sorted(path.name for path in folder.iterdir()) if folder.is_dir() else []


@pytest.fixture
def lab(tmp_path: Path) -> Lab:
    return Lab(tmp_path)


# ---- what comes out ---------------------------------------------------------------------------------------------------------------


def test_a_component_describes_the_files_it_holds(lab: Lab) -> None:
    component = lab.build()
    data = component.program_path.read_bytes()
    assert data == b"int main() {}\n"
    assert component.program == components.BuiltFile("llama", len(data), sha256(data).hexdigest(), zlib.crc32(data))
    assert component.program_path.stat().st_mode & 0o111
    (library,) = component.libraries
    content = library.path.read_bytes()
    assert (library.size, library.sha256, library.crc32) == (len(content), sha256(content).hexdigest(), zlib.crc32(content))
    assert library.entry() == {
        "name": "ggml-cpu-avx2-x86_64.so",
        "file": "ggml-cpu-avx2-x86_64.so",
        "kind": "cpu",
        "variant": "avx2",
        "os": "linux",
        "arch": "x86_64",
        "size": len(content),
        "sha256": library.sha256,
        "abi": ABI,
        "build": component.build,
    }
    assert (component.engine, component.tree_id, component.versions) == ("opencoti-0.10.7-c1", TREE, {"stand-in": "1.0"})
    assert component.flags["OPENCOTI_CPU_VARIANTS"] == "avx2" and component.flags["LLAMA_BUILD_NUMBER"] == "11434"
    assert component.flags["GGML_AVX2"] == "OFF" and component.flags["GGML_SSE42"] == "ON"
    assert json.loads((component.directory / "component.json").read_text())["libraries"][0]["variant"] == "avx2"
    assert components.read_component(component.directory) == component


def test_the_targets_own_variants_are_built_unless_others_are_named(lab: Lab) -> None:
    assert [library.variant for library in lab.build(variants=None).libraries] == list(TARGET.variants)
    assert lab.build(variants=()).libraries == ()


def test_export_copies_everything(lab: Lab, tmp_path: Path) -> None:
    component = lab.build()
    copies = component.export(tmp_path / "out")
    assert sorted(path.name for path in copies) == ["component.json", "ggml-cpu-avx2-x86_64.so", "llama"]
    assert (tmp_path / "out" / "llama").read_bytes() == component.program_path.read_bytes()
    moved = components.read_component(tmp_path / "out")
    moved.verify()


def test_all_components_lists_what_can_be_read(lab: Lab) -> None:
    one, other = lab.build(), lab.build(variants=())
    (lab.cache.result(components.KIND, "broken")).mkdir()
    (lab.cache.result(components.KIND, "broken") / "component.json").write_text("{")
    assert {component.key for component in components.all_components(lab.cache)} == {one.key, other.key}


# ---- when it is built -------------------------------------------------------------------------------------------------------------


def test_the_same_inputs_are_built_once(lab: Lab) -> None:
    first = lab.build()
    assert lab.calls == ["cmake", "ninja"]
    assert lab.build() == first
    assert lab.calls == ["cmake", "ninja"]


@pytest.mark.parametrize(
    "change",
    [
        {"tree_id": "cd" * 20},
        {"variants": ()},
        {"variants": ("avx512",)},
        {"identity": Identity("0.10.7", "c2")},
        {"identity": Identity("0.10.8", "c1")},
        {"base_version": "b11435"},
        {"base_commit": None},
        {"target": dataclasses.replace(TARGET, cpu="x86_64")},
        {"target": dataclasses.replace(TARGET, cmake={**TARGET.cmake, "GGML_AVX": "ON"})},
    ],
    ids=lambda change: next(iter(change)),
)
def test_each_input_has_its_own_result(lab: Lab, change: dict[str, Any]) -> None:
    first = lab.build()
    second = lab.build(**change)
    assert second.key != first.key and len(lab.stored()) == 2
    assert lab.build() == first and lab.build(**change) == second
    assert lab.calls.count("ninja") == 2


def test_warming_is_the_toolchains_business(lab: Lab) -> None:
    targets = [TARGET, target_named("windows-x86_64")]
    components.warm(StandIn(lab.root), targets, cache=lab.cache, console=Console(lab.text, mode=Mode.PLAIN), runner=SystemRunner(), build_root=lab.root / "build")
    assert (lab.root / "build" / "components" / "stand-in.tmp" / "warm").read_text() == "linux-x86_64 windows-x86_64"


def test_another_toolchain_starts_a_fresh_build_directory(lab: Lab) -> None:
    lab.build()
    marker = lab.root / "build" / "components" / "linux-x86_64-stand-in" / "build" / "object"
    marker.touch()
    lab.build(tree_id="cd" * 20)
    assert marker.exists(), "a change of the sources goes on in the same directory"
    lab.build(toolchain=StandIn(lab.root, tag="2"))
    assert not marker.exists()


def test_an_equal_configuration_is_not_configured_again(lab: Lab) -> None:
    lab.build(variants=("avx2",))
    (lab.cache.result(components.KIND, lab.stored()[0]) / "llama").write_bytes(b"damaged")
    lab.build(variants=("avx2",))
    assert lab.calls == ["cmake", "ninja", "ninja"]


@pytest.mark.parametrize("damage", ["llama", "ggml-cpu-avx2-x86_64.so", "component.json"])
@pytest.mark.parametrize("how", ["truncate", "flip", "remove"])
def test_a_damaged_result_is_never_handed_out(lab: Lab, damage: str, how: str) -> None:
    first = lab.build()
    path = first.directory / damage
    content = path.read_bytes()
    if how == "remove":
        path.unlink()
    else:
        path.write_bytes(content[:-3] if how == "truncate" else bytes([content[0] ^ 1]) + content[1:])
    again = lab.build()
    assert again == first
    again.verify()
    assert path.read_bytes() == content


def test_verify_names_the_damaged_file(lab: Lab) -> None:
    component = lab.build()
    component.program_path.write_bytes(b"x")
    with pytest.raises(ChecksumError, match="llama"):
        component.verify()


# ---- when it fails ----------------------------------------------------------------------------------------------------------------


def test_a_compiler_error_is_shown_first_and_nothing_is_stored(lab: Lab) -> None:
    lab.flag("ninja-fails")
    with pytest.raises(BuildError) as caught:
        lab.build()
    assert caught.value.details.splitlines()[0] == "main.cpp:1:2: error: expected a semicolon"
    log = lab.root / "build" / "components" / "linux-x86_64-stand-in" / "build.log"
    assert str(log) in caught.value.message and "ninja: build stopped" in log.read_text()
    assert lab.stored() == []
    lab.flag("ninja-fails", False)
    lab.build().verify()


def test_a_configure_error_is_shown_and_configured_again_next_time(lab: Lab) -> None:
    lab.flag("cmake-fails")
    for _ in range(2):
        with pytest.raises(BuildError, match="could not configure") as caught:
            lab.build()
        assert "CMake Error at CMakeLists.txt:1" in caught.value.details
    lab.flag("cmake-fails", False)
    lab.build()
    assert lab.calls == ["cmake", "cmake", "cmake", "ninja"]


@pytest.mark.parametrize(("flag", "words"), [("no-program", "made no llama"), ("other-abi", "does not carry the ABI")])
def test_a_build_that_lacks_a_part_is_refused(lab: Lab, flag: str, words: str) -> None:
    lab.flag(flag)
    with pytest.raises(BuildError, match=words):
        lab.build()
    assert lab.stored() == []


def test_sources_that_changed_during_the_build_are_not_stored(lab: Lab) -> None:
    with pytest.raises(BuildError, match="changed while"):
        lab.build(current_tree=lambda: "ef" * 20)
    assert lab.stored() == []
    assert lab.build(current_tree=lambda: TREE).tree_id == TREE


def test_an_unsupported_target_and_a_strange_base_are_refused(lab: Lab) -> None:
    with pytest.raises(ToolchainError, match="Only x86_64"):
        lab.build(target=target_named("linux-aarch64"))
    with pytest.raises(BuildError, match="v1.2"):
        lab.build(base_version="v1.2")
    assert lab.calls == []


@pytest.mark.parametrize("name", ["a$b", "a;b", "a`b", "a#b"])
def test_a_folder_that_cmake_cannot_build_in_is_said(lab: Lab, name: str) -> None:
    with pytest.raises(BuildError, match="another folder"):
        lab.build(build_root=lab.root / name)
    assert lab.calls == []


def test_two_runs_do_not_build_in_one_directory(lab: Lab) -> None:
    with files.lock(lab.root / "build" / "components" / ".linux-x86_64-stand-in.lock"), pytest.raises(BusyError):
        lab.build()


RUN = """
import sys
sys.path[:0] = [{tests!r}, {package!r}]
from pathlib import Path
import test_components
lab = test_components.Lab.__new__(test_components.Lab)
lab.root = Path({root!r}); lab.cache = test_components.Cache(lab.root / "cache"); lab.text = sys.stderr; lab.source = lab.root / "source"
lab.build()
"""


def run_apart(lab: Lab) -> subprocess.Popen[bytes]:
    code = RUN.format(tests=str(Path(__file__).parent), package=str(Path(components.__file__).parents[1]), root=str(lab.root))
    return subprocess.Popen([sys.executable, "-c", textwrap.dedent(code)], stderr=subprocess.PIPE)


def wait_for(condition: Any, what: str) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.02)


def test_after_a_kill_the_next_run_waits_for_the_compilers_left_and_completes(lab: Lab) -> None:
    lab.flag("slow")
    process = run_apart(lab)
    wait_for(lambda: "ninja" in lab.calls, "the first run came to its compilers")
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert process.stderr is not None
    process.stderr.close()
    assert lab.stored() == []
    waiting = "waiting for the compilers of an interrupted run"

    def release() -> None:
        wait_for(lambda: waiting in lab.text.getvalue(), "the second run waits")
        lab.flag("slow", False)

    helper = threading.Thread(target=release)
    helper.start()
    lab.build().verify()
    helper.join()
    assert waiting in lab.text.getvalue()
    assert len(lab.stored()) == 1
    assert not list((lab.cache.root / "results" / components.KIND).glob(".*"))


# ---- build ids --------------------------------------------------------------------------------------------------------------------


def test_a_build_id_comes_from_the_inputs_never_from_the_clock(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SOURCE_DATE_EPOCH", raising=False)
    key = "0" * 13 + "4d3" + "f" * 48
    assert components.build_id(key) == "8001010000" + "235"  # 0x4d3 is 1235
    assert components.build_id(key, 1_900_000_000) == "3003171746" + "235"
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "1900000000")
    assert components.build_id(key) == "3003171746235"
    component = lab.build()
    assert component.build.startswith("3003171746") and component.libraries[0].build == component.build
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "1900000060")
    assert lab.build().build.startswith("3003171747"), "another date is another id"
    assert lab.calls == ["cmake", "ninja"], "and no other build"


# ---- changes ninja would not see --------------------------------------------------------------------------------------------------


def test_a_file_replaced_by_an_older_one_is_brought_to_the_present(tmp_path: Path) -> None:
    source, record = tmp_path / "s", tmp_path / "record"
    (source / ".git").mkdir(parents=True)
    for name in ("replaced", "same", "newer", ".git/x"):
        (source / name).write_text("1")
        os.utime(source / name, (1000, 1000))
    components.touch_changed_sources(source, record)
    (source / "replaced").write_text("2")
    os.utime(source / "replaced", (500, 500))
    (source / ".git" / "x").write_text("2")
    os.utime(source / ".git" / "x", (500, 500))
    later = time.time() + 100
    os.utime(source / "newer", (later, later))
    before = time.time()
    components.touch_changed_sources(source, record)
    assert (source / "replaced").stat().st_mtime >= before - 1
    assert (source / "same").stat().st_mtime == 1000
    assert (source / "newer").stat().st_mtime == pytest.approx(later)
    assert (source / ".git" / "x").stat().st_mtime == 500
    stamp = (source / "replaced").stat().st_mtime_ns
    components.touch_changed_sources(source, record)
    assert (source / "replaced").stat().st_mtime_ns == stamp, "once"


# ---- reading component.json -------------------------------------------------------------------------------------------------------

json_values = st.recursive(st.none() | st.booleans() | st.integers() | st.text(max_size=8), lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3), max_leaves=8)


@given(name=st.sampled_from(["schema", "key", "target", "base", "toolchain", "program", "libraries", "flags", "tree", "os"]), value=json_values)
@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
def test_a_strange_component_json_is_a_manifest_error(lab_with_one: Component, name: str, value: Any) -> None:
    path = lab_with_one.directory / "component.json"
    document = json.loads(ORIGINALS[path])
    document[name] = value
    path.write_text(json.dumps(document))
    try:
        components.read_component(lab_with_one.directory).verify()
    except (ManifestError, ChecksumError):
        pass


@given(data=st.binary(max_size=60))
@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
def test_a_component_json_of_any_bytes_is_a_manifest_error(lab_with_one: Component, data: bytes) -> None:
    (lab_with_one.directory / "component.json").write_bytes(data)
    with pytest.raises(ManifestError):
        components.read_component(lab_with_one.directory)


ORIGINALS: dict[Path, str] = {}


@pytest.fixture
def lab_with_one(lab: Lab) -> Component:
    component = lab.build()
    path = component.directory / "component.json"
    ORIGINALS[path] = path.read_text()
    return component


# ---- ninja's output ---------------------------------------------------------------------------------------------------------------


def test_progress_follows_the_status_lines_and_keeps_the_errors() -> None:
    text = io.StringIO()
    times = iter(range(0, 10_000, 20))
    console = Console(text, mode=Mode.PLAIN, clock=lambda: float(next(times)))
    with console.progress("Building x") as meter:
        progress = ninja.Progress(meter)
        for line in ("[1/4] Building CXX object a/CMakeFiles/x.dir/b/arg.cpp.o", "arg.cpp:3:1: warning: unused", "[2/4] Linking CXX executable bin/llama", "ld.lld: error: undefined symbol: f"):
            progress.line(line)
    assert (progress.done, progress.total) == (2, 4)
    assert progress.errors == ["ld.lld: error: undefined symbol: f"]
    lines = text.getvalue().splitlines()
    assert "1 of 4" in lines[0] and "ETA" in lines[0] and lines[0].endswith("arg.cpp")
    assert "2 of 4" in lines[1]


@pytest.mark.parametrize(
    "line",
    [
        "x.c:1:2: error: bad",
        "x.c:1:2: fatal error: 'y.h' file not found",
        "ld.lld: error: undefined symbol: g",
        "/usr/bin/ld: x.o: undefined reference to `g'",
        "collect2: error: ld returned 1 exit status",
        "error: unable to find libc",
        "ninja: error: unknown target 'x'",
        "CMake Error at a:1 (message):",
    ],
)
def test_lines_that_name_an_error_are_recognised(line: str) -> None:
    assert ninja.first_errors(f"note\n{line}\nmore") == line


def test_a_log_without_an_error_line_shows_its_end() -> None:
    log = "\n".join(str(number) for number in range(100))
    assert ninja.first_errors(log).splitlines() == [str(number) for number in range(60, 100)]


@given(st.text(max_size=200))
def test_no_output_upsets_the_progress(text: str) -> None:
    console = Console(io.StringIO(), mode=Mode.QUIET)
    with console.progress("x") as meter:
        progress = ninja.Progress(meter)
        for line in text.splitlines():
            progress.line(line)


def test_the_number_of_jobs_is_the_users_else_the_machines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENCOTI_JOBS", "7")
    assert ninja.default_jobs() == 7
    monkeypatch.setenv("OPENCOTI_JOBS", "many")
    assert 1 <= ninja.default_jobs() <= (os.cpu_count() or 1)
    monkeypatch.setattr(ninja, "physical_memory", lambda: 1 << 29)
    assert ninja.default_jobs() == 1


def test_the_lease_is_kept_by_the_programs_that_were_started(tmp_path: Path) -> None:
    console = Console(io.StringIO(), mode=Mode.QUIET)
    with ninja.lease(tmp_path / "lease", console=console) as descriptor:
        assert descriptor is not None
        child = subprocess.Popen(["sleep", "60"], pass_fds=(descriptor,))
    try:
        with pytest.raises(BusyError), ninja.lease(tmp_path / "lease", console=console, wait_seconds=0.2):
            pass
    finally:
        child.kill()
        child.wait()
    with ninja.lease(tmp_path / "lease", console=console, wait_seconds=5):
        pass
