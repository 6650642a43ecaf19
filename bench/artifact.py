"""What the single file and the toolkit around it cost.

    python bench/artifact.py FILE [--rounds 11] [--write]

Start: `sh FILE --version` on a warm cache against the native program; the first start, in a cache folder that is there and empty, against a copy
of the program. Verify: against
`sha256sum` of a large file with the same host. Payload changed only: assembling that large file against copying it.
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
import rounds

from opencoti_build import container, files, manifest
from opencoti_build.container import PayloadEntry
from opencoti_build.project import find_project

NOTE = """\
"In memory": neither side waits for the disk; the copy then runs at the speed of memory, and ours cannot be faster than the sha256 of the finished
file (about 1.1 s for 1.2 GiB), which the manifest needs. "On the disk" is what `invoke build` does: whole under its name or not there, and written out.
About the first start: docs/decisions/0006.

Made by `bench/artifact.py`.
"""

PAYLOAD_MIB = 1200
"""Size of the stand-in for GPU libraries, of random bytes."""


def timed(action: Callable[[], object]) -> Callable[[], Mapping[str, float]]:
    def run() -> Mapping[str, float]:
        started = time.perf_counter()
        action()
        return {"seconds": time.perf_counter() - started}

    return run


def native_program(file: Path, folder: Path) -> Path:
    """The plain program for this machine, taken out of the file."""
    name = f"bin/linux-{os.uname().machine}"
    program = folder / "program"
    with program.open("wb") as stream:
        subprocess.run(["unzip", "-p", str(file), name], stdout=stream, check=True)
    program.chmod(0o755)
    return program


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path)
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--write", action="store_true", help="write the table to docs/evaluations/toolkit-cost.md")
    given = parser.parse_args()
    project = find_project()
    rows: list[list[str]] = []
    with tempfile.TemporaryDirectory(dir=project.build) as name:
        folder = Path(name)
        program = native_program(given.file, folder)
        warm = {**os.environ, "OPENCOTI_LLAMAFILE_CACHE": str(folder / "warm")}
        start = ["sh", str(given.file), "--version"]
        subprocess.run(start, env=warm, check=True, capture_output=True)

        def first_start() -> None:
            cache = folder / "cold"
            subprocess.run(start, env={**os.environ, "OPENCOTI_LLAMAFILE_CACHE": str(cache)}, check=True, capture_output=True)

        def clear() -> None:
            shutil.rmtree(folder / "cold", ignore_errors=True)
            (folder / "cold").mkdir()
            (folder / "copy").unlink(missing_ok=True)

        def copy_program() -> None:
            subprocess.run(["cp", str(program), str(folder / "copy")], check=True)

        result = rounds.alternate(
            {
                "native": timed(lambda: subprocess.run([str(program), "--version"], check=True, capture_output=True)),
                "single file": timed(lambda: subprocess.run(start, env=warm, check=True, capture_output=True)),
            },
            given.rounds,
        )
        native, single = result["native"]["seconds"].median, result["single file"]["seconds"].median
        rows.append(["start, warm cache", f"native program {native * 1000:.1f} ms", f"{single * 1000:.1f} ms", f"+{(single - native) * 1000:.1f} ms", "+20 ms"])

        def cold_pair(action: Callable[[], object]) -> Callable[[], Mapping[str, float]]:
            run = timed(action)

            def cleared() -> Mapping[str, float]:
                clear()
                return run()

            return cleared

        result = rounds.alternate({"copy": cold_pair(copy_program), "first start": cold_pair(first_start)}, given.rounds)
        copy, first = result["copy"]["seconds"].median, result["first start"]["seconds"].median
        rows.append(["first start", f"copy of the program {copy * 1000:.1f} ms", f"{first * 1000:.1f} ms", f"{first / copy:.2f} x", "1.5 x"])

        stand_in = folder / "stand-in.so"
        generator = random.Random(1)
        with stand_in.open("wb") as stream:
            for _ in range(PAYLOAD_MIB):
                stream.write(generator.randbytes(1 << 20))
        document = manifest.read(manifest.beside(given.file))
        sha256, crc32 = files.sha256_file(stand_in), container._measure(stand_in)[1]  # noqa: SLF001 - the figures a component carries
        host = folder / "host.exe"
        with given.file.open("rb") as source, host.open("wb") as target:
            target.write(source.read(document.host.size))
        host.chmod(0o755)
        found = next((project_host for project_host in _cached_hosts(document.host.sha256)), None)
        if found is not None:
            host = found
        big = folder / "big.exe"
        entry = PayloadEntry("ggml-cuda.so", stand_in, sha256=sha256, crc32=crc32)

        def assemble(*, sync: bool = False) -> None:
            container.append(host, big, [entry], engine=document.engine, windows_limit=True, sync=sync)

        def replace_copy() -> None:
            """What replaces a file as safely as the toolkit does: whole under its name or not there, and on the disk."""
            shutil.copyfile(source_file, folder / "big.new")
            with (folder / "big.new").open("rb") as stream:
                os.fsync(stream.fileno())
            os.replace(folder / "big.new", folder / "big.copy")

        def afresh(action: Callable[[], object], *names: str) -> Callable[[], Mapping[str, float]]:
            run = timed(action)

            def cleared() -> Mapping[str, float]:
                for name in names:
                    (folder / name).unlink(missing_ok=True)
                os.sync()
                return run()

            return cleared

        assemble()
        source_file = folder / "big.source"
        os.link(big, source_file)
        some = max(5, given.rounds // 3)
        result = rounds.alternate(
            {"copy": afresh(lambda: shutil.copyfile(source_file, folder / "big.copy"), "big.copy"), "assemble": afresh(assemble, "big.exe")}, some
        )
        copy, made = result["copy"]["seconds"].median, result["assemble"]["seconds"].median
        rows.append([f"payload of {PAYLOAD_MIB} MiB changed, in memory", f"copy of the file {copy:.2f} s", f"{made:.2f} s", f"{made / copy:.2f} x", "1.3 x"])
        result = rounds.alternate({"copy": afresh(replace_copy), "assemble": afresh(lambda: assemble(sync=True))}, some)
        copy, made = result["copy"]["seconds"].median, result["assemble"]["seconds"].median
        rows.append([f"payload of {PAYLOAD_MIB} MiB changed, on the disk", f"copy, fsync, rename {copy:.2f} s", f"{made:.2f} s", f"{made / copy:.2f} x", "1.3 x"])
        result = rounds.alternate(
            {
                "sha256sum": timed(lambda: subprocess.run(["sha256sum", str(big)], check=True, capture_output=True)),
                "verify": timed(lambda: subprocess.run([sys.executable, "-m", "invoke", "verify", "artifact", str(big)], cwd=project.root, capture_output=True)),
            },
            max(3, given.rounds // 3),
        )
        rival, ours = result["sha256sum"]["seconds"].median, result["verify"]["seconds"].median
        rows.append([f"verify {big.stat().st_size >> 20} MiB", f"sha256sum {rival:.2f} s", f"{ours:.2f} s", f"{ours / rival:.2f} x", "1.2 x"])
    build = rounds.alternate(
        {"build": timed(lambda: subprocess.run([sys.executable, "-m", "invoke", "build", "--variant", document.variant], cwd=project.root, check=True, capture_output=True))},
        max(3, given.rounds // 3),
    )
    seconds = build["build"]["seconds"].median
    rows.append(["build, nothing changed", "", f"{seconds:.2f} s", "", "2 s"])
    text = (
        f"# What the single file and the toolkit cost\n\n{given.file.name}, {rounds.machine()}; medians of alternating rounds.\n\n"
        + rounds.markdown(["what", "rival", "ours", "difference", "bar"], rows)
        + "\n" + NOTE
    )
    print(text)
    if given.write:
        (project.root / "docs" / "evaluations" / "toolkit-cost.md").write_text(text, "utf-8")
    return 0


def _cached_hosts(sha256: str) -> list[Path]:
    from opencoti_build.cache import Cache, default_root

    root = Cache(default_root()).root / "results" / "host"
    return [path for path in root.glob("*/host.exe") if files.sha256_file(path) == sha256]


if __name__ == "__main__":
    raise SystemExit(main())
