"""What a host takes, checked before the first byte is sent: sizes, numbers, and names that every system can hold.

The numbers are data: ``resources/hosts.yaml``.
"""

from __future__ import annotations

import functools
import re
import unicodedata
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from importlib import resources
from pathlib import PurePosixPath

from ..console import human_bytes
from ..errors import PublishError
from ..schema import Node, parse_yaml
from .tree import Tree

HUB = "huggingface"
GITHUB = "github"
_UNLIMITED = 1 << 62

# Names that Windows gives to devices, whatever follows the first dot.
_DEVICES = frozenset({"CON", "PRN", "AUX", "NUL", *(f"{port}{digit}" for port in ("COM", "LPT") for digit in "123456789¹²³")})
_NOT_IN_NAMES = frozenset('<>:"|?*\\')
# The hub's client refuses the first two, and the hub silently drops what the third lists.
_NOT_ON_THE_HUB = (".git", ".cache", ".gitignore")
_NAME_BYTES = 255


@dataclass(frozen=True)
class Host:
    """The limits of one host; a field that its data does not give is no limit. ``names`` matches the file names it keeps as they are."""

    name: str
    file_bytes: int = _UNLIMITED
    repository_files: int = _UNLIMITED
    folder_entries: int = _UNLIMITED
    commit_operations: int = _UNLIMITED
    path_bytes: int = _UNLIMITED
    names: re.Pattern[str] | None = None


@functools.cache
def hosts() -> Mapping[str, Host]:
    """The hosts of ``resources/hosts.yaml`` by name. Raises DataError."""
    where = "hosts.yaml"
    root = Node(parse_yaml(resources.files("opencoti_build").joinpath("resources", where).read_text("utf-8"), where), where)
    made = {}
    for name in root.names():
        row = root.get(name)
        numbers = {
            key: row.optional(key, Node.number, _UNLIMITED)
            for key in ("file_bytes", "repository_files", "folder_entries", "commit_operations", "path_bytes")
        }
        made[name] = Host(name, names=row.optional("names", lambda node: re.compile(node.text())), **numbers)
        row.done()
    return made


def name_problem(name: str) -> str:
    """Why not every system can hold a file of this path; "" when all can."""
    if name.startswith("/") or not name:
        return "is no relative path"
    try:
        name.encode("utf-8")
    except UnicodeEncodeError:
        return "is not UTF-8"
    for part in name.split("/"):
        if part in ("", ".", ".."):
            return f"has the part {part!r}"
        if part in _NOT_ON_THE_HUB:
            return f"has the part {part!r}, which the hub does not take"
        if bad := next((letter for letter in part if letter in _NOT_IN_NAMES or unicodedata.category(letter) == "Cc"), ""):
            return f"has the character {bad!r}, which Windows cannot hold"
        if part[-1] in " .":
            return f"has a part that ends with {part[-1]!r}, which Windows drops"
        if part.split(".")[0].rstrip(" ").upper() in _DEVICES:
            return f"has the part {part!r}, which is a device on Windows"
        if len(part.encode("utf-8")) > _NAME_BYTES:
            return f"has a part of more than {_NAME_BYTES} bytes"
        if unicodedata.normalize("NFC", part) != part:
            return "is not in Unicode's composed form (NFC), as some systems write it"
    return ""


def problems(host: Host, sent: Tree, result: Tree, operations: int) -> tuple[str, ...]:
    """Sentences about everything that ``host`` will not take: of the files that are ``sent``, and of the ``result``ing tree."""
    found = [f"{path} {problem}" for path in sent if (problem := name_problem(path))]
    for path, content in sent.items():
        if content.size > host.file_bytes:
            found.append(f"{path} has {human_bytes(content.size)}, and {host.name} takes {human_bytes(host.file_bytes)} a file")
        if len(path.encode("utf-8", "surrogateescape")) > host.path_bytes:
            found.append(f"{path[:80]}... is a path of more than {host.path_bytes} bytes")
    found += [f"{path} makes the hub drop files silently: delete it there" for path in result if path.split("/")[-1] == ".gitignore" and path not in sent]
    folders = {str(folder) for path in result for folder in PurePosixPath(path).parents if str(folder) != "."}
    found += [f"{path} is a file and a folder" for path in result if path in folders]
    folded: dict[str, str] = {}
    for path in sorted({*result, *folders}):
        twin = folded.setdefault(unicodedata.normalize("NFC", path).casefold(), path)
        if twin != path:
            found.append(f"{twin} and {path} are one name on Windows and macOS")
    entries = Counter(str(PurePosixPath(path).parent) for path in {*result, *folders})
    found += [f"the folder {name} has {count} entries, and {host.name} takes {host.folder_entries}" for name, count in entries.items() if count > host.folder_entries]
    if len(result) > host.repository_files:
        found.append(f"the repository would have {len(result)} files, and {host.name} takes {host.repository_files}")
    if operations > host.commit_operations:
        found.append(f"the commit would have {operations} operations, and {host.name} takes {host.commit_operations}")
    return tuple(found)


def refuse(found: Iterable[str]) -> None:
    """Raise PublishError with all problems as its details; does nothing when there are none."""
    if sentences := list(found):
        raise PublishError(f"The cut cannot be published: {sentences[0]}.", details="\n".join(sentences) if len(sentences) > 1 else "")


def left_out(host: Host, tree: Tree) -> dict[str, str]:
    """The files of ``tree`` that a host with one flat list of files (a GitHub release) does not take, and why."""
    names = Counter(path.rsplit("/", 1)[-1] for path in tree)
    reasons = {}
    for path, content in tree.items():
        name = path.rsplit("/", 1)[-1]
        if content.size > host.file_bytes:
            reasons[path] = f"{human_bytes(content.size)} is too large"
        elif host.names is not None and not host.names.fullmatch(name):
            reasons[path] = "its name would be changed"
        elif names[name] > 1:
            reasons[path] = "another file has the same name"
    return reasons
