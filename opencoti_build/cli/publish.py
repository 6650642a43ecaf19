"""``invoke publish``: what is here becomes what is published, in one commit."""

from __future__ import annotations

import json as json_module
import sys
from pathlib import Path

from invoke.context import Context

from .. import release_layout
from ..errors import HubRefused, OfflineError, UsageError
from .common import command, context


@command(
    help={
        "repo": "The repository on the hub, as OWNER/NAME (default: OPENCOTI_PUBLISH_REPO).",
        "cut": "Folder of the cut (default: releases/FULL-TAG of the cut that this checkout makes).",
        "dry_run": "Print the plan and stop; the repository is read and not changed.",
        "yes": "Do not ask before the plan is carried out.",
        "json": "Print plan and result as JSON on standard output.",
    }
)
def publish(c: Context, repo: str = "", cut: str = "", dry_run: bool = False, yes: bool = False, json: bool = False) -> None:
    """Publish a cut to a Hugging Face repository: plan, upload with resume, one commit, the superseded cut archived."""
    from ..publish import cut as cut_reader
    from ..publish import execute, hub, plan
    from ..publish.journal import Journal

    made = context(c)
    dry_run = dry_run or made.dry_run
    repository = hub.repository_name(repo)
    if made.offline:
        raise OfflineError("Publishing needs the network, and OPENCOTI_OFFLINE is set: unset it.")
    if not dry_run and not yes and not sys.stdin.isatty():
        raise UsageError("There is no terminal to ask at: give --yes to publish, or --dry-run to see the plan.")
    folder = Path(cut) if cut else made.project.root / release_layout.RELEASES / made.project.identity().full_tag
    layout = release_layout.load()
    release = cut_reader.read(folder, made.project.root, layout, made.console)
    with hub.Hub(repository) as there:
        if not dry_run and not there.token:
            raise HubRefused("There is no token to publish with: log in with 'hf auth login', or set HF_TOKEN.")
        journal = Journal.of(made.cache, there.endpoint, repository)
        with made.cache.lock(f"publish-{journal.path.stem}"):
            head = there.head()
            planned = plan.make(release, there.tree(head), head, layout, large=there.policy.large)
            document = {"repository": repository, "endpoint": there.endpoint, "plan": planned.to_dict()}
            if not json or not yes:
                planned.show(made.console, repository)
            if not dry_run:
                if planned.changes and not yes and not _agreed(repository):
                    raise UsageError("Nothing was published: the plan was not confirmed.")
                result = execute.carry_out(there, planned, journal, made.console)
                document["result"] = result.to_dict()
                made.console.success(f"{repository} holds {planned.identity.full_tag} at {result.commit}, {result.outcome.value}")
    if json:
        print(json_module.dumps(document, indent=1))


def _agreed(repository: str) -> bool:
    print(f"Publish this to {repository}? Type yes: ", end="", file=sys.stderr, flush=True)
    return sys.stdin.readline().strip() == "yes"
