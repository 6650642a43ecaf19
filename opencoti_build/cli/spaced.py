"""Commands spelled with a space: ``invoke patches apply`` beside ``invoke patches.apply``.

Invoke itself knows dotted names only. Here a collection of the root is a word of its own: its parser context takes the next
word, becomes the context of that command and goes on parsing with the command's own arguments. So every command keeps its
own flags and its own ``--help`` in both spellings, and ``invoke patches`` alone lists what there is.

A call that cannot be understood ends like every other error of ours: one sentence, and the exit code of ``UsageError``.
"""

from __future__ import annotations

import difflib
import sys
from collections.abc import Iterable
from typing import Any, NoReturn

from invoke import Collection, Task, task
from invoke.exceptions import Exit, ParseError
from invoke.parser import Argument, ParserContext
from invoke.parser.context import to_flag
from invoke.parser.parser import ParseMachine

from ..errors import UsageError


class Misunderstood(ParseError, Exit):
    """A call whose words are off.

    Invoke prints a ``ParseError`` and ends with 1, and with the code of an ``Exit``: this is both. Its completion of words catches the former.
    """

    def __init__(self, sentence: str, context: ParserContext | None) -> None:
        super().__init__(sentence, context)
        self.sentence = sentence
        self.message = None  # or it would be printed a second time, as that of an Exit
        self._code = UsageError.exit_code

    def __str__(self) -> str:
        return f"error: {self.sentence}"


class SpacedContext(ParserContext):
    """The parser context of one command; fills optional positional arguments too, and never takes a flag for one.

    ``rest`` is the one positional argument that takes every word that is left, at least one; "" for none.
    """

    def __init__(self, name: str, aliases: Iterable[str], args: Iterable[Argument], optional: tuple[str, ...] = (), rest: str = "") -> None:
        super().__init__(name=name, aliases=aliases, args=args)
        self.optional = [self.args[option] for option in optional]
        for argument in self.optional:
            argument.default = None  # the function's own default applies; see ``command``
        self.positional_args += self.optional
        self.rest = self.args[rest] if rest else None

    @property
    def missing_positional_args(self) -> list[Argument]:
        """The positional arguments still open, for the question at hand.

        Invoke's parse machine asks twice: for each word, whether it may be a positional value (``handle``), and at the end,
        whether a required one is missing (``complete_context``). Only the first question concerns the optional ones, and only
        the caller's frame tells the two apart.
        """
        caller = sys._getframe(1)
        if caller.f_code.co_name == "handle":
            return self.open_positionals(caller.f_locals["token"])
        asked_for_help = caller.f_locals["self"].initial.flags["--help"].got_value
        return [] if asked_for_help else self.open_positionals(None)

    def open_positionals(self, word: str | None) -> list[Argument]:
        """Those that ``word`` could fill, or with None those that are required and missing."""
        missing = [argument for argument in self.positional_args if argument.value is None]
        if word is None:
            return [argument for argument in missing if argument not in self.optional] + ([self.rest] if self.rest and not self.rest.got_value else [])
        return [] if word.startswith("-") and word != "-" else missing + ([self.rest] if self.rest else [])


class Chooser(Argument):
    """The word after a collection's name; seeing it turns the group's context into the command's."""

    def __init__(self, group: GroupContext) -> None:
        super().__init__(name="command", help="one of: " + ", ".join(sorted(group.commands)), positional=True)
        self.group = group

    def set_value(self, value: Any, cast: bool = True) -> None:
        """Accept a command's name; refuse an unknown one with the nearest."""
        commands = self.group.commands
        if value not in commands:
            near = difflib.get_close_matches(str(value), commands, n=1)
            hint = f" (did you mean {near[0]!r}?)" if near else ""
            raise Misunderstood(f"{self.group.name!r} has no command {value!r}{hint}: there are {', '.join(sorted(commands))}.", self.group)
        super().set_value(value, cast)
        self.group.become(commands[value])


