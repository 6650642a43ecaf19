"""The model zoo in a real engine: every model loads whole, and what it says depends on what it read."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from server_process import ServerProcess, run_engine, serve

from opencoti_build.cli.common import CommandContext
from opencoti_build.gates import zoo
from opencoti_build.gates.zoo import library, mixes
from opencoti_build.project import find_project

pytest.importorskip("numpy", reason="the test extra brings it: pip install -e '.[test]'")

MODELS = zoo.choose(zoo.load(zoo.zoo_file(find_project().root)), None)
ALONE = [model for model in MODELS if not model.is_drafter]
DRAFTERS = [model for model in MODELS if model.is_drafter]

# One thread: these models are so small that two would spend their time waiting for each other.
FLAGS = ("--ctx-size", "1024", "--parallel", "1", "--threads", "1", "--no-warmup", "--log-verbosity", "4")


@pytest.fixture(scope="module")
def paths(workshop: CommandContext) -> dict[str, Path]:
    """The zoo's files, from the cache or written now."""
    return zoo.ensure(workshop)


def serving(engine: Path, model: zoo.ZooModel, path: Path, *more: str) -> ServerProcess:
    """A server with the model; one that drafts for itself does so, as its last block is loaded only then."""
    drafting = ("--spec-type", "draft-mtp", "--spec-draft-n-max", "2") if model.has_next else ()
    return serve(engine, path, *FLAGS, *drafting, *more)


def first_token(server: ServerProcess, prompt: str) -> dict[int, float]:
    """Natural logarithms of all tokens' probabilities behind a prompt; what is then said (always an "a") has no part in them."""
    answer = server.complete(prompt, 1, n_probs=272, cache_prompt=False, logit_bias=[[ord("a"), 1000]])
    return {item["id"]: item["logprob"] for item in answer["completion_probabilities"][0]["top_logprobs"]}


def entropy(logs: dict[int, float]) -> float:
    """In nats; all 272 tokens alike would be 5.6."""
    return -sum(math.exp(log) * log for log in logs.values())


def assert_whole(log: str) -> None:
    assert "unused tensor" not in log
    assert "partial load" not in log
    assert "tokenizer config may be incorrect" not in log


@pytest.mark.parametrize("model", ALONE, ids=lambda model: model.name)
def test_a_model_loads_whole_and_listens(engine: Path, paths: dict[str, Path], model: zoo.ZooModel) -> None:
    with serving(engine, model, paths[model.name]) as server:
        seen = [first_token(server, text) for text in ("The quick brown fox", "the quick brown fox", "The quick brown cat", "x" * 300)]
        said: list[Any] = [server.complete(text, 12, ignore_eos=True, return_tokens=True)["tokens"] for text in ("Once upon a time", "Twice upon a time")]
        log = server.log
    for logs in seen:
        assert len(logs) == 272
        assert all(math.isfinite(value) for value in logs.values())
        assert 0.2 < entropy(logs) < 5.4
    assert 1.0 < sum(map(entropy, seen)) / len(seen) < 5.0
    # Changes at the start and at the end of a prompt reach the answer.
    assert max(abs(seen[0][token] - seen[1][token]) for token in seen[0]) > 0.05
    assert max(abs(seen[0][token] - seen[2][token]) for token in seen[0]) > 0.05
    assert [len(tokens) for tokens in said] == [12, 12]
    assert said[0] != said[1]
    assert_whole(log)


@pytest.mark.parametrize("model", DRAFTERS, ids=lambda model: model.name)
def test_a_drafter_reads_its_target(engine: Path, paths: dict[str, Path], model: zoo.ZooModel) -> None:
    target = next(other for other in MODELS if other.family == model.target and other.mix == model.mix)
    with serve(engine, paths[target.name], *FLAGS) as server:
        alone = server.complete("Once upon a time", 24, ignore_eos=True, return_tokens=True)["tokens"]
    with serve(engine, paths[target.name], *FLAGS, "--spec-type", "draft-mtp", "--spec-draft-model", str(paths[model.name]), "--spec-draft-n-max", "3") as server:
        answer = server.complete("Once upon a time", 24, ignore_eos=True, return_tokens=True)
        log = server.log
    assert answer["timings"]["draft_n"] > 0
    assert answer["tokens"] == alone
    assert_whole(log)


def test_chat_works_with_the_byte_vocabulary(engine: Path, paths: dict[str, Path]) -> None:
    with serve(engine, paths["qwen3-q8_0"], *FLAGS) as server:
        reply = server.post("/v1/chat/completions", {"messages": [{"role": "user", "content": "h\u00e9llo"}], "max_tokens": 8, "temperature": 0})
        tokens = server.post("/tokenize", {"content": "h\u00e9llo \n\t ab  c"})["tokens"]
        text = server.post("/detokenize", {"tokens": tokens})["content"]
    # <bos>, '<|im_start|>user\n', the text's six bytes, '<|im_end|>\n', '<|im_start|>assistant\n': special tokens count once.
    assert reply["usage"]["prompt_tokens"] == 1 + 6 + 6 + 2 + 11
    assert tokens == list("h\u00e9llo \n\t ab  c".encode())
    assert text == "h\u00e9llo \n\t ab  c"


def variants() -> list[zoo.ZooModel]:
    """A model of every family that has layers to choose among; the base treats exactly eight experts apart, so these have sixteen."""
    families = {model.family: model for model in ALONE if model.mix.name == "F16"}
    return [
        replace(model, shape=replace(model.shape, experts=replace(model.shape.experts, count=16))) if model.shape.experts is not None else model
        for model in families.values()
    ]


@pytest.mark.parametrize("model", variants(), ids=lambda model: model.family)
def test_mixes_are_those_of_the_engines_quantizer(engine: Path, workshop: CommandContext, tmp_path: Path, model: zoo.ZooModel) -> None:
    gguf = library.load(zoo.gguf_folder(workshop))
    path = zoo.write(model, tmp_path, gguf=gguf)
    names = [tensor.name for tensor in gguf.GGUFReader(path).tensors]
    every = {other.mix.name: other.mix for other in zoo.load(zoo.zoo_file(workshop.project.root))}
    for form in ("Q4_K_M", "Q6_K", "IQ2_M", "IQ2_XXS"):
        shown = run_engine(engine, "quantize", "--dry-run", str(path), form, home=tmp_path).stderr
        theirs = {name: kind.upper() for name, kind in re.findall(r"^\[ *\d+/ *\d+\] (\S+) .*\((\w+)\)$", shown, re.MULTILINE)}
        ours = dict(zip(names, mixes.types_of(replace(model, mix=every[form]), zoo.plan(model).tensors), strict=True))
        assert {name: kind for name, kind in ours.items() if kind not in ("F32", "F16")} == theirs, form
