"""Does the measuring: finds engines, models and texts, starts servers when something is missing, keeps every result.

One laboratory serves one run of the gate; its scratch folder holds texts and distributions (hundreds of MiB for a large vocabulary)
and goes with it.
"""

from __future__ import annotations

import importlib
import shutil
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from functools import cached_property
from hashlib import sha256
from pathlib import Path
from typing import Any

from ... import assemble, files
from ...console import Meter
from ...errors import DataError
from ...sources import Upstream, Workshop
from ..serving import Engine, Server
from . import perplexity, texts
from .cells import Cells, LocalModel, Subject
from .perplexity import Difference, Divergence, Reading
from .plan import GateModel, Plan, Side

THREADS = 2
"""Threads of every run unless another number is asked for: sums are split by thread, so results are kept for each count by itself."""

CONTEXT_MARGIN = 512
"""Tokens of context beyond what the model was trained for: chat markers, and a haystack that came out long."""


@dataclass(frozen=True)
class Ask:
    """A request to a server; ``cost`` is about the tokens it takes, for the progress line."""

    path: str
    body: dict[str, Any]
    cost: int


class Laboratory:
    """The means of one run. ``engine`` takes the place of the patched engine that the toolkit would build."""

    def __init__(self, workshop: Workshop, plan: Plan, scratch: Path, *, engine: Path | None = None, threads: int = THREADS) -> None:
        self.workshop = workshop
        self.plan = plan
        self.scratch = scratch
        self.threads = threads
        self.cells = Cells(workshop.cache)
        self._given = engine
        self._engines: dict[str, Engine] = {}
        self._models: dict[str, LocalModel | str] = {}
        self._texts: dict[str, str] = {}

    # ---- what there is ---------------------------------------------------------------------------------------------------------

    @cached_property
    def upstream(self) -> Upstream:
        """The base of the engine, for its texts."""
        return Upstream.load(self.workshop)

    def engine(self, name: str) -> Engine:
        """The engine ``patched`` or ``pristine``; built by this machine's compiler unless the cache has it."""
        if name not in self._engines:
            if name == "patched" and self._given is not None:
                self._engines[name] = Engine.at(self._given)
            else:
                component = assemble.engine(self.workshop, "native", toolchain="native", pristine=name == "pristine")
                self._engines[name] = Engine(f"{name} engine", component.program_path, component.program.sha256)
        return self._engines[name]

    def model(self, model: GateModel) -> LocalModel | str:
        """The model's file, or the sentence that says why there is none."""
        if model.name not in self._models:
            self._models[model.name] = self._find(model)
        return self._models[model.name]

    def _find(self, model: GateModel) -> LocalModel | str:
        if model.file:
            path = self.workshop.project.root / model.file
            if not path.is_file():
                return f"{model.file} is not there"
        else:
            try:
                package = importlib.import_module(model.package)
            except ImportError:
                return f"its package is not installed (pip install {model.package.replace('_', '-')})"
            path = Path(package.assemble(self.workshop.cache.root / "models" / package.MODEL_NAME))
        return LocalModel(model.name, path, files.sha256_file(path))

    def subject(self, side: Side, model: GateModel, flags: Sequence[str] = (), *, serving: bool) -> Subject:
        """A side of a comparison with a model that is there; ``flags`` come before the side's own. Raises DataError for an absent model."""
        local = self.model(model)
        if isinstance(local, str):
            raise DataError(f"{model.name} cannot be measured: {local}.")
        return Subject(self.engine(side.engine), local, (*flags, *side.flags, *(side.server_flags if serving else ())))

    def text(self, name: str) -> str:
        """A corpus by its name."""
        if name not in self._texts:
            self._texts[name] = texts.load(self.plan.texts[name], self.workshop.project.root, lambda: self.upstream.pristine().path)
        return self._texts[name]

    def server_flags(self, model: GateModel, slots: int) -> tuple[str, ...]:
        """Flags of every server: room for the longest haystack in each slot, nothing kept from request to request."""
        room = (model.context + CONTEXT_MARGIN) * slots
        return ("--ctx-size", str(room), "--parallel", str(slots), "--threads", str(self.threads), "--fit", "off", "--cache-ram", "0", "--no-ui")

    # ---- over HTTP -------------------------------------------------------------------------------------------------------------

    def missing(self, subject: Subject, asks: Sequence[Ask]) -> int:
        """The cost of those requests whose answers are not kept yet."""
        return sum(ask.cost for ask in asks if self.cells.get(self._key(subject, ask)) is None)

    def _key(self, subject: Subject, ask: Ask) -> str:
        return self.cells.key("http", [subject], [ask.path, ask.body])

    def answers(self, subject: Subject, asks: Sequence[Ask], shorten: Callable[[Any], Any], *, at_once: int, meter: Meter) -> list[Any]:
        """What the subject answers, in order. ``shorten`` picks from an answer what is kept; it must give the same for the same path.

        A server is started for the requests that have no kept answer, ``at_once`` of which are under way together.
        """
        keys = [self._key(subject, ask) for ask in asks]
        kept = {key: value for key in keys if (value := self.cells.get(key)) is not None}
        todo = list({key: ask for key, ask in zip(keys, asks, strict=True) if key not in kept}.items())
        if todo:
            with Server(subject.engine, subject.model.path, subject.words) as server, ThreadPoolExecutor(at_once) as pool:

                def one(item: tuple[str, Ask]) -> tuple[str, Any]:
                    key, ask = item
                    value = shorten(self._ask(server, ask))
                    self.cells.put(key, value)
                    meter.advance(ask.cost)
                    return key, value

                try:
                    kept.update(pool.map(one, todo))
                except BaseException:
                    pool.shutdown(wait=False, cancel_futures=True)
                    server.stop()
                    raise
        return [kept[key] for key in keys]

    def _ask(self, server: Server, ask: Ask) -> Any:
        body = ask.body
        if "messages" in body and ask.path == "/completion":
            # A continuation of a chat, wanted as token ids, which only this endpoint tells.
            prompt = server.post("/apply-template", {"messages": body["messages"]})["prompt"]
            body = {name: value for name, value in body.items() if name != "messages"} | {"prompt": prompt}
        return server.post(ask.path, body)

    # ---- by the perplexity command ---------------------------------------------------------------------------------------------

    def divergence_key(self, reference: Subject, candidate: Subject, text: str, reading: Reading) -> str:
        """The cell of a divergence."""
        return self.cells.key("kld", [reference, candidate], [_digest(text), _facts(reading)])

    def divergence(self, reference: Subject, candidate: Subject, text: str, reading: Reading, *, meter: Meter) -> Divergence:
        """How far the candidate's distributions on ``text`` are from the reference's."""
        key = self.divergence_key(reference, candidate, text, reading)
        if (kept := self.cells.get(key)) is None:
            base = self._distributions(reference, text, reading, meter)
            measured = perplexity.divergence(
                candidate.engine, candidate.model.path, candidate.words, reading, base, home=self.scratch, on_chunk=lambda: meter.advance(reading.context)
            )
            self.cells.put(key, kept := asdict(measured))
        return Divergence(**kept)

    def difference_key(self, reference: Subject, candidate: Subject, text: str, reading: Reading) -> str:
        """The cell of a comparison of distributions."""
        return self.cells.key("logits", [reference, candidate], [_digest(text), _facts(reading)])

    def difference(self, reference: Subject, candidate: Subject, text: str, reading: Reading, *, meter: Meter) -> Difference:
        """At how many positions of ``text`` the two sides' distributions differ at all."""
        key = self.difference_key(reference, candidate, text, reading)
        if (kept := self.cells.get(key)) is None:
            found = perplexity.difference(self._distributions(reference, text, reading, meter), self._distributions(candidate, text, reading, meter))
            self.cells.put(key, kept := asdict(found))
        first = kept["first"]
        return Difference(kept["positions"], kept["different"], None if first is None else (first[0], first[1]))

    def _distributions(self, subject: Subject, text: str, reading: Reading, meter: Meter) -> Path:
        """The file of the subject's distributions, written unless an earlier measurement of this run needed it, too."""
        path = self.scratch / f"{self.cells.key('file', [subject], [_digest(text), _facts(reading)])[:24]}.logits"
        if not path.is_file():
            source = self.scratch / f"{_digest(text)[:24]}.txt"
            if not source.is_file():
                files.write_text(source, text)
            self._make_room(path)
            part = path.with_suffix(".part")
            perplexity.write_logits(subject.engine, subject.model.path, source, subject.words, reading, part, home=self.scratch)
            part.replace(path)
        path.touch()  # used last, removed last
        meter.advance(reading.context * reading.chunks)
        return path

    def _make_room(self, wanted: Path, keep: int = 2) -> None:
        """Remove distributions but for those used last: they can be made again, and take a GiB each with a large vocabulary."""
        there = sorted((path for path in self.scratch.glob("*.logits") if path != wanted), key=lambda path: path.stat().st_mtime_ns)
        for path in there[: max(0, len(there) - keep)]:
            path.unlink()


def fresh_scratch(workshop: Workshop) -> Path:
    """An empty folder for one run, below ``build/``; what a killed run left there is removed. Hold the gate's lock."""
    folder = workshop.project.build / "gates" / "quality" / "scratch"
    with files.disk_errors(folder):
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True, exist_ok=True)
    return folder


def _digest(text: str) -> str:
    return sha256(text.encode()).hexdigest()


def _facts(reading: Reading) -> list[Any]:
    return [reading.context, reading.chunks, reading.batch.value, reading.sequences, reading.threads]
