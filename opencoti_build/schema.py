"""Reads data files: YAML text into checked values, with a sentence for everything that is wrong.

A ``Node`` is a value together with the place it stands at (``vendors/zig.yaml: platforms.linux-x86_64.size``), so that every
complaint names it. Readers ask for the keys they know and call ``done()``, which refuses the rest and suggests the nearest name.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from . import files
from .errors import DataError

SIZE_LIMIT = 1 << 20
"""Bytes a data file may have; more is not a file of this project."""

_HEX = re.compile(r"[0-9a-f]+")


class _Loader(yaml.SafeLoader):
    """The safe loader; it refuses a key that stands twice in one mapping instead of keeping the last, and all aliases."""

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        if self.check_event(yaml.AliasEvent):
            raise yaml.constructor.ConstructorError(None, None, "aliases are not used in this project's files", self.peek_event().start_mark)  # type: ignore[no-untyped-call]
        return super().compose_node(parent, index)

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        seen: set[str] = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode):
                if key.value in seen:
                    raise yaml.constructor.ConstructorError(None, None, f"the key {key.value!r} stands twice", key.start_mark)
                seen.add(key.value)
        return super().construct_mapping(node, deep=deep)


def parse_yaml(text: str, where: str) -> Any:
    """The value of a YAML text. Raises DataError, naming ``where`` and the line, for anything that is not plain YAML."""
    try:
        return yaml.load(text, _Loader)  # noqa: S506 - a subclass of the safe loader
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        line = f" line {mark.line + 1}" if mark is not None else ""
        raise DataError(f"{where}{line} is not YAML as expected: {error.problem or 'it cannot be read'}.") from error
    except (yaml.YAMLError, RecursionError, ValueError) as error:
        raise DataError(f"{where} is not YAML as expected: {str(error).splitlines()[0] if str(error) else 'it cannot be read'}.") from error


def read_yaml(path: Path) -> Any:
    """The value of a YAML file. Raises DataError when it is absent, too large, not UTF-8 or not YAML."""
    return parse_yaml(read_text(path), path.name)


def read_text(path: Path) -> str:
    """The text of a data file. Raises DataError when it is absent, too large or not UTF-8."""
    try:
        return files.read_limited(path, SIZE_LIMIT, "data file of this project", DataError).decode("utf-8")
    except UnicodeDecodeError as error:
        raise DataError(f"{path} is not UTF-8 text (byte {error.start}).") from error


@dataclass
class Node:
    """A value and where it stands. ``path`` is the dotted way from the file's root."""

    value: Any
    where: str
    path: str = ""
    _asked: set[str] = field(default_factory=set)

    def fail(self, problem: str) -> DataError:
        """The error to raise about this value."""
        return DataError(f"{self.where}: {self.path + ': ' if self.path else ''}{problem}.")

    def _child(self, key: str, value: Any) -> Node:
        return Node(value, self.where, f"{self.path}.{key}" if self.path else key)

    def mapping(self) -> Node:
        """This node, if it is a mapping with names as keys."""
        if not isinstance(self.value, dict):
            raise self.fail(f"expected a mapping, found {_kind(self.value)}")
        for key in self.value:
            if not isinstance(key, str):
                raise self.fail(f"expected names as keys, found {key!r}; put it in quotes")
        return self

    def names(self) -> list[str]:
        """The keys of a mapping in the order of the file; the reader takes them all."""
        self.mapping()
        self._asked.update(self.value)
        return list(self.value)

    def has(self, key: str) -> bool:
        """Whether the mapping has the key with a value other than null."""
        self.mapping()
        self._asked.add(key)
        return self.value.get(key) is not None

    def get(self, key: str) -> Node:
        """The value of a key that must be there."""
        self.mapping()
        self._asked.add(key)
        if key not in self.value:
            near = difflib.get_close_matches(key, [k for k in self.value if k not in self._asked], n=1)
            hint = f"; {near[0]!r} looks like it, misspelled" if near else ""
            raise self.fail(f"the field {key!r} is missing{hint}")
        return self._child(key, self.value[key])

    def optional(self, key: str, read: Callable[[Node], Any], default: Any = None) -> Any:
        """``read`` of a key's value, or ``default`` when the key is absent or null."""
        return read(self.get(key)) if self.has(key) else default

    def done(self, known: Iterable[str] = ()) -> None:
        """Refuse keys that nobody asked for."""
        names = self._asked | set(known)
        for key in self.value:
            if key not in names:
                near = difflib.get_close_matches(key, sorted(names), n=1)
                hint = f"; did you mean {near[0]!r}" if near else f"; known are {', '.join(sorted(names))}"
                raise self.fail(f"unknown field {key!r}{hint}")

    def items(self, *, empty: bool = False) -> list[Node]:
        """The elements of a list; one without elements is refused unless ``empty`` allows it."""
        if not isinstance(self.value, list):
            raise self.fail(f"expected a list, found {_kind(self.value)}")
        if not self.value and not empty:
            raise self.fail("the list is empty")
        return [self._child(str(index), value) for index, value in enumerate(self.value)]

    def text(self) -> str:
        """A string of one line that is not empty."""
        if not isinstance(self.value, str):
            hint = "; put it in quotes" if isinstance(self.value, (int, float)) else ""
            raise self.fail(f"expected text, found {_kind(self.value)}{hint}")
        if not self.value.strip() or any(ord(c) < 32 or ord(c) == 127 for c in self.value):
            raise self.fail("expected one line of text")
        return self.value

    def prose(self) -> str:
        """A string of any number of lines."""
        if not isinstance(self.value, str):
            raise self.fail(f"expected text, found {_kind(self.value)}")
        return self.value

    def number(self, *, minimum: int = 0, maximum: int = 1 << 50) -> int:
        """A whole number within limits."""
        if not isinstance(self.value, int) or isinstance(self.value, bool):
            raise self.fail(f"expected a whole number, found {_kind(self.value)}")
        if not minimum <= self.value <= maximum:
            raise self.fail(f"{self.value} is not between {minimum} and {maximum}")
        return self.value

    def flag(self) -> bool:
        """true or false."""
        if not isinstance(self.value, bool):
            raise self.fail(f"expected true or false, found {_kind(self.value)}")
        return self.value

    def hexadecimal(self, digits: int) -> str:
        """Exactly ``digits`` lower-case hex digits."""
        text = self.text()
        if len(text) != digits or not _HEX.fullmatch(text):
            raise self.fail(f"expected {digits} hex digits (0-9, a-f), found {text!r} with {len(text)} characters")
        return text

    def one_of(self, values: Iterable[str]) -> str:
        """One of the given words."""
        known = list(values)
        text = self.text()
        if text not in known:
            near = difflib.get_close_matches(text, known, n=1)
            hint = f"did you mean {near[0]!r}" if near else f"known are {', '.join(known)}"
            raise self.fail(f"{text!r} is not known; {hint}")
        return text


def _kind(value: Any) -> str:
    names = {dict: "a mapping", list: "a list", str: "text", bool: "true or false", int: "a number", float: "a number", type(None): "nothing"}
    return names.get(type(value), type(value).__name__)
