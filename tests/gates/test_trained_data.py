"""The generator of the trained models' tasks: examples fit, stand where asked, and their answers follow from the text."""

from __future__ import annotations

import importlib.util
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[2] / "gate" / "trained"


@pytest.fixture(scope="module")
def data():
    spec = importlib.util.spec_from_file_location("trained_data", FOLDER / "data.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    yield module
    del sys.modules[spec.name]


def examples(data, task, length, count=25):
    for seed in range(count):
        depth = seed / (count - 1)
        yield data.make_tool_chat(length, depth, seed) if task == "tool_chat" else data.make(task, length, depth, seed)


ALL = ("needle", "multikey", "variables", "copy", "arithmetic", "tool_json", "tool_chat")


@pytest.mark.parametrize("length", [512, 1024, 4096])
@pytest.mark.parametrize("task", ALL)
def test_rendering_fits_and_is_nearly_full(data, task, length):
    for example in examples(data, task, length):
        size = data.token_count(data.render_chat(example) + example.answer + data.IM_END + "\n")
        assert length - 140 <= size <= length


def test_same_arguments_give_the_same_example_in_another_process(data):
    code = f"import sys; sys.path.insert(0, {str(FOLDER)!r}); import data; print(repr([data.make(t, 700, 0.4, 9) for t in data.TASKS]))"
    other = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert other.strip() == repr([data.make(task, 700, 0.4, 9) for task in data.TASKS])


@pytest.mark.parametrize("task", ALL)
def test_seeds_differ(data, task):
    assert len({example.prompt for example in examples(data, task, 700)}) == 25


@pytest.mark.parametrize("length", [1024, 8192])
def test_needle_stands_at_its_depth(data, length):
    for example in examples(data, "needle", length):
        text = example.prompt.rpartition("\n\n")[0]
        at = text.index(f"{example.answer}.")
        assert abs(at / len(text) - example.depth) < 220 / length
    first, last = data.make("needle", length, 0.0, 3), data.make("needle", length, 1.0, 3)
    assert first.answer in first.prompt[:80]
    assert last.prompt.rpartition("\n\n")[0].endswith(f"{last.answer}.")


def test_multikey_asks_for_one_of_many(data):
    for example in examples(data, "multikey", 4096):
        text, _, question = example.prompt.rpartition("\n\n")
        facts = re.findall(r"(?:value of|Note:|value for) (\S+) (?:is|=|was set to) (\S+)\.", text)
        assert len(facts) == 32 and len({key for key, _ in facts}) == 32
        [key] = [key for key, _ in facts if re.search(rf"(?<!\S){re.escape(key)}(?![\w-])", question)]
        assert dict(facts)[key] == example.answer
        few = data.make("multikey", 4096, example.depth, example.seed, keys=7).prompt.rpartition("\n\n")[0]
        assert len(re.findall(r"value of|Note:|value for", few)) == 7


def test_variables_resolve_to_the_answer(data):
    for hops in (1, 4, 7):
        for seed in range(20):
            example = data.make("variables", 1024, 0.9, seed, hops=hops)
            text, _, question = example.prompt.rpartition("\n\n")
            assignments = re.findall(r"VAR (\w+) = (\w+)\.", text)
            defined, order = dict(assignments), [name for name, _ in assignments]
            assert len(defined) == len(order) == 2 * hops  # the asked chain and a decoy
            chain = [re.search(r"variable (\w+)", question)[1]]
            while not chain[-1].isdigit():
                chain.append(defined[chain[-1]])
            assert " = ".join(chain) == example.answer and chain[-1] == example.value and len(chain) == hops + 1
            places = [order.index(name) for name in chain[:-1]]
            assert places == sorted(places, reverse=True)  # each name is defined before it is used


def test_arithmetic_is_right(data):
    for example in examples(data, "arithmetic", 700):
        label = re.search(r"sum (\w+) modulo", example.prompt)[1]
        expression = re.search(rf"Sum {label}: ([\d +-]+)\.", example.prompt)[1]
        numbers = [int(n) for n in re.sub(r"([+-]) ", r"\1", expression).split()]
        assert example.value == str(sum(numbers) % 10) and example.answer.endswith(f"; {example.value}")


@pytest.mark.parametrize("task", ["tool_json", "tool_chat"])
def test_tool_call_takes_its_arguments_from_the_record(data, task):
    for example in examples(data, task, 1024):
        record = re.search(r"for record (\w+)\.$", example.prompt)[1]
        facts = dict(part.split(" ", 1) for part in re.search(rf"Record {record}: (.*?)\.", example.prompt)[1].split(", "))
        call = json.loads(example.value)
        tool = example.tools[0]["function"] if example.tools else json.loads(re.search(r"Tool: (.*)", example.prompt)[1])
        kinds = tool["parameters"]["properties"] if example.tools else tool["parameters"]
        assert call["name"] == tool["name"] and list(call["arguments"]) == list(kinds)
        assert {k: str(v) for k, v in call["arguments"].items()} == {k: facts[k] for k in kinds}


def test_refusals(data):
    with pytest.raises(ValueError, match="unknown task"):
        data.make("riddle", 1024, 0.5, 1)
    with pytest.raises(ValueError, match="outside"):
        data.make("needle", 1024, 1.5, 1)
    with pytest.raises(ValueError, match="greater length"):
        data.make("multikey", 512, 0.5, 1, keys=60)


def test_files_are_small(data):
    files = sorted(FOLDER.glob("retrieval-*.gguf"))
    assert [f.name for f in files] == ["retrieval-gemma4.gguf", "retrieval-qwen3.gguf", "retrieval-qwen35.gguf"]
    for file in files:
        assert file.read_bytes()[:4] == b"GGUF" and file.stat().st_size <= 8 << 20
