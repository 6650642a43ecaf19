"""Writes the probe's table of upstream's parameters, ``fields.inc``, from the headers of the pristine tree.

C++ cannot list the members of a structure, and a list kept by hand would miss what the next base adds. So the structures are read
out of ``include/llama.h`` and ``common/common.h``: a function ``each_field`` for each, and the programs that know options. Both probes
are compiled with the same table: a member that a patch renames or removes stops the build of the patched one.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from ...errors import DataError

LLAMA = ("llama_model_params", "llama_context_params", "llama_model_quantize_params", "llama_sampler_chain_params")
"""Structures of llama.h that have a function with defaults."""

_NOISE = re.compile(r"//[^\n]*|/\*.*?\*/|\"(?:[^\"\\\n]|\\.)*\"|'(?:[^'\\\n]|\\.)+'", re.S)
_PREPROCESSOR = re.compile(r"^[ \t]*#(?:[^\n\\]|\\.|\\\n)*", re.M)
_OPENING = re.compile(r"\bstruct\s+(\w+)\s*\{")
_NOT_A_FIELD = re.compile(r"^(?:static|using|typedef|friend|template|explicit|virtual|public|private|protected|enum|union)\b|\boperator\b")
_POINTER_TO_FUNCTION = re.compile(r"\(\s*\*\s*(\w+)\s*\)\s*\(")
_DECLARATOR = re.compile(r"([A-Za-z_]\w*)\s*(?:\[[^\]]*\]\s*)*$")


@dataclass(frozen=True)
class Structure:
    """A structure of a header: its members in the order they are declared."""

    name: str
    fields: tuple[str, ...]


def bare(text: str) -> str:
    """A header without comments, preprocessor lines, and contents of literals."""

    def replaced(match: re.Match[str]) -> str:
        found = match.group()
        return " " if found.startswith("/") else found[0] * 2

    return _PREPROCESSOR.sub("", _NOISE.sub(replaced, text))


def structures(header: str) -> list[Structure]:
    """Every structure with members that a header defines, in its order."""
    text = bare(header)
    found = []
    for match in _OPENING.finditer(text):
        body = text[match.end() : _closing(text, match.end() - 1)]
        if names := tuple(name for statement in _statements(body) for name in _names(statement)):
            found.append(Structure(match.group(1), names))
    return found


def enumerators(header: str, name: str) -> tuple[str, ...]:
    """The names of an enumeration, in their order. Raises DataError when the header has none of that name."""
    text = bare(header)
    match = re.search(rf"\benum\s+{name}\s*(?::\s*\w+\s*)?\{{", text)
    if match is None:
        raise DataError(f"The headers of the base define no enumeration {name}: the probe's table cannot be written (see opencoti_build/gates/off/fields.py).")
    body = text[match.end() : _closing(text, match.end() - 1)]
    return tuple(word.partition("=")[0].strip() for word in body.split(",") if word.strip())


def _closing(text: str, start: int) -> int:
    """Where the brace that opens at ``start`` is closed."""
    depth = 0
    for index in range(start, len(text)):
        depth += {"{": 1, "}": -1}.get(text[index], 0)
        if depth == 0:
            return index
    raise DataError("A header of the base has a brace that is never closed: the probe's table cannot be written.")


def _statements(body: str) -> Iterator[str]:
    """The declarations of a structure; what stands in braces (bodies, initialisers) is left out, a function's body ends it."""
    statement, index = "", 0
    while index < len(body):
        letter = body[index]
        if letter == "{":
            index = _closing(body, index)
            # Braces behind an = or a bare name initialise a member, and a semicolon follows; others are a body.
            if "(" in statement.partition("=")[0] or re.match(r"\s*(?:struct|union|enum|class)\b[^=]*$", statement):
                statement = "" if "(" in statement else statement + "{}"
        elif letter == ";":
            yield " ".join(statement.split())
            statement = ""
        else:
            statement += letter
        index += 1


def _names(statement: str) -> list[str]:
    """The members that a declaration declares."""
    if not statement or "{}" in statement or _NOT_A_FIELD.search(re.sub(r"^(?:struct|enum|const)\s+", "", statement)):
        return []
    if match := _POINTER_TO_FUNCTION.search(statement):
        return [match.group(1)]
    parts = [part.partition("=")[0].strip() for part in _split(statement)]
    if "(" in re.sub(r"<[^;]*>", "", parts[0]):
        return []
    if len(parts[0].split()) < 2 and "*" not in parts[0]:
        return []  # a forward declaration, a label
    if re.fullmatch(r"(?:struct|class|union)\s+\w+", parts[0]):
        return []
    return [match.group(1) for part in parts if (match := _DECLARATOR.search(part))]


def _split(statement: str) -> list[str]:
    """At commas that are in no bracket of any kind."""
    parts, depth = [""], 0
    for letter in statement:
        depth += {"<": 1, "(": 1, "[": 1, ">": -1, ")": -1, "]": -1}.get(letter, 0)
        if letter == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += letter
    return parts


def render(llama_header: str, common_header: str) -> str:
    """The text of ``fields.inc``. Raises DataError when a structure it needs is not in the headers."""
    known = {item.name: item for item in structures(llama_header) if item.name in LLAMA}
    if missing := [name for name in LLAMA if name not in known]:
        raise DataError(f"The base's llama.h defines no {missing[0]}: the probe's table cannot be written (see opencoti_build/gates/off/fields.py).")
    ours = [item for item in structures(common_header) if re.match(r"common_(?:params|cpu_params|grammar)|lr_opt", item.name)]
    if not any(item.name == "common_params" for item in ours):
        raise DataError("The base's common.h defines no common_params: the probe's table cannot be written (see opencoti_build/gates/off/fields.py).")
    lines = ["// Written from the headers of the pristine tree; see opencoti_build/gates/off/fields.py.", ""]
    chosen = [*known.values(), *ours]
    lines += [f"void each_field(field_writer & out, const {item.name} & value);" for item in chosen]
    for item in chosen:
        lines += ["", f"void each_field(field_writer & out, const {item.name} & value) {{"]
        lines += [f'    out.field("{name}", value.{name});' for name in item.fields]
        lines += ["}"]
    programs = [name for name in enumerators(common_header, "llama_example") if not name.endswith("_COUNT")]
    lines += ["", "static const std::pair<const char *, llama_example> programs[] = {"]
    lines += [f'    {{ "{name.removeprefix("LLAMA_EXAMPLE_").lower()}", {name} }},' for name in programs]
    return "\n".join([*lines, "};", ""])
