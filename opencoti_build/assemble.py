"""Makes an artifact: plans its parts, builds the engines, joins the host block, appends the payload, writes the papers.

Every step looks at content: an engine is taken from the cache by the digest of its inputs, a host block by the digest of its programs,
and an artifact stays as it is when its manifest names the same inputs and its bytes still have the manifest's sha256.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from . import components, container, files, loader, manifest, report, toolchains, universal, variants
from .cache import digest_of
from .components import Component, Library
from .container import PayloadEntry
from .errors import IncompleteError, ManifestError, UsageError
from .plan import Part, Plan, State, Timings
from .sources import Tree, Upstream, Workshop
from .store import Found, Store
from .variants import ComponentLibrary, EngineLibraries, HostKind, Variant

HOST_TARGETS = ("windows-x86_64", "linux-x86_64", "linux-aarch64")
"""The programs of the universal host block, the same in every variant; the first is the PE in front."""

HOST_SCHEMA = 1
"""Raise it when the way host blocks are joined changes without any input changing."""


@dataclass(frozen=True)
class Artifact:
    """A finished file and its manifest; ``changed`` is False when it was there already."""

    path: Path
    manifest: manifest.Manifest
    changed: bool


def engine(workshop: Workshop, target: str, *, toolchain: str = "zig", pristine: bool = False, jobs: int | None = None) -> Component:
    """The engine component of one target, built if need be. ``native`` stands for this machine.

    ``pristine`` builds the base without the series: the rival of benchmarks and of the off-means-off tests.
    """
    return Builder(workshop, toolchain=toolchain, jobs=jobs).engine(target, pristine=pristine)


def artifact(workshop: Workshop, variant: Variant, *, toolchain: str | None = None, strict: bool = False, jobs: int | None = None, out: Path | None = None) -> Artifact:
    """Build one variant into ``out`` (default ``dist/``). Raises IncompleteError with ``strict`` when parts are missing."""
    return Builder(workshop, toolchain=toolchain or variant.toolchain, jobs=jobs).artifact(variant, strict=strict, out=out or workshop.project.dist)


class Builder:
    """One run: pins, patched sources and toolchain are looked up once."""

    def __init__(self, workshop: Workshop, *, toolchain: str = "zig", jobs: int | None = None) -> None:
        self.workshop = workshop
        self.jobs = jobs
        self.upstream = Upstream.load(workshop)
        self.identity = workshop.project.identity()
        self.toolchain = toolchains.named(toolchain, self.upstream.fetcher, self.upstream.pins)
        self.timings = Timings(workshop.cache.root / "timings.json")
        self.store = Store(workshop.project.dist / "components")

    # ---- parts ----------------------------------------------------------------------------------------------------------------

    def _target(self, name: str) -> toolchains.Target:
        return toolchains.machine_target() if name == "native" else toolchains.target_named(name)

    def _built(self, name: str, *, pristine: bool = False) -> Component | None:
        """The engine of a target if the cache has it; nothing is fetched or built."""
        target = self._target(name)
        tree = self.upstream.base.identified().tree_id if pristine else self.upstream.patched.tree_id
        assert tree is not None
        return components.find_component(self.workshop.cache, self._key(target, tree, pristine))

    def _cpu_variants(self, target: toolchains.Target, pristine: bool) -> tuple[str, ...]:
        return () if pristine or self.toolchain.name != "zig" else target.variants

    def _key(self, target: toolchains.Target, tree: str, pristine: bool) -> str:
        wanted = self._cpu_variants(target, pristine)
        flags = components.cache_variables(
            target,
            self.toolchain,
            identity=self.identity,
            tree_id=tree,
            base_version=self.upstream.pin.version,
            base_commit=self.upstream.pin.commit,
            variants=wanted,
        )
        return components.component_key(target, self.toolchain, tree_id=tree, flags=flags, variants=wanted)

    def engine(self, name: str, *, pristine: bool = False) -> Component:
        """The engine of a target, from the cache or built now."""
        if (found := self._built(name, pristine=pristine)) is not None:
            return found
        target = self._target(name)
        source: Tree = self.upstream.pristine() if pristine else self.upstream.tree()
        root = self.workshop.project.build / "pristine" if pristine else self.workshop.project.build
        started = time.monotonic()
        component = components.build_engine(
            target,
            source.path,
            source.tree_id,
            self.toolchain,
            identity=self.identity,
            base_version=self.upstream.pin.version,
            base_commit=self.upstream.pin.commit,
            variants=self._cpu_variants(target, pristine),
            cache=self.workshop.cache,
            console=self.workshop.console,
            runner=self.workshop.runner,
            build_root=root,
            jobs=self.jobs,
            current_tree=None if pristine else lambda: self.upstream.tree().tree_id,
        )
        self.timings.put(self._timing(name, pristine), time.monotonic() - started)
        return component

    def _warm(self, names: Sequence[str]) -> None:
        """Several engines to build: what the toolchain can do for all of them at once comes first."""
        cold = [self._target(name) for name in names if self._built(name) is None]
        if len(cold) > 1:
            workshop = self.workshop
            components.warm(self.toolchain, cold, cache=workshop.cache, console=workshop.console, runner=workshop.runner, build_root=workshop.project.build)

    def _timing(self, name: str, pristine: bool = False) -> str:
        return f"engine {name} {self.toolchain.name}{' pristine' if pristine else ''}"

    # ---- plan -----------------------------------------------------------------------------------------------------------------

    def host_targets(self, variant: Variant) -> tuple[str, ...]:
        """The targets whose programs make the host of a variant."""
        return HOST_TARGETS if variant.host is HostKind.UNIVERSAL else ("native",)

    def plan(self, variant: Variant) -> Plan:
        """All parts of ``variant`` and their state; fetches and builds nothing."""
        parts = [self._engine_part(name) for name in self.host_targets(variant)]
        for library in variant.libraries:
            if isinstance(library, EngineLibraries):
                parts += self._engine_library_parts(library)
            else:
                parts.append(self._component_part(library))
        return Plan(self.identity.artifact(variant.suffix), tuple(parts))

    def _engine_part(self, name: str) -> Part:
        if reason := self.toolchain.supports(self._target(name)):
            return Part(f"engine {name}", self.toolchain.name, State.MISSING, reason)
        state = State.READY if self._built(name) is not None else State.BUILD
        source = f"{self.upstream.pin.name} {self.upstream.pin.version} + {len(self.upstream.patched.patches)} patches, {self.toolchain.name}"
        return Part(f"engine {name}", source, state, estimate=self.timings.get(self._timing(name)))

    def _engine_library_parts(self, library: EngineLibraries) -> list[Part]:
        target = self._target(library.target)
        state = State.READY if self._built(library.target) is not None else State.BUILD
        return [Part(target.library_name(variant), f"with engine {library.target}", state, estimate=0.0) for variant in self._cpu_variants(target, False)]

    def _component_part(self, library: ComponentLibrary) -> Part:
        found = self.store.find(library)
        if found is None:
            return Part(library.part, f"component {library.component}", State.MISSING, f"no {library.file} in {self.store.folder(library).relative_to(self.workshop.project.root).as_posix()}")
        return Part(library.part, f"component {library.component} {found.build}", State.READY)

    # ---- artifact -------------------------------------------------------------------------------------------------------------

    def artifact(self, variant: Variant, *, strict: bool, out: Path) -> Artifact:
        """Plan, build, join, append, describe."""
        console = self.workshop.console
        plan = self.plan(variant)
        plan.show(console)
        if strict:
            refuse_missing(plan)
        targets = list(dict.fromkeys([*self.host_targets(variant), *_engine_targets(variant)]))
        self._warm(targets)
        engines = {name: self.engine(name) for name in targets}
        host = self.host([engines[name] for name in self.host_targets(variant)], variant)
        entries = self._entries(variant, engines)
        path = out / plan.artifact
        inputs = digest_of([HOST_SCHEMA, files.sha256_file(host), self.identity.engine, [_fact(entry) for entry in entries]])
        facts = report.Facts.gather(self.upstream, self.identity, engines.values(), plan)
        kept = _kept(path, inputs)
        if kept is None:
            console.step(f"Writing {path.name}")
            started = time.monotonic()
            assembled = container.append(host, path, entries, engine=self.identity.engine, windows_limit=variant.windows_limit, console=console, replace=False)
            self.timings.put(f"assemble {variant.name}", time.monotonic() - started)
            document = report.manifest_of(assembled, facts, variant, self.identity.engine, inputs)
        else:
            document = report.renewed(kept, facts)
        report.write_papers(out, path, document, facts, self.identity, variants.load(self.workshop.project.variants))
        return Artifact(path, document, changed=kept is None)

    def host(self, engines: Sequence[Component], variant: Variant) -> Path:
        """The host block of these engines, joined if the cache does not have it."""
        if variant.host is HostKind.PROGRAM:
            return engines[0].program_path
        windows, *others = engines
        if windows.os != "windows":
            raise UsageError("The first engine of a universal host must be the one for Windows.")
        loaders = self.loaders([item.target for item in others if item.os == "linux"])
        stages = list(universal.launcher_stages())
        key = digest_of([HOST_SCHEMA, self.identity.engine, stages, [[item.target, item.program.sha256] for item in engines], {name: hashlib.sha256(data).hexdigest() for name, data in loaders.items()}])
        directory = self.workshop.cache.result("host", key)
        path = directory / "host.exe"
        if not directory.is_dir():
            with self.workshop.cache.producing("host", key) as fresh:
                universal.build_host(fresh / path.name, windows.program_path, {item.target: item.program_path for item in others}, self.identity.engine, loaders)
        return path

    def loaders(self, names: Sequence[str]) -> dict[str, bytes]:
        """What maps the programs of these targets out of the file; a second of work when cold. Only zig makes programs for no C library."""
        if not isinstance(self.toolchain, toolchains.ZigToolchain):
            return {}
        scratch = self.workshop.project.build / "components" / "loaders.tmp"
        targets = [self._target(name) for name in names]
        return {target.name: loader.build(target, self.toolchain, cache=self.workshop.cache, runner=self.workshop.runner, scratch=scratch) for target in targets}

    def _entries(self, variant: Variant, engines: dict[str, Component]) -> list[PayloadEntry]:
        entries: list[PayloadEntry] = []
        for library in variant.libraries:
            if isinstance(library, EngineLibraries):
                entries += [_engine_entry(item) for item in engines[library.target].libraries if item.kind == library.kind]
            elif (found := self.store.find(library)) is not None:
                entries.append(_store_entry(library, found))
        return entries


def refuse_missing(plan: Plan) -> None:
    """Raise IncompleteError when a part of the plan is missing."""
    if plan.missing:
        names = ", ".join(part.name for part in plan.missing)
        raise IncompleteError(f"{plan.artifact} would lack {names}: bring the components, or build without --strict.")


def _engine_targets(variant: Variant) -> list[str]:
    return [library.target for library in variant.libraries if isinstance(library, EngineLibraries)]


def _engine_entry(library: Library) -> PayloadEntry:
    return PayloadEntry(
        name=library.name,
        path=library.path,
        library=library.entry(),
        component=f"engine/{library.os}-{library.arch}",
        build=library.build,
        sha256=library.sha256,
        crc32=library.crc32,
    )


def _store_entry(library: ComponentLibrary, found: Found) -> PayloadEntry:
    facts = {
        "name": library.entry,
        "file": library.file,
        "kind": library.kind,
        "variant": library.variant,
        "os": library.os,
        "arch": library.arch,
        "abi": found.abi,
        "build": found.build,
    }
    return PayloadEntry(library.entry, found.path, library=facts, component=library.component, build=found.build, sha256=found.sha256, crc32=found.crc32)


def _fact(entry: PayloadEntry) -> list[object]:
    return [entry.name, entry.sha256, entry.component, entry.build, entry.method.value, dict(entry.library or {})]


def _kept(path: Path, inputs: str) -> manifest.Manifest | None:
    """The manifest of a file that is there, made of these inputs and still what its manifest says; else None."""
    try:
        document = manifest.read(manifest.beside(path))
    except ManifestError:
        return None
    if document.inputs != inputs or not path.is_file() or path.stat().st_size != document.size:
        return None
    return document if files.sha256_file(path) == document.sha256 else None
