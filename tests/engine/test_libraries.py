"""Loading of backend libraries at the start of the commands that compute: order, checks, fallbacks, and what the engine says about it."""

from __future__ import annotations

import os
import random
import re
import shutil
import subprocess
import zipfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from engine_start import NOBODY, environment, one_line, open_folder, start, with_tmpfs, without_write_access
from payload_file import Library, cache_copy, copy_engine, write_payload

pytestmark = pytest.mark.skipif(os.name == "nt", reason="POSIX permissions, signals and mounts")

ARCH = {"x86_64": "x86_64", "aarch64": "aarch64", "arm64": "aarch64"}[os.uname().machine]
LOAD = ("completion", "--list-devices")
"""Loads the libraries, prints the devices and ends: no model is needed."""


def file_name(variant: str) -> str:
    return f"ggml-cpu-{variant}-{ARCH}.so"


@pytest.fixture(scope="session")
def runnable(engine: Path, libraries: Path) -> list[str]:
    """The CPU variants that were built and that this machine can run, as ``--cpu-variant`` names them."""
    names = [match[1] for path in sorted(libraries.iterdir()) if (match := re.fullmatch(rf"ggml-cpu-(.+)-{ARCH}\.so", path.name))]
    assert names, f"no CPU libraries in {libraries}"
    result = [name for name in names if start(engine, *LOAD, "--cpu-library", libraries / file_name(name)).returncode == 0]
    if not result:
        pytest.skip("this CPU runs none of the variants")
    return result


@pytest.fixture(scope="session")
def variant(runnable: list[str]) -> str:
    """One variant that runs here."""
    return runnable[0]


@pytest.fixture(scope="session")
def library(libraries: Path, variant: str) -> Library:
    """The library of that variant as a payload row."""
    return Library(file_name(variant), (libraries / file_name(variant)).read_bytes(), variant=variant, arch=ARCH)


@pytest.fixture(scope="session")
def other_abi(library: Library) -> Library:
    """The same library with another ABI hash inside: a real library that must be refused."""
    assert library.abi != "0" * 64, "the library holds one hash, its ABI"
    return Library(library.name, library.data.replace(library.abi.encode(), b"f" * 64), variant=library.variant, arch=ARCH)


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """An empty home folder."""
    folder = tmp_path / "home"
    folder.mkdir()
    return folder


@pytest.fixture
def single(engine: Path, library: Library, tmp_path: Path) -> Path:
    """A single file that carries the library."""
    (tmp_path / "app").mkdir()
    return write_payload(tmp_path / "app" / "engine", engine, [library])


@pytest.fixture
def plain(engine: Path, tmp_path: Path) -> Path:
    """The engine alone."""
    return copy_engine(engine, tmp_path / "app")


def cpu_lines(stderr: str) -> list[str]:
    return [line for line in stderr.splitlines() if line.startswith("cpu: ")]


def loaded(library: Library, origin: str, name: str | None = None) -> str:
    return f"cpu: loaded {name or library.name} ({origin}, {len(library.data)} bytes)"


def put(folder: Path, name: str, content: bytes) -> Path:
    path = folder / name
    path.write_bytes(content)
    return path


# ---- the order ----------------------------------------------------------------------------------


def test_bundled_library_is_extracted_and_loaded(single: Path, library: Library, home: Path) -> None:
    for _ in range(2):
        result = start(single, *LOAD, home=home)
        assert result.returncode == 0
        assert cpu_lines(result.stderr) == [loaded(library, "bundled, beside the executable")]
    assert cache_copy(single.parent, library).read_bytes() == library.data
    assert list(home.iterdir()) == []


def test_library_beside_the_executable_goes_before_the_bundled_one(single: Path, library: Library, home: Path) -> None:
    put(single.parent, library.name, library.data)
    result = start(single, *LOAD, home=home)
    assert result.returncode == 0
    assert cpu_lines(result.stderr) == [loaded(library, "executable directory")]
    assert not (single.parent / ".llamafile").exists()


def test_explicit_path_goes_before_everything(single: Path, library: Library, home: Path, tmp_path: Path) -> None:
    put(single.parent, library.name, b"not a library")
    path = put(tmp_path, "some name ä.so", library.data)
    result = start(single, *LOAD, "--cpu-library", path, home=home)
    assert result.returncode == 0
    assert cpu_lines(result.stderr) == [loaded(library, "explicit path", path.name)]


