"""How long a cold build takes, against the bare cmake + ninja builds that it contains.

    python bench/build_time.py [--variant universal] [--targets linux-x86_64,...] [--repeat 1] [--work FOLDER] [--json FILE]

Both sides start with the downloads in place and everything else absent: no unpacked toolchain, no zig runtime, no build folder. The toolkit's
side is ``invoke build`` in a fresh clone of HEAD (so uncommitted changes are not measured): unpacking, patches, three engines with their
CPU libraries, host block, payload, manifest. The bare side is ``cmake`` and ``ninja`` for the same targets with the same flags, wrappers and
number of jobs, run one after the other by hand, from toolchain archives that are already unpacked; its zig cache is empty as well. Then
the toolkit once more with nothing changed.

The machine should be idle: the share of the processors that other processes took is printed, CPU time beside the wall time.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
import rounds as rounds_of

from opencoti_build import assemble, components, ninja, toolchains
from opencoti_build.cache import Cache, default_root
from opencoti_build.cli.common import CommandContext
from opencoti_build.console import Console, Mode
from opencoti_build.project import Project, find_project
from opencoti_build.runner import SystemRunner
from opencoti_build.toolchains.base import load_recipe

BAR = 1.15
UNCHANGED_BAR = 2.0


@dataclass(frozen=True)
class Timing:
    """Seconds: elapsed, of this machine's processors for the work itself, and the share (0..1) that other processes took meanwhile."""

    what: str
    wall: float
    cpu: float
    others: float


def busy_seconds() -> float:
    """Seconds that all processors together were busy since boot; 0 where the system does not tell (proc(5), /proc/stat)."""
    try:
        fields = Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:]
    except OSError:
        return 0.0
    user, nice, system, _idle, _iowait, irq, softirq = (int(field) for field in fields[:7])
    return (user + nice + system + irq + softirq) / os.sysconf("SC_CLK_TCK")


