"""The papers of an artifact: its manifest, and over all artifacts of a folder SHA256SUMS, BUILD_INFO.md and RELEASE_NOTES.md."""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass, replace
from importlib import resources
from pathlib import Path
from typing import Any

import jinja2

from . import checksums, files, manifest
from .components import Component
from .console import human_bytes
from .container import WINDOWS_LIMIT, Assembled
from .epoch import source_date
from .errors import GitError, ManifestError
from .git import Git
from .manifest import Base, Block, Entry, Manifest, Missing, Patch
from .plan import Plan, State
from .project import Identity, Project
from .sources import Upstream
from .toolchains.base import FIXED_EPOCH
from .variants import Variant

BUILD_INFO = "BUILD_INFO.md"
RELEASE_NOTES = "RELEASE_NOTES.md"


@dataclass(frozen=True)
class Repository:
    """The state of this repository: its commit ("" outside git), the commit's time, and whether anything is uncommitted."""

    commit: str
    dirty: bool
    seconds: int = FIXED_EPOCH

    @classmethod
    def read(cls, project: Project) -> Repository:
        """Ask git; a folder that is no repository of its own (an unpacked archive) has no commit and counts as dirty."""
        try:
            git = Git.discover(project.root).with_work_tree(project.root)
            commit = git.resolve("HEAD") or ""
            seconds = int(git.text("log", "-1", "--format=%ct", commit)) if commit else FIXED_EPOCH
            return cls(commit, bool(git.status()) or not commit, seconds)
        except GitError:
            return cls("", True)

    @property
    def date(self) -> str:
        """``SOURCE_DATE_EPOCH`` as a day, else the day of the commit: never the clock, so that papers can be made again."""
        return time.strftime("%Y-%m-%d", time.gmtime(source_date() or self.seconds))


@dataclass(frozen=True)
class Facts:
    """What all artifacts of one run share."""

    repository: Repository
    bases: tuple[Base, ...]
    patches: tuple[Patch, ...]
    tree: str
    toolchains: dict[str, str]
    missing: tuple[Missing, ...]

    @classmethod
    def gather(cls, upstream: Upstream, identity: Identity, engines: Iterable[Component], plan: Plan) -> Facts:
        """Read pins, series, repository; the toolchains are those the engines were built with."""
        versions: dict[str, str] = {}
        for component in engines:
            versions.update(component.versions)
        llamafile = upstream.pins.get("llamafile")
        bases = [Base(upstream.pin.name, upstream.pin.version, upstream.pin.commit or "", upstream.patched.base_tree)]
        if llamafile is not None:
            bases.append(Base(llamafile.name, llamafile.version, llamafile.commit or ""))
        return cls(
            repository=Repository.read(upstream.workshop.project),
            bases=tuple(bases),
            patches=tuple(Patch(f"{patch.number:04d}", patch.title, patch.sha256) for patch in upstream.patched.patches),
            tree=upstream.patched.tree_id,
            toolchains=versions,
            missing=tuple(Missing(part.name, part.detail) for part in plan.parts if part.state is State.MISSING),
        )


def manifest_of(assembled: Assembled, facts: Facts, variant: Variant, engine: str, inputs: str) -> Manifest:
    """The manifest of a file that was just assembled."""
    document = Manifest(
        file=assembled.path.name,
        size=assembled.size,
        sha256=assembled.sha256,
        engine=engine,
        variant=variant.name,
        commit="",
        dirty=False,
        base=(),
        patches=(),
        tree="",
        toolchains={},
        complete=True,
        missing=(),
        host=Block(assembled.host_size, assembled.host_sha256),
        entries=tuple(
            Entry(
                name=entry.name,
                method=manifest.METHODS[entry.method],
                size=entry.size,
                compressed_size=entry.compressed_size,
                offset=entry.offset,
                crc32=f"{entry.crc32:08x}",
                sha256=entry.sha256,
                component=entry.component,
                build=entry.build,
            )
            for entry in assembled.entries
        ),
        inputs=inputs,
    )
    return renewed(document, facts)


def renewed(document: Manifest, facts: Facts) -> Manifest:
    """The manifest of a file whose bytes stay as they are, with the facts of now (a commit of the documentation changes those)."""
    return replace(
        document,
        commit=facts.repository.commit,
        dirty=facts.repository.dirty,
        base=facts.bases,
        patches=facts.patches,
        tree=facts.tree,
        toolchains=facts.toolchains,
        complete=not facts.missing,
        missing=facts.missing,
    )


def write_papers(out: Path, path: Path, document: Manifest, facts: Facts, identity: Identity, variants: dict[str, Variant]) -> None:
    """Write the manifest of ``path`` and renew the papers of all artifacts of this engine in ``out``."""
    manifest.write(manifest.beside(path), document)
    artifacts = [found for found in _artifacts(out) if found.engine == identity.engine and found.tree == facts.tree]
    values = {
        "identity": identity,
        "source_date": facts.repository.date,
        "repository": facts.repository,
        "base": facts.bases[0],
        "bases": facts.bases,
        "patches": facts.patches,
        "tree": facts.tree,
        "toolchains": facts.toolchains,
        "complete": all(found.complete for found in artifacts),
        "artifacts": [_row(found, variants) for found in artifacts],
    }
    for name in (BUILD_INFO, RELEASE_NOTES):
        files.write_text(out / name, render(name, values))
    known = {out / found.file: found.sha256 for found in artifacts}
    papers = [manifest.beside(target) for target in known] + [out / BUILD_INFO, out / RELEASE_NOTES]
    checksums.write(out / checksums.NAME, [*known, *papers], known=known)


def render(name: str, values: dict[str, Any]) -> str:
    """The document ``name`` from its template; an unknown value in a template is an error, not an empty text."""
    environment = jinja2.Environment(undefined=jinja2.StrictUndefined, keep_trailing_newline=True, autoescape=False)
    environment.filters["bytes"] = human_bytes
    return environment.from_string(resources.files("opencoti_build").joinpath("resources", f"{name}.j2").read_text("utf-8")).render(values)


def _artifacts(out: Path) -> list[Manifest]:
    """The manifests of the files in ``out`` that are there with the size they should have, by name."""
    found: list[Manifest] = []
    for path in sorted(out.glob(f"*{manifest.SUFFIX}")):
        try:
            document = manifest.read(path)
            target = out / document.file
            if manifest.beside(target) == path and target.stat().st_size == document.size:
                found.append(document)
        except (ManifestError, OSError):
            continue
    return found


def _row(document: Manifest, variants: dict[str, Variant]) -> dict[str, Any]:
    variant = variants.get(document.variant)
    return {
        "file": document.file,
        "title": variant.title if variant is not None else document.variant,
        "size": document.size,
        "sha256": document.sha256,
        "host": document.host,
        "entries": document.entries,
        "missing": document.missing,
        "windows_headroom": WINDOWS_LIMIT - document.size if variant is not None and variant.windows_limit else None,
    }