def test_explicit_path_in_the_environment(plain: Path, library: Library, home: Path, tmp_path: Path) -> None:
    path = put(tmp_path, "elsewhere.so", library.data)
    result = start(plain, *LOAD, home=home, extra={"OPENCOTI_LLAMAFILE_CPU_LIBRARY": str(path)})
    assert cpu_lines(result.stderr) == [loaded(library, "explicit path", path.name)]


def test_library_in_the_current_folder_is_not_loaded(plain: Path, library: Library, home: Path, tmp_path: Path) -> None:
    folder = tmp_path / "current"
    folder.mkdir()
    for name in (library.name, f"lib{library.name}"):
        put(folder, name, library.data)
    result = subprocess.run([plain, *LOAD], cwd=folder, env=environment(home), capture_output=True, text=True, timeout=120)
    assert result.returncode == 0 and cpu_lines(result.stderr) == []


def test_best_variant_is_chosen(engine: Path, libraries: Path, runnable: list[str], tmp_path: Path, home: Path) -> None:
    """All variants bundled: the one that is loaded is the best of those that run here, and only that one is extracted."""
    rows = [Library(file_name(name), (libraries / file_name(name)).read_bytes(), variant=name, arch=ARCH) for name in runnable]
    file = write_payload(tmp_path / "engine", engine, rows)
    result = start(file, *LOAD, home=home)
    order = [name for name in ("amx", "avx512bf16", "avx512vnni", "avx512", "avx2", "armv8.6", "armv8.2") if name in runnable]
    best = next(row for row in rows if row.variant == order[0])
    assert cpu_lines(result.stderr) == [loaded(best, "bundled, beside the executable")]
    assert [path.name for path in tmp_path.rglob("*.so")] == [best.name]


def test_libraries_of_other_systems_are_left_alone(engine: Path, library: Library, tmp_path: Path, home: Path) -> None:
    good = Library(library.name, library.data, variant=library.variant, arch=ARCH)
    rows = [
        replace(good, name=f"os-{good.name}", os="windows"),
        replace(good, name=f"arch-{good.name}", arch="riscv64"),
        replace(good, name=f"kind-{good.name}", kind="sidecar"),
    ]
    file = write_payload(tmp_path / "engine", engine, rows)
    result = start(file, *LOAD, home=home)
    assert result.returncode == 0 and cpu_lines(result.stderr) == []
    assert not (tmp_path / ".llamafile").exists()


# ---- what the user asks for ---------------------------------------------------------------------


def test_baseline_on_request(single: Path, home: Path) -> None:
    result = start(single, *LOAD, "--cpu-variant", "baseline", home=home)
    assert result.returncode == 0 and cpu_lines(result.stderr) == []
    assert not (single.parent / ".llamafile").exists()


def test_named_variant(single: Path, library: Library, home: Path) -> None:
    for arguments, extra in (
        (["--cpu-variant", library.variant], {}),
        (["--cpu_variant", library.variant], {}),
        ([], {"OPENCOTI_LLAMAFILE_CPU_VARIANT": library.variant}),
        (["--cpu-variant", library.variant], {"OPENCOTI_LLAMAFILE_CPU_VARIANT": "baseline"}),
    ):
        result = start(single, *LOAD, *arguments, home=home, extra=extra)
        assert result.returncode == 0
        assert cpu_lines(result.stderr) == [loaded(library, "bundled, beside the executable")]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--cpu-variant", "sse9"], ["auto", "baseline", "sse9"]),
        (["--cpu-variant"], ["value"]),
        (["--cpu-library", "/no/such/file.so"], ["/no/such/file.so", "no such file"]),
        (["--cpu-library", "/"], ["/"]),
        (["--gpu-library", "/no/such/gpu.so"], ["/no/such/gpu.so", "no such file"]),
        (["--gpu", "voodoo"], ["voodoo", "nvidia", "disable"]),
        (["--gpu", "apple"], ["apple"]),
    ],
)
def test_what_was_named_and_cannot_be_had_is_an_error(plain: Path, home: Path, arguments: list[str], words: list[str]) -> None:
    result = start(plain, *LOAD, *arguments, home=home)
    assert result.returncode == 1 and result.stdout == ""
    assert one_line(result.stderr) and result.stderr.startswith("error: ")
    assert all(word in result.stderr for word in words)


def test_named_variant_without_a_library_is_an_error(plain: Path, variant: str, home: Path) -> None:
    result = start(plain, *LOAD, "--cpu-variant", variant, home=home)
    assert result.returncode == 1 and one_line(result.stderr) and variant in result.stderr


