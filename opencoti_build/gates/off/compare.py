"""Names the first difference between what two probes wrote: the node, the input, the token, the byte."""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from .results import ASPECTS, Defaults, Dump, Record

TITLES = {
    "backend": "backend",
    "defaults": "defaults",
    "outcome": "outcome",
    "reserved": "reserved graphs",
    "computed": "computed graphs",
    "inputs": "graph inputs",
    "logits": "logits",
    "drafts": "drafts",
    "state": "state blobs",
    "memory": "memory",
}
"""What people read for an aspect."""

_SHOWN = 160
"""Characters of a value that a finding shows."""


@dataclass(frozen=True)
class Finding:
    """A difference: in which aspect, at which place, and what either side has there.

    ``model`` and ``configuration`` are empty for what belongs to the tree as a whole (defaults, backend).
    """

    aspect: str
    place: str
    pristine: str
    patched: str
    model: str = ""
    configuration: str = ""

    @property
    def text(self) -> str:
        """One line for people."""
        where = f"{self.model}, {self.configuration}: " if self.model else ""
        return f"{where}{TITLES[self.aspect]}: {self.place}: the base has {self.pristine}, the patched tree {self.patched}"


def first_difference(aspect: str, base: Sequence[Record], ours: Sequence[Record]) -> Finding | None:
    """The first difference in one aspect of one configuration, or None."""
    if aspect in ("reserved", "computed"):
        # The line with the number of nodes comes before the nodes; it differs with every node that is too many.
        nodes = _first([record for record in base if record.kind == "node"], [record for record in ours if record.kind == "node"])
        if nodes is not None:
            return Finding(aspect, *_node(*nodes))
    found = _first(base, ours)
    if found is None:
        return None
    one, other = found[0][found[2]] if found[2] < len(found[0]) else None, found[1][found[2]] if found[2] < len(found[1]) else None
    return Finding(aspect, *_record(one, other))


def differences(configuration: str, base: Dump, ours: Dump, *, model: str) -> list[Finding]:
    """The first difference of every aspect of a configuration, causes before effects."""
    found = []
    for aspect in ASPECTS:
        key = (configuration, aspect)
        if (finding := first_difference(aspect, base.get(key, ()), ours.get(key, ()))) is not None:
            found.append(Finding(aspect, finding.place, finding.pristine, finding.patched, model, configuration))
    return found


Place = tuple[Sequence[Record], Sequence[Record], int]


def _first(base: Sequence[Record], ours: Sequence[Record]) -> Place | None:
    for index in range(max(len(base), len(ours))):
        if index >= len(base) or index >= len(ours) or base[index].fields != ours[index].fields:
            return base, ours, index
    return None


# ---- nodes ----------------------------------------------------------------------------------------------------------------------


def _node(base: Sequence[Record], ours: Sequence[Record], index: int) -> tuple[str, str, str]:
    """Place and both sides of the first differing node. A node is: node, step, graph, number, then NAME=VALUE."""
    one = base[index] if index < len(base) else None
    other = ours[index] if index < len(ours) else None
    here = one or other
    assert here is not None
    place = f"node {here.fields[3]} of graph {here.fields[2]} of '{here.fields[1]}'"
    if one is None or other is None:
        return place, _named(one), _named(other)
    if one.fields[1:3] != other.fields[1:3]:
        return place, f"{_named(one)} in '{one.fields[1]}', graph {one.fields[2]}", f"{_named(other)} in '{other.fields[1]}', graph {other.fields[2]}"
    if index + 1 < len(ours) and _look(ours[index + 1]) == _look(one) != _look(other):
        return place, _named(one), f"an extra {_named(other)} before it"
    if index + 1 < len(base) and _look(base[index + 1]) == _look(other) != _look(one):
        return place, f"{_named(one)} before it", f"{_named(other)} at once"
    mine, theirs = _values(one), _values(other)
    if _look(one) != _look(other):
        return place, _named(one), _named(other)
    name = next((name for name in {**mine, **theirs} if mine.get(name) != theirs.get(name)), "number")
    return f"{place} ({_title(mine)}), {_FIELDS.get(name, name)}", _value(mine.get(name)), _value(theirs.get(name))


_FIELDS = {"ne": "elements", "nb": "strides", "params": "parameters of the operation", "on": "backend", "src0": "source 0", "src1": "source 1", "src2": "source 2", "src3": "source 3"}


def _values(record: Record) -> dict[str, str]:
    return dict(field.partition("=")[::2] for field in record.fields[4:])


def _look(record: Record) -> tuple[str, ...]:
    """What a node is recognised by."""
    values = _values(record)
    return tuple(values.get(name, "") for name in ("op", "name", "type", "ne"))


def _title(values: Mapping[str, str]) -> str:
    return f"{values.get('op', '?')} '{values.get('name', '?')}'"


def _named(record: Record | None) -> str:
    if record is None:
        return "no such node"
    values = _values(record)
    return f"{_title(values)} ({values.get('type')}, {values.get('ne', '').replace(',', ' x ')})"


def _value(text: str | None) -> str:
    if text is None:
        return "none"
    return f"'{_short(text)}'" if text else "nothing"


def _short(text: str) -> str:
    return text if len(text) <= _SHOWN else text[:_SHOWN] + "..."


