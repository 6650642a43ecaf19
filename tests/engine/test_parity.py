"""Off means off: with no opencoti flag the patched engine says, token by token, what the base says."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from server_process import ServerProcess

PROMPTS = [
    "The capital of France is",
    "Once upon a time, in a village by the sea, there lived",
    "def fibonacci(n):\n    ",
    "Die Hauptstadt von Österreich heißt",
]
LENGTH = 24


def completions(engine: Path, model: Path, *flags: str) -> list[dict[str, Any]]:
    """Greedy continuations with the ten best log-probabilities of every token, in full precision as JSON carries it."""
    with ServerProcess(engine, model, "--threads", "2", "--parallel", "1", "--ctx-size", "1024", *flags, mode=("serve",)) as server:
        answers = [server.complete(prompt, LENGTH, n_probs=10, cache_prompt=False) for prompt in PROMPTS]
    return [{"content": answer["content"], "probabilities": answer["completion_probabilities"]} for answer in answers]


@pytest.mark.parametrize(
    "flags",
    [(), ("--flash-attn", "off"), ("--cache-type-k", "q8_0", "--cache-type-v", "q8_0"), ("--ubatch-size", "8", "--batch-size", "8")],
    ids=["default", "no-flash-attention", "q8_0-cache", "small-batches"],
)
def test_text_and_log_probabilities_are_the_bases(patched: Path, vanilla: Path, model: Path, flags: tuple[str, ...]) -> None:
    ours, theirs = completions(patched, model, *flags), completions(vanilla, model, *flags)
    assert all(answer["content"].strip() and len(answer["probabilities"]) == LENGTH for answer in theirs)
    assert ours == theirs