@pytest.mark.parametrize("option", ["--cpu-library", "--gpu-library"])
@pytest.mark.parametrize("content", ["text", "system library", "other ABI"])
def test_named_file_that_is_no_library_of_this_engine(plain: Path, other_abi: Library, home: Path, tmp_path: Path, option: str, content: str) -> None:
    path = tmp_path / "file.so"
    if content == "text":
        path.write_text("not a library\n")
    elif content == "other ABI":
        path.write_bytes(other_abi.data)
    else:
        maps = Path("/proc/self/maps").read_text()
        path = Path(next(word for word in maps.split() if re.search(r"/libc(\.so\.6|-[0-9.]+\.so)$", word)))
    result = start(plain, *LOAD, option, path, home=home)
    assert result.returncode == 1
    assert "terminate called" not in result.stderr and result.stderr.splitlines()[-1].startswith(f"error: {option}: ")
    assert str(path) in result.stderr


def test_gpu_libraries_by_kind(plain: Path, library: Library, home: Path) -> None:
    """The CPU library under the name of a GPU library: enough to see which names are looked for."""
    put(plain.parent, f"ggml-vulkan-{ARCH}.so", library.data)
    line = f"vulkan: loaded ggml-vulkan-{ARCH}.so (executable directory, {len(library.data)} bytes)"
    for gpu in ("auto", "vulkan", "vk", "amd"):
        result = start(plain, *LOAD, "--gpu", gpu, home=home)
        assert result.returncode == 0 and line in result.stderr.splitlines()
    result = start(plain, *LOAD, home=home, extra={"OPENCOTI_LLAMAFILE_GPU": "vulkan"})
    assert line in result.stderr.splitlines()
    result = start(plain, *LOAD, "--gpu", "disable", home=home)
    assert result.returncode == 0 and "vulkan" not in result.stderr
    result = start(plain, *LOAD, "--gpu", "nvidia", home=home)
    assert result.returncode == 1 and one_line(result.stderr)


def test_gpu_disable_leaves_the_cpu_variants(single: Path, library: Library, home: Path) -> None:
    result = start(single, *LOAD, "--gpu", "disable", home=home)
    assert cpu_lines(result.stderr) == [loaded(library, "bundled, beside the executable")]


def test_log_disable_is_quiet(single: Path, library: Library, home: Path) -> None:
    result = start(single, *LOAD, "--log-disable", home=home)
    assert result.returncode == 0 and cpu_lines(result.stderr) == []
    assert cache_copy(single.parent, library).exists()


def test_empty_variables_count_as_unset(plain: Path, home: Path) -> None:
    names = ("GPU", "CPU_VARIANT", "GPU_LIBRARY", "CPU_LIBRARY")
    result = start(plain, *LOAD, home=home, extra={f"OPENCOTI_LLAMAFILE_{name}": "" for name in names})
    assert result.returncode == 0 and "Available devices" in result.stdout
    result = start(plain, *LOAD, "--cpu-library", "", home=home)
    assert result.returncode == 1 and one_line(result.stderr)


def test_options_are_in_the_help(plain: Path, home: Path) -> None:
    text = start(plain, "completion", "--help", home=home).stdout
    for word in ("--gpu ", "--cpu-variant", "--gpu-library", "--cpu-library", "OPENCOTI_LLAMAFILE_GPU"):
        assert word in text


# ---- what is refused ----------------------------------------------------------------------------


def test_other_abi_beside_the_executable_is_refused(single: Path, library: Library, other_abi: Library, home: Path) -> None:
    put(single.parent, library.name, other_abi.data)
    result = start(single, *LOAD, home=home)
    lines = cpu_lines(result.stderr)
    assert result.returncode == 0 and len(lines) == 2
    assert lines[0].startswith(f"cpu: refused {single.parent / library.name}: ")
    assert "f" * 64 in lines[0] and library.abi in lines[0]
    assert lines[1] == loaded(library, "bundled, beside the executable")


@pytest.mark.parametrize("listed", ["as it is", "wrongly", "not at all"])
def test_other_abi_in_the_payload_leaves_the_baseline(
    engine: Path, library: Library, other_abi: Library, tmp_path: Path, home: Path, listed: str
) -> None:
    """``payload.json`` saves extracting it; what the library itself answers decides."""
    abi = {"as it is": other_abi.abi, "wrongly": library.abi, "not at all": ""}[listed]
    row = Library(other_abi.name, other_abi.data, variant=other_abi.variant, arch=ARCH, overrides={"abi": abi})
    file = write_payload(tmp_path / "engine", engine, [row])
    result = start(file, *LOAD, home=home)
    lines = cpu_lines(result.stderr)
    assert result.returncode == 0 and "Available devices" in result.stdout
    assert len(lines) == 2 and lines[0].startswith("cpu: refused ") and "f" * 64 in lines[0] and library.abi in lines[0]
    assert lines[1] == "cpu: using the built-in baseline"
    assert (tmp_path / ".llamafile").exists() == (listed != "as it is")