# ---- everything else ------------------------------------------------------------------------------------------------------------


def _record(one: Record | None, other: Record | None) -> tuple[str, str, str]:
    if one is None or other is None:
        here = one or other
        assert here is not None
        return _place(here), "it" if one else "nothing", "it" if other else "nothing"
    if one.kind != other.kind or _place(one) != _place(other):
        return "the order of what happens", _place(one), _place(other)
    if one.data is not None and other.data is not None and one.data != other.data:
        return _bytes(one, other)
    for mine, theirs in zip(one.fields, other.fields, strict=False):
        if mine != theirs:
            name, equals, value = mine.partition("=")
            if equals and theirs.startswith(f"{name}="):
                return f"{_place(one)}, {name}", value, theirs.partition("=")[2]
            return _place(one), _value(mine), _value(theirs)
    return _place(one), f"{len(one.fields)} values", f"{len(other.fields)} values"


def _place(record: Record) -> str:
    """Which record it is, without what it says."""
    match record.fields:
        case ("logits", step, sequence, position, token, *_):
            return f"'{step}', sequence {sequence}, position {position}, token {token}"
        case ("hidden", step, sequence, position, token, *_):
            return f"hidden state after '{step}', sequence {sequence}, position {position}, token {token}"
        case ("input", step, graph, name, kind, shape, *_):
            return f"input '{name}' ({kind}, {shape.replace(',', ' x ')}) of graph {graph} of '{step}'"
        case ("state", step, what, *_):
            return f"{what} {step}"
        case ("draft" | "remove", step, sequence, *_):
            return f"{record.kind} of '{step}', sequence {sequence}"
        case ("memory", what, buffer, *_):
            return f"{what}, buffers of type {buffer}"
        case ("graph" | "splits", step, *_):
            return f"{record.kind} '{step}'" if record.kind == "graph" else f"splits of the last graph of '{step}'"
        case _:
            return record.kind


_FORMATS = {"f32": ("<f", 4), "f16": ("<e", 2), "i32": ("<i", 4), "i64": ("<q", 8), "i16": ("<h", 2), "i8": ("<b", 1)}


def _bytes(one: Record, other: Record) -> tuple[str, str, str]:
    assert one.data is not None and other.data is not None
    place = _place(one)
    if len(one.data) != len(other.data):
        return f"{place}, size", f"{len(one.data)} bytes", f"{len(other.data)} bytes"
    at = next(index for index, (a, b) in enumerate(zip(one.data, other.data, strict=True)) if a != b)
    kind = "f32" if one.kind in ("logits", "hidden") else one.fields[4] if one.kind == "input" else ""
    if kind not in _FORMATS:
        return f"{place}, byte {at} of {len(one.data)}", one.data[at : at + 8].hex(" "), other.data[at : at + 8].hex(" ")
    layout, width = _FORMATS[kind]
    index = at // width
    values = [struct.unpack_from(layout, record, index * width)[0] for record in (one.data, other.data)]
    noun = "logit" if one.kind == "logits" else "value"
    where = _coordinates(index, one.fields[5]) if one.kind == "input" else str(index)
    return f"{place}, {noun} {where}", *(f"{value!r} ({record[index * width : (index + 1) * width].hex()})" for value, record in zip(values, (one.data, other.data), strict=True))  # type: ignore[return-value]


def _coordinates(index: int, shape: str) -> str:
    """The place of an element of a contiguous tensor, first dimension first."""
    sizes = [int(size) for size in shape.split(",")]
    found = []
    for size in sizes:
        index, rest = divmod(index, size)
        found.append(rest)
    while len(found) > 1 and sizes[len(found) - 1] == 1:
        found.pop()
    return f"[{', '.join(map(str, found))}]"


# ---- defaults -------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class DefaultsComparison:
    """Differences of defaults, and the options that only the patched tree has: program, flags."""

    findings: tuple[Finding, ...]
    added: tuple[tuple[str, str], ...]


def compare_defaults(base: Defaults, ours: Defaults) -> DefaultsComparison:
    """Every upstream default must be as it was; options of the series are listed apart, and may not take a name of upstream's."""
    findings = [
        Finding("defaults", name, value, ours.fields.get(name, "no such field")) for name, value in base.fields.items() if ours.fields.get(name) != value
    ]
    findings += [Finding("defaults", name, "no such field", value) for name, value in ours.fields.items() if name not in base.fields]
    taken: dict[str, set[str]] = {}
    for (program, flags), values in base.options.items():
        taken.setdefault(program, set()).update(flags.split())
        theirs = ours.options.get((program, flags))
        place = f"option {flags.replace(' ', ', ')} of {program}"
        if theirs is None:
            findings.append(Finding("defaults", place, "it", "none with these names"))
            continue
        findings += [Finding("defaults", f"{place}, {name}", _short(value), _short(theirs.get(name, "nothing"))) for name, value in values.items() if theirs.get(name) != value]
    added = []
    for program, flags in ours.options:
        if (program, flags) in base.options:
            continue
        added.append((program, flags))
        if clash := sorted(set(flags.split()) & taken.get(program, set())):
            findings.append(Finding("defaults", f"option {clash[0]} of {program}", "its own", f"another with that name ({flags})"))
    return DefaultsComparison(tuple(findings), tuple(added))