def timed(what: str, argv: Sequence[str | Path], *, cwd: Path, environment: dict[str, str]) -> Timing:
    """Run a program and time it; its output is shown only if it fails."""
    before, busy, started = resource.getrusage(resource.RUSAGE_CHILDREN), busy_seconds(), time.monotonic()
    done = subprocess.run([str(word) for word in argv], cwd=cwd, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    wall, after = time.monotonic() - started, resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    if done.returncode != 0:
        print(done.stdout[-6000:], file=sys.stderr)
        raise SystemExit(f"{what} failed with exit code {done.returncode}")
    others = max(0.0, busy_seconds() - busy - cpu) / (wall * (os.cpu_count() or 1))
    print(f"  {what}: {wall:.1f} s, {cpu:.1f} s of processor time, others {others:.0%}", file=sys.stderr, flush=True)
    return Timing(what, wall, cpu, others)


def fresh_cache(folder: Path, downloads: Path) -> Path:
    """A cache that holds the downloads and nothing else."""
    (folder / "blobs").mkdir(parents=True)
    for blob in (downloads / "blobs").iterdir():
        try:
            os.link(blob, folder / "blobs" / blob.name)
        except OSError:
            shutil.copyfile(blob, folder / "blobs" / blob.name)
    return folder


def toolkit(work: Path, root: Path, variant: str, jobs: int) -> tuple[Timing, Timing, Project]:
    """A cold ``invoke build`` in a fresh clone, then one with nothing changed."""
    checkout = work / "checkout"
    subprocess.run(["git", "clone", "--quiet", "--no-local", str(root), str(checkout)], check=True)
    environment = {**os.environ, "OPENCOTI_CACHE": str(fresh_cache(work / "cache", default_root())), "OPENCOTI_OFFLINE": "1", "PYTHONPATH": str(checkout)}
    environment.pop("OPENCOTI_CCACHE", None)
    argv = [sys.executable, "-m", "invoke", "build", "--variant", variant, "--jobs", str(jobs)]
    cold = timed(f"invoke build --variant {variant}, cold", argv, cwd=checkout, environment=environment)
    again = timed("the same with nothing changed", argv, cwd=checkout, environment=environment)
    return cold, again, Project(checkout)


def bare(work: Path, project: Project, names: Sequence[str], jobs: int) -> list[Timing]:
    """cmake and ninja as a person would run them, for each target."""
    runner, console = SystemRunner(), Console(io.StringIO(), mode=Mode.QUIET)
    cache = Cache(fresh_cache(work / "bare-cache", default_root()))
    made = CommandContext(project=project, console=console, runner=runner, cache=cache, offline=True, dry_run=False)
    builder = assemble.Builder(made, toolchain="zig", jobs=jobs)
    tree = builder.upstream.tree()
    timings = []
    for name in names:
        target = toolchains.target_named(name)
        setup = builder.toolchain.prepare(target, cache, runner, scratch=work)
        flags = components.cache_variables(
            target,
            builder.toolchain,
            identity=builder.identity,
            tree_id=tree.tree_id,
            base_version=builder.upstream.pin.version,
            base_commit=builder.upstream.pin.commit,
            variants=target.variants,
        )
        folder = work / f"bare-{name}"
        definitions = [f"-D{key}={value}" for key, value in flags.items()]
        configure = timed(f"{name}: cmake", (setup.tools.cmake, "-G", "Ninja", "-S", tree.path, "-B", folder, *setup.arguments, *definitions), cwd=work, environment=dict(setup.environment))
        goals = [*load_recipe().ninja_targets, *(f"bin/{target.library_name(variant)}" for variant in target.variants)]
        build = timed(f"{name}: ninja", (setup.tools.ninja, "-C", folder, "-j", str(jobs), *goals), cwd=work, environment=dict(setup.environment))
        timings += [configure, build]
    return timings


def report(variant: str, jobs: int, measured: Sequence[tuple[Timing, Timing, Sequence[Timing]]]) -> str:
    """The page for docs/evaluations."""
    parts_of = [f"# How long a cold build takes\n\n`invoke build --variant {variant}` with {jobs} jobs, {rounds_of.machine()}.\n"]
    for number, (cold, again, parts) in enumerate(measured, 1):
        wall, cpu = sum(part.wall for part in parts), sum(part.cpu for part in parts)
        rows = [
            [timing.what, f"{timing.wall:.1f}", f"{timing.cpu:.1f}", f"{timing.others:.0%}"]
            for timing in (*parts, Timing("bare, all", wall, cpu, 0.0), cold, again)
        ]
        parts_of.append((f"Round {number}\n\n" if len(measured) > 1 else "") + rounds_of.markdown(["step", "wall s", "processor s", "others"], rows))
        parts_of.append(
            f"Cold against bare: {cold.wall / wall:.3f} by wall time, {cold.cpu / cpu:.3f} by processor time (bar {BAR}). Nothing changed: {again.wall:.2f} s (bar {UNCHANGED_BAR} s).\n"
        )
    parts_of.append('"others" is the share of the processors that other processes took meanwhile. Made by `bench/build_time.py`, which says what each side starts from.\n')
    return "\n".join(parts_of)


def main() -> None:
    """Measure, print the table, write the figures."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--variant", default="universal")
    parser.add_argument("--targets", default=",".join(assemble.HOST_TARGETS), help="the builds that the variant contains")
    parser.add_argument("--repeat", type=int, default=1)
    parser.add_argument("--jobs", type=int, default=ninja.default_jobs())
    parser.add_argument("--work", type=Path, help="a folder for the builds, some GiB; it is emptied")
    parser.add_argument("--json", type=Path, help="write the figures there")
    parser.add_argument("--write", action="store_true", help="write the table to docs/evaluations/build-time.md")
    parser.add_argument("--keep", action="store_true", help="leave the folders of the builds")
    options = parser.parse_args()
    root = find_project().root
    names = options.targets.split(",")
    rounds = []
    for number in range(options.repeat):
        work = Path(tempfile.mkdtemp(prefix="build-time-", dir=options.work))
        try:
            print(f"round {number + 1} of {options.repeat}, {options.jobs} jobs, in {work}", file=sys.stderr)
            cold, again, project = toolkit(work, root, options.variant, options.jobs)
            rounds.append((cold, again, bare(work, project, names, options.jobs)))
        finally:
            if not options.keep:
                shutil.rmtree(work, ignore_errors=True)
    rows = [
        {"cold": asdict(cold), "unchanged": asdict(again), "bare": [asdict(part) for part in parts]} for cold, again, parts in rounds
    ]
    text = report(options.variant, options.jobs, rounds)
    print(text)
    if options.write:
        (root / "docs" / "evaluations" / "build-time.md").write_text(text, "utf-8")
    if options.json:
        options.json.write_text(json.dumps({"schema": 1, "variant": options.variant, "targets": names, "jobs": options.jobs, "rounds": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