@pytest.mark.parametrize("content", ["text", "truncated", "headers only", "empty"])
def test_junk_beside_the_executable(single: Path, library: Library, home: Path, content: str) -> None:
    put(
        single.parent,
        library.name,
        {"text": b"hello\n", "truncated": library.data[:-9000], "headers only": library.data[:5000], "empty": b""}[content],
    )
    result = start(single, *LOAD, home=home)
    lines = cpu_lines(result.stderr)
    assert result.returncode == 0 and len(lines) == 2
    assert lines[0].startswith(f"cpu: cannot load {single.parent / library.name}: ")
    assert lines[1] == loaded(library, "bundled, beside the executable")


WRONG: dict[str, Callable[[bytes], bytes]] = {
    "truncated": lambda data: data[:-100],
    "empty": lambda data: b"",
    "foreign": lambda data: random.Random(3).randbytes(len(data)),
    "one bit": lambda data: data[:-1] + bytes([data[-1] ^ 1]),
}


@pytest.mark.parametrize("record", [True, False], ids=["stale record", "no record"])
@pytest.mark.parametrize("kind", WRONG)
def test_wrong_copy_is_replaced_and_never_loaded(single: Path, library: Library, home: Path, kind: str, record: bool) -> None:
    copy = cache_copy(single.parent, library)
    assert start(single, *LOAD, home=home).returncode == 0
    copy.write_bytes(WRONG[kind](library.data))
    if not record:
        copy.with_name(copy.name + ".verified").unlink()
    result = start(single, *LOAD, home=home)
    assert result.returncode == 0
    assert cpu_lines(result.stderr) == [loaded(library, "bundled, beside the executable")]
    assert copy.read_bytes() == library.data


# ---- nothing to load ----------------------------------------------------------------------------


def test_deleted_payload_runs_on_the_baseline(plain: Path, home: Path) -> None:
    result = start(plain, *LOAD, home=home)
    assert result.returncode == 0 and "Available devices" in result.stdout
    assert cpu_lines(result.stderr) == []


def test_payload_without_libraries_runs_on_the_baseline(engine: Path, tmp_path: Path, home: Path) -> None:
    file = write_payload(tmp_path / "engine", engine, [])
    result = start(file, *LOAD, home=home)
    assert result.returncode == 0 and cpu_lines(result.stderr) == []


def test_deleted_entry_runs_on_the_baseline(engine: Path, library: Library, tmp_path: Path, home: Path) -> None:
    file = write_payload(tmp_path / "engine", engine, [library], absent=[library.name])
    result = start(file, *LOAD, home=home)
    assert result.returncode == 0
    assert cpu_lines(result.stderr) == ["cpu: using the built-in baseline"]
    # a copy that was extracted before still counts
    copy = cache_copy(tmp_path, library)
    copy.parent.mkdir(parents=True)
    copy.write_bytes(library.data)
    assert cpu_lines(start(file, *LOAD, home=home).stderr) == [loaded(library, "bundled, beside the executable")]


def test_damaged_entry_runs_on_the_baseline(engine: Path, library: Library, tmp_path: Path, home: Path) -> None:
    file = write_payload(tmp_path / "engine", engine, [library])
    content = bytearray(file.read_bytes())
    with zipfile.ZipFile(file) as archive:
        content[archive.getinfo(library.name).header_offset + 1000] ^= 1
    file.write_bytes(content)
    result = start(file, *LOAD, home=home)
    lines = cpu_lines(result.stderr)
    assert result.returncode == 0 and "damaged" in lines[0]
    assert lines[-1] == "cpu: using the built-in baseline"
    assert list(tmp_path.rglob("*.so")) == []


# ---- surroundings -------------------------------------------------------------------------------


