"""What a server tells about itself: /props, /health, /slots."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from server_process import serve

PROPS = {
    "version": str,
    "base": str,
    "commit": str,
    "tree": str,
    "kv": {"cache_type_k": str, "cache_type_v": str, "auto_tier": bool, "effective": dict},
    "residency": {"kv_residency_mode": int, "vram_target_mib": int},
    "dca": {"enabled": bool, "chunk_size": int, "yarn_factor": float},
    "sparse_attn": {"enabled": bool, "block_size": int, "topk": int},
    "speculative": {"types": list, "n_max": int},
    "kv_reuse": {"n_parallel": int, "kv_unified": bool, "cache_ram_mib": int},
    "rest_kv": {"eviction": bool, "recent": int, "layer": int},
    "repeat_layers": type(None),
}
EFFECTIVE = {
    "type_k": str,
    "type_v": str,
    "n_cells": int,
    "n_cells_resident": int,
    "n_layers_spilling": int,
    "fully_resident": bool,
    "is_iswa": bool,
}


def check_shape(value: dict[str, Any], shape: dict[str, Any], path: str = "opencoti") -> None:
    for name, kind in shape.items():
        assert name in value, f"{path}.{name} is missing"
        if isinstance(kind, dict):
            check_shape(value[name], kind, f"{path}.{name}")
        else:
            assert type(value[name]) is kind, f"{path}.{name} is {value[name]!r}"


def wait_for(condition: Callable[[], bool], what: str, within: float = 120) -> None:
    deadline = time.monotonic() + within
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.1)


def test_props_has_every_member_of_the_guide(engine: Path, model: Path) -> None:
    with serve(engine, model, "--ctx-size", "512", "--parallel", "2") as server:
        ours = server.get("/props").json["opencoti"]
    check_shape(ours, PROPS)
    check_shape(ours["kv"]["effective"], EFFECTIVE, "opencoti.kv.effective")
    assert ours["speculative"]["types"] == ["none"]
    assert ours["kv_reuse"]["n_parallel"] == 2


def test_effective_is_read_back_from_the_cache(engine: Path, model: Path) -> None:
    flags = ("--parallel", "2", "--ctx-size", "1024", "--no-kv-unified", "--flash-attn", "on", "--cache-type-k", "q8_0", "--cache-type-v", "q4_0")
    with serve(engine, model, *flags) as server:
        kv = server.get("/props").json["opencoti"]["kv"]
        assert (kv["cache_type_k"], kv["cache_type_v"]) == ("q8_0", "q4_0")
        effective = kv["effective"]
        assert (effective["type_k"], effective["type_v"]) == ("q8_0", "q4_0")
        assert (effective["n_cells"], effective["n_stream"]) == (1024, 2)
        assert (effective["n_cells_resident"], effective["n_layers_spilling"], effective["fully_resident"]) == (1024, 0, True)
        assert effective["is_iswa"] is True  # the model has windowed layers
        assert 0 < effective["n_cells_swa"]
        assert effective["n_cells_used"] == 0

        answer = server.complete(list(range(100, 200)), 8)
        tokens = answer["tokens_evaluated"] + answer["tokens_predicted"]
        assert tokens == 108
        wait_for(lambda: server.get("/slots").json[answer["id_slot"]]["is_processing"] is False, "the slot is idle")
        used = server.get("/props").json["opencoti"]["kv"]["effective"]["n_cells_used"]
        assert used in (tokens - 1, tokens)  # the last token is sampled, not always stored


def test_one_stream_when_unified(engine: Path, model: Path) -> None:
    with serve(engine, model, "--parallel", "2", "--ctx-size", "1024", "--kv-unified") as server:
        ours = server.get("/props").json["opencoti"]
    assert ours["kv_reuse"]["kv_unified"] is True
    assert (ours["kv"]["effective"]["n_stream"], ours["kv"]["effective"]["n_cells"]) == (1, 1024)


def test_health_has_features(engine: Path, model: Path) -> None:
    with serve(engine, model, "--ctx-size", "256") as server:
        for path in ("/health", "/v1/health"):
            health = server.get(path).json
            assert health["status"] == "ok"
            assert health["features"]["introspection_v1"] is True


def test_a_slot_starts_with_zero_counters(engine: Path, model: Path) -> None:
    with serve(engine, model, "--ctx-size", "512", "--parallel", "2") as server:
        server.complete("The capital of France is", 4, id_slot=0)
        slots = server.get("/slots").json
    zero = {"draft_n_total": 0, "draft_n_accepted": 0, "draft_acceptance": 0.0, "session_id": None, "pool": None}
    assert [slot["opencoti"] for slot in slots] == [zero, zero]


def test_draft_counters_last_longer_than_a_request(engine: Path, model: Path) -> None:
    prompt = "one two three four five six seven eight nine ten " * 6
    with serve(engine, model, "--ctx-size", "1024", "--parallel", "2", "--spec-type", "ngram-simple") as server:
        assert server.get("/props").json["opencoti"]["speculative"]["types"] == ["none", "ngram-simple"]
        timings = [server.complete(prompt, 48, id_slot=0, cache_prompt=False)["timings"] for _ in range(2)]
        wait_for(lambda: not any(slot["is_processing"] for slot in server.get("/slots").json), "the slots are idle")
        first, second = (slot["opencoti"] for slot in server.get("/slots").json)
    drafted = sum(timing.get("draft_n", 0) for timing in timings)
    accepted = sum(timing.get("draft_n_accepted", 0) for timing in timings)
    assert drafted > 0 and accepted > 0, "the prompt should make the n-gram drafter draft"
    assert (first["draft_n_total"], first["draft_n_accepted"]) == (drafted, accepted)
    assert first["draft_acceptance"] == pytest.approx(accepted / drafted)
    assert second["draft_n_total"] == 0


def test_props_and_health_answer_while_a_prompt_is_decoded(engine: Path, model: Path) -> None:
    """One batch as long as the prompt: the server thread is inside a single decode while the GET routes are asked."""
    flags = ("--ctx-size", "2048", "--parallel", "1", "--batch-size", "2048", "--ubatch-size", "512", "--threads", "1")
    with serve(engine, model, *flags) as server:
        answers: list[dict[str, Any]] = []
        request = threading.Thread(target=lambda: answers.append(server.complete([100 + i % 100 for i in range(1500)], 1)))
        request.start()
        try:
            wait_for(lambda: server.get("/slots").json[0]["is_processing"], "the request has a slot")
            assert server.get("/props").json["opencoti"]["kv"]["effective"]["n_cells"] == 2048
            assert server.get("/health").json["features"]["introspection_v1"] is True
            before = list(answers)
        finally:
            request.join()
    assert before == [], "the request ended before the routes were asked: make the prompt longer"
    assert answers[0]["tokens_evaluated"] == 1500


def test_a_sleeping_server_answers_and_wakes(engine: Path, model: Path) -> None:
    with serve(engine, model, "--ctx-size", "256", "--sleep-idle-seconds", "1") as server:
        awake = server.get("/props").json["opencoti"]
        assert awake["kv"]["effective"]["n_cells"] == 256
        wait_for(lambda: server.get("/props").json["is_sleeping"] and "entering sleeping" in server.log, "the server sleeps")
        wait_for(lambda: server.get("/props").json["opencoti"]["kv"]["effective"] is None, "no cache while sleeping", within=10)
        asleep = server.get("/props").json["opencoti"]
        assert asleep["version"] == awake["version"] and asleep["kv_reuse"] == awake["kv_reuse"]
        assert server.get("/health").json["features"] == {"introspection_v1": True}
        answer = server.complete("The capital of France is", 4)
        assert answer["content"].strip()
        assert server.get("/props").json["opencoti"]["kv"]["effective"]["n_cells"] == 256
