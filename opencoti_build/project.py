"""Where the project's files lie, and what this engine is called."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from .errors import DataError
from .schema import Node, read_yaml


@dataclass(frozen=True)
class Identity:
    """The names a cut goes by. ``version`` is the pinned upstream llamafile version, ``tag`` our cut (``c1``, ``c2``...)."""

    version: str
    tag: str

    @property
    def engine(self) -> str:
        """What ``--version`` prints first."""
        return f"opencoti-{self.version}-{self.tag}"

    @property
    def full_tag(self) -> str:
        """The release tag."""
        return f"llamafile-v{self.version}+opencoti.{self.tag}"

    def artifact(self, suffix: str) -> str:
        """The file name of an artifact, e.g. ``artifact("universal.llamafile.exe")``."""
        return f"opencoti-llamafile-{self.version}-{self.tag}-{suffix}"


@dataclass(frozen=True)
class Project:
    """The checkout below ``root``."""

    root: Path

    @property
    def vendors(self) -> Path:
        """Pins of upstreams and toolchains."""
        return self.root / "vendors"

    @property
    def patches(self) -> Path:
        """One folder a patched upstream, its series inside."""
        return self.root / "patches"

    @property
    def variants(self) -> Path:
        """What goes into each artifact."""
        return self.root / "variants"

    @property
    def pins(self) -> Path:
        """What integrators check."""
        return self.root / "pin"

    @property
    def build(self) -> Path:
        """Scratch: may be deleted at any time."""
        return self.root / "build"

    @property
    def dist(self) -> Path:
        """Finished artifacts."""
        return self.root / "dist"

    def identity(self) -> Identity:
        """VER from the llamafile pin, TAG from release.yaml."""
        version = Node(read_yaml(self.vendors / "llamafile.yaml"), "vendors/llamafile.yaml").get("version").text()
        release = Node(read_yaml(self.root / "release.yaml"), "release.yaml")
        tag = release.get("tag").text()
        release.done()
        return Identity(version, tag)


def find_project(start: Path | None = None) -> Project:
    """The project that holds ``start`` (default: this package's checkout)."""
    here = (start or Path(__file__)).resolve()
    for folder in (here, *here.parents):
        if (folder / "vendors").is_dir() and (folder / "pyproject.toml").is_file():
            return Project(folder)
    raise DataError(f"{here} is not inside a checkout of opencoti-llamafile: run this from the project's folder.")
