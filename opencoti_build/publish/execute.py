"""Carries a plan out: large files first, with resume; then one commit on top of the commit that the plan was made for.

Until that commit nothing that anybody sees changes, so a run may die at any moment. Afterwards the published tree is read back and
compared with the plan. A commit whose reply was lost is settled by reading as well: either the repository holds the plan's tree, or it stands where
it stood and the commit is tried again, or somebody else came in between and the run stops.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, Any

from ..console import Console, Meter, count_of, human_bytes
from ..errors import ConflictError, HubMismatch, HubUnavailable
from .journal import Journal
from .plan import Plan
from .tree import Tree, difference

if TYPE_CHECKING:
    from .hub import Hub, Prepared


class Outcome(Enum):
    """How it ended; whatever else can happen is an error."""

    PUBLISHED = "published"
    UNCHANGED = "unchanged"


@dataclass(frozen=True)
class Result:
    """``commit`` is the one the repository stands at now; ``sent`` are the bytes of file content that were uploaded by this run."""

    outcome: Outcome
    commit: str
    sent: int = 0

    def to_dict(self) -> dict[str, Any]:
        """For ``--json``."""
        return {"outcome": self.outcome.value, "commit": self.commit, "bytes_uploaded": self.sent}


def carry_out(hub: Hub, plan: Plan, journal: Journal, console: Console) -> Result:
    """Publish. Raises HubRefused, HubUnavailable, ConflictError, HubMismatch, DiskError; the repository is then what it was, or the plan's tree."""
    if not plan.changes:
        journal.forget()
        return Result(Outcome.UNCHANGED, plan.parent)
    # In a thread of its own, so that an interrupt finds this one waiting, and can tell all threads, the client's too, to stop.
    hub.traffic.stop.clear()
    with ThreadPoolExecutor(max_workers=1) as pool:
        running = pool.submit(_carry_out, hub, plan, journal, console)
        try:
            return running.result()
        finally:
            hub.traffic.stop.set()


def _carry_out(hub: Hub, plan: Plan, journal: Journal, console: Console) -> Result:
    known = journal.uploaded()
    prepared = [hub.prepare(change, plan.parent) for change in plan.changes]
    expected = dict(plan.result) | {item.change.path: item.content for item in prepared if item.change.path in plan.result}
    first = {item.content.sha256: item for item in reversed(prepared) if item.change.sent and item.change.file is not None}
    waiting = [item for item in first.values() if item.content.size >= hub.policy.large and known.get(item.content.sha256) != item.content.size]
    resumed = sum(item.content.size for item in first.values() if known.get(item.content.sha256) == item.content.size)
    if resumed:
        console.info(f"{human_bytes(resumed)} have been uploaded by an earlier run")
    sent = _Sent()
    with console.progress(f"uploading {plan.identity.full_tag}", sum(item.content.size for item in waiting) or None, unit="bytes") as meter:
        hub.traffic.on_sent = lambda count: sent.add(count, meter)
        hub.traffic.on_wait = console.warn
        _upload(hub, waiting, journal)
        console.step(f"committing {count_of(len(prepared), 'change')} at once")
        commit = _commit(hub, plan, prepared, expected, console)
    if wrong := difference(expected, hub.tree(commit)):
        raise HubMismatch(
            f"The commit {commit} is made, and {hub.repository} does not hold what was sent: {wrong[0]} differs; look at it, and revert the commit there.",
            details="\n".join(wrong) if len(wrong) > 1 else "",
        )
    journal.forget()
    return Result(Outcome.PUBLISHED, commit, sent.count)


@dataclass
class _Sent:
    """Bytes sent by all threads together."""

    count: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)

    def add(self, count: int, meter: Meter) -> None:
        with self.lock:
            self.count += count
            meter.advance(count)


def _upload(hub: Hub, waiting: Sequence[Prepared], journal: Journal) -> None:
    """Upload files, several at a time, the largest first; the first failure ends all."""

    def one(item: Prepared) -> None:
        try:
            hub.upload(item)
        except BaseException:
            hub.traffic.stop.set()
            raise
        journal.add(item.content.sha256, item.content.size)

    with ThreadPoolExecutor(max_workers=max(1, hub.policy.parallel)) as pool:
        running = [pool.submit(one, item) for item in sorted(waiting, key=lambda item: -item.content.size)]
        failures = [error for future in running if (error := future.exception()) is not None]
    if failures:
        from .transport import Stopped

        raise next((error for error in failures if not isinstance(error, Stopped)), failures[0])


def _commit(hub: Hub, plan: Plan, prepared: Sequence[Prepared], expected: Tree, console: Console) -> str:
    """The id of the commit, found out one way or the other."""
    from .transport import ReplyLost

    failures = 0
    while True:
        try:
            return hub.commit(prepared, plan.identity.full_tag, plan.parent)
        except (ReplyLost, ConflictError) as error:
            problem = error
        head = hub.head()
        if head != plan.parent:
            if not difference(expected, hub.tree(head)):
                console.info("the answer to the commit was lost, and the commit is there")
                return head
            raise ConflictError(
                f"Somebody else changed {hub.repository} after it was read ({plan.parent[:12]}, now {head[:12]}): nothing was published; run the same command again for a new plan."
            )
        failures += 1
        if failures >= hub.policy.attempts:
            raise HubUnavailable(f"The commit was sent {failures} times and did not arrive ({problem.message}): {hub.repository} is unchanged; run the same command again later.")
        pause = hub.policy.pause(failures)
        console.warn(f"{problem.message}; the repository stands where it stood, the commit is sent again")
        hub.clock.sleep(pause, hub.traffic.stop)
