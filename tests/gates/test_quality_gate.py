"""The whole gate with a small program in the place of the engine: judgement, what is kept, what fails and how it is said."""

from __future__ import annotations

import io
import json
import os
import shutil
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from opencoti_build.cache import Cache
from opencoti_build.cli.common import CommandContext
from opencoti_build.console import Console, Mode
from opencoti_build.errors import BusyError, GateError, UsageError
from opencoti_build.gates import quality
from opencoti_build.gates.quality.gate import Report
from opencoti_build.gates.quality.measures import first_difference
from opencoti_build.gates.quality.pictures import used
from opencoti_build.gates.quality.plan import Bound
from opencoti_build.gates.quality.statistics import Interval
from opencoti_build.gates.quality.verdict import Check, Outcome, Value
from opencoti_build.project import Project
from opencoti_build.runner import SystemRunner

pytestmark = pytest.mark.skipif(os.name == "nt", reason="the stand-in is started by its first line")

REPOSITORY = Path(__file__).parents[2]

MODELS = """
models:
  - {name: small, title: A small one, file: small.gguf, context: 1024, text: tasks, kld_context: 128, tasks: [needle, multikey]}
  - {name: absent, title: Not there, file: absent.gguf, context: 1024, text: tasks, kld_context: 128, tasks: [needle]}
"""
TEXTS = "texts: [{name: tasks, size: 4096, tasks: [needle, copy]}]\n"
PROFILES = """
profiles:
  - {name: quick, lengths: {"512": 1}, depths: [0.5], chunks: 3, decode_chunks: 2, continuations: 2, tokens: 8}
  - {name: full, lengths: {"512": 4, "768": 3, "4096": 5}, depths: [0.0, 0.5, 1.0], chunks: 4, decode_chunks: 2, continuations: 4, tokens: 8}
"""


class Bench:
    """A checkout with a stand-in engine and one feature, whose candidate has the given flags."""

    def __init__(self, root: Path) -> None:
        self.root = root
        data = root / "gate" / "quality"
        (data / "features").mkdir(parents=True)
        (root / "gate" / "trained").mkdir()
        (root / "vendors").mkdir()
        (root / "pyproject.toml").touch()
        shutil.copy(REPOSITORY / "gate" / "trained" / "data.py", root / "gate" / "trained")
        for name, text in (("models", MODELS), ("texts", TEXTS), ("profiles", PROFILES)):
            (data / f"{name}.yaml").write_text(text, "utf-8")
        (root / "small.gguf").write_bytes(b"GGUF, more or less")
        self.engine = root / "engine"
        source = (Path(__file__).parent / "stand_in_engine.py").read_text("utf-8")
        self.engine.write_text(f"#!{sys.executable}\n{source}", "utf-8")
        self.engine.chmod(0o755)
        self.said = io.StringIO()
        self.workshop = CommandContext(Project(root), Console(self.said, mode=Mode.PLAIN), SystemRunner(), Cache(root / "cache"), offline=True, dry_run=False)

    def feature(self, name: str, measures: str, *flags: str, models: str = "[small]", server: bool = False) -> None:
        key = "server_flags" if server else "flags"
        text = f"name: {name}\ntitle: {name}\ncandidate: {{{key}: {json.dumps(list(flags))}}}\nmodels: {models}\nmeasures:\n{textwrap.indent(textwrap.dedent(measures), '  ')}"
        (self.root / "gate" / "quality" / "features" / f"{name}.yaml").write_text(text, "utf-8")

    def run(self, **options: Any) -> Report:
        return quality.run(self.workshop, engine=self.engine, **options)

    @property
    def starts(self) -> list[str]:
        path = self.root / "starts"
        return path.read_text().splitlines() if path.exists() else []


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path)


RETRIEVAL = """
- kind: retrieval
  at_most: {loss: 0.05}
  at_least: {reference: 0.9}
"""
KLD = """
- kind: kld
  at_most: {mean: 0.01, q999: 0.2}
  at_least: {top1: 0.98}
"""
LOGITS = """
- kind: logits
  at_most: {different: 0}
"""
TEXT = """
- kind: text
  tasks: [needle]
  at_most: {gap: 0.1}
  at_least: {equal: 0.9}
"""


def test_a_candidate_that_finds_everything_passes(bench):
    bench.feature("good", RETRIEVAL, "--harmless")
    report = bench.run()
    (result,) = report.results
    assert report.passed and result.outcome is Outcome.PASS
    # 2 tasks x 3 depths x (4 at 512, 3 at 768); 4096 is beyond the model's context.
    assert result.values["accuracy"].count == 2 * 3 * 7
    assert result.values["accuracy"].value == 1 and result.values["loss"].value == 0
    assert result.values["loss"].interval.low < 0 < result.values["loss"].interval.high
    report.raise_for_failure()


