"""What the results of two engines say together, and the data that the gate reads."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from opencoti_build.errors import DataError
from opencoti_build.gates import suite_data, upstream
from opencoti_build.gates.native_suite import NativeResult
from opencoti_build.gates.native_suite import Outcome as NativeOutcome
from opencoti_build.gates.server_suite import Outcome, TestResult
from opencoti_build.gates.standins import Kind, png
from opencoti_build.gates.upstream import Judged, Report, Verdict, document, judge_disputed, judge_native, judge_server, part_of
from opencoti_build.project import find_project

DATA = find_project().root / "gate" / "upstream.yaml"
TREE = "c" * 40


def passed(*soft: tuple[int, bool]) -> TestResult:
    return TestResult("unit/a.py::t", Outcome.PASSED, soft=soft)


def failed(where: str = "a.py:3", error: str = "AssertionError") -> TestResult:
    return TestResult("unit/a.py::t", Outcome.FAILED, "assert 1 == 2", where, error)


def native(outcome: NativeOutcome, code: int = 0) -> NativeResult:
    return NativeResult("test-a", outcome, code, 1.0, "" if outcome is NativeOutcome.PASSED else "the end of the log")


@pytest.mark.parametrize(
    ("ours", "theirs", "verdict"),
    [
        (native(NativeOutcome.PASSED), None, Verdict.PASSED),
        (native(NativeOutcome.FAILED, 1), native(NativeOutcome.PASSED), Verdict.REGRESSION),
        (native(NativeOutcome.FAILED, 1), native(NativeOutcome.FAILED, 2), Verdict.BASE),
        (native(NativeOutcome.TIMED_OUT, -9), native(NativeOutcome.PASSED), Verdict.REGRESSION),
        (native(NativeOutcome.FAILED, 1), None, Verdict.REGRESSION),
    ],
)
def test_native_verdicts(ours: NativeResult, theirs: NativeResult | None, verdict: Verdict) -> None:
    assert judge_native(ours, theirs).verdict is verdict


@pytest.mark.parametrize(("result", "verdict"), [(passed(), Verdict.PASSED), (failed(), Verdict.BASE), (TestResult("x", Outcome.SKIPPED, "why"), Verdict.SKIPPED)])
def test_what_ends_alike_is_no_matter_of_the_series(result: TestResult, verdict: Verdict) -> None:
    assert judge_server(result, result).verdict is verdict and not verdict.refused


@pytest.mark.parametrize(
    ("ours", "theirs", "verdict"),
    [
        ([failed()] * 3, [passed()] * 3, Verdict.REGRESSION),
        ([failed("a.py:9")] * 3, [failed("a.py:3")] * 3, Verdict.DIFFERS),
        ([failed(error="KeyError")] * 3, [failed()] * 3, Verdict.DIFFERS),
        ([passed()] * 3, [failed()] * 3, Verdict.REPAIRED),
        ([failed(), passed(), passed()], [passed()] * 3, Verdict.UNSTABLE),
        ([failed()] * 3, [passed(), failed(), passed()], Verdict.UNSTABLE),
        ([passed((4, True))] * 3, [passed((4, False))] * 3, Verdict.REGRESSION),
        ([passed((4, True))] * 3, [passed((4, False)), passed((4, True)), passed((4, False))], Verdict.UNSTABLE),
        ([failed("a.py:9"), failed("a.py:8")], [passed(), passed()], Verdict.REGRESSION),
    ],
)
def test_a_difference_counts_when_it_stays(ours: list[TestResult], theirs: list[TestResult], verdict: Verdict) -> None:
    judged = judge_disputed(ours, theirs)
    assert judged.verdict is verdict
    assert verdict.refused == (verdict in (Verdict.REGRESSION, Verdict.DIFFERS))


def test_the_note_of_a_regression_says_what_happened_on_both() -> None:
    note = judge_disputed([failed()] * 3, [passed((4, True))] * 3).note
    assert "a.py:3: assert 1 == 2" in note and "line 4 holds" in note


def report(*judged: Judged, complete: bool = True) -> Report:
    return Report("b1", TREE, judged, complete)


def test_the_document_names_what_was_left_out_and_why() -> None:
    skips = [Judged("server", f"unit/a.py::t[{case}]", Verdict.SKIPPED, "needs a | model") for case in "xyz"]
    text = document(report(Judged("native", "n", Verdict.PASSED, seconds=3.0), *skips, Judged("server", "unit/b.py::u", Verdict.BASE, "b.py:1: no")))
    assert "| `a.py::t` (3 cases) | needs a / model |" in text
    assert "| `b.py::u` | b.py:1: no |" in text
    assert "| C++ tests (`tests/`) | 1 passed |" in text
    assert text == document(report(Judged("native", "n", Verdict.PASSED, seconds=9.0), *skips, Judged("server", "unit/b.py::u", Verdict.BASE, "b.py:1: no")))


def test_only_a_complete_run_counts_as_the_record() -> None:
    assert report(complete=False).to_dict()["complete"] is False
    assert report(Judged("native", "n", Verdict.REGRESSION)).to_dict()["passed"] is False


def test_the_projects_own_data_fits_together() -> None:
    data = suite_data.load(DATA)
    for pattern in data.server.soft:
        re.compile(pattern)
    parts = {name: tuple(Path(str(number)) for number in range(model.parts)) for name, model in data.standins.items()}
    for listed in data.server.repositories.values():
        for standin in listed.values():
            assert part_of(parts, standin)
    used = {standin.partition("/")[0] for listed in data.server.repositories.values() for standin in listed.values()} | {data.native.model, *data.native.models.values()}
    assert used == set(data.standins), "a stand-in that nobody uses"
    words, scores, types = data.pieces.tokens(())
    assert len(words) == len(set(words)) == len(scores) == len(types)
    assert data.native.limit("test-backend-ops").memory > data.native.limit("test-unknown").memory


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (("model: story", "model: stroy"), "native.model.*'story'"),
        (("schema: 1", "schema: 2"), "schema 1"),
        (("kind: llama, embedding: 64", "kind: lama, embedding: 64"), "'lama'"),
        (("heads: 8, kv_heads: 4", "heads: 7, kv_heads: 4"), "heads has to divide"),
        (("fetched:", "fetchd:"), "fetched"),
        (("pieces: >-\n  th he", "pieces: >-\n  th th he"), "twice"),
        (("\"*\": {memory", "\"x*\": {memory"), "all other tests"),
    ],
)
def test_a_mistake_in_the_data_names_its_place(tmp_path: Path, change: tuple[str, str], says: str) -> None:
    text = DATA.read_text()
    assert text.count(change[0]) >= 1
    (tmp_path / "upstream.yaml").write_text(text.replace(*change, 1))
    with pytest.raises(DataError, match=says):
        suite_data.load(tmp_path / "upstream.yaml").pieces.tokens(())


def test_pictures_are_pictures() -> None:
    import struct
    import zlib

    data = png("x", 5)
    assert data[:8] == b"\x89PNG\r\n\x1a\n" and struct.unpack(">II", data[16:24]) == (5, 5)
    start = data.index(b"IDAT")
    (size,) = struct.unpack(">I", data[start - 4 : start])
    rows = zlib.decompress(data[start + 4 : start + 4 + size])
    assert len(rows) == 5 * (1 + 15) and rows[::16] == b"\0" * 5
    assert png("x", 5) == data and png("y", 5) != data


def test_a_weight_is_a_function_of_its_name() -> None:
    numpy = pytest.importorskip("numpy")
    from opencoti_build.gates.standins import uniform

    one = uniform("a", (50, 40), 0.5)
    assert one.dtype == numpy.float32 and (one == uniform("a", (50, 40), 0.5)).all() and (one != uniform("b", (50, 40), 0.5)).any()
    assert one.min() >= -0.5 and one.max() < 0.5 and abs(float(one.mean())) < 0.05 and abs(float(one.var()) - 0.25 / 3) < 0.01
    assert (uniform("a", (2, 3), 1.0).ravel() == uniform("a", (6,), 1.0)).all()


def test_every_kind_has_a_stand_in() -> None:
    assert {model.kind for model in suite_data.load(DATA).standins.values()} == set(Kind)
    assert upstream.DOCUMENT.suffix == ".md"
