"""Synthetic retrieval tasks: deterministic examples for training, evaluation and the HTTP quality gate.

Needs the standard library only. Everything is a pure function of its arguments: the random source is
``random.Random(seed).random()``, whose stream Python guarantees across versions.

The vocabulary is bytes, so a text's length in tokens is its length in UTF-8 bytes (all text here is ASCII) plus one
token for each special marker. ``length`` always means the whole chat rendering: markers, prompt and answer.

    example = make("needle", length=4096, depth=0.5, seed=7)
    post(messages=[{"role": "user", "content": example.prompt}])     # expects example.answer, exactly
"""

from __future__ import annotations

import bisect
import json
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

BOS = "<bos>"
IM_START = "<|im_start|>"
IM_END = "<|im_end|>"
END_OF_TEXT = "<|endoftext|>"
CALL_OPEN = "<tool_call>"
CALL_CLOSE = "</tool_call>"

USER_OPEN = f"{IM_START}user\n"
ASSISTANT_OPEN = f"{IM_END}\n{IM_START}assistant\n"
PLAIN_QUESTION = "\nQuestion: "
PLAIN_ANSWER = "\nAnswer: "
TOOLS_HEAD = "Tools:\n"

_MARKERS = (BOS, IM_START, IM_END, END_OF_TEXT, CALL_OPEN, CALL_CLOSE)

_NOUNS = (
    "river garden lantern bridge engine orchard harbour kettle ladder meadow signal window carpet hammer island market "
    "mirror needle paper pillow quarry ribbon saddle tunnel valley wagon anchor basket candle desert forest glacier "
    "hangar insect jacket kitchen library machine network office planet rocket sailor temple village winter archive "
    "battery cabinet device elevator factory gallery highway journal keyboard letter mountain notebook painting"
).split()
_ADJECTIVES = (
    "quiet narrow golden ancient broken careful distant early famous gentle hollow instant jolly kind lively modern "
    "noisy orange patient quick rusty silver tired unusual violet warm young bright clever dusty empty frozen grey "
    "heavy idle joint large"
).split()
_VERBS = (
    "crossed watched repaired painted carried followed measured opened sketched visited avoided borrowed cleaned "
    "described examined finished gathered helped ignored joined kept lifted moved noticed ordered passed reached "
    "searched touched used wanted admired built copied"
).split()
_NAMES = (
    "Anna Boris Clara David Elena Felix Greta Hugo Irene Jonas Karin Leo Maria Nils Olga Peter Rosa Simon Tilda Ulrich "
    "Vera Walter Yara Zeno Agnes Bruno Carla Dario Edith Frank"
).split()
_PLACES = (
    "Arden Belmont Corvale Dunmore Eastwick Fairholm Glenrock Hartwell Ironside Junction Kelso Larkspur Millbrook "
    "Norwood Oakdale Pinecrest Quayside Redhill Stonegate Thornbury"
).split()
_WHEN = (
    "in the morning,after lunch,before sunset,on Monday,last winter,every second week,without a word,for a while,"
    "at noon,during the storm,on the third day,two hours later,as usual,once again,in silence"
).split(",")
_ONSET = "b c d f g h j k l m n p r s t v w z br cr dr fl gr kl pl st tr".split()
_NUCLEUS = "a e i o u ai ea io".split()
_CODA = "n r s l t m x nd rk st".split()

_LOWER = "abcdefghijklmnopqrstuvwxyz"
_UPPER = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
_DIGITS = "0123456789"

TASKS = ("needle", "multikey", "variables", "copy", "arithmetic", "tool_json")


class Rng:
    """Draws from ``random.Random.random`` alone, the one method whose stream is fixed for all Python versions."""

    def __init__(self, *seed: object) -> None:
        self._next = random.Random("/".join(map(str, seed))).random

    def unit(self) -> float:
        return self._next()

    def below(self, n: int) -> int:
        return int(self._next() * n)

    def between(self, low: int, high: int) -> int:
        """A whole number in [low, high]."""
        return low + int(self._next() * (high - low + 1))

    def pick(self, items: Sequence):
        return items[int(self._next() * len(items))]

    def chance(self, p: float) -> bool:
        return self._next() < p

    def text(self, alphabet: str, n: int) -> str:
        return "".join(alphabet[int(self._next() * len(alphabet))] for _ in range(n))

    def shuffle(self, items: list) -> None:
        for i in range(len(items) - 1, 0, -1):
            j = self.below(i + 1)
            items[i], items[j] = items[j], items[i]


