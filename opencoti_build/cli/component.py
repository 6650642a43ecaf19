"""``invoke component``: the engine of one platform, its CPU libraries with it."""

from __future__ import annotations

import json as json_module
import sys
from pathlib import Path

from invoke import Collection
from invoke.context import Context

from .. import assemble, components, container, toolchains
from ..components import Component
from ..console import Console, count_of, human_bytes
from ..container import PayloadEntry
from ..errors import UsageError
from .common import CommandContext, command, context, job_count

_TARGET = "A platform, such as linux-x86_64, or 'native' for this machine; 'invoke component list' shows them."
_TOOLCHAIN = f"One of {', '.join(toolchains.NAMES)} (default: zig; native for the target 'native')."


def _builder(made: CommandContext, target: str, toolchain: str, jobs: str = "") -> assemble.Builder:
    return assemble.Builder(made, toolchain=toolchain or ("native" if target == "native" else "zig"), jobs=job_count(jobs))


@command(
    help={
        "target": _TARGET,
        "toolchain": _TOOLCHAIN,
        "jobs": "Compilers at once (default: as many as processor and memory allow).",
        "pristine": "Build the base without the series.",
        "json": "Print component.json instead of the program's path.",
    }
)
def build(c: Context, target: str, toolchain: str = "", jobs: str = "", pristine: bool = False, json: bool = False) -> None:
    """Build the engine for a platform, unless its inputs are those of one in the cache; prints the program's path."""
    made = context(c)
    if target != "native":
        toolchains.target_named(target)
    component = _builder(made, target, toolchain, jobs).engine(target, pristine=pristine)
    if json:
        print((component.directory / "component.json").read_text("utf-8"), end="")
        return
    _show(made, component)
    print(component.program_path)


def _show(made: CommandContext, component: Component) -> None:
    rows = [(component.program.file, "program", human_bytes(component.program.size), component.program.sha256)]
    rows += [(library.file, f"{library.kind} {library.variant}", human_bytes(library.size), library.sha256) for library in component.libraries]
    made.console.table(f"{component.engine} for {component.target}, build {component.build}", ("file", "what", "size", "sha256"), rows, right=(2,))


@command(name="list", help={"json": "Print JSON instead of a table."})
def list_components(c: Context, json: bool = False) -> None:
    """Show the platforms, and the engines in the cache."""
    made = context(c)
    built = components.all_components(made.cache)
    targets = toolchains.load_targets().values()
    if json:
        document = {
            "schema": 1,
            "targets": [{"name": target.name, "variants": list(target.variants), "experimental": target.experimental} for target in targets],
            "components": [json_module.loads((component.directory / "component.json").read_text("utf-8")) for component in built],
        }
        print(json_module.dumps(document, indent=1))
        return
    console = Console(sys.stdout)
    rows = [(target.name, target.zig_triple, ", ".join(target.variants) or "-", "on request only" if target.experimental else "default") for target in targets]
    console.table("Targets", ("target", "triple", "CPU libraries", "built"), rows)
    engines = [(item.target, item.toolchain, item.engine, item.tree_id[:12], item.build, human_bytes(item.program.size), item.key[:12]) for item in built]
    console.table("Engines in the cache", ("target", "toolchain", "engine", "tree", "build", "program", "key"), engines, right=(5,))


@command(help={"target": _TARGET, "toolchain": _TOOLCHAIN, "out": "Folder to copy into."})
def export(c: Context, target: str, out: str, toolchain: str = "") -> None:
    """Copy an engine's program and libraries, with component.json, into a folder; builds it if need be."""
    made = context(c)
    component = _builder(made, target, toolchain).engine(target)
    for path in component.export(Path(out).absolute()):
        print(path)


@command(
    help={
        "host": "An executable: a native program, an Actually Portable Executable, or a file of ours.",
        "out": "The file to write.",
        "library": "NAME=FILE: put FILE in under this name; may be given several times.",
        "replace": "The host holds a payload already: leave that out.",
    },
    iterable=["library"],
)
def append(c: Context, host: str, out: str, library: list[str], replace: bool = False) -> None:
    """Append a payload to any executable without changing a byte of it; prints the finished file's path."""
    made = context(c)
    entries = []
    for text in library:
        name, mark, path = text.partition("=")
        if not mark or not name or not path:
            raise UsageError(f"--library is {text!r}; give it as NAME=FILE.")
        entries.append(PayloadEntry(name, Path(path), library={"file": Path(path).name}))
    done = container.append(Path(host), Path(out), entries, engine=made.project.identity().engine, replace=replace, windows_limit=out.lower().endswith(".exe"), console=made.console)
    made.console.success(f"{done.path.name} written, {human_bytes(done.size)}, {count_of(len(entries), 'library', 'libraries')}, sha256 {done.sha256}")
    print(done.path)


ns = Collection("component")
for _task in (build, list_components, export, append):
    ns.add_task(_task)
