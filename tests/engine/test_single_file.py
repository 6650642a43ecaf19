"""The finished single file: serves a real model, and stays a server whatever is done to its payload."""

from __future__ import annotations

import json
import os
import platform
import shutil
import subprocess
import zipfile
from pathlib import Path

import pytest
from server_process import ServerProcess

from opencoti_build import manifest
from opencoti_build.gates.serving import environment

WINE = next((found for name in ("wine64", "wine", "/usr/lib/wine/wine64") if (found := shutil.which(name))), None)
AARCH64_LOADER = Path("/usr/aarch64-linux-gnu/lib/ld-linux-aarch64.so.1")


def server(file: Path, model: Path, home: Path, *flags: str) -> ServerProcess:
    """The file as the README starts it, with caches of its own."""
    return ServerProcess(file, model, "--threads", "2", "--ctx-size", "512", *flags, env={"OPENCOTI_LLAMAFILE_CACHE": str(home / "cache"), "HOME": str(home)})


def run(words: list[str], home: Path, **more: str) -> subprocess.CompletedProcess[str]:
    clean = environment(home, {"OPENCOTI_LLAMAFILE_CACHE": str(home / "cache"), "HOME": str(home)} | more)
    return subprocess.run(words, env=clean, capture_output=True, text=True, timeout=300)