@dataclass(frozen=True)
class Example:
    """One question. ``prompt`` is the user's message, ``answer`` the whole expected reply, ``value`` its last part."""

    task: str
    prompt: str
    answer: str
    length: int
    depth: float
    seed: int
    value: str = ""
    tools: tuple[dict, ...] = ()

    @property
    def messages(self) -> list[dict[str, str]]:
        return [{"role": "user", "content": self.prompt}]


@dataclass(frozen=True)
class Item:
    """Statements that go into the haystack, in this order, and the questions they answer."""

    statements: tuple[str, ...]
    questions: tuple[tuple[str, str], ...]

    @property
    def cost(self) -> int:
        return sum(map(len, self.statements)) + 2 * len(self.statements)


# --- filler ---------------------------------------------------------------------------------------------------------


def _pseudo_word(rng: Rng) -> str:
    word = "".join(rng.pick(_ONSET) + rng.pick(_NUCLEUS) for _ in range(rng.between(1, 3)))
    return word + rng.pick(_CODA) if rng.chance(0.5) else word


def sentence(rng: Rng) -> str:
    """One sentence of filler (20 to 110 characters); some carry numbers or invented words."""
    noun = lambda: _pseudo_word(rng) if rng.chance(0.12) else rng.pick(_NOUNS)
    phrase = lambda: f"{rng.pick(_ADJECTIVES)} {noun()}" if rng.chance(0.6) else noun()
    kind = rng.below(10)
    if kind == 0:
        return f"{rng.pick(_NAMES)} {rng.pick(_VERBS)} the {phrase()} {rng.pick(_WHEN)}."
    if kind == 1:
        return f"The {phrase()} near {rng.pick(_PLACES)} was {rng.pick(_ADJECTIVES)}."
    if kind == 2:
        return f"{rng.pick(_NAMES)} and {rng.pick(_NAMES)} {rng.pick(_VERBS)} a {phrase()} and the {phrase()}."
    if kind == 3:
        return f"There were {rng.between(2, 999)} pieces of {noun()} in the {phrase()}."
    if kind == 4:
        return f"Nobody in {rng.pick(_PLACES)} {rng.pick(_VERBS)} the {phrase()}, not even {rng.pick(_NAMES)}."
    if kind == 5:
        return f"In {rng.between(1600, 2099)} the {phrase()} {rng.pick(_VERBS)} {rng.pick(_PLACES)}."
    if kind == 6:
        return f"A {phrase()} is seldom as {rng.pick(_ADJECTIVES)} as the {noun()} of {rng.pick(_NAMES)}."
    if kind == 7:
        return f"{rng.pick(_WHEN).capitalize()}, the {phrase()} {rng.pick(_VERBS)} the {noun()} of {_pseudo_word(rng).capitalize()}."
    if kind == 8:
        return f"Why {rng.pick(_NAMES)} {rng.pick(_VERBS)} the {phrase()} remains unknown."
    return f"{rng.pick(_NAMES)} wrote: the {noun()}, the {noun()} and the {phrase()} {rng.pick(_WHEN)}."


class Bank:
    """Sentences made once and drawn from many times; with size 0 each draw makes a new sentence."""

    def __init__(self, seed: object, size: int = 0) -> None:
        rng = Rng("bank", seed)
        self._sentences = [sentence(rng) for _ in range(size)]

    def draw(self, rng: Rng) -> str:
        return rng.pick(self._sentences) if self._sentences else sentence(rng)


# --- items ----------------------------------------------------------------------------------------------------------


def _fresh(make: Callable[[], str], taken: set[str]) -> str:
    while (name := make()) in taken:
        pass
    taken.add(name)
    return name