def test_a_candidate_that_forgets_fails_and_the_pairs_say_so(bench):
    bench.feature("bad", RETRIEVAL, "--forget", "0.5")
    report = bench.run()
    (result,) = report.results
    assert result.outcome is Outcome.FAIL and not report.passed
    lost = result.facts["pairs"]["reference_only"]
    assert 10 < lost < 32 and result.facts["pairs"]["candidate_only"] == 0
    assert result.values["loss"].value == pytest.approx(lost / 42)
    assert result.facts["p"] == pytest.approx(2 / 2**lost)
    with pytest.raises(GateError, match="does not let through: bad on small"):
        report.raise_for_failure()


def test_a_reference_that_finds_nothing_is_a_failure_too(bench):
    """Equal to a reference that is useless proves nothing."""
    bench.feature("blind", RETRIEVAL, "--forget", "1")
    path = bench.root / "gate" / "quality" / "features" / "blind.yaml"
    path.write_text(path.read_text() + "reference: {flags: [--forget, '1.0']}\n")
    (result,) = bench.run().results
    assert result.values["loss"].value == 0 and result.outcome is Outcome.FAIL
    assert [check.bound.quantity for check in result.checks if not check.passed] == ["reference"]


@pytest.mark.parametrize(("noise", "outcome"), [("0.001", Outcome.PASS), ("0.05", Outcome.FAIL), ("nan", Outcome.FAIL)])
def test_divergence_is_held_against_its_bounds(bench, noise, outcome):
    bench.feature("noisy", KLD, "--noise", noise)
    report = bench.run()
    assert report.results[0].outcome is outcome
    assert report.results[0].values["mean"].count == 4 * 63
    json.loads(json.dumps(report.to_dict(), allow_nan=False))


def test_equal_distributions_pass_and_others_are_placed(bench):
    bench.feature("equal", LOGITS, "--harmless")
    bench.feature("other", LOGITS, "--noise", "0.5")
    equal, other = bench.run().results
    assert (equal.outcome, equal.values["different"].value) == (Outcome.PASS, 0)
    assert (other.outcome, other.values["different"].value) == (Outcome.FAIL, 3 * 63 - 3)
    assert other.notes == ["first difference in piece 1 of the text, after token 67"]


def test_the_reference_is_read_once_for_all_features(bench):
    bench.feature("one", KLD, "--noise", "0.001")
    bench.feature("two", KLD, "--noise", "0.002")
    bench.run()
    assert sum("perplexity" in start and "--kl-divergence " not in start + " " for start in bench.starts) == 1
    assert len(bench.starts) == 3


def test_continuations_that_part_where_two_tokens_are_near_are_told_from_others(bench):
    bench.feature("near", TEXT.replace("equal: 0.9", "equal: 0.0").replace("0.1", "0.3"), "--part", "5", server=True)
    bench.feature("far", TEXT.replace("equal: 0.9", "equal: 0.0"), "--part", "5", server=True)
    bench.feature("same", TEXT, "--harmless", server=True)
    far, near, same = bench.run().results
    assert (same.outcome, same.values["equal"].value, same.values["equal"].count) == (Outcome.PASS, 1, 8)
    # The stand-in holds its own token for 0.25 nats more likely.
    assert far.values["gap"].value == near.values["gap"].value == pytest.approx(0.25)
    assert (far.outcome, near.outcome) == (Outcome.FAIL, Outcome.PASS)
    assert "8 of 8 continuations part, the first after 5 tokens" in far.notes


def test_drafts_are_counted_and_speed_is_a_ratio(bench):
    bench.feature("drafts", TEXT.replace("equal: 0.9", "equal: 0.9, acceptance: 0.45"), "--draft", server=True)
    bench.feature("none", TEXT.replace("equal: 0.9", "acceptance: 0.0001"), "--harmless", server=True)
    drafts, none = bench.run().results
    assert (drafts.outcome, drafts.values["acceptance"].value, drafts.facts["speed_ratio"]) == (Outcome.PASS, 0.5, 2.0)
    assert none.outcome is Outcome.FAIL  # nothing was drafted at all


def test_first_difference():
    assert first_difference([1, 2, 3], [1, 2, 3]) is None
    assert first_difference([1, 2, 3], [1, 9, 3]) == 1
    assert first_difference([1, 2], [1, 2, 3]) == 2 == first_difference([1, 2, 3], [1, 2])