@pytest.fixture(scope="module")
def file(universal: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A private copy, so that what the engine puts beside it stays out of the folder of finished files."""
    folder = tmp_path_factory.mktemp("single")
    shutil.copy(universal, folder)
    return folder / universal.name


def ask(running: ServerProcess) -> str:
    reply = running.post("/v1/chat/completions", {"messages": [{"role": "user", "content": "Say hello."}], "max_tokens": 16, "temperature": 0})
    return reply["choices"][0]["message"]["content"]


def test_it_serves_a_chat_and_says_what_it_is(file: Path, universal: Path, model: Path, tmp_path: Path) -> None:
    document = manifest.read(manifest.beside(universal))
    with server(file, model, tmp_path) as running:
        assert ask(running).strip()
        props = running.get("/props").json["opencoti"]
        assert json.dumps(props).count(document.engine) >= 1
        assert "features" in running.get("/health").json
        assert all("opencoti" in slot for slot in running.get("/slots").json)
        log = running.log
    assert "bundled, beside the executable" in log, log


def test_version_is_what_the_manifest_says(file: Path, universal: Path, tmp_path: Path) -> None:
    document = manifest.read(manifest.beside(universal))
    done = run(["sh", str(file), "--version"], tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[0] == document.engine
    assert document.tree in done.stdout and document.base[0].version in done.stdout


def test_the_payload_lists_every_library_of_the_manifest(file: Path, universal: Path, tmp_path: Path) -> None:
    document = manifest.read(manifest.beside(universal))
    listed = run(["sh", str(file), "payload", "list"], tmp_path).stdout
    libraries = [entry.name for entry in document.entries if entry.name.startswith("ggml-")]
    assert libraries and all(name in listed for name in libraries)


def without_payload(file: Path, universal: Path, target: Path) -> Path:
    """The host block alone, as somebody would cut it."""
    document = manifest.read(manifest.beside(universal))
    target.write_bytes(file.read_bytes()[: document.host.size])
    target.chmod(0o755)
    return target


def test_without_its_payload_it_serves_on_the_baseline(file: Path, universal: Path, model: Path, tmp_path: Path) -> None:
    bare = without_payload(file, universal, tmp_path / "bare.exe")
    with server(bare, model, tmp_path) as running:
        assert ask(running).strip()
        assert "bundled" not in running.log


def test_no_gpu_and_baseline_on_request(file: Path, model: Path, tmp_path: Path) -> None:
    with server(file, model, tmp_path, "--gpu", "disable", "--cpu-variant", "baseline") as running:
        assert ask(running).strip()
        assert "bundled" not in running.log


def test_a_wrong_library_beside_it_is_refused_and_the_bundled_one_taken(file: Path, universal: Path, model: Path, tmp_path: Path) -> None:
    folder = tmp_path / "beside"
    folder.mkdir()
    copy = folder / file.name
    shutil.copy(file, copy)
    with zipfile.ZipFile(file) as archive:
        names = [name for name in archive.namelist() if name.startswith("ggml-cpu-") and name.endswith(f"-{platform.machine()}.so")]
    for name in names:
        (folder / name).write_bytes(b"\x7fELF not a library")
    with server(copy, model, tmp_path) as running:
        assert ask(running).strip()
        assert "bundled, beside the executable" in running.log, running.log


@pytest.mark.skipif(shutil.which("unzip") is None, reason="unzip is not installed")
def test_unzip_sees_what_the_manifest_lists(file: Path, universal: Path) -> None:
    document = manifest.read(manifest.beside(universal))
    assert subprocess.run(["unzip", "-tqq", str(file)], capture_output=True).returncode == 0
    for entry in document.entries:
        done = subprocess.run(f"unzip -p '{file}' '{entry.name}' | sha256sum", shell=True, capture_output=True, text=True, check=True)
        assert done.stdout.split()[0] == entry.sha256, entry.name


def test_the_plain_program_taken_out_runs_alone(file: Path, tmp_path: Path) -> None:
    with zipfile.ZipFile(file) as archive:
        program = tmp_path / "engine"
        program.write_bytes(archive.read(f"bin/linux-{platform.machine()}"))
    program.chmod(0o755)
    done = run([str(program), "--version"], tmp_path)
    assert done.returncode == 0 and done.stdout.startswith("opencoti-")


@pytest.mark.skipif(shutil.which("qemu-aarch64-static") is None or not AARCH64_LOADER.exists(), reason="qemu-user-static and libc6-arm64-cross are not installed")
def test_the_aarch64_program_runs_and_loads_its_library(file: Path, model: Path, tmp_path: Path) -> None:
    emulator = ["qemu-aarch64-static", "-L", str(AARCH64_LOADER.parents[1])]
    with zipfile.ZipFile(file) as archive:
        archive.extractall(tmp_path, [name for name in archive.namelist() if name.endswith("aarch64.so") or name == "bin/linux-aarch64"])
    program = tmp_path / "engine"
    (tmp_path / "bin" / "linux-aarch64").rename(program)
    program.chmod(0o755)
    done = run([*emulator, str(program), "--version"], tmp_path)
    assert done.returncode == 0 and done.stdout.startswith("opencoti-"), done.stderr
    words = [*emulator, str(program), "completion", "-m", str(model), "-p", "The capital of France is", "-n", "4", "--temp", "0", "-t", "2", "-c", "64", "-no-cnv"]
    done = run(words, tmp_path)
    assert done.returncode == 0 and len(done.stdout.split("The capital of France is")[-1].split()) >= 3, done.stderr
    assert "ggml-cpu-armv8" in done.stderr, done.stderr


@pytest.mark.skipif(WINE is None, reason="wine is not installed")
def test_under_wine_it_says_its_version_and_lists_and_extracts(file: Path, universal: Path, tmp_path: Path) -> None:
    document = manifest.read(manifest.beside(universal))
    prefix = {"WINEPREFIX": str(tmp_path / "wine"), "WINEDEBUG": "-all", "PATH": os.environ["PATH"]}
    done = run([WINE, str(file), "--version"], tmp_path, **prefix)
    assert done.returncode == 0 and done.stdout.splitlines()[0].strip() == document.engine, done.stderr
    listed = run([WINE, str(file), "payload", "list"], tmp_path, **prefix)
    assert listed.returncode == 0 and "ggml-cpu-avx2-win-x86_64.dll" in listed.stdout
    out = tmp_path / "out"
    out.mkdir()
    done = run([WINE, str(file), "payload", "extract", "ggml-cpu-avx2-win-x86_64.dll", "--to", f"Z:{out}"], tmp_path, **prefix)
    assert done.returncode == 0, done.stderr
    with zipfile.ZipFile(file) as archive:
        assert (out / "ggml-cpu-avx2-win-x86_64.dll").read_bytes() == archive.read("ggml-cpu-avx2-win-x86_64.dll")
