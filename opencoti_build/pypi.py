"""Finds a PyPI project's file: its address, by the package indexes that pip is configured with.

Why not ``pip download``: for an sdist it runs the project's build code to learn its metadata, it neither resumes nor checks a
size, and it picks files for the running platform only. So this module asks the index itself (the simple repository API: JSON, PEP 691
and 700, or HTML, PEP 503) and leaves the transfer to ``download``; the pin's hash decides, whatever the index says.

The settings come from pip by its public commands, so a mirror, a proxy or a company's certificate that works for ``pip install``
works here: ``pip config list`` for what the user set, ``pip download --help`` for pip's own default index.
"""

from __future__ import annotations

import html.parser
import json
import os
import re
import shlex
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from urllib.parse import unquote, urljoin, urlsplit

import requests
import urllib3

from .download import file_path
from .errors import DownloadError
from .runner import Runner

_JSON = "application/vnd.pypi.simple.v1+json"
_ACCEPT = f"{_JSON}, application/vnd.pypi.simple.v1+html;q=0.2, text/html;q=0.1"
_ANSWER_LIMIT = 64 << 20
_SETTING = re.compile(r"(?:global|download|install|:env:)\.([a-z-]+)=(.*)")


@dataclass(frozen=True)
class Settings:
    """What pip is told about indexes. ``indexes`` are base addresses, ``links`` local folders with files."""

    indexes: tuple[str, ...]
    links: tuple[Path, ...] = ()
    certificates: str | None = None
    proxy: str | None = None


@dataclass(frozen=True)
class IndexFile:
    """A file an index offers. ``size`` (bytes) and ``sha256`` are None where the index does not say."""

    file: str
    url: str
    size: int | None = None
    sha256: str | None = None


def normalised(project: str) -> str:
    """A project's name as indexes spell it (PEP 503)."""
    return re.sub(r"[-_.]+", "-", project).lower()


def pip_settings(runner: Runner, environment: Mapping[str, str] = os.environ) -> Settings:
    """The indexes of ``OPENCOTI_INDEX_URL``, else of pip's configuration, else pip's default.

    Raises DownloadError when there is no pip to ask and the variable is not set.
    """
    values: dict[str, str] = {}
    listed = runner.run([sys.executable, "-m", "pip", "config", "list"], check=False, error=DownloadError)
    for line in listed.output.splitlines() if listed.code == 0 else ():
        if match := _SETTING.fullmatch(line.strip()):
            with_quotes = match[2]
            # ``download`` and the environment win over ``global``; pip lists them later.
            values[match[1]] = " ".join(shlex.split(with_quotes)) if with_quotes[:1] in "'\"" else with_quotes
    indexes: list[str] = []
    if own := environment.get("OPENCOTI_INDEX_URL"):
        indexes = own.split()
    elif values.get("no-index", "").lower() not in ("1", "true", "yes", "on"):
        # pip writes several values on separate lines, spelled \n in its listing.
        extra = values.get("extra-index-url", "").replace("\\n", " ").split()
        indexes = [values.get("index-url") or default_index(runner), *extra]
    links = [_local(link) for link in values.get("find-links", "").replace("\\n", " ").split()]
    return Settings(
        indexes=tuple(dict.fromkeys(index.rstrip("/") for index in indexes)),
        links=tuple(link for link in links if link is not None and link.is_dir()),
        certificates=values.get("cert") or None,
        proxy=values.get("proxy") or None,
    )


def default_index(runner: Runner) -> str:
    """The address pip uses when nothing is configured. Raises DownloadError when there is no pip."""
    outcome = runner.run([sys.executable, "-m", "pip", "download", "--help"], check=False, error=DownloadError, env={**os.environ, "COLUMNS": "200"})
    match = re.search(r"--index-url <url>.*?\(default\s+(https://[^\s)]+)\)", outcome.output, re.DOTALL)
    if outcome.code != 0 or not match:
        raise DownloadError("This Python has no pip that tells the address of PyPI: run 'python -m ensurepip', or set OPENCOTI_INDEX_URL.")
    return match[1]


