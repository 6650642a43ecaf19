"""Upstream's server suite on real engines with stand-in models, and an engine with a fault that only the suite can see."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from opencoti_build.cli.common import CommandContext
from opencoti_build.gates import standins
from opencoti_build.gates.server_suite import Outcome, Suite
from opencoti_build.gates.upstream import UpstreamGate, Verdict, judge_disputed, judge_server, part_of

pytest.importorskip("numpy", reason="the stand-ins are written with gguf-py: pip install -e '.[gate]'")
pytest.importorskip("filelock", reason="upstream's tests use it: pip install -e '.[gate]'")

BASICS = (
    "unit/test_basic.py::test_server_models",
    "unit/test_basic.py::test_server_props",
    "unit/test_basic.py::test_load_split_model",
    "unit/test_tokenize.py::test_tokenize_detokenize",
    "unit/test_embedding.py::test_embedding_single",
    "unit/test_embedding.py::test_embedding_usage_multiple",
    "unit/test_rerank.py::test_rerank",
    "unit/test_lora.py::test_lora_per_request",
    "unit/test_speculative.py::test_with_and_without_draft",
    "unit/test_router.py::test_router_download_model",
    "unit/test_slot_save.py::test_slot_save_restore_with_image",
)
"""One test at least for each stand-in and each way to get it."""


@pytest.fixture(scope="module")
def gate(workshop: CommandContext) -> UpstreamGate:
    return UpstreamGate.load(workshop)


@pytest.fixture(scope="module")
def repositories(gate: UpstreamGate) -> Mapping[str, Mapping[str, Path]]:
    models = standins.ensure(gate.workshop, gate.upstream, gate.data.standins, gate.data.pieces)
    return {repository: {path: part_of(models, name) for path, name in listed.items()} for repository, listed in gate.data.server.repositories.items()}


@pytest.fixture(scope="module")
def suite(gate: UpstreamGate, repositories: Mapping[str, Mapping[str, Path]]) -> Callable[[str, Path], Suite]:
    tree = gate.upstream.tree()
    return lambda name, program: Suite(gate.workshop, gate.data.server, tree.path, tree.tree_id, repositories, name, program)


def test_every_stand_in_does_what_the_original_is_used_for(suite: Callable[[str, Path], Suite], patched: Path) -> None:
    results = suite("patched", patched).run(BASICS)
    assert {name: (result.outcome, result.reason) for name, result in results.items() if result.outcome is not Outcome.PASSED} == {}


def test_the_suite_is_large(suite: Callable[[str, Path], Suite], patched: Path) -> None:
    ids = suite("patched", patched).collect()
    assert len(ids) > 400 and set(BASICS) <= set(ids)


def test_a_fault_that_the_base_does_not_have_is_a_regression(suite: Callable[[str, Path], Suite], patched: Path, tmp_path: Path) -> None:
    """The faulty engine answers to another name than it was given."""
    faulty = tmp_path / "llama"
    faulty.write_text(f"#!/bin/sh\nexec '{patched}' \"$@\" --alias somebody-else\n")
    faulty.chmod(0o755)
    good, bad = suite("pristine", patched), suite("planted", faulty)
    wrong, right = "unit/test_basic.py::test_server_models", "unit/test_tokenize.py::test_tokenize_detokenize"
    ours, theirs = [bad.run([wrong, right], fresh=True, workers=1) for _ in range(2)], good.run([wrong, right])
    assert ours[0][wrong].verdict != theirs[wrong].verdict
    judged = judge_disputed([run[wrong] for run in ours], [theirs[wrong], theirs[wrong]])
    assert judged.verdict is Verdict.REGRESSION and "test_basic.py:" in judged.note
    assert ours[0][right].verdict == theirs[right].verdict
    assert judge_server(ours[0][right], theirs[right]).verdict is Verdict.PASSED
