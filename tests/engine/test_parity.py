"""Off means off: with no opencoti flag the patched engine says, token by token, what the base says."""

from __future__ import annotations

import json
import urllib.request
from pathlib import Path

import pytest

from server_process import ServerProcess

PROMPTS = [
    "The capital of France is",
    "Once upon a time, in a village by the sea, there lived",
    "def fibonacci(n):\n    ",
    "Die Hauptstadt von Österreich heißt",
]


def completions(engine: Path, model: Path, *flags: str) -> list[dict]:
    """Greedy continuations with the ten best log-probabilities of every token, full precision as JSON carries it."""
    answers = []
    with ServerProcess(engine, model, "--threads", "2", "--parallel", "1", "--ctx-size", "1024", *flags) as server:
        for prompt in PROMPTS:
            body = {"prompt": prompt, "n_predict": 24, "temperature": 0, "n_probs": 10, "cache_prompt": False, "seed": 1}
            request = urllib.request.Request(f"{server.url}/completion", json.dumps(body).encode(), {"Content-Type": "application/json"})
            with urllib.request.urlopen(request, timeout=120) as reply:
                answer = json.load(reply)
            answers.append({"content": answer["content"], "probabilities": answer["completion_probabilities"]})
    return answers


@pytest.mark.parametrize("flags", [(), ("--flash-attn", "off"), ("--cache-type-k", "q8_0", "--cache-type-v", "q8_0"), ("--ubatch-size", "8", "--batch-size", "8")])
def test_text_and_log_probabilities_are_the_bases(patched: Path, vanilla: Path, model: Path, flags: tuple[str, ...]) -> None:
    ours, theirs = completions(patched, model, *flags), completions(vanilla, model, *flags)
    assert all(answer["content"].strip() and len(answer["probabilities"]) == 24 for answer in theirs)
    assert ours == theirs