class GroupContext(SpacedContext):
    """The parser context of a whole collection, until its command is known."""

    def __init__(self, name: str, commands: dict[str, SpacedContext]) -> None:
        super().__init__(name, (), ())
        self.commands = commands
        self.chooser = Chooser(self)
        self.positional_args = [self.chooser]

    def open_positionals(self, word: str | None) -> list[Argument]:
        """As in a command; before the command is known, a word names it and nothing is required."""
        if self.chooser.got_value:
            return super().open_positionals(word)
        return [] if word is None or word.startswith("-") else [self.chooser]

    def become(self, command: SpacedContext) -> None:
        """Take over the command's name and arguments."""
        self.name, self.aliases, self.optional, self.rest = command.name, command.aliases, command.optional, command.rest
        self.args, self.flags, self.inverse_flags = command.args, command.flags, command.inverse_flags
        self.positional_args = [*command.positional_args]


def spaced_contexts(root: Collection, ignore_unknown_help: bool | None = None) -> list[ParserContext]:
    """What ``Collection.to_contexts`` returns, with one context per command (dotted) and one per sub-collection (its bare name)."""
    commands: list[ParserContext] = []
    groups: dict[str, dict[str, SpacedContext]] = {}
    for name, aliases in root.task_names.items():
        made = root[name]
        group, _, word = name.rpartition(".")
        if word == OVERVIEW:
            continue
        context = SpacedContext(name, aliases, made.get_arguments(ignore_unknown_help=ignore_unknown_help), getattr(made, "optional_positionals", ()), getattr(made, "rest_positional", ""))
        commands.append(context)
        if group:
            groups.setdefault(group, {})[word] = context
    return commands + [GroupContext(group, members) for group, members in groups.items()]


OVERVIEW = "overview"
"""Name of the default task that every sub-collection gets: it lists the commands."""


def misunderstand(machine: ParseMachine, msg: str) -> NoReturn:
    """What ``ParseMachine.error`` does: end the parsing, with what it says and where to read more."""
    name = (machine.context.name if machine.context is not None else None) or ""
    spelled = name.replace(".", " ")
    more = f"'invoke {spelled} --help' lists what it takes" if name else "'invoke --list' shows every command, 'invoke --help' every option"
    flag = machine.flag
    if flag is not None and flag.takes_value and flag.raw_value is None and not flag.optional:
        msg = f"{to_flag(flag.name)} needs a value"  # invoke's own sentence shows the inside of the flag
    msg = msg.rstrip(".!").replace(f"{name!r}", f"{spelled!r}").replace("did not receive required positional arguments:", "needs")
    raise Misunderstood(f"{msg}: {more}.", machine.context)


def see_positional(machine: ParseMachine, value: Any) -> None:
    """What ``ParseMachine.see_positional_arg`` does: give a word to the first argument that is open for it; ``rest`` always is."""
    context = machine.context
    given = context.open_positionals(value) if isinstance(context, SpacedContext) else context.missing_positional_args
    given[0].value = value


def install() -> None:
    """Teach invoke the spelling with a space, and our way to end a call that cannot be understood.

    Invoke copies the collection of a tasks.py into a plain ``Collection`` of its own, so a subclass would be lost on the way, and its parser
    names its machine itself: the methods are replaced, once, in this process. What invoke refuses before it has read tasks.py, or after
    the parsing (``--list`` or ``--help`` with a name that is not there), still ends with its own code, 1.
    """
    Collection.to_contexts = spaced_contexts  # type: ignore[method-assign]
    ParseMachine.error = misunderstand  # type: ignore[method-assign]
    ParseMachine.see_positional_arg = see_positional  # type: ignore[method-assign]


def add_group(root: Collection, collection: Collection) -> None:
    """Add a sub-collection whose commands can be spelled with a space."""
    name = str(collection.name)
    rows = [(f"{name} {word}", _first_line(made)) for word, made in sorted(collection.tasks.items())]
    width = max(len(left) for left, _ in rows)
    listing = "\n".join([f"Usage: invoke {name} COMMAND [--help]", "", *(f"  {left:<{width}}  {right}" for left, right in rows)])

    def overview(c: Any) -> None:
        print(listing)

    overview.__doc__ = f"List the commands of ``{name}``.\n\n{listing}"
    collection.add_task(task(overview), name=OVERVIEW, default=True)
    root.add_collection(collection)


def _first_line(made: Task[Any]) -> str:
    return (made.__doc__ or "").strip().splitlines()[0] if made.__doc__ else ""