def _key(rng: Rng, taken: set[str]) -> str:
    kind = rng.below(4)
    if kind == 0:
        return _fresh(lambda: rng.text(_LOWER, rng.between(4, 8)), taken)
    if kind == 1:
        return _fresh(lambda: rng.text(_UPPER, 2) + rng.text(_DIGITS, rng.between(2, 4)), taken)
    if kind == 2:
        return _fresh(lambda: f"{rng.pick(_ADJECTIVES)}-{rng.pick(_NOUNS)}", taken)
    return _fresh(lambda: f"{rng.text(_LOWER, 3)}-{rng.text(_DIGITS, 3)}", taken)


def _value(rng: Rng) -> str:
    kind = rng.below(4)
    if kind < 2:
        return rng.text(_DIGITS, rng.between(4, 8))
    if kind == 2:
        return rng.text(_LOWER, rng.between(4, 8))
    return rng.text(_UPPER + _DIGITS, rng.between(4, 8))


_KV_STATEMENTS = (
    "The secret value of {k} is {v}.",
    "Remember that the value of {k} is {v}.",
    "Note: {k} = {v}.",
    "The value for {k} was set to {v}.",
)
_KV_QUESTIONS = (
    "What is the value of {k}?",
    "Which value belongs to {k}?",
    "Tell me the value of {k}.",
)


def key_value(rng: Rng, taken: set[str]) -> Item:
    """``The secret value of KEY is VALUE.`` asked for the value."""
    k, v = _key(rng, taken), _value(rng)
    return Item((rng.pick(_KV_STATEMENTS).format(k=k, v=v),), ((rng.pick(_KV_QUESTIONS).format(k=k), v),))


def variables(rng: Rng, taken: set[str], hops: int) -> Item:
    """A chain of assignments: the answer walks back from the last name to the value, ``C = B = A = 417``."""
    names = [_fresh(lambda: rng.text(_UPPER, 3), taken) for _ in range(hops)]
    value = rng.text(_DIGITS, rng.between(3, 6))
    statements = [f"VAR {names[0]} = {value}."] + [f"VAR {b} = {a}." for a, b in zip(names, names[1:])]
    asked = rng.between(1, hops)
    chain = list(reversed(names[:asked])) + [value]
    return Item(tuple(statements), ((f"Trace the variable {names[asked - 1]}.", " = ".join(chain)),))


def copy_span(rng: Rng, taken: set[str], size: int) -> Item:
    """A marked passage of words, letters and digits that must be repeated exactly."""
    label = _fresh(lambda: rng.text(_UPPER, 2), taken)
    parts: list[str] = []
    while sum(map(len, parts)) + len(parts) < size:
        kind = rng.below(3)
        parts.append(rng.pick(_NOUNS) if kind == 0 else rng.text(_LOWER if kind == 1 else _DIGITS, rng.between(2, 7)))
    span = " ".join(parts)
    return Item((f"Passage {label}: <<{span}>>",), ((f"Repeat passage {label}.", span),))


def arithmetic(rng: Rng, taken: set[str], steps: int) -> Item:
    """Single digits added and subtracted modulo 10; the answer shows each step and ends in the result."""
    label = _fresh(lambda: rng.text(_LOWER, 4), taken)
    total = rng.below(10)
    terms, work = [str(total)], []
    for _ in range(steps):
        sign, digit = rng.pick("+-"), rng.below(10)
        after = (total + digit if sign == "+" else total - digit) % 10
        terms += [sign, str(digit)]
        work.append(f"{total}{sign}{digit}={after}")
        total = after
    return Item(
        (f"Sum {label}: {' '.join(terms)}.",), ((f"Work out sum {label} modulo 10.", f"{'; '.join(work)}; {total}"),)
    )


_TOOL_VERBS = "send book move store check update create cancel".split()
_TOOL_OBJECTS = "parcel room truck record order ticket device invoice".split()
_TOOL_FIELDS: dict[str, str] = {
    "city": "string", "weight": "integer", "code": "string", "owner": "string", "floor": "integer", "day": "string",
    "count": "integer", "label": "string",
}
_DAYS = "Monday Tuesday Wednesday Thursday Friday Saturday Sunday".split()


def _field_value(rng: Rng, name: str) -> str | int:
    if _TOOL_FIELDS[name] == "integer":
        return rng.between(1, 999)
    if name == "city":
        return rng.pick(_PLACES) if rng.chance(0.5) else _pseudo_word(rng).capitalize()
    if name == "owner":
        return rng.pick(_NAMES)
    if name == "day":
        return rng.pick(_DAYS)
    return rng.text(_UPPER + _DIGITS, rng.between(3, 5))