# ---- what is kept ------------------------------------------------------------------------------------------------------------------


def test_a_second_run_starts_no_engine_and_says_the_same(bench):
    for name, measure, flags in (("a", RETRIEVAL, ("--forget", "0.5")), ("b", KLD, ("--noise", "0.001")), ("c", LOGITS, ("--x",)), ("d", TEXT, ("--part", "3"))):
        bench.feature(name, measure, *flags)
    first = bench.run().to_dict()
    before = bench.starts
    assert len(before) > 4
    assert bench.run().to_dict() == first
    assert bench.starts == before
    assert "All 4 results kept from earlier runs." in bench.said.getvalue()


@pytest.mark.parametrize("change", ["engine", "model", "flags", "examples"])
def test_what_depends_on_a_change_is_measured_again(bench, change):
    bench.feature("a", RETRIEVAL, "--forget", "0.1")
    bench.run()
    before = len(bench.starts)
    if change == "engine":
        bench.engine.write_text(bench.engine.read_text() + "# another\n")
    elif change == "model":
        (bench.root / "small.gguf").write_bytes(b"GGUF, other weights")
    elif change == "flags":
        bench.feature("a", RETRIEVAL, "--forget", "0.2")
    else:
        profiles = bench.root / "gate" / "quality" / "profiles.yaml"
        profiles.write_text(profiles.read_text().replace('"768": 3', '"768": 4'))
    bench.run()
    assert len(bench.starts) - before == (1 if change == "flags" else 2)


