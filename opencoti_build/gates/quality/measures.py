"""The four measures. Each takes a feature, one of its models and how much to measure, and gives a result.

A measure is prepared first (which requests, which texts), so that the whole run knows how much is still to do, and then run.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any, Protocol

from ...console import Meter
from . import examples, statistics, texts
from .cells import Subject
from .examples import Question
from .laboratory import Ask, Laboratory
from .perplexity import Reading
from .plan import Batch, Feature, GateModel, Kind, Measure, Profile
from .statistics import Interval, Pairs
from .verdict import Result, Value

LEAST_FOR_Q999 = 1000
"""Positions below which a 99.9 % quantile is little more than the largest value."""

TEXT_SEEDS = 50_000
"""Added to the seeds of examples whose continuations are compared, which so differ from those of the retrieval."""

TEXT_LENGTHS = (512, 768, 1024)
"""Tokens of those examples, in turn."""

ALTERNATIVES = 20
"""Candidates for a token that are asked for where two continuations part."""


class Work(Protocol):
    """A prepared measurement."""

    def cost(self) -> int:
        """About how many tokens are still to be read and written; 0 when all is kept from before."""
        ...

    def run(self, meter: Meter) -> Result:
        """Measure what is missing and judge."""
        ...


@dataclass(frozen=True)
class Subjects:
    """Both sides with the model."""

    reference: Subject
    candidate: Subject


@dataclass(frozen=True)
class _Prepared:
    laboratory: Laboratory
    feature: Feature
    measure: Measure
    model: GateModel
    profile: Profile

    def subjects(self, *flags: str, serving: bool) -> Subjects:
        sides = [self.laboratory.subject(side, self.model, flags, serving=serving) for side in (self.feature.reference, self.feature.candidate)]
        return Subjects(*sides)

    def result(self, values: Mapping[str, Value], facts: Mapping[str, Any], notes: list[str]) -> Result:
        return Result(self.feature.name, self.model.name, self.measure, values, facts, notes)


# ---- distributions -----------------------------------------------------------------------------------------------------------------


class _Reading(_Prepared):
    """What both measures on distributions share: the text and how it is read."""

    @cached_property
    def text(self) -> str:
        return self.laboratory.text(self.model.text)

    @cached_property
    def sides(self) -> Subjects:
        return self.subjects(serving=False)

    @property
    def reading(self) -> Reading:
        decode = self.measure.batch is Batch.DECODE
        chunks = self.profile.decode_chunks if decode else self.profile.chunks
        return Reading(self.model.kld_context, max(chunks, self.measure.sequences), self.measure.batch, self.measure.sequences, self.laboratory.threads)


class KldWork(_Reading):
    """Distributions of the candidate against those of the reference."""

    def cost(self) -> int:
        key = self.laboratory.divergence_key(self.sides.reference, self.sides.candidate, self.text, self.reading)
        return 0 if self.laboratory.cells.get(key) is not None else 2 * self.reading.context * self.reading.chunks

    def run(self, meter: Meter) -> Result:
        found = self.laboratory.divergence(self.sides.reference, self.sides.candidate, self.text, self.reading, meter=meter)
        count = found.positions
        error = statistics.Z * found.mean_error
        values = {
            "mean": Value(found.mean, count, Interval(found.mean - error, found.mean + error) if math.isfinite(error) else None),
            "q999": Value(found.q999, count),
            "max": Value(found.max, count),
            "top1": Value(found.top1, count, statistics.wilson(round(found.top1 * count), count) if math.isfinite(found.top1) else None),
        }
        notes = [f"{count} positions: the 99.9 % quantile is little more than the largest value"] if count < LEAST_FOR_Q999 else []
        return self.result(values, asdict(found), notes)


class LogitsWork(_Reading):
    """Distributions of both sides, row by row."""

    def cost(self) -> int:
        key = self.laboratory.difference_key(self.sides.reference, self.sides.candidate, self.text, self.reading)
        return 0 if self.laboratory.cells.get(key) is not None else 2 * self.reading.context * self.reading.chunks

    def run(self, meter: Meter) -> Result:
        found = self.laboratory.difference(self.sides.reference, self.sides.candidate, self.text, self.reading, meter=meter)
        notes = [] if found.first is None else [f"first difference in piece {found.first[0]} of the text, after token {found.first[1]}"]
        return self.result({"different": Value(found.different, found.positions)}, asdict(found), notes)


# ---- retrieval ---------------------------------------------------------------------------------------------------------------------


def _chat_reply(answer: Any) -> dict[str, Any]:
    message = answer["choices"][0]["message"]
    return {"reply": message.get("content") or "", "prompt_tokens": answer["usage"]["prompt_tokens"]}


class RetrievalWork(_Prepared):
    """The same questions to both sides."""

    @cached_property
    def asked(self) -> list[Question]:
        root = self.laboratory.workshop.project.root
        return list(examples.questions(root, self.model, self.profile, self.measure.tasks or self.model.tasks))

    @cached_property
    def asks(self) -> list[Ask]:
        return [Ask("/v1/chat/completions", question.request(self.model), question.length) for question in self.asked]

    @cached_property
    def sides(self) -> Subjects:
        return self.subjects(*self.laboratory.server_flags(self.model, self.measure.slots), serving=True)

    def cost(self) -> int:
        return sum(self.laboratory.missing(side, self.asks) for side in (self.sides.reference, self.sides.candidate))

    def run(self, meter: Meter) -> Result:
        right: list[list[bool]] = []
        tokens = 0
        for side in (self.sides.reference, self.sides.candidate):
            replies = self.laboratory.answers(side, self.asks, _chat_reply, at_once=self.measure.slots, meter=meter)
            right.append([question.right(reply["reply"], self.model) for question, reply in zip(self.asked, replies, strict=True)])
            tokens = max(tokens, *(reply["prompt_tokens"] for reply in replies))
        pairs = Pairs.of(*right)
        count = pairs.count
        values = {
            "reference": Value(pairs.reference / count, count, statistics.wilson(pairs.reference, count)),
            "accuracy": Value(pairs.candidate / count, count, statistics.wilson(pairs.candidate, count)),
            "loss": Value((pairs.reference - pairs.candidate) / count, count, statistics.paired_loss(pairs)),
        }
        facts = {
            "pairs": asdict(pairs),
            "p": statistics.mcnemar(pairs),
            "longest_prompt": tokens,
            "cells": {
                name: [{"task": task, "length": length, "depth": depth, "right": hits, "count": all_} for (task, length, depth), (hits, all_) in examples.by_cell(self.asked, hit).items()]
                for name, hit in zip(("reference", "candidate"), right, strict=True)
            },
        }
        notes = [f"{pairs.reference_only} right only with the reference, {pairs.candidate_only} only with the candidate (exact McNemar p = {facts['p']:.3g})"]
        return self.result(values, facts, notes)


# ---- continuations -----------------------------------------------------------------------------------------------------------------


def _continuation(answer: Any) -> dict[str, Any]:
    timings = answer.get("timings", {})
    kept = {name: timings.get(name, 0) for name in ("predicted_n", "predicted_ms", "draft_n", "draft_n_accepted")}
    return {"tokens": answer["tokens"], **kept}


def _alternatives(answer: Any) -> list[list[list[Any]]]:
    return [[[item["id"], item["logprob"]] for item in position["top_logprobs"]] for position in answer["completion_probabilities"]]


class TextWork(_Prepared):
    """The same greedy continuations by both sides."""

    @cached_property
    def asks(self) -> list[Ask]:
        count, tokens = self.profile.continuations, self.profile.tokens
        common = {"n_predict": tokens, "temperature": 0, "seed": 1, "cache_prompt": False, "return_tokens": True}
        asks: list[Ask] = []
        if self.measure.excerpts:
            for piece in texts.excerpts(self.laboratory.text(self.model.text), count):
                asks.append(Ask("/completion", {"prompt": piece, "ignore_eos": True, **common}, tokens))
        root = self.laboratory.workshop.project.root
        for task in self.measure.tasks:
            for number in range(count):
                length = min(TEXT_LENGTHS[number % len(TEXT_LENGTHS)], self.model.context)
                question = examples.make(root, self.model, task, length, (number % 5) / 4, examples.FIRST_SEED + TEXT_SEEDS + number)
                asks.append(Ask("/completion", {"messages": [{"role": "user", "content": question.prompt}], **common}, length + tokens))
        return asks

    @cached_property
    def sides(self) -> Subjects:
        return self.subjects(*self.laboratory.server_flags(self.model, self.measure.slots), serving=True)

    def cost(self) -> int:
        return sum(self.laboratory.missing(side, self.asks) for side in (self.sides.reference, self.sides.candidate))

    def run(self, meter: Meter) -> Result:
        reference, candidate = (self.laboratory.answers(side, self.asks, _continuation, at_once=self.measure.slots, meter=meter) for side in (self.sides.reference, self.sides.candidate))
        parted = {
            index: place
            for index, (one, two) in enumerate(zip(reference, candidate, strict=True))
            if (place := first_difference(one["tokens"], two["tokens"])) is not None
        }
        count, same = len(self.asks), len(self.asks) - len(parted)
        gaps = [self._gap(index, place, candidate[index]["tokens"], meter) for index, place in parted.items()]
        drafted, accepted = (sum(item[name] for item in candidate) for name in ("draft_n", "draft_n_accepted"))
        values = {
            "equal": Value(same / count, count, statistics.wilson(same, count)),
            "gap": Value(max(gaps, default=0.0), len(gaps)),
            # Where nothing was drafted, a bound on acceptance must not hold.
            "acceptance": Value(accepted / drafted if drafted else 0.0, drafted, statistics.wilson(accepted, drafted)),
        }
        ratio = _speed(candidate) / max(1e-9, _speed(reference))
        facts = {"continuations": count, "same": same, "drafted": drafted, "accepted": accepted, "speed_ratio": round(ratio, 3), "tokens": sum(len(item["tokens"]) for item in reference)}
        notes = [f"{ratio:.2f} times the reference's tokens a second, at the moment of measuring"] if drafted else []
        if parted:
            notes.append(f"{len(parted)} of {count} continuations part, the first after {min(parted.values())} tokens")
        return self.result(values, facts, notes)

    def _gap(self, index: int, place: int, other: list[int], meter: Meter) -> float:
        """How much more likely (nats) the reference holds its own token than the candidate's, where the two part.

        Where the candidate ended, or its token is not among the best, it is the distance to the last of those that are known, so at
        least that; infinite where the reference ended.
        """
        ask = self.asks[index]
        asked = Ask(ask.path, ask.body | {"n_predict": place + 1, "n_probs": ALTERNATIVES}, 0)
        (positions,) = self.laboratory.answers(self.sides.reference, [asked], _alternatives, at_once=1, meter=meter)
        if place >= len(positions) or not positions[place]:
            return float("inf")
        known = {token: logprob for token, logprob in positions[place]}
        best = max(known.values())
        return float(best - known.get(other[place], min(known.values()))) if place < len(other) else float(best - min(known.values()))


def first_difference(one: list[int], two: list[int]) -> int | None:
    """The first index at which two lists differ, None for equal ones; where one ends early, its length."""
    for index, (a, b) in enumerate(zip(one, two, strict=False)):
        if a != b:
            return index
    return None if len(one) == len(two) else min(len(one), len(two))


def _speed(continuations: list[dict[str, Any]]) -> float:
    """Tokens a second over all of them."""
    tokens, milliseconds = (sum(float(item[name]) for item in continuations) for name in ("predicted_n", "predicted_ms"))
    return tokens / max(1e-9, milliseconds / 1000)


KINDS: Mapping[Kind, type[KldWork | LogitsWork | RetrievalWork | TextWork]] = {
    Kind.KLD: KldWork,
    Kind.LOGITS: LogitsWork,
    Kind.RETRIEVAL: RetrievalWork,
    Kind.TEXT: TextWork,
}