@dataclass
class Index:
    """The configured indexes as one. ``known`` settings spare the question to pip, which else comes with the first file."""

    runner: Runner
    session: requests.Session
    known: Settings | None = None
    timeout: float = 30.0
    sleep: Callable[[float], None] = time.sleep
    answers: dict[str, list[IndexFile]] = field(default_factory=dict)

    @cached_property
    def settings(self) -> Settings:
        """pip's settings; the session takes the certificates and the proxy over."""
        settings = self.known if self.known is not None else pip_settings(self.runner)
        if settings.certificates:
            self.session.verify = settings.certificates
        if settings.proxy:
            self.session.proxies.update({"http": settings.proxy, "https": settings.proxy})
        return settings

    def files(self, project: str) -> list[IndexFile]:
        """Every file of a project, in the order of the indexes. Raises DownloadError when none has the project."""
        name = normalised(project)
        if name not in self.answers:
            found: list[IndexFile] = []
            troubles: list[str] = []
            for base in self.settings.indexes:
                try:
                    found += self._ask(f"{base}/{name}/")
                except DownloadError as error:
                    troubles.append(error.message)
            for folder in self.settings.links:
                found += [IndexFile(path.name, path.as_uri(), path.stat().st_size) for path in sorted(folder.iterdir()) if path.is_file()]
            if not found:
                raise DownloadError(f"no index knows {project}", details="; ".join(troubles))
            # The same file on a mirror comes once, from the index that is asked first.
            self.answers[name] = list({offered.file: offered for offered in reversed(found)}.values())[::-1]
        return self.answers[name]

    def find(self, project: str, file: str) -> IndexFile:
        """The first offer of a file. Raises DownloadError."""
        for offered in self.files(project):
            if offered.file == file:
                return offered
        raise DownloadError(f"no index has {file} of {project}")

    def _ask(self, url: str) -> list[IndexFile]:
        if urlsplit(url).scheme == "file":
            page = file_path(url) / "index.html"
            try:
                return _parse_html(page.read_text("utf-8"), url)
            except (OSError, ValueError) as error:
                raise DownloadError(f"{page} cannot be read") from error
        for attempt in (1, 2, 3):
            try:
                with self.session.get(url, headers={"Accept": _ACCEPT, "Cache-Control": "max-age=0"}, timeout=self.timeout, stream=True) as response:
                    if response.status_code in (429, 500, 502, 503, 504) and attempt < 3:
                        self.sleep(float(attempt))
                        continue
                    if response.status_code != 200:
                        raise DownloadError(f"the index answers {response.status_code} for {urlsplit(url).path}")
                    body = response.raw.read(_ANSWER_LIMIT + 1, decode_content=True)
                    if len(body) > _ANSWER_LIMIT:
                        raise DownloadError("the index's answer is too long")
                    return _parse(body, response.headers.get("Content-Type", ""), response.url)
            except (requests.exceptions.RequestException, urllib3.exceptions.HTTPError, OSError) as error:
                if attempt == 3:
                    raise DownloadError(f"the index does not answer ({type(error).__name__})") from error
                self.sleep(float(attempt))
            except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
                raise DownloadError("the index's answer cannot be read") from error
        raise DownloadError("the index does not answer")


def _parse(body: bytes, kind: str, url: str) -> list[IndexFile]:
    if not kind.startswith(_JSON):
        return _parse_html(body.decode("utf-8"), url)
    offered = []
    answer = json.loads(body)
    if not isinstance(answer, dict) or not isinstance(answer["files"], list):
        raise ValueError("no list of files")
    for entry in answer["files"]:
        size, sha256 = entry.get("size"), entry.get("hashes", {}).get("sha256")
        address = urljoin(url, str(entry["url"]))
        offered.append(IndexFile(str(entry["filename"]), address, size if isinstance(size, int) else None, sha256 if isinstance(sha256, str) else None))
    return offered


class _Anchors(html.parser.HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.base: str | None = None
        self.addresses: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        address = dict(attrs).get("href")
        if tag == "a" and address:
            self.addresses.append(address)
        elif tag == "base" and address and self.base is None:
            self.base = address


def _parse_html(text: str, url: str) -> list[IndexFile]:
    """Anchors of a PEP 503 page; the fragment may carry ``sha256=...``."""
    parser = _Anchors()
    parser.feed(text)
    offered = []
    for address in parser.addresses:
        whole = urljoin(urljoin(url, parser.base) if parser.base else url, address)
        parts = urlsplit(whole)
        name = unquote(parts.path.rsplit("/", 1)[-1])
        sha256 = parts.fragment.removeprefix("sha256=") if parts.fragment.startswith("sha256=") else None
        if name:
            offered.append(IndexFile(name, whole.split("#", 1)[0], None, sha256))
    return offered


def _local(link: str) -> Path | None:
    if urlsplit(link).scheme == "file":
        return file_path(link)
    return None if "://" in link else Path(link).expanduser()