def test_a_killed_run_goes_on_where_it_was(bench, tmp_path):
    bench.feature("a", RETRIEVAL, "--forget", "0.5")
    script = tmp_path / "run.py"
    script.write_text(
        "import sys; sys.path.insert(0, sys.argv[1])\n"
        "from pathlib import Path\n"
        "from opencoti_build.cache import Cache\nfrom opencoti_build.cli.common import CommandContext\nfrom opencoti_build.console import Console\n"
        "from opencoti_build.gates import quality\nfrom opencoti_build.project import Project\nfrom opencoti_build.runner import SystemRunner\n"
        "root = Path(sys.argv[2])\n"
        "quality.run(CommandContext(Project(root), Console(), SystemRunner(), Cache(root / 'cache'), offline=True, dry_run=False), engine=root / 'engine')\n"
    )
    cells = bench.root / "cache" / "results" / "quality"
    process = subprocess.Popen([sys.executable, str(script), str(REPOSITORY), str(bench.root)], stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and process.poll() is None and len(list(cells.glob("[!.]*"))) < 10:
        time.sleep(0.005)
    process.send_signal(signal.SIGKILL)
    process.wait()
    done = len(list(cells.glob("[!.]*")))
    assert 10 <= done <= 84
    report = bench.run()
    assert len(list(cells.glob("[!.]*"))) == 84  # 42 questions to two sides
    other = Bench(tmp_path / "other")
    other.feature("a", RETRIEVAL, "--forget", "0.5")
    assert report.results[0].to_dict() == other.run().results[0].to_dict()


def test_two_runs_at_once_are_refused(bench):
    bench.feature("a", RETRIEVAL, "--x")
    with bench.workshop.cache.lock("gate-quality"), pytest.raises(BusyError):
        bench.run()


def test_nothing_is_left_behind(bench):
    bench.feature("a", KLD, "--noise", "0.001")
    bench.run()
    assert list((bench.root / "build" / "gates" / "quality" / "scratch").iterdir()) == []


# ---- what goes wrong ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("measure", [RETRIEVAL, KLD, LOGITS, TEXT])
def test_an_engine_that_crashes_is_an_error_and_hides_no_other_feature(bench, measure):
    bench.feature("a-crash", measure, "--crash")
    bench.feature("good", RETRIEVAL, "--harmless")
    report = bench.run()
    crash, good = report.results
    assert (crash.outcome, good.outcome) == (Outcome.ERROR, Outcome.PASS)
    with pytest.raises(GateError, match="a-crash on small") as caught:
        report.raise_for_failure()
    assert "the stand-in was told to crash" in caught.value.details


def test_a_model_that_is_not_there_is_skipped_and_alone_is_no_pass(bench):
    bench.feature("both", RETRIEVAL, "--harmless", models="[small, absent]")
    bench.feature("lonely", RETRIEVAL, "--harmless", models="[absent]")
    report = bench.run()
    assert [result.outcome for result in report.results] == [Outcome.PASS, Outcome.SKIPPED, Outcome.SKIPPED]
    assert report.unmeasured == ("lonely",) and not report.passed
    with pytest.raises(GateError, match="Nothing is known about lonely"):
        report.raise_for_failure()


def test_names_are_checked(bench):
    bench.feature("good", RETRIEVAL, "--harmless")
    with pytest.raises(UsageError, match="Did you mean 'good'"):
        bench.run(features=["goood"])
    with pytest.raises(UsageError, match="no model"):
        bench.run(models=["smal"])
    with pytest.raises(UsageError, match="is no file"):
        quality.run(bench.workshop, engine=bench.root / "nothing")


def test_quick_measures_less(bench):
    bench.feature("good", RETRIEVAL, "--harmless")
    assert bench.run(quick=True).results[0].values["accuracy"].count == 2


# ---- what is shown -----------------------------------------------------------------------------------------------------------------


def test_the_papers_say_what_was_measured(bench, tmp_path):
    bench.feature("bad", RETRIEVAL + KLD.lstrip("\n") + TEXT.lstrip("\n"), "--forget", "0.5", "--noise", "0.05")
    report = bench.run()
    folder = tmp_path / "papers"
    written = quality.write(report, folder)
    assert {path.name for path in written} == {"quality.json", "README.md", "bad.svg"}
    assert json.loads((folder / "quality.json").read_text("utf-8")) == json.loads(json.dumps(report.to_dict()))
    page = (folder / "README.md").read_text("utf-8")
    assert "![bad](bad.svg)" in page and "| small | retrieval | loss |" in page and "fail" in page and str(tmp_path) not in page
    svg = ElementTree.parse(folder / "bad.svg").getroot()
    texts = [element.text for element in svg.iter("{http://www.w3.org/2000/svg}text")]
    pairs = report.results[0].facts["pairs"]
    found = [sum(pairs[name] for name in ("both", side)) for side in ("reference_only", "candidate_only")]
    by_task = [text for text in texts if text and text.startswith(("reference: ", "candidate: "))]
    assert len(by_task) == 4  # two tasks, two sides
    assert sum(int(text.split()[1]) for text in by_task if text.startswith("reference")) == found[0]
    assert sum(int(text.split()[1]) for text in by_task if text.startswith("candidate")) == found[1]
    # Every part lies inside the picture.
    height = float(svg.get("height"))
    assert all(0 <= float(box.get("y")) + float(box.get("height")) <= height for box in svg.iter("{http://www.w3.org/2000/svg}rect"))
    # The same results give the same bytes.
    before = (folder / "bad.svg").read_bytes()
    quality.write(bench.run(), folder)
    assert (folder / "bad.svg").read_bytes() == before


def test_the_table_tells_what_is_not_conclusive(bench):
    bench.feature("good", RETRIEVAL, "--harmless")
    quality.show(bench.run(), bench.workshop.console)
    text = bench.said.getvalue()
    assert "pass, not conclusive" in text  # 42 examples cannot exclude a loss of 5 %
    assert "100.00 %" in text and "good" in text


@pytest.mark.parametrize(
    ("value", "interval", "passed", "conclusive"),
    [(0.95, Interval(0.92, 0.97), True, True), (0.95, Interval(0.85, 0.98), True, False), (0.85, Interval(0.8, 0.92), False, False), (0.8, Interval(0.7, 0.85), False, True), (0.95, None, True, None)],
)
def test_a_check_is_conclusive_when_its_whole_interval_agrees(value, interval, passed, conclusive):
    check = Check(Bound("accuracy", 0.9, least=True), Value(value, 100, interval))
    assert (check.passed, check.conclusive) == (passed, conclusive)


@pytest.mark.parametrize(
    ("bound", "value", "share"),
    [(Bound("mean", 0.02, False), 0.01, 0.5), (Bound("top1", 0.98, True), 0.99, 0.5), (Bound("top1", 0.98, True), 0.96, 2.0), (Bound("different", 0, False), 0, 0.0), (Bound("different", 0, False), 3, float("inf")), (Bound("loss", 0.05, False), -0.1, 0.0)],
)
def test_the_bar_shows_how_much_of_a_bound_is_used(bound, value, share):
    assert used(Check(bound, Value(value, 10))) == pytest.approx(share)


def test_the_command_lists_what_there_is(capsys):
    from invoke.context import Context

    from opencoti_build.cli.gate_quality import quality as command

    command(Context(), list=True)
    shown = capsys.readouterr().out
    assert all(name in shown for name in ("kv-q8_0", "speculation-mtp", "gemma-3-270m"))
