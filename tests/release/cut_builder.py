"""Makes checkouts with cuts of tiny files that have the names and places of a real cut's."""

from __future__ import annotations

import hashlib
import random
from dataclasses import dataclass
from pathlib import Path

from opencoti_build import checksums
from opencoti_build.project import Identity

C1 = Identity("0.10.7", "c1")
C2 = Identity("0.10.7", "c2")
C3 = Identity("0.10.8", "c3")


def binary(seed: str, size: int = 3000) -> bytes:
    """Bytes that only ``seed`` decides, a program as far as a hub can see."""
    return b"MZ\0" + random.Random(seed).randbytes(size)


@dataclass(frozen=True)
class Checkout:
    """A checkout below ``root`` with the cut of ``identity`` in it."""

    root: Path
    identity: Identity

    @property
    def cut(self) -> Path:
        """The cut's folder."""
        return self.root / "releases" / self.identity.full_tag

    def put(self, name: str, data: bytes) -> None:
        """Put a file into the checkout."""
        path = self.root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)

    def sums(self) -> None:
        """Write the cut's SHA256SUMS."""
        paths = [path for path in sorted(self.cut.rglob("*")) if path.is_file() and path.name != checksums.NAME]
        checksums.write(self.cut / checksums.NAME, paths)

    def places(self) -> dict[str, Path]:
        """Published path to file, when this is a repository's first cut; put together from the README's words, not by the code under test."""
        places: dict[str, Path] = {}
        for path in self.cut.rglob("*"):
            if path.is_file():
                name = path.relative_to(self.cut).as_posix()
                is_single = "/" not in name and name.endswith((".llamafile", ".exe"))
                places[name if is_single or name.startswith("components/") else f"releases/{self.identity.full_tag}/{name}"] = path
        for name in ("patches", "docs", "pin"):
            places |= {path.relative_to(self.root).as_posix(): path for path in (self.root / name).rglob("*") if path.is_file()}
        return places | {"USAGE.md": self.root / "docs" / "USAGE.md"}

    def published(self) -> dict[str, str]:
        """Path to sha256 of the same."""
        return {place: hashlib.sha256(path.read_bytes()).hexdigest() for place, path in self.places().items()}

    def archived(self) -> dict[str, str]:
        """Path to sha256 of the cut in the archive."""
        return {
            f"releases/archived/{self.identity.full_tag}/{path.relative_to(self.cut).as_posix()}": hashlib.sha256(path.read_bytes()).hexdigest()
            for path in self.cut.rglob("*")
            if path.is_file()
        }


def make(root: Path, identity: Identity = C1, *, size: int = 3000, cuda: str = "cuda-1") -> Checkout:
    """A checkout with a cut. ``cuda`` is the build of a component, the same bytes for the same build."""
    checkout = Checkout(root, identity)
    folder = f"releases/{identity.full_tag}"
    singles = ("universal.llamafile.exe", "win-x86_64-gpu.llamafile.exe", "x86_64.llamafile", "aarch64.llamafile")
    for suffix in singles:
        name = identity.artifact(suffix)
        checkout.put(f"{folder}/{name}", binary(name, size))
        checkout.put(f"{folder}/{name}.MANIFEST.json", f'{{"file": "{name}"}}\n'.encode())
    bare = binary(f"bare {identity.full_tag}", size)
    engine = f"{folder}/components/engine/26113010{identity.tag[1:]:0>2}001"
    checkout.put(f"{engine}/{identity.artifact('bare.llamafile')}", bare)
    checkout.put(f"{engine}/{identity.artifact('win-x86_64.llamafile.exe')}", bare)
    checkout.put(f"{folder}/components/cuda/{cuda}/ggml-cuda-win-x86_64.dll", binary(f"{cuda} dll", size))
    checkout.put(f"{folder}/components/cuda/{cuda}/ggml-cuda-x86_64.so", binary(f"{cuda} so", size))
    checkout.put(f"{folder}/RELEASE_NOTES.md", f"# {identity.full_tag}\n".encode())
    checkout.put(f"{folder}/BUILD_INFO.md", f"Built as {identity.engine}.\n".encode())
    checkout.put(f"{folder}/licenses/NONE", b"")
    checkout.put("patches/README.md", b"How patches work.\n")
    checkout.put(f"patches/llama.cpp/0001-{identity.tag}.patch", f"a patch of {identity.tag}\n".encode())
    checkout.put("docs/USAGE.md", f"How to use {identity.tag}.\n".encode())
    checkout.put("docs/features/kvarn.md", b"KVarN\n")
    checkout.put("pin/index.txt", f"cuda components/cuda/{cuda}\n".encode())
    checkout.sums()
    return checkout
