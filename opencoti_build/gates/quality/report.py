"""How results are shown: a table in the terminal; for the repository a page, JSON and a picture for each feature."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from ... import files
from ...console import Console
from .gate import Report
from .pictures import picture
from .plan import QUANTITIES, Feature, Kind
from .verdict import SHARES, Check, Outcome, Result, shown

COLUMNS = ("feature", "model", "measure", "quantity", "value", "95 % interval", "n", "bound", "outcome")


def show(report: Report, console: Console) -> None:
    """The table, and below it what the figures do not say."""
    console.table(f"Quality, profile {report.profile}", COLUMNS, _rows(report), right=(4, 5, 6))
    for result in report.results:
        for note in result.notes:
            console.info(f"    {result.feature}, {result.model}, {result.measure.label}: {note}.")
        if result.outcome is Outcome.ERROR:
            console.error(f"{result.feature}, {result.model}, {result.measure.label}: {result.reason or 'a bound has no value'}")


def _rows(report: Report) -> list[tuple[str, ...]]:
    rows: list[tuple[str, ...]] = []
    for result in report.results:
        head = (result.feature, result.model, result.measure.label)
        if not result.checks:
            rows.append((*head, "", "", "", "", "", f"{result.outcome.value}: {result.reason}" if result.reason else result.outcome.value))
        rows += [(*head, *_cells(check)) for check in result.checks]
    return rows


def _cells(check: Check) -> tuple[str, ...]:
    name, measured = check.bound.quantity, check.measured
    interval = "" if measured.interval is None else f"{shown(name, measured.interval.low)} .. {shown(name, measured.interval.high)}"
    limit = f"{'>=' if check.bound.least else '<='} {shown(name, check.bound.limit)}"
    word = Outcome.PASS.value if check.passed else Outcome.FAIL.value
    return (name, shown(name, measured.value), interval, str(measured.count), limit, f"{word}, not conclusive" if check.conclusive is False else word)


def write(report: Report, folder: Path) -> list[Path]:
    """Write the page, the JSON and the pictures into ``folder``; returns the files. Raises DiskError."""
    written = [folder / "quality.json", folder / "README.md"]
    files.write_text(written[0], json.dumps(report.to_dict(), indent=1, ensure_ascii=False) + "\n")
    for feature in report.features:
        if results := _of(report, feature):
            written.append(folder / f"{feature.name}.svg")
            files.write_text(written[-1], picture(feature.title, results))
    files.write_text(written[1], page(report))
    return written


def _of(report: Report, feature: Feature) -> list[Result]:
    return [result for result in report.results if result.feature == feature.name and result.outcome is not Outcome.SKIPPED]


def page(report: Report) -> str:
    """The report in Markdown."""
    lines = ["# Quality of each feature", ""]
    lines += [f"Measured by `invoke gate quality`, profile {report.profile}. Every value is compared with its bound in `gate/quality/features/`;", ""]
    lines[-2] += " a value decides by itself, and where its 95 % interval reaches over the bound, it says so."
    lines += [f"- engine {name}: sha256 `{sha256}`" for name, sha256 in report.engines.items()]
    for feature in report.features:
        results = _of(report, feature)
        lines += ["", f"## {feature.title} (`{feature.name}`)", "", _sides(feature), ""]
        skipped = [result for result in report.results if result.feature == feature.name and result.outcome is Outcome.SKIPPED]
        if results:
            lines += [f"![{feature.title}]({feature.name}.svg)", ""]
            lines += _markdown(COLUMNS[1:], [row[1:] for row in _rows(Report(report.profile, {}, tuple(results), (feature,)))])
        lines += [f"- {result.model}, {result.measure.label}: {note}." for result in results for note in result.notes]
        lines += [f"- Not measured on {name}." for name in dict.fromkeys(f"{result.model} ({result.reason})" for result in skipped)]
    lines += ["", "## Quantities", ""]
    for kind in Kind:
        lines += [f"- {kind.value} `{name}`: {meaning}{' (a share)' if name in SHARES and 'share' not in meaning else ''}." for name, meaning in QUANTITIES[kind].items()]
    return "\n".join(lines) + "\n"


def _sides(feature: Feature) -> str:
    words = []
    for name, side in (("reference", feature.reference), ("candidate", feature.candidate)):
        flags = " ".join((*side.flags, *side.server_flags))
        words.append(f"{name}: {side.engine} engine{f', `{flags}`' if flags else ''}")
    return "; ".join(words) + "."


def _markdown(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    table = ["| " + " | ".join(columns) + " |", "|" + "---|" * len(columns)]
    return [*table, *("| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in rows), ""]
