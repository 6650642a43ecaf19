"""Random faults, seeded: whatever happens, the repository holds the old cut or the new one, and a later run completes.

``OPENCOTI_TEST_FAULTS=1000`` makes it a thousand schedules; a failing one is named by its seed.
"""

from __future__ import annotations

import os
import random
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from cut_builder import C1, C2, Checkout, make
from hub_lab import POLICY, lab
from hub_server import TOKEN, Asked, Fault, HubServer, running

from opencoti_build.errors import ConflictError, HubMismatch, HubRefused, HubUnavailable, OpencotiError, PublishError
from opencoti_build.publish.execute import Outcome

SCHEDULES = int(os.environ.get("OPENCOTI_TEST_FAULTS", "60"))
GROUPS = 6
RUNS = 4
"""Of one schedule that may fail; the next has nothing wrong."""

ANY = ("info", "tree", "paths", "preupload", "batch", "put", "part", "complete", "verify", "commit", "resolve")
EXPECTED = (HubRefused, HubUnavailable, HubMismatch, ConflictError, PublishError)
"""The last for a hub whose list of files lies: it seems to hold another c2."""


@pytest.fixture(scope="module")
def cuts(tmp_path_factory: pytest.TempPathFactory) -> tuple[Checkout, Checkout]:
    """The old cut and the new one; they are only read."""
    folder = tmp_path_factory.mktemp("cuts")
    return make(folder / "old"), make(folder / "new", C2, cuda="cuda-2")


def drawn(draw: random.Random) -> Fault:
    """A fault that could happen."""
    kind = draw.choice(ANY + ("put", "commit", "commit"))
    where = {"kind": kind, "nth": draw.choice((1, 1, 2, 3, 5)), "times": draw.choice((1, 1, 1, 2, 3, 6))}
    ways: list[dict[str, object]] = [
        {"status": draw.choice((400, 401, 403, 404, 412, 413, 422))},
        {"status": 429, "headers": {"Retry-After": str(draw.choice((0, 1, 30, 100000)))}},
        {"status": draw.choice((408, 500, 502, 503, 504))},
        {"drop_after": draw.choice((0, 1, 100, 1700, 3002))},
        {"lose_reply": True},
        {"cut_reply": draw.randrange(40)},
        {"rubbish": True},
        {"lie": True},
        {"damage": kind in ("put", "part")} if kind in ("put", "part") else {"lose_reply": True},
    ]
    return Fault(**where, **draw.choice(ways), message=f"scripted for {TOKEN}")  # type: ignore[arg-type]


def intruding(server: HubServer, nth: int) -> None:
    """Somebody else edits a file of theirs just before the ``nth`` request is answered; ``del server.note`` ends it."""
    note = server.note
    count = iter(range(1, 1 << 30))

    def noting(asked: Asked) -> Fault | None:
        if next(count) == nth:
            server.write({"README.md": b"edited on the hub\n"})
        return note(asked)

    server.note = noting  # type: ignore[method-assign]


def one_schedule(seed: int, folder: Path, cuts: tuple[Checkout, Checkout]) -> int:
    """Run one; gives how many runs failed."""
    draw = random.Random(seed)
    old, new = cuts
    parts = draw.random() < 0.5
    with running(folder / "hub", multipart_from=2500 if parts else 1 << 62, part_size=1000, page=draw.choice((7, 1000))) as server:
        files = {place: path.read_bytes() for place, path in old.places().items()} | {"README.md": b"a model card\n"}
        server.write(files, C1.full_tag)
        first = len(server.commits) - 1
        here = replace(lab(server, folder), policy=replace(POLICY, parallel=1 + seed % 2), show=seed % 8 == 0)
        before = server.content()
        after = {".gitattributes": before[".gitattributes"]} | new.published() | old.archived()
        if draw.random() < 0.15:
            intruding(server, draw.randrange(1, 60))
        failed = 0
        for _ in range(RUNS):
            server.script(*(drawn(draw) for _ in range(draw.randrange(1, 6))))
            try:
                here.publish(new)
            except OpencotiError as error:
                assert isinstance(error, EXPECTED), f"seed {seed}: {error!r}"
                assert TOKEN not in error.message + error.details
                failed += 1
        server.script()
        vars(server).pop("note", None)
        assert here.publish(new).outcome in (Outcome.PUBLISHED, Outcome.UNCHANGED)
        old_tree = {path: value for path, value in before.items() if path != "README.md"}
        states = [{path: value for path, value in server.content(commit).items() if path != "README.md"} for commit in server.commits[first:]]
        assert all(state in (old_tree, after) for state in states), f"seed {seed}: a commit between the cuts"
        assert states[-1] == after, f"seed {seed}: not completed"
        assert sum(commit.message == C2.full_tag for commit in server.commits) == 1, f"seed {seed}: the cut was committed more than once"
        assert not any(TOKEN in text for text in (here.said.getvalue(), *(path.read_text("latin-1") for path in here.cache.root.rglob("*") if path.is_file())))
        return failed


@pytest.mark.parametrize("group", range(GROUPS))
def test_random_faults_leave_no_half_cut(group: int, tmp_path: Path, cuts: tuple[Checkout, Checkout]) -> None:
    failed = 0
    for seed in range(group, SCHEDULES, GROUPS):
        failed += one_schedule(seed, tmp_path / str(seed), cuts)
        shutil.rmtree(tmp_path / str(seed))
    assert failed, "schedules that never make a run fail test nothing"
