"""A feature's results as one SVG picture: how much of each bound is used, and where in a text the needles are found.

Plain SVG 1.1 with the bytes a function of the results alone, so that a picture in the repository changes only when a figure does.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from xml.sax.saxutils import escape

from .plan import QUANTITIES, Bound
from .verdict import SHARES, Check, Outcome, Result, shown

WIDTH = 920
_LEFT = 400
_BAR = 22
_CELL_WIDTH, _CELL_HEIGHT = 58, 26
_GOOD, _BAD, _INK, _FAINT = "#2b7a4b", "#b3261e", "#1b1b1b", "#c9c9c9"
_SCALE = ((0.0, (178, 24, 43)), (0.5, (244, 165, 90)), (0.8, (250, 230, 150)), (1.0, (56, 140, 84)))
"""From nothing found to all found; the steps near 1 are wide, since that is where models live."""


class _Canvas:
    """Collects elements from top to bottom."""

    def __init__(self) -> None:
        self.parts: list[str] = []
        self.y = 0.0

    def text(self, x: float, y: float, words: str, *, size: int = 13, anchor: str = "start", fill: str = _INK, weight: str = "normal") -> None:
        self.parts.append(f'<text x="{x:g}" y="{y:g}" font-size="{size}" text-anchor="{anchor}" fill="{fill}" font-weight="{weight}">{escape(words)}</text>')

    def box(self, x: float, y: float, width: float, height: float, fill: str, *, title: str = "") -> None:
        inner = f"<title>{escape(title)}</title>" if title else ""
        self.parts.append(f'<rect x="{x:g}" y="{y:g}" width="{max(0.0, width):g}" height="{height:g}" fill="{fill}">{inner}</rect>')

    def line(self, x1: float, y1: float, x2: float, y2: float, stroke: str, *, dashed: bool = False) -> None:
        dash = ' stroke-dasharray="4 3"' if dashed else ""
        self.parts.append(f'<line x1="{x1:g}" y1="{y1:g}" x2="{x2:g}" y2="{y2:g}" stroke="{stroke}"{dash}/>')


def used(check: Check) -> float:
    """The share of what the bound allows that is used: 1 at the bound, 0 at the ideal, above 1 beyond it.

    The ideal is 0 for a bound above, and for a share that must be high, 1.
    """
    bound, value = check.bound, check.measured.value
    lost, allowed = (1 - value, 1 - bound.limit) if bound.least and bound.quantity in SHARES else (value, bound.limit)
    if allowed > 0:
        return max(0.0, lost / allowed)
    return 0.0 if check.passed else float("inf")


def picture(title: str, results: Sequence[Result]) -> str:
    """The SVG text for the results of one feature."""
    canvas = _Canvas()
    canvas.y = 34
    canvas.text(20, canvas.y, title, size=18, weight="bold")
    canvas.y += 14
    _bars(canvas, [result for result in results if result.checks])
    for result in results:
        if cells := result.facts.get("cells"):
            _heat_maps(canvas, result, cells)
    height = canvas.y + 20
    head = f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height:g}" viewBox="0 0 {WIDTH} {height:g}" font-family="Helvetica, Arial, sans-serif">'
    return "\n".join([head, f'<rect x="0" y="0" width="{WIDTH}" height="{height:g}" fill="#ffffff"/>', *canvas.parts, "</svg>"]) + "\n"


# ---- bounds ------------------------------------------------------------------------------------------------------------------------


def _bars(canvas: _Canvas, results: Sequence[Result]) -> None:
    """A bar for each check; the dashed line is the bound."""
    if not results:
        canvas.y += 20
        canvas.text(20, canvas.y, "Nothing was measured.")
        return
    room = WIDTH - _LEFT - 190
    unit = room / 1.5
    canvas.y += 18
    canvas.text(_LEFT, canvas.y, "share of the allowed deviation that is used; the dashed line is the bound", size=11)
    top = canvas.y + 6
    for result in results:
        canvas.y += 24
        canvas.text(20, canvas.y, f"{result.model}, {result.measure.label}", weight="bold", fill=_INK if result.outcome is Outcome.PASS else _BAD)
        for check in result.checks:
            canvas.y += _BAR
            share, colour = used(check), _GOOD if check.passed else _BAD
            canvas.text(_LEFT - 10, canvas.y + 4, _short(check.bound), anchor="end", size=12)
            canvas.box(_LEFT, canvas.y - 8, max(1.0, min(share, 1.5) * unit), 14, colour, title=QUANTITIES[result.measure.kind][check.bound.quantity])
            words = f"{shown(check.bound.quantity, check.measured.value)} (n = {check.measured.count})"
            canvas.text(_LEFT + room + 8, canvas.y + 4, words, size=12, fill=colour)
    canvas.line(_LEFT + unit, top, _LEFT + unit, canvas.y + 8, _INK, dashed=True)
    canvas.line(_LEFT, top, _LEFT, canvas.y + 8, _FAINT)
    canvas.y += 16


def _short(bound: Bound) -> str:
    words = {"mean": "mean KLD", "q999": "99.9 % KLD", "max": "largest KLD", "top1": "same top token", "different": "differing positions"}
    words |= {"reference": "reference accuracy", "accuracy": "accuracy", "loss": "loss of accuracy", "equal": "equal continuations", "gap": "gap where they part", "acceptance": "drafts accepted"}
    return f"{words[bound.quantity]} {'at least' if bound.least else 'at most'} {shown(bound.quantity, bound.limit)}"


# ---- needles -----------------------------------------------------------------------------------------------------------------------


def _heat_maps(canvas: _Canvas, result: Result, cells: Mapping[str, Sequence[Mapping[str, object]]]) -> None:
    """For each task two maps side by side, reference and candidate: depth downwards, length to the right."""
    tasks = list(dict.fromkeys(str(cell["task"]) for cell in cells["reference"]))
    for task in tasks:
        canvas.y += 34
        canvas.text(20, canvas.y, f"{result.model}: {task}", weight="bold")
        here = {name: {(_number(cell["length"]), _number(cell["depth"])): (_number(cell["right"]), _number(cell["count"])) for cell in side if cell["task"] == task} for name, side in cells.items()}
        lengths = sorted({length for length, _ in here["reference"]})
        depths = sorted({depth for _, depth in here["reference"]})
        top = canvas.y + 10
        x = 70.0
        bottom = top
        for name in ("reference", "candidate"):
            bottom = max(bottom, _map(canvas, x, top, name, here[name], lengths, depths))
            x += _CELL_WIDTH * len(lengths) + 90
        canvas.y = bottom


def _map(canvas: _Canvas, x: float, top: float, name: str, cells: Mapping[tuple[float, float], tuple[float, float]], lengths: Sequence[float], depths: Sequence[float]) -> float:
    """Draw one map and return where it ends."""
    right, count = (sum(pair[index] for pair in cells.values()) for index in (0, 1))
    canvas.text(x, top + 10, f"{name}: {right:g} of {count:g}", size=12)
    y = top + 18
    for depth in depths:
        canvas.text(x - 6, y + 17, f"{100 * depth:g} %", size=11, anchor="end")
        for column, length in enumerate(lengths):
            if (pair := cells.get((length, depth))) is None:
                continue
            share = pair[0] / pair[1]
            left = x + column * _CELL_WIDTH
            canvas.box(left, y, _CELL_WIDTH - 2, _CELL_HEIGHT - 2, _colour(share), title=f"{name}, {length:g} tokens, depth {100 * depth:g} %: {pair[0]:g} of {pair[1]:g}")
            canvas.text(left + _CELL_WIDTH / 2 - 1, y + 16, f"{pair[0]:g}/{pair[1]:g}", size=11, anchor="middle", fill="#ffffff" if share < 0.3 or share > 0.93 else _INK)
        y += _CELL_HEIGHT
    for column, length in enumerate(lengths):
        canvas.text(x + column * _CELL_WIDTH + _CELL_WIDTH / 2 - 1, y + 13, f"{length:g}", size=11, anchor="middle")
    return y + 18


def _colour(share: float) -> str:
    for (low, first), (high, second) in itertools.pairwise(_SCALE):
        if share <= high:
            way = (share - low) / (high - low)
            return "#" + "".join(f"{round(a + (b - a) * way):02x}" for a, b in zip(first, second, strict=True))
    return _GOOD


def _number(value: object) -> float:
    if not isinstance(value, (int, float)):
        raise TypeError(f"{value!r} is no number")
    return float(value)