@dataclass(frozen=True)
class ToolCall:
    """A tool, a record sentence with more fields than it needs, and the call that the request asks for."""

    statement: str
    request: str
    name: str
    parameters: dict[str, str] = field(hash=False)
    arguments: dict[str, str | int] = field(hash=False)

    @property
    def call(self) -> str:
        return json.dumps({"name": self.name, "arguments": self.arguments})

    @property
    def brief(self) -> str:
        return json.dumps({"name": self.name, "parameters": self.parameters})

    @property
    def openai(self) -> dict:
        """The description as an entry of the ``tools`` array of a chat request."""
        properties = {name: {"type": kind} for name, kind in self.parameters.items()}
        function = {"name": self.name, "parameters": {"type": "object", "properties": properties}}
        return {"type": "function", "function": function}


def tool_call(rng: Rng, taken: set[str]) -> ToolCall:
    record = _fresh(lambda: rng.text(_UPPER, 1) + rng.text(_DIGITS, 3), taken)
    names = list(_TOOL_FIELDS)
    rng.shuffle(names)
    known = names[: rng.between(2, 4)]
    facts = {name: _field_value(rng, name) for name in known}
    wanted = known[: rng.between(1, len(known))]
    rng.shuffle(wanted)
    listing = ", ".join(f"{name} {value}" for name, value in facts.items())
    tool = f"{rng.pick(_TOOL_VERBS)}_{rng.pick(_TOOL_OBJECTS)}"
    return ToolCall(
        statement=f"Record {record}: {listing}.",
        request=f"Call {tool} for record {record}.",
        name=tool,
        parameters={name: _TOOL_FIELDS[name] for name in wanted},
        arguments={name: facts[name] for name in wanted},
    )


def tool_json(rng: Rng, taken: set[str]) -> Item:
    """The tool is described in the question, the arguments stand in the haystack; the answer is the JSON call."""
    spec = tool_call(rng, taken)
    return Item((spec.statement,), ((f"Tool: {spec.brief}\n{spec.request}", spec.call),))


# --- haystack -------------------------------------------------------------------------------------------------------


def haystack(rng: Rng, budget: int, placed: Sequence[tuple[float, str]], bank: Bank) -> str:
    """Filler of at most ``budget`` characters with each statement near its depth (0 first, 1 last).

    Statements of equal depth keep their order.
    """
    room = budget - sum(len(text) + 1 for _, text in placed)
    pieces: list[str] = []
    ends: list[int] = []
    used = 0
    while True:
        piece = bank.draw(rng)
        if used + len(piece) + 1 > room:
            break
        used += len(piece) + 1
        pieces.append(piece)
        ends.append(used)
    slots: list[list[str]] = [[] for _ in range(len(pieces) + 1)]
    for depth, text in sorted(placed, key=lambda entry: entry[0]):
        slots[min(bisect.bisect_left(ends, depth * used + 1e-9), len(pieces))].append(text)
    # bisect_left finds the sentence that holds the depth; a statement of depth 1 must follow the last one
    out: list[str] = []
    for i, here in enumerate(slots):
        out.extend(here)
        if i < len(pieces):
            out.append(pieces[i])
    joined: list[str] = []
    for text in out:
        joined.append(text)
        joined.append("\n" if rng.chance(0.12) else " ")
    return "".join(joined).rstrip()


def overhead(question: str, answer: str) -> int:
    """Tokens of a chat rendering that are neither haystack nor question nor answer, plus those two."""
    markers = token_count(USER_OPEN + "\n\n" + ASSISTANT_OPEN + IM_END + "\n")
    return markers + 1 + token_count(question) + token_count(answer)


def token_count(text: str) -> int:
    """Length in tokens: one for each special marker, one for each byte of the rest."""
    count = len(text.encode())
    for marker in _MARKERS:
        count -= text.count(marker) * (len(marker) - 1)
    return count


def _fitting_haystack(rng: Rng, length: int, fixed: int, placed: Sequence[tuple[float, str]]) -> str:
    if sum(len(text) + 1 for _, text in placed) > length - fixed:
        raise ValueError(f"the statements and the question alone exceed {length} tokens: ask for a greater length")
    return haystack(rng, length - fixed, placed, Bank(0))


