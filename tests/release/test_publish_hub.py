"""The real client against the hub of the tests: what is published, what goes wrong, and what the repository holds afterwards."""

from __future__ import annotations

import json
import time
import traceback
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import requests
from cut_builder import C1, C2, Checkout, make
from hub_lab import Lab, lab
from hub_server import TOKEN, Fault, HubServer, resolve_address, running

from opencoti_build.errors import ConflictError, HubMismatch, HubRefused, HubUnavailable, OpencotiError
from opencoti_build.publish import execute
from opencoti_build.publish.execute import Outcome
from opencoti_build.publish.hub import Hub

WRITES = ("preupload", "batch", "put", "verify", "commit")
READS = ("info", "tree", "resolve", "paths")
EVERY = READS + WRITES


@dataclass
class Scene:
    """A repository that holds c1, and a checkout with c2 that is to be published."""

    lab: Lab
    server: HubServer
    old: Checkout
    new: Checkout
    before: dict[str, str]

    @property
    def after(self) -> dict[str, str]:
        """What the repository holds when c2 is published."""
        kept = {path: value for path, value in self.before.items() if path in (".gitattributes", "README.md")}
        return kept | self.new.published() | self.old.archived()

    def nothing_between(self) -> None:
        """Every commit that anybody could ever see holds a whole cut."""
        start = next(index for index, commit in enumerate(self.server.commits) if self.server.content(commit) == self.before)
        for commit in self.server.commits[start:]:
            assert self.server.content(commit) in (self.before, self.after)

    def unchanged(self) -> None:
        """The repository is what it was."""
        assert self.server.content() == self.before
        self.nothing_between()

    def completes(self) -> None:
        """The next run, with nothing wrong, publishes c2 in one commit."""
        commits = len(self.server.commits)
        self.server.script()
        assert self.lab.publish(self.new).outcome is Outcome.PUBLISHED
        assert self.server.content() == self.after and len(self.server.commits) == commits + 1
        self.nothing_between()

    def large(self) -> int:
        """Bytes of the files of c2 that are uploaded, each content once."""
        return sum(size for size, _ in {(path.stat().st_size, path.read_bytes()) for path in self.new.cut.rglob("*") if path.suffix in (".exe", ".llamafile", ".dll", ".so")})


def scene(folder: Path, server: HubServer) -> Scene:
    old, new = make(folder / "old"), make(folder / "new", C2, cuda="cuda-2")
    server.write({place: path.read_bytes() for place, path in old.places().items()} | {"README.md": b"---\nlicense: mit\n---\n"}, C1.full_tag)
    server.script()
    return Scene(lab(server, folder), server, old, new, server.content())


@pytest.fixture
def stage(tmp_path: Path) -> Iterator[Scene]:
    with running(tmp_path / "hub") as server:
        yield scene(tmp_path, server)


# ---- when all is well ------------------------------------------------------------------------------------------------------------------------


def test_a_cut_is_published_in_one_commit_and_the_old_one_archived(stage: Scene) -> None:
    planned = stage.lab.plan(stage.new)
    stage.server.script()
    done = stage.lab.publish(stage.new)
    assert done.outcome is Outcome.PUBLISHED and done.commit == stage.server.head.oid
    assert stage.server.content() == stage.after
    assert stage.server.head.parent == stage.server.commits[-2].oid and stage.server.head.message == C2.full_tag
    assert stage.server.count("commit") == 1
    # What goes over the line is what the plan says, and nothing of the old cut's large files.
    assert stage.server.uploaded == done.sent == stage.large()
    assert stage.server.uploaded + stage.server.committed == planned.sent
    sent = {asked.path.rsplit("/", 1)[-1] for asked in stage.server.asked if asked.kind == "put"}
    assert sent.isdisjoint(stage.before.values())
    stage.nothing_between()


def test_an_unchanged_cut_sends_nothing_and_writes_nothing(stage: Scene) -> None:
    stage.lab.publish(stage.new)
    stage.server.script()
    commits = len(stage.server.commits)
    done = stage.lab.publish(stage.new)
    assert (done.outcome, done.sent, done.commit) == (Outcome.UNCHANGED, 0, stage.server.head.oid)
    assert {asked.kind for asked in stage.server.asked} == {"info", "tree"} and len(stage.server.commits) == commits
    assert sum(asked.body for asked in stage.server.asked) == 0


