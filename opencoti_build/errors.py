"""The one family of errors; each class has its own exit code.

A message is one sentence that says what is wrong and, where a next step exists, what to do. ``details`` may hold more
lines (a captured log, expected and actual values); the command line prints them below the sentence.
"""

from __future__ import annotations


class OpencotiError(Exception):
    """Anything the toolkit refuses or fails at. ``exit_code`` is what the process ends with."""

    exit_code = 1

    def __init__(self, message: str, *, details: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.details = details

    def __str__(self) -> str:
        return self.message


class UsageError(OpencotiError):
    """The call's words are off: an unknown name, a missing argument."""

    exit_code = 2


class DataError(OpencotiError):
    """A data file of the repository (pin, variant, series list) cannot be read or contradicts itself."""

    exit_code = 3


class BusyError(OpencotiError):
    """Another run holds the lock."""

    exit_code = 4


class DiskError(OpencotiError):
    """The file system refused: full, read-only, no permission."""

    exit_code = 5


class DownloadError(OpencotiError):
    """No source delivered the file."""

    exit_code = 10


class ChecksumError(OpencotiError):
    """Bytes arrived or lie here whose size, sha256 or tree digest is not the pinned one."""

    exit_code = 11


class OfflineError(OpencotiError):
    """Offline was asked for and the cache does not hold the file."""

    exit_code = 12


class ArchiveError(OpencotiError):
    """An archive is damaged, or holds what must not be unpacked; also a folder that cannot be a tree."""

    exit_code = 13


class GitError(OpencotiError):
    """A git command failed."""

    exit_code = 20


class PatchError(OpencotiError):
    """A patch does not apply, or the series stands in the middle of a conflict."""

    exit_code = 21


class LintError(OpencotiError):
    """The series breaks a rule of patches/README.md."""

    exit_code = 22


class ToolchainError(OpencotiError):
    """A toolchain is absent or fails its probe."""

    exit_code = 30


class BuildError(OpencotiError):
    """The compiler or linker failed; ``details`` holds the end of the log."""

    exit_code = 31


class IncompleteError(OpencotiError):
    """--strict was asked for and parts of the artifact are missing."""

    exit_code = 32


class ContainerError(OpencotiError):
    """A host or payload that cannot be joined or read."""

    exit_code = 40


class ManifestError(OpencotiError):
    """MANIFEST.json, SHA256SUMS, payload.json or a pin file is not what its format says."""

    exit_code = 41


class VerifyError(OpencotiError):
    """A file is not what it claims to be. Each kind of failure is a subclass with its own code."""

    exit_code = 50


class HashMismatch(VerifyError):
    """The file's size or sha256 differs from its manifest."""

    exit_code = 51


class StructureMismatch(VerifyError):
    """The ZIP structure is damaged or ambiguous."""

    exit_code = 52


class EntryMismatch(VerifyError):
    """An embedded entry differs from the manifest, the index or the pin."""

    exit_code = 53


class HostMismatch(VerifyError):
    """The host block differs from the engine component."""

    exit_code = 54


class VersionMismatch(VerifyError):
    """The version string inside, or printed, is not the one promised."""

    exit_code = 55


class BinaryMismatch(VerifyError):
    """An ELF, PE or Mach-O part is malformed, for another machine, or needs what it may not need."""

    exit_code = 56


class FloorMismatch(VerifyError):
    """A symbol version above the promised glibc floor is needed."""

    exit_code = 57


class HeadroomError(VerifyError):
    """A Windows variant is at or over the 4 GiB limit."""

    exit_code = 58


class RunMismatch(VerifyError):
    """The file was started and did not behave."""

    exit_code = 59


class GateError(OpencotiError):
    """A gate measured what it does not let through."""

    exit_code = 60


class EngineError(OpencotiError):
    """A gate started an engine, and it ended, hung or answered against its interface; ``details`` holds the end of its log."""

    exit_code = 61


class PublishError(OpencotiError):
    """A cut cannot be published as it is: a name, a size, its layout, or it contradicts what is published."""

    exit_code = 80


class HubRefused(OpencotiError):
    """The hub refused: no permission, no such repository, or a request that it does not take."""

    exit_code = 81


class HubUnavailable(OpencotiError):
    """The hub could not be reached, or kept failing until the patience for it ran out."""

    exit_code = 82


class ConflictError(OpencotiError):
    """Somebody else changed the published repository in between."""

    exit_code = 83


class HubMismatch(OpencotiError):
    """The hub holds other bytes than were sent."""

    exit_code = 84