def make(task: str, length: int, depth: float, seed: int, *, keys: int | None = None, hops: int = 4) -> Example:
    """One example of ``task`` (see ``TASKS``) that fits ``length`` tokens, with its needle at ``depth`` in 0..1.

    ``keys`` is the number of key-value sentences of ``multikey`` (default: one for each 128 tokens, 4 to 64); ``hops``
    the number of names in the asked chain of ``variables``, whose statements are spread over the haystack before and
    up to ``depth``. Raises ValueError for an unknown task, a depth outside 0..1 or a length too short for what must
    stand in it (512 is enough for every task with its defaults).
    """
    if task not in TASKS:
        raise ValueError(f"unknown task {task!r}: use one of {', '.join(TASKS)}")
    if not 0.0 <= depth <= 1.0:
        raise ValueError(f"depth {depth} is outside 0..1")
    rng = Rng("example", task, length, depth, seed, keys, hops)
    taken: set[str] = set()
    placed: list[tuple[float, str]]
    if task == "variables":
        item = variables(rng, taken, hops)
        while item.questions[0][1].count("=") != hops:  # ask for the end of the chain
            item = variables(rng, taken, hops)
        n = len(item.statements)
        placed = [(depth * (i + 1) / n, text) for i, text in enumerate(item.statements)]
        other = variables(rng, taken, hops)
        placed += [(rng.unit() * (i + 1) / n, text) for i, text in enumerate(other.statements)]
    else:
        if task == "copy":
            item = copy_span(rng, taken, rng.between(24, 80))
        elif task == "arithmetic":
            item = arithmetic(rng, taken, rng.between(2, 5))
        elif task == "tool_json":
            item = tool_json(rng, taken)
        else:
            item = key_value(rng, taken)
        placed = [(depth, text) for text in item.statements]
        if task == "multikey":
            total = keys if keys is not None else max(4, min(64, length // 128))
            placed += [(rng.unit(), key_value(rng, taken).statements[0]) for _ in range(total - 1)]
    question, answer = item.questions[0]
    text = _fitting_haystack(rng, length, overhead(question, answer), placed)
    value = answer.split(" = ")[-1] if task == "variables" else answer.split("; ")[-1] if task == "arithmetic" else answer
    return Example(task, f"{text}\n\n{question}", answer, length, depth, seed, value)


def make_tool_chat(length: int, depth: float, seed: int) -> Example:
    """Like ``tool_json``, but the tool goes in the request's ``tools``; the answer carries the call's markers."""
    rng = Rng("tool-chat", length, depth, seed)
    spec = tool_call(rng, set())
    answer = f"{CALL_OPEN}\n{spec.call}\n{CALL_CLOSE}"
    extra = token_count(f"{IM_START}system\n{TOOLS_HEAD}{json.dumps(spec.openai)}\n{IM_END}\n")
    text = _fitting_haystack(rng, length, overhead(spec.request, answer) + extra, [(depth, spec.statement)])
    return Example("tool_chat", f"{text}\n\n{spec.request}", answer, length, depth, seed, spec.call, (spec.openai,))


def render_chat(example: Example) -> str:
    """The prompt as the chat template renders it, up to where the assistant begins to speak."""
    system = ""
    if example.tools:
        system = f"{IM_START}system\n{TOOLS_HEAD}{''.join(json.dumps(tool) + chr(10) for tool in example.tools)}{IM_END}\n"
    return f"{system}{USER_OPEN}{example.prompt}{ASSISTANT_OPEN}"


def render_plain(example: Example) -> str:
    """The prompt for a bare completion, without chat markers."""
    text, _, question = example.prompt.rpartition("\n\n")
    return f"{text}\n{PLAIN_QUESTION}{question}{PLAIN_ANSWER}"


# --- training documents ---------------------------------------------------------------------------------------------

Segment = tuple[str, bool]
"""Text and whether it is an answer (that the model is judged on)."""


def document(rng: Rng, length: int, bank: Bank, tools_share: float = 0.12) -> list[Segment]:
    """A haystack with several kinds of items and as many questions about it as fit, in at most ``length`` tokens.

    One document in four holds a single item, so that a lone needle is as well known as a crowded haystack. The first
    question follows the haystack; later ones are further turns. A document is either a chat or plain text; a share of
    those long enough are chats with a tool in the system turn.
    """
    taken: set[str] = set()
    lone = rng.chance(0.25)
    makers: list[tuple[float, Callable[[], Item]]] = [
        (0.44, lambda: key_value(rng, taken)),
        (0.20, lambda: variables(rng, taken, rng.between(1, 5))),
        (0.08, lambda: copy_span(rng, taken, rng.between(16, 90))),
        (0.13, lambda: arithmetic(rng, taken, rng.between(1, 5))),
        (0.15, lambda: tool_json(rng, taken)),
    ]
    share = 0.08 + 0.5 * rng.unit() ** 2
    focus = rng.below(len(makers)) if rng.chance(0.4) else None

    def draw() -> Item:
        if focus is not None and rng.chance(0.8):
            return makers[focus][1]()
        point, total = rng.unit(), 0.0
        for weight, maker in makers:
            total += weight
            if point < total:
                return maker()
        return makers[0][1]()

    tools: ToolCall | None = tool_call(rng, taken) if length >= 500 and rng.chance(tools_share) else None
    chat = tools is not None or rng.chance(0.7)
    system = ""
    if tools is not None:
        system = f"{IM_START}system\n{TOOLS_HEAD}{json.dumps(tools.openai)}\n{IM_END}\n"
    elif chat and rng.chance(0.15):
        system = f"{IM_START}system\n{bank.draw(rng)}{IM_END}\n"
    fixed = token_count(system) + 40
    budget = length - fixed
    items: list[Item] = []
    if tools is not None:
        items.append(Item((tools.statement,), ((tools.request, f"{CALL_OPEN}\n{tools.call}\n{CALL_CLOSE}"),)))
    spent = sum(item.cost for item in items)
    while True:
        item = draw()
        asked = sum(len(q) + len(a) + 24 for q, a in item.questions)
        if spent + item.cost + asked > budget - 20 and items:
            break
        items.append(item)
        spent += item.cost
        if lone or spent > share * budget:
            break

    placed: list[tuple[float, str]] = []
    questions: list[tuple[str, str]] = []
    for item in items:
        depths = sorted(rng.unit() for _ in item.statements)
        placed += list(zip(depths, item.statements))
        questions += item.questions
    rng.shuffle(questions)
    asked_list: list[tuple[str, str]] = []
    room = min(budget - sum(len(text) + 1 for _, text in placed), int(budget * (0.15 + 0.45 * rng.unit())))
    turn = token_count(IM_END + "\n" + USER_OPEN + ASSISTANT_OPEN)
    cost = 0
    for question, answer in questions:
        one = token_count(question) + token_count(answer) + turn
        if asked_list and cost + one > room:
            continue
        asked_list.append((question, answer))
        cost += one
    text = haystack(rng, budget - cost, placed, bank)

    segments: list[Segment] = []
    if chat:
        segments.append((f"{system}{USER_OPEN}{text}\n\n", False))
        for i, (question, answer) in enumerate(asked_list):
            segments.append((("" if i == 0 else f"\n{USER_OPEN}") + question + ASSISTANT_OPEN, False))
            segments.append((answer + IM_END, True))
        segments.append(("\n", False))
    else:
        segments.append((f"{text}\n", False))
        for question, answer in asked_list:
            segments.append((f"{PLAIN_QUESTION}{question}{PLAIN_ANSWER}", False))
            segments.append((answer + IM_END, True))
    return segments


def sequence(rng: Rng, length: int, bank: Bank, bos: bool, tools_share: float = 0.12) -> list[Segment]:
    """Documents one after another until ``length`` tokens are (nearly) full; half of the sequences hold one alone."""
    segments: list[Segment] = []
    used = 0
    while length - used >= 256:
        rest = length - used
        size = rest
        if rest > 512 and rng.chance(0.5):
            size = int(256 * (rest / 256) ** rng.unit())
        if bos:
            segments.append((BOS, False))
        body = document(rng, size - 1, bank, tools_share)
        segments += body
        used += int(bos) + sum(token_count(text) for text, _ in body)
    return segments
