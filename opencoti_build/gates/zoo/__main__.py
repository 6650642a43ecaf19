"""``python -m opencoti_build.gates.zoo``: write models where only Python, numpy and PyYAML are, such as a rented GPU machine.

It is run in a checkout; ``--gguf-py`` names that folder of the engine's base (``build/src/llama.cpp/gguf-py`` once it was built).
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from pathlib import Path

from ...errors import OpencotiError
from . import library
from .provide import choose, zoo_file
from .shapes import load
from .writer import data_size, write

ROOT = Path(__file__).resolve().parents[3]


def main(arguments: list[str] | None = None) -> int:
    """Write the named models and print their paths; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m opencoti_build.gates.zoo", description="Write models of the zoo.")
    parser.add_argument("names", nargs="*", help="names of models or families; none lists them all")
    parser.add_argument("--out", type=Path, default=Path(), help="folder for the files (default: here)")
    parser.add_argument("--gguf-py", type=Path, default=ROOT / "build" / "src" / "llama.cpp" / "gguf-py", help="gguf-py of the engine's base")
    options = parser.parse_args(arguments)
    try:
        models = load(zoo_file(ROOT))
        if not options.names:
            for model in models:
                print(f"{model.name:28} {model.group.value:6} {data_size(model) / 1e9:8.3f} GB")
            return 0
        for model in choose(models, options.names):
            print(write(model, options.out.absolute(), gguf=library.load(options.gguf_py.absolute()), progress=_reporter(model.name, data_size(model))), flush=True)
    except OpencotiError as error:
        print(f"error: {error.message}", file=sys.stderr)
        return error.exit_code
    return 0


def _reporter(name: str, total: int, *, interval: float = 5.0) -> Callable[[int], None]:
    """Progress with an estimate of what is left, a line now and then."""
    done, started, last = 0, time.monotonic(), time.monotonic()

    def advance(count: int) -> None:
        nonlocal done, last
        done += count
        now = time.monotonic()
        if now - last >= interval:
            last = now
            left = (now - started) * (total - done) / done
            print(f"{name}: {done / 1e9:.1f} of {total / 1e9:.1f} GB, {left:.0f} s left", file=sys.stderr, flush=True)

    return advance


if __name__ == "__main__":
    sys.exit(main())
