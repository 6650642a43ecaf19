"""The one gateway to the hub: its own client, told how to behave.

- Xet is off: that path sends in a program of its own, where neither our patience nor our count of bytes reaches, and a hub may not have it. Large
  files go through LFS, which every hub speaks.
- Telemetry is off: a release says nothing about who makes it.
- All requests go through ``transport.py``; the client's progress bars, log lines and waiting stay silent.
- The token comes from the places the client looks at (``HF_TOKEN``, the file that its login command writes) and is handed to the client only.
- What the client raises leaves as an error of ours, without the client's traceback behind it: there the token would be one frame away.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, BinaryIO, TypeVar

from ..errors import ConflictError, DiskError, HubMismatch, HubRefused, OfflineError, OpencotiError, UsageError
from .plan import Action, Change
from .policy import Clock, Policy, SystemClock
from .tree import Content, Tree, content_of

if TYPE_CHECKING:
    from huggingface_hub import CommitOperationAdd, HfApi

    from .transport import Traffic

BRANCH = "main"

_T = TypeVar("_T")


@dataclass(frozen=True)
class Prepared:
    """A change that is ready to be sent: the client's operation, and for an addition the identity of its bytes."""

    change: Change
    operation: Any
    content: Content


@dataclass
class Hub:
    """One repository of a hub, used as a context manager. ``endpoint`` is the hub's address ("" for what the client takes itself:
    ``HF_ENDPOINT`` or the public hub); ``token`` None looks at the standard places, "" goes without."""

    repository: str
    endpoint: str = ""
    token: str | None = field(default=None, repr=False)
    policy: Policy = Policy()
    clock: Clock = SystemClock()
    traffic: Traffic = field(init=False, repr=False)
    _api: HfApi = field(init=False, repr=False)

    def __post_init__(self) -> None:
        # Read at import; a process that imported the client before us gets the constants changed.
        os.environ["HF_HUB_DISABLE_XET"] = os.environ["HF_HUB_DISABLE_TELEMETRY"] = "1"
        import huggingface_hub
        from huggingface_hub import constants
        from huggingface_hub.utils import disable_progress_bars, logging, set_client_factory
        from huggingface_hub.utils._runtime import is_xet_available

        from .transport import Secrets, Traffic, client

        constants.HF_HUB_DISABLE_XET = constants.HF_HUB_DISABLE_TELEMETRY = True
        if constants.is_offline_mode():
            raise OfflineError("Publishing needs the network, and HF_HUB_OFFLINE is set: unset it.")
        if is_xet_available():
            raise UsageError("This version of huggingface_hub cannot be told to leave Xet off: install the version that pyproject.toml names.")
        disable_progress_bars()
        logging.set_verbosity_error()
        if self.token is None:
            self.token = huggingface_hub.get_token() or ""
        self.traffic = Traffic(self.policy, self.clock, Secrets((self.token,) if self.token else ()))
        set_client_factory(lambda: client(self.traffic))
        self.endpoint = self.endpoint or constants.ENDPOINT
        self._api = huggingface_hub.HfApi(endpoint=self.endpoint, token=self.token or False)

    def __enter__(self) -> Hub:
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None) -> None:
        from huggingface_hub.utils import close_session

        close_session()

    # ---- reading -------------------------------------------------------------------------------------------------------------

    def head(self) -> str:
        """The commit that the branch stands at. Raises HubRefused, HubUnavailable."""
        head = self._ask("The repository", lambda: self._api.repo_info(self.repository, revision=BRANCH).sha)
        if not isinstance(head, str) or not head:
            raise HubMismatch(f"{self.endpoint} does not say which commit {self.repository} stands at: is this a hub?")
        return head

    def tree(self, commit: str) -> Tree:
        """All files of a commit. Raises HubRefused, HubUnavailable, HubMismatch."""
        from huggingface_hub.hf_api import RepoFile

        def read() -> Tree:
            found: dict[str, Content] = {}
            for entry in self._api.list_repo_tree(self.repository, recursive=True, revision=commit):
                if isinstance(entry, RepoFile):
                    lfs = entry.lfs
                    found[entry.path] = Content(lfs.size, sha256=lfs.sha256) if lfs else Content(entry.size, blob=entry.blob_id)
            return found

        return self._ask("The list of files", read)

    def fetch(self, path: str, commit: str, expected: Content) -> bytes:
        """A small published file. Raises HubMismatch when it is not the ``expected`` one, HubRefused, HubUnavailable."""
        from huggingface_hub import hf_hub_url
        from huggingface_hub.utils import build_hf_headers, get_session, hf_raise_for_status

        url = hf_hub_url(self.repository, path, revision=commit, endpoint=self.endpoint)

        def read() -> bytes:
            reply = get_session().get(url, headers=build_hf_headers(token=self.token or False))
            hf_raise_for_status(reply)
            return reply.content

        data = self._ask(path, read)
        if not content_of(data).same(expected):
            raise HubMismatch(f"{path} comes from the hub as {len(data)} bytes that are not the ones its list of files names: look at the repository.")
        return data

    # ---- writing -------------------------------------------------------------------------------------------------------------

    def prepare(self, change: Change, parent: str) -> Prepared:
        """The client's operation for a change. A file that the hub keeps in git is fetched here if it is to be copied."""
        from huggingface_hub import CommitOperationAdd, CommitOperationCopy, CommitOperationDelete

        content = change.content

        def operation() -> Any:
            if change.action is Action.DELETE:
                return CommitOperationDelete(path_in_repo=change.path, is_folder=False)
            if change.file is not None:
                return self._addition(change.path, change.file.path, change.content)
            if change.content.stored_large:
                return CommitOperationCopy(src_path_in_repo=change.source, path_in_repo=change.path, src_revision=parent)
            return CommitOperationAdd(path_in_repo=change.path, path_or_fileobj=data)

        if change.action is Action.COPY and not content.stored_large:
            # The client would fetch it as well, and believe whatever comes.
            data = self.fetch(change.source, parent, content)
            content = content_of(data)
        return Prepared(change, self._ask(change.path, operation), content)

    def _addition(self, place: str, path: Path, content: Content) -> CommitOperationAdd:
        from huggingface_hub import CommitOperationAdd

        traffic = self.traffic

        class Addition(CommitOperationAdd):
            """A file whose uploads can be rewound by the transport, and that is not hashed a second time."""

            @contextlib.contextmanager
            def as_file(self, with_tqdm: bool = False) -> Iterator[BinaryIO]:
                with path.open("rb") as stream, traffic.sending(stream):
                    yield stream

        addition = Addition(path_in_repo=place, path_or_fileobj=str(path))
        addition.upload_info.sha256 = bytes.fromhex(content.sha256)
        if addition.upload_info.size != content.size:
            raise HubMismatch(f"{path} has changed since it was read: make the cut again.")
        return addition

    def upload(self, prepared: Prepared) -> None:
        """Put the bytes of an addition into the large file storage, if they belong there and are not there yet.

        Raises HubRefused, HubUnavailable, HubMismatch.
        """
        self._ask(
            prepared.change.path,
            lambda: self._api.preupload_lfs_files(self.repository, [prepared.operation], revision=BRANCH, num_threads=1, free_memory=False),
        )

    def commit(self, prepared: Sequence[Prepared], message: str, parent: str) -> str:
        """Make the one commit on top of ``parent``; gives its id.

        Raises ReplyLost when nobody knows whether it was made, ConflictError when the branch stands elsewhere, HubRefused, HubUnavailable.
        """
        operations = [item.operation for item in prepared]

        def send() -> str:
            done = self._api.create_commit(
                self.repository, operations, commit_message=message, revision=BRANCH, parent_commit=parent, num_threads=self.policy.parallel
            )
            return done.oid

        return self._ask("The commit", send, committing=True)

    # ---- errors --------------------------------------------------------------------------------------------------------------

    def _ask(self, what: str, call: Callable[[], _T], *, committing: bool = False) -> _T:
        """What ``call`` gives; whatever the client raises in it becomes an error of ours."""
        try:
            return call()
        except Exception as error:
            problem = error
        raise self._ours(what, problem, committing=committing)

    def _ours(self, what: str, problem: Exception, *, committing: bool) -> OpencotiError:
        """The error of ours for one of the client's. It is made, and raised, outside of any handler, so that the client's is no context of it:
        what a host said, a repeated token included, would be one step away."""
        from huggingface_hub.errors import HfHubHTTPError, RepositoryNotFoundError

        from .transport import ReplyLost

        clean = self.traffic.secrets.clean
        # The client wraps what it meets, so all links are looked at.
        links = tuple(_chain(problem))
        if (ours := next((link for link in links if isinstance(link, OpencotiError)), None)) is not None:
            ours.__cause__ = ours.__context__ = None
            return ours.with_traceback(None)
        if any(isinstance(link, RepositoryNotFoundError) for link in links):
            return HubRefused(
                f"{self.endpoint} has no repository {self.repository}, or this token may not see it: create it there, or log in as somebody who may write to it."
            )
        if (answer := next((link for link in links if isinstance(link, HfHubHTTPError)), None)) is not None:
            status = answer.response.status_code
            reason = clean(answer.server_message or answer.response.headers.get("x-error-message", "") or str(answer)).rstrip(".")
            if committing and status in (409, 412):
                return ConflictError(f"{self.repository} has changed since it was read ({reason}).")
            return HubRefused(f"{what}: {self.endpoint} answers {status}: {reason}.")
        if (unread := next((link for link in links if isinstance(link, OSError) and link.filename), None)) is not None:
            return DiskError(f"Cannot read {unread.filename}: {unread.strerror}.")
        sentence = f"{what}: {self.endpoint} answers in a way that its client does not understand ({clean(str(links[-1])) or type(problem).__name__})"
        # A commit that was taken and answered with rubbish is a commit.
        return ReplyLost(sentence) if committing else HubRefused(f"{sentence}: is this a hub?")


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def repository_name(text: str, environment: Mapping[str, str] = os.environ) -> str:
    """The repository to publish to: ``text``, else ``OPENCOTI_PUBLISH_REPO``. Raises UsageError."""
    name = text or environment.get("OPENCOTI_PUBLISH_REPO", "")
    if not name:
        raise UsageError("Which repository to publish to is not said: give --repo OWNER/NAME, or set OPENCOTI_PUBLISH_REPO.")
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id

    try:
        validate_repo_id(name)
    except HFValidationError:
        pass
    else:
        if name.count("/") == 1:
            return name
    raise UsageError(f"{name[:100]!r} is not the name of a repository: give it as OWNER/NAME.")