def test_where_the_hub_keeps_all_in_large_storage_the_archive_sends_no_byte_at_all(tmp_path: Path) -> None:
    with running(tmp_path / "hub", large_patterns=("*",)) as server:
        stage = scene(tmp_path, server)
        planned = stage.lab.plan(stage.new)
        assert sum(change.sent for change in planned.changes if change.path.startswith("releases/archived/")) == 0
        stage.lab.publish(stage.new)
        sent = {asked.path.rsplit("/", 1)[-1] for asked in server.asked if asked.kind == "put"}
        assert sent == set(stage.new.published().values()) - set(stage.before.values()) and server.committed == 0
        assert server.content() == stage.after


def test_a_first_cut_into_an_empty_repository_page_by_page(tmp_path: Path) -> None:
    with running(tmp_path / "hub", page=3) as server:
        checkout = make(tmp_path / "one")
        here = lab(server, tmp_path)
        here.publish(checkout)
        assert server.content() == checkout.published() | {".gitattributes": server.content()[".gitattributes"]}
        assert here.publish(checkout).outcome is Outcome.UNCHANGED


def test_uploads_in_parts(tmp_path: Path) -> None:
    with running(tmp_path / "hub", multipart_from=2500, part_size=1000) as server:
        stage = scene(tmp_path, server)
        server.script(Fault("part", nth=2, drop_after=300), Fault("part", nth=6, status=503))
        stage.lab.publish(stage.new)
        assert server.content() == stage.after
        assert server.count("complete") == 7 and server.count("put") == 0
        # Only the two parts that failed were sent again; one of them broke after 300 bytes.
        assert server.count("part") == 7 * 4 + 2
        assert stage.large() < server.uploaded <= stage.large() + 2 * 1000


def test_what_the_hub_of_the_tests_answers_to_downloads(stage: Scene) -> None:
    name = C1.artifact("x86_64.llamafile")
    data = (stage.old.cut / name).read_bytes()
    address = resolve_address(stage.server, name)
    assert requests.get(address, timeout=5).content == data
    part = requests.get(address, headers={"Range": "bytes=10-19"}, timeout=5)
    assert (part.status_code, part.content, part.headers["Content-Range"]) == (206, data[10:20], f"bytes 10-19/{len(data)}")
    assert requests.get(address, headers={"Range": "bytes=-4"}, timeout=5).content == data[-4:]
    assert requests.get(address, headers={"Range": "bytes=9999-"}, timeout=5).status_code == 416
    head = requests.head(address, timeout=5)
    assert (head.headers["X-Linked-Size"], head.headers["X-Repo-Commit"], head.content) == (str(len(data)), stage.server.head.oid, b"")
    stage.lab.publish(stage.new)
    # Every commit can be read back, also one that is no longer the head.
    assert requests.get(address, timeout=5).status_code == 404
    assert requests.get(resolve_address(stage.server, name, stage.server.commits[-2].oid), timeout=5).content == data
    who = requests.get(f"{stage.server.url}/api/whoami-v2", headers={"Authorization": f"Bearer {TOKEN}"}, timeout=5)
    assert who.json()["name"] == "owner"


# ---- refusals stop at once -------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("kind", "status"), [*((kind, 403) for kind in EVERY), ("info", 401), ("put", 401), ("commit", 401)])
def test_a_refusal_stops_at_once_with_the_hosts_reason(stage: Scene, kind: str, status: int) -> None:
    stage.server.script(Fault(kind, status=status, times=99, message="You have reached your storage limit"))
    with pytest.raises(HubRefused, match=rf"refuses \({status}\): You have reached your storage limit\.$"):
        stage.lab.publish(stage.new)
    # Uploads that ran beside the refused one may have met the same refusal; none came after it.
    assert stage.server.count(kind) <= stage.lab.policy.parallel
    assert stage.lab.clock.slept == []
    stage.unchanged()
    stage.completes()


def test_a_repository_that_is_not_there(stage: Scene) -> None:
    stage.server.repository = "somebody/else"
    here = replace(stage.lab)
    with pytest.raises(HubRefused, match="has no repository owner/engine"), Hub("owner/engine", endpoint=stage.server.url, token=TOKEN) as hub:
        hub.head()
    assert here.clock.slept == []


def test_a_place_that_is_no_hub(stage: Scene) -> None:
    stage.server.script(Fault("info", rubbish=True))
    with pytest.raises(HubRefused, match="is this a hub"):
        stage.lab.publish(stage.new)
    stage.unchanged()


# ---- troubles that pass ----------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", EVERY)
def test_too_many_requests_waits_as_long_as_the_host_says(stage: Scene, kind: str) -> None:
    stage.server.script(Fault(kind, times=2, status=429, headers={"Retry-After": "17"}))
    assert stage.lab.publish(stage.new).outcome is Outcome.PUBLISHED
    assert stage.lab.clock.slept == [17.0, 17.0]
    assert stage.server.content() == stage.after
    stage.nothing_between()


