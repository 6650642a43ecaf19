"""Prompt and decode speed of the single file against vanilla llama.cpp, built by this machine's compiler for this machine's processor.

    python bench/speed.py FILE MODEL [--rounds 7] [--write]

FILE is an artifact with a program for this machine. The rival is built (or found in the cache) by the toolkit.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
import rounds

from opencoti_build import assemble
from opencoti_build.cache import Cache, default_root
from opencoti_build.cli.common import CommandContext
from opencoti_build.console import Console
from opencoti_build.project import find_project
from opencoti_build.runner import SystemRunner

BAR = 0.97
"""The least ratio to the rival that the project promises."""


def contender(command: list[str], model: Path, threads: int, prompt: int, decode: int) -> Callable[[], Mapping[str, float]]:
    """One run of the program's own benchmark: tokens a second for the prompt and for decoding."""

    def run() -> Mapping[str, float]:
        words = [*command, "bench", "-m", str(model), "-t", str(threads), "-p", str(prompt), "-n", str(decode), "-r", "3", "-o", "json"]
        done = subprocess.run(words, capture_output=True, text=True, check=True)
        rows = json.loads(done.stdout)
        return {f"prompt {prompt}" if row["n_prompt"] else f"decode {decode}": row["avg_ts"] for row in rows}

    return run


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path)
    parser.add_argument("model", type=Path)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, nargs="*", default=[1, 2])
    parser.add_argument("--rival", default="native-openmp", help="toolchain of the rival: native-openmp (upstream's default) or native (without OpenMP)")
    parser.add_argument("--prompt", type=int, default=256)
    parser.add_argument("--decode", type=int, default=64)
    parser.add_argument("--write", action="store_true", help="write the table to docs/evaluations/single-file-speed.md")
    given = parser.parse_args()
    project = find_project()
    workshop = CommandContext(project, Console(), SystemRunner(), Cache(default_root()), offline=False, dry_run=False)
    vanilla = assemble.engine(workshop, "native", toolchain=given.rival, pristine=True).program_path
    rows: list[list[str]] = []
    worst = float("inf")
    for threads in given.threads:
        result = rounds.alternate(
            {
                "vanilla": contender([str(vanilla)], given.model, threads, given.prompt, given.decode),
                "single file": contender(["sh", str(given.file)], given.model, threads, given.prompt, given.decode),
            },
            given.rounds,
        )
        for measure, rival in result["vanilla"].items():
            ours = result["single file"][measure]
            ratio = ours.median / rival.median
            worst = min(worst, ratio)
            rows.append([str(threads), measure, f"{rival.median:.1f}", f"{ours.median:.1f}", f"{ratio:.3f}", str(rival.disturbed + ours.disturbed)])
    table = rounds.markdown(["threads", "measure", "vanilla tok/s", "single file tok/s", "ratio", "disturbed runs"], rows)
    text = (
        f"# Speed of the single file\n\n{given.file.name} against vanilla llama.cpp of the same build, this machine's compiler and `-march=native` (toolchain {given.rival}). "
        f"Model {given.model.name}; {given.rounds} alternating rounds, medians. {rounds.machine()}. The bar is a ratio of {BAR}.\n\n{table}\n"
        "Made by `bench/speed.py`.\n"
    )
    print(text)
    if given.write:
        (project.root / "docs" / "evaluations" / "single-file-speed.md").write_text(text, "utf-8")
    return 0 if worst >= BAR else 1


if __name__ == "__main__":
    raise SystemExit(main())
