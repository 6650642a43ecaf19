"""``invoke publish`` as a person runs it: a process of its own, in a checkout of its own, killed at any moment."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from cut_builder import C1, C2, Checkout, make
from hub_server import TOKEN, Fault, HubServer, running

from opencoti_build.errors import HubRefused, PublishError, UsageError
from opencoti_build.publish.hub import repository_name

PROJECT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def toolkit(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkout with this toolkit and the cut c2, and no git."""
    root = tmp_path_factory.mktemp("checkout")
    shutil.copytree(PROJECT / "opencoti_build", root / "opencoti_build", ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("tasks.py", "pyproject.toml"):
        shutil.copy(PROJECT / name, root / name)
    (root / "vendors").mkdir()
    shutil.copy(PROJECT / "vendors" / "llamafile.yaml", root / "vendors")
    (root / "release.yaml").write_text("tag: c2\n")
    make(root, C2, cuda="cuda-2", size=300_000)
    return root


@pytest.fixture
def server(tmp_path: Path) -> Iterator[HubServer]:
    """A hub that holds c1."""
    with running(tmp_path / "hub") as server:
        server.write({place: path.read_bytes() for place, path in make(tmp_path / "old").places().items()}, C1.full_tag)
        server.script()
        yield server


def variables(server: HubServer, folder: Path, **more: str) -> dict[str, str]:
    kept = {name: os.environ[name] for name in ("PATH", "SYSTEMROOT", "LD_LIBRARY_PATH") if name in os.environ}
    own = {"HOME": str(folder), "HF_HOME": str(folder / "hf"), "OPENCOTI_CACHE": str(folder / "cache"), "HF_ENDPOINT": server.url, "HF_TOKEN": TOKEN}
    return kept | own | {"OPENCOTI_PLAIN": "1", "NO_PROXY": "*"} | more


def words(*more: str) -> list[str]:
    return [sys.executable, "-m", "invoke", "publish", "--repo", "owner/engine", *more]


def run(toolkit: Path, server: HubServer, folder: Path, *more: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(words(*more), cwd=toolkit, env=variables(server, folder, **environment), capture_output=True, text=True, timeout=60, stdin=subprocess.DEVNULL)


def everything_said(done: subprocess.CompletedProcess[str], folder: Path) -> str:
    kept = [path.read_text("latin-1") for place in ("cache", "hf") for path in (folder / place).rglob("*") if path.is_file()]
    return done.stdout + done.stderr + "".join(kept)


def holds(server: HubServer, toolkit: Path, tmp_path: Path) -> bool:
    new, old = Checkout(toolkit, C2), Checkout(tmp_path / "old", C1)
    return server.content() == {".gitattributes": server.content()[".gitattributes"]} | new.published() | old.archived()


def test_dry_run_then_publish_then_again(toolkit: Path, server: HubServer, tmp_path: Path) -> None:
    head = server.head
    dry = run(toolkit, server, tmp_path, "--dry-run", "--json")
    assert dry.returncode == 0, dry.stderr
    plan = json.loads(dry.stdout)["plan"]
    assert plan["release"] == C2.full_tag and plan["superseded"] == [C1.full_tag] and plan["parent"] == head.oid
    assert server.head.oid == head.oid and {asked.kind for asked in server.asked} == {"info", "tree"}
    assert C2.artifact("universal.llamafile.exe") in dry.stderr and "copied by the hub" in dry.stderr

    done = run(toolkit, server, tmp_path, "--yes", "--json")
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    assert document["result"] == {"outcome": "published", "commit": server.head.oid, "bytes_uploaded": server.uploaded}
    assert server.uploaded + server.committed == plan["bytes_sent"] and holds(server, toolkit, tmp_path)

    server.script()
    again = run(toolkit, server, tmp_path, "--yes", OPENCOTI_DEBUG="1", HF_DEBUG="1")
    assert again.returncode == 0 and "nothing to send" in again.stderr and server.uploaded == 0 and server.count("commit") == 0
    assert TOKEN not in everything_said(dry, tmp_path) + everything_said(done, tmp_path) + everything_said(again, tmp_path)


def test_refusals_are_a_sentence_and_a_code(toolkit: Path, server: HubServer, tmp_path: Path) -> None:
    def ends(code: int, sentence: str, *more: str, **environment: str) -> None:
        done = run(toolkit, server, tmp_path, *more, **environment)
        assert done.returncode == code and sentence in done.stderr and "Traceback" not in done.stderr, done.stderr
        assert TOKEN not in everything_said(done, tmp_path)

    ends(UsageError.exit_code, "There is no terminal to ask at")
    ends(PublishError.exit_code, "There is no cut at", "--yes", "--cut", str(tmp_path / "nothing"))
    ends(HubRefused.exit_code, "There is no token to publish with", "--yes", HF_TOKEN="")
    server.script(Fault("put", status=403, times=99, message=f"storage limit of {TOKEN} reached"))
    ends(HubRefused.exit_code, "127.0.0.1 refuses (403): storage limit of [token] reached.", "--yes")
    assert server.count("commit") == 0


def test_a_refusal_with_all_debugging_on_does_not_show_the_token(toolkit: Path, server: HubServer, tmp_path: Path) -> None:
    server.script(Fault("commit", status=400, times=99, message=f"Bearer {TOKEN}"))
    done = run(toolkit, server, tmp_path, "--yes", OPENCOTI_DEBUG="1", HF_DEBUG="1", HF_HUB_VERBOSITY="debug")
    assert done.returncode == HubRefused.exit_code and "Traceback" in done.stderr
    assert TOKEN not in everything_said(done, tmp_path)


@pytest.mark.parametrize("name", ["", "engine", "a/b/c", "../x", "owner/en gine", "owner/", "owner/x--y"])
def test_names_that_are_no_repository(name: str) -> None:
    with pytest.raises(UsageError, match="OWNER/NAME"):
        repository_name(name, {})
    assert repository_name("", {"OPENCOTI_PUBLISH_REPO": "owner/engine"}) == "owner/engine"


@pytest.mark.skipif(os.name == "nt", reason="signals")
@pytest.mark.parametrize("seed", range(2))
def test_killed_at_random_moments(toolkit: Path, server: HubServer, tmp_path: Path, seed: int) -> None:
    """Killed after so many requests, again and again: nothing is ever between, and what was confirmed is not sent twice."""
    draw = random.Random(seed)
    before = server.content()
    confirmed: set[str] = set()
    for _ in range(3):
        # A slow hub, so that the kill finds uploads, and the commit, under way.
        server.script(Fault("put", times=99, delay=0.02), Fault("commit", times=99, delay=0.05, delay_reply=0.1))
        moment = draw.randrange(2, 75)
        process = subprocess.Popen(words("--yes"), cwd=toolkit, env=variables(server, tmp_path), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, stdin=subprocess.DEVNULL)
        deadline = time.monotonic() + 60
        while len(server.asked) < moment and process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.002)
        process.send_signal(signal.SIGKILL)
        process.wait()
        journals = list((tmp_path / "cache" / "publish").glob("*.journal"))
        confirmed |= {line.split()[0] for journal in journals for line in journal.read_text("ascii").splitlines()}
        assert server.content() == before or holds(server, toolkit, tmp_path)
    time.sleep(0.2)
    server.script()
    done = run(toolkit, server, tmp_path, "--yes")
    assert done.returncode == 0, done.stderr
    assert holds(server, toolkit, tmp_path)
    assert confirmed.isdisjoint(asked.path.rsplit("/", 1)[-1] for asked in server.asked if asked.kind == "put")
    assert [commit.message for commit in server.commits] == ["initial commit", C1.full_tag, C2.full_tag]


@pytest.mark.skipif(os.name == "nt", reason="signals")
def test_an_interrupt_ends_at_once_and_goes_on_later(toolkit: Path, server: HubServer, tmp_path: Path) -> None:
    server.script(Fault("put", nth=3, times=99, status=429, headers={"Retry-After": "600"}))
    process = subprocess.Popen(words("--yes"), cwd=toolkit, env=variables(server, tmp_path), stdout=subprocess.PIPE, stderr=subprocess.PIPE, stdin=subprocess.DEVNULL, text=True)
    deadline = time.monotonic() + 60
    while server.count("put") < 6 and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    try:
        _, said = process.communicate(timeout=30)
    finally:
        process.kill()
    assert process.returncode == 130 and "Interrupted: run the same command again to go on from here." in said, said
    server.script()
    assert run(toolkit, server, tmp_path, "--yes").returncode == 0
    assert server.count("put") == 5 and holds(server, toolkit, tmp_path)