def test_a_wait_that_is_too_long_is_left_to_a_person(stage: Scene) -> None:
    stage.server.script(Fault("put", status=429, times=99, headers={"Retry-After": "7200"}))
    with pytest.raises(HubUnavailable, match="asks to wait 2 h 00 min"):
        stage.lab.publish(stage.new)
    assert stage.lab.clock.slept == []
    stage.unchanged()
    stage.completes()


@pytest.mark.parametrize(("kind", "status"), [*((kind, 503) for kind in EVERY), ("put", 500), ("commit", 500), ("commit", 504)])
def test_errors_of_the_host_are_waited_out_with_growing_pauses(stage: Scene, kind: str, status: int) -> None:
    stage.lab.policy = replace(stage.lab.policy, parallel=1)
    stage.server.script(Fault(kind, times=3, status=status))
    assert stage.lab.publish(stage.new).outcome is Outcome.PUBLISHED
    assert stage.lab.clock.slept == [1.0, 2.0, 4.0]
    assert stage.server.content() == stage.after
    stage.nothing_between()


@pytest.mark.parametrize("kind", EVERY)
def test_patience_ends(stage: Scene, kind: str) -> None:
    stage.lab.policy = replace(stage.lab.policy, parallel=1)
    stage.server.script(Fault(kind, times=99, status=503))
    with pytest.raises(HubUnavailable, match="4 times"):
        stage.lab.publish(stage.new)
    assert stage.server.count(kind) == stage.lab.policy.attempts and stage.lab.clock.slept == [1.0, 2.0, 4.0]
    stage.unchanged()
    stage.completes()


@pytest.mark.parametrize("after", [0, 1, 1500, 3002])
def test_an_upload_whose_connection_breaks_is_sent_again(stage: Scene, after: int) -> None:
    stage.server.script(Fault("put", nth=3, drop_after=after))
    done = stage.lab.publish(stage.new)
    assert stage.server.content() == stage.after and len(stage.lab.clock.slept) == 1
    assert stage.server.uploaded == stage.large() + after
    assert done.sent == stage.large(), "bytes that did not arrive are not counted"


@pytest.mark.parametrize("kind", ["info", "tree", "preupload", "batch", "commit", "paths"])
def test_answers_that_break_off(stage: Scene, kind: str) -> None:
    stage.server.script(Fault(kind, cut_reply=1))
    assert stage.lab.publish(stage.new).outcome is Outcome.PUBLISHED
    assert stage.server.content() == stage.after
    stage.nothing_between()


@pytest.mark.parametrize("kind", ["put", "verify", "batch", "preupload"])
def test_answers_that_get_lost_before_the_commit(stage: Scene, kind: str) -> None:
    stage.server.script(Fault(kind, times=2, lose_reply=True))
    assert stage.lab.publish(stage.new).outcome is Outcome.PUBLISHED
    assert stage.server.content() == stage.after


def test_a_slow_host(stage: Scene) -> None:
    stage.server.script(*(Fault(kind, delay=0.1) for kind in EVERY))
    assert stage.lab.publish(stage.new).outcome is Outcome.PUBLISHED
    assert stage.server.content() == stage.after and stage.lab.clock.slept == []


def test_a_host_that_falls_silent(stage: Scene) -> None:
    stage.lab.policy = replace(stage.lab.policy, reply_timeout=0.2)
    stage.server.script(Fault("put", delay=0.6), Fault("tree", delay=0.6))
    assert stage.lab.publish(stage.new).outcome is Outcome.PUBLISHED
    assert stage.server.content() == stage.after


def test_a_host_that_is_not_there(stage: Scene) -> None:
    stage.server.script()
    here = replace(stage.lab, server=replace(stage.server, url="http://127.0.0.1:9"))
    with pytest.raises(HubUnavailable, match="127.0.0.1 does not answer"):
        here.publish(stage.new)
    assert here.clock.slept == [1.0, 2.0, 4.0]


