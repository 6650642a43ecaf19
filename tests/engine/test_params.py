"""Options and their environment twins, seen from outside: a running server."""

from __future__ import annotations

from pathlib import Path

import pytest

from server_process import ServerProcess, run_engine, serve

TWINS = {
    "OPENCOTI_LLAMAFILE_CTX_SIZE": "512",
    "OPENCOTI_LLAMAFILE_PARALLEL": "2",
    "OPENCOTI_LLAMAFILE_CACHE_TYPE_K": "q8_0",
    "OPENCOTI_LLAMAFILE_NO_SLOTS": "1",
    "OPENCOTI_LLAMAFILE_METRICS": "1",
    "OPENCOTI_LLAMAFILE_ALIAS": "twin",
}


def test_every_kind_of_option_reads_its_twin(engine: Path, model: Path) -> None:
    with serve(engine, model, env=TWINS) as server:
        props = server.get("/props").json
        assert props["total_slots"] == 2
        assert props["default_generation_settings"]["n_ctx"] == 256  # 512 for two slots
        assert props["model_alias"] == "twin"
        assert server.get("/metrics").status == 200
        assert server.get("/slots").status == 501
        kv = props["opencoti"]["kv"]
        assert (kv["cache_type_k"], kv["explicit_k"], kv["cache_type_v"], kv["explicit_v"]) == ("q8_0", True, "f16", False)


def test_the_command_line_wins(engine: Path, model: Path) -> None:
    flags = ("--parallel", "3", "--ctx-size", "768", "--cache-type-k", "f16", "--slots", "--alias", "line")
    with serve(engine, model, *flags, env=TWINS) as server:
        props = server.get("/props").json
        assert (props["total_slots"], props["model_alias"]) == (3, "line")
        assert props["default_generation_settings"]["n_ctx"] == 256
        assert len(server.get("/slots").json) == 3
        kv = props["opencoti"]["kv"]
        assert (kv["cache_type_k"], kv["explicit_k"]) == ("f16", True)


def test_upstreams_own_variable_wins_over_the_twin(engine: Path, model: Path) -> None:
    with serve(engine, model, "--ctx-size", "256", env=TWINS | {"LLAMA_ARG_ALIAS": "upstream", "LLAMA_ARG_ENDPOINT_SLOTS": "1"}) as server:
        assert server.get("/props").json["model_alias"] == "upstream"
        assert server.get("/slots").status == 200


def test_an_empty_twin_is_no_twin(engine: Path, model: Path) -> None:
    with serve(engine, model, "--ctx-size", "256", env=dict.fromkeys(TWINS, "")) as server:
        kv = server.get("/props").json["opencoti"]["kv"]
        assert (kv["cache_type_k"], kv["explicit_k"], kv["explicit_v"]) == ("f16", False, False)
        assert server.get("/slots").status == 200


def test_the_server_itself_has_a_twin(engine: Path, model: Path) -> None:
    env = {"OPENCOTI_LLAMAFILE_SERVER": "1"}
    with ServerProcess(engine, model, "--ctx-size", "256", mode=(), env=env) as server:
        assert server.get("/health").json["status"] == "ok"


@pytest.mark.parametrize(("name", "value"), [("CTX_SIZE", "many"), ("NO_SLOTS", "perhaps"), ("CACHE_TYPE_K", "q17")])
def test_a_bad_value_names_the_variable(engine: Path, tmp_path: Path, name: str, value: str) -> None:
    result = run_engine(engine, "--server", "-m", "none.gguf", home=tmp_path, env={f"OPENCOTI_LLAMAFILE_{name}": value})
    assert result.returncode != 0
    assert f"OPENCOTI_LLAMAFILE_{name}" in result.stderr