def test_sixteen_first_starts_at_once(single: Path, library: Library, home: Path) -> None:
    processes = [
        subprocess.Popen([single, *LOAD], env=environment(home), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for _ in range(16)
    ]
    results = [(*process.communicate(timeout=180), process.returncode) for process in processes]
    for stdout, stderr, code in results:
        assert code == 0 and "Available devices" in stdout
        assert cpu_lines(stderr) == [loaded(library, "bundled, beside the executable")]
    assert [path.name for path in single.parent.rglob("*") if ".part-" in path.name] == []


def test_folder_that_is_not_writable(engine: Path, library: Library) -> None:
    with open_folder() as folder:
        (folder / "app").mkdir()
        (folder / "home").mkdir()
        file = write_payload(folder / "app" / "engine", engine, [library])
        prefix = without_write_access(folder / "app")
        if prefix:
            os.chown(folder / "home", NOBODY, NOBODY)
        first = start(file, *LOAD, home=folder / "home", prefix=prefix)
        lines = cpu_lines(first.stderr)
        assert first.returncode == 0 and len(lines) == 2
        assert str(folder / "app" / ".llamafile") in lines[0] and str(folder / "home" / ".llamafile") in lines[0]
        assert lines[1] == loaded(library, "bundled, home folder")
        second = start(file, *LOAD, home=folder / "home", prefix=prefix)
        assert cpu_lines(second.stderr) == lines[1:]


def test_noexec_folder_falls_back_to_home(single: Path, library: Library, home: Path) -> None:
    prefix = with_tmpfs(single.parent / ".llamafile", "noexec")
    result = start(single, *LOAD, home=home, prefix=prefix)
    lines = cpu_lines(result.stderr)
    assert result.returncode == 0 and len(lines) == 2
    assert lines[0].startswith(f"cpu: cannot load {single.parent / '.llamafile'}")
    assert lines[1] == loaded(library, "bundled, home folder")


def test_full_disk_falls_back_to_home(single: Path, library: Library, home: Path) -> None:
    prefix = with_tmpfs(single.parent / ".llamafile", "size=64k")
    result = start(single, *LOAD, home=home, prefix=prefix)
    lines = cpu_lines(result.stderr)
    assert result.returncode == 0 and len(lines) == 2
    assert "No space left on device" in lines[0] and lines[1] == loaded(library, "bundled, home folder")


def test_full_disk_everywhere_runs_on_the_baseline(single: Path) -> None:
    prefix = with_tmpfs(single.parent / ".llamafile", "size=64k")
    result = start(single, *LOAD, home=Path("/proc/nowhere"), prefix=prefix)
    lines = cpu_lines(result.stderr)
    assert result.returncode == 0 and "Available devices" in result.stdout
    assert "No space left on device" in lines[0] and lines[-1] == "cpu: using the built-in baseline"


def test_home_unset(single: Path, library: Library) -> None:
    result = start(single, *LOAD, home=None)
    assert result.returncode == 0
    assert cpu_lines(result.stderr) == [loaded(library, "bundled, beside the executable")]


def test_odd_folder_name(single: Path, library: Library, tmp_path: Path, home: Path) -> None:
    folder = tmp_path / "with space　ä 日本"
    folder.mkdir()
    file = Path(shutil.copy(single, folder))
    assert cpu_lines(start(file, *LOAD, home=home).stderr) == [loaded(library, "bundled, beside the executable")]


# ---- a real model -------------------------------------------------------------------------------


def system_info(stderr: str) -> str:
    return next(line for line in stderr.splitlines() if "system_info" in line)


def test_loaded_library_computes(single: Path, library: Library, model: Path, home: Path) -> None:
    """Text comes out, and threads, features and memory belong to the loaded library, not to the built-in one."""
    arguments = ("completion", "-m", model, "-p", "The capital of France is", "-n", "8", "--temp", "0", "-no-cnv", "-t", "2")
    results = [start(single, *arguments, *extra, home=home) for extra in ([], ["--cpu-variant", "baseline"])]
    for result in results:
        assert result.returncode == 0
        assert re.match(r"The capital of France is \w+", result.stdout)
    assert cpu_lines(results[0].stderr) == [loaded(library, "bundled, beside the executable")]
    info, baseline = (system_info(result.stderr) for result in results)
    feature = "AVX2 = 1" if ARCH == "x86_64" else "DOTPROD = 1"
    assert feature in info and feature not in baseline
    assert info.count("CPU : ") == 1, "one CPU backend is registered"


def test_bench_takes_the_options_too(single: Path, library: Library, model: Path, home: Path) -> None:
    arguments = ("bench", "-m", model, "-p", "8", "-n", "0", "-r", "1", "-t", "2", "-o", "jsonl")
    chosen = start(single, *arguments, "--cpu-variant", library.variant, home=home)
    assert chosen.returncode == 0 and cpu_lines(chosen.stderr) == [loaded(library, "bundled, beside the executable")]
    baseline = start(single, *arguments, "--cpu-variant", "baseline", home=home)
    assert baseline.returncode == 0 and cpu_lines(baseline.stderr) == []