def test_the_proxy_of_the_environment_is_used(stage: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", stage.server.url)
    monkeypatch.setenv("no_proxy", "")
    with Hub(stage.server.repository, endpoint="http://hub.invalid", token=TOKEN, policy=stage.lab.policy, clock=stage.lab.clock) as hub:
        assert hub.head() == stage.server.head.oid


# ---- the commit ------------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", [{"lose_reply": True}, {"rubbish": True}, {"cut_reply": 5}, {"status_after": 504}, {"status_after": 500}])
def test_a_commit_whose_answer_is_lost_is_found(stage: Scene, how: dict[str, object]) -> None:
    commits = len(stage.server.commits)
    stage.server.script(Fault("commit", **how))  # type: ignore[arg-type]
    done = stage.lab.publish(stage.new)
    assert done.outcome is Outcome.PUBLISHED and done.commit == stage.server.head.oid
    assert stage.server.count("commit") == 1 and len(stage.server.commits) == commits + 1
    assert stage.server.content() == stage.after
    assert "the answer to the commit was lost, and the commit is there" in stage.lab.said.getvalue()


@pytest.mark.parametrize("after", [0, 200])
def test_a_commit_that_never_arrived_is_sent_again(stage: Scene, after: int) -> None:
    commits = len(stage.server.commits)
    stage.server.script(Fault("commit", drop_after=after))
    assert stage.lab.publish(stage.new).outcome is Outcome.PUBLISHED
    assert stage.server.count("commit") == 2 and len(stage.server.commits) == commits + 1
    assert stage.server.content() == stage.after


@pytest.mark.parametrize("patient", [True, False])
def test_a_commit_that_is_made_late(stage: Scene, patient: bool) -> None:
    """The answer takes too long, the head is read before the commit is made, and then it is made after all."""
    commits = len(stage.server.commits)
    stage.lab.policy = replace(stage.lab.policy, reply_timeout=0.3)
    if patient:
        stage.lab.clock.on_sleep = lambda: time.sleep(0.8)
    stage.server.script(Fault("commit", delay=0.7))
    assert stage.lab.publish(stage.new).outcome is Outcome.PUBLISHED
    time.sleep(0 if patient else 0.8)
    assert stage.server.count("commit") == 2 and len(stage.server.commits) == commits + 1
    assert stage.server.content() == stage.after


def test_somebody_elses_commit_in_between_stops(stage: Scene) -> None:
    with stage.lab.hub() as hub:
        planned = stage.lab._plan(hub, stage.new)
        stage.server.write({"README.md": b"edited on the hub\n"})
        with pytest.raises(ConflictError, match="Somebody else changed owner/engine"):
            execute.carry_out(hub, planned, stage.lab.journal, stage.lab.console)
    stage.before["README.md"] = stage.server.content()["README.md"]
    assert stage.server.content() == stage.before
    stage.server.script()
    assert stage.lab.publish(stage.new).outcome is Outcome.PUBLISHED
    assert stage.server.uploaded == 0, "what was uploaded before the conflict is not sent again"
    assert stage.server.content() == stage.after


def test_somebody_elses_commit_while_ours_is_under_way(stage: Scene) -> None:
    """Ours is lost on the way, and theirs is there when the head is read."""
    stage.server.script(Fault("commit", drop_after=10))
    intruding = {"README.md": b"edited on the hub\n"}
    note = stage.server.note
    stage.server.note = lambda asked: (stage.server.write(intruding) if asked.kind == "commit" else None, note(asked))[1]  # type: ignore[method-assign]
    with pytest.raises(ConflictError, match="nothing was published"):
        stage.lab.publish(stage.new)
    assert stage.server.head.message == "by hand"


def test_a_lost_answer_and_somebody_elses_commit_on_top_of_ours(stage: Scene) -> None:
    """Ours was made, theirs followed, and the answer was lost: a new plan says what is left to do, which is nothing."""
    stage.server.script(Fault("commit", lose_reply=True), Fault("info", nth=2, delay=0.3))
    answer = stage.server.answer

    def answering(asked: object, *words: object, **more: object) -> object:
        done = answer(asked, *words, **more)  # type: ignore[arg-type]
        if asked.kind == "commit":  # type: ignore[attr-defined]
            stage.server.write({"README.md": b"thanks\n"})
        return done

    stage.server.answer = answering  # type: ignore[method-assign, assignment]
    with pytest.raises(ConflictError):
        stage.lab.publish(stage.new)
    stage.server.answer = answer  # type: ignore[method-assign]
    assert stage.lab.publish(stage.new).outcome is Outcome.UNCHANGED


# ---- wrong bytes -----------------------------------------------------------------------------------------------------------------------------


def test_bytes_damaged_on_the_way_never_get_into_a_commit(stage: Scene) -> None:
    stage.server.script(Fault("put", nth=2, damage=True))
    with pytest.raises(HubRefused, match="the bytes that came are not those of the oid"):
        stage.lab.publish(stage.new)
    stage.unchanged()
    stage.completes()


def test_a_small_file_that_comes_wrong_is_not_copied_into_the_archive(stage: Scene) -> None:
    stage.server.script(Fault("resolve", lie=True))
    with pytest.raises(HubMismatch, match="not the ones its list of files names"):
        stage.lab.publish(stage.new)
    assert stage.server.uploaded == 0
    stage.unchanged()
    stage.completes()


def test_a_hub_that_shows_other_hashes_after_the_commit(stage: Scene) -> None:
    stage.server.script(Fault("tree", nth=2, lie=True))
    with pytest.raises(HubMismatch, match="does not hold what was sent") as caught:
        stage.lab.publish(stage.new)
    assert ".gitattributes" in caught.value.details
    assert stage.server.content() == stage.after
    stage.nothing_between()
    assert stage.lab.publish(stage.new).outcome is Outcome.UNCHANGED


def test_a_file_that_changes_while_it_is_published(stage: Scene) -> None:
    with stage.lab.hub() as hub:
        planned = stage.lab._plan(hub, stage.new)
        target = stage.new.cut / C2.artifact("aarch64.llamafile")
        data = target.read_bytes()
        target.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
        with pytest.raises(HubRefused, match="the bytes that came are not those of the oid"):
            execute.carry_out(hub, planned, stage.lab.journal, stage.lab.console)
        target.write_bytes(data[:-1])
        with pytest.raises(HubMismatch, match="has changed since it was read"):
            execute.carry_out(hub, planned, stage.lab.journal, stage.lab.console)
    target.write_bytes(data)
    stage.unchanged()
    stage.completes()


# ---- resume ----------------------------------------------------------------------------------------------------------------------------------


def test_what_is_uploaded_is_remembered_and_not_even_asked_for(stage: Scene) -> None:
    stage.server.script(Fault("commit", status=403, times=99, message="no"))
    with pytest.raises(HubRefused):
        stage.lab.publish(stage.new)
    assert len(stage.lab.journal.uploaded()) == 7
    stage.server.script()
    assert stage.lab.publish(stage.new).sent == 0
    assert stage.server.uploaded == 0 and stage.server.count("batch") == 1
    assert "have been uploaded by an earlier run" in stage.lab.said.getvalue()
    assert not stage.lab.journal.path.exists(), "a commit that holds all of it needs no journal"
    assert stage.server.content() == stage.after


def test_what_the_hub_has_lost_since_is_sent_again(stage: Scene) -> None:
    stage.server.script(Fault("commit", status=403, times=99, message="no"))
    with pytest.raises(HubRefused):
        stage.lab.publish(stage.new)
    for suffix in ("universal.llamafile.exe", "aarch64.llamafile"):
        stage.server.lose_object(stage.new.published()[C2.artifact(suffix)])
    stage.server.script()
    assert stage.lab.publish(stage.new).sent == 2 * 3003
    assert stage.server.content() == stage.after


def test_a_journal_of_lies_harms_nothing(stage: Scene) -> None:
    for path in stage.new.cut.rglob("*"):
        if path.is_file():
            stage.lab.journal.add(stage.new.published().get(path.name, "f" * 64), path.stat().st_size)
    stage.completes()


# ---- the token -------------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", EVERY)
def test_the_token_is_nowhere_but_in_the_requests_to_the_hub(stage: Scene, kind: str) -> None:
    """A host that repeats it in its refusal, in its header and in its body, included."""
    stage.server.script(Fault(kind, status=422, times=99, message=f"bad credentials: Bearer {TOKEN}"), Fault("commit", nth=2, status=403))
    planned = json.dumps(stage.lab.plan(stage.new).to_dict()) if kind not in ("info", "tree") else ""
    with pytest.raises(OpencotiError) as caught:
        stage.lab.publish(stage.new)
    told = "".join(traceback.format_exception(caught.value))
    kept = b"".join(path.read_bytes() for path in stage.lab.cache.root.rglob("*") if path.is_file())
    assert caught.value.__context__ is None and caught.value.__cause__ is None
    assert TOKEN not in told + stage.lab.said.getvalue() + planned + repr(stage.lab.hub())
    assert TOKEN.encode() not in kept
    assert "[token]" in caught.value.message
    assert all("authorization" not in asked.headers for asked in stage.server.asked if asked.kind in ("put", "part"))
    stage.unchanged()


def test_the_token_comes_from_the_standard_places(stage: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    stage.lab.token = None  # type: ignore[assignment]
    assert stage.lab.publish(stage.new).outcome is Outcome.PUBLISHED
    stage.lab.token = "hf_of_somebody_else"
    (stage.new.root / "docs" / "new.md").write_text("new\n")
    with pytest.raises(HubRefused, match=r"refuses \(401\): Invalid username or password"):
        stage.lab.publish(stage.new)
