"""The server that gates and engine tests start, with a program of a few lines in the engine's place."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from opencoti_build.errors import EngineError
from opencoti_build.gates.serving import Engine, Server

STAND_IN = """#!{python}
import http.server, json, os, sys
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
    def do_POST(self):
        self.send_response(200)
        self.end_headers()
        self.wfile.write(json.dumps([sys.argv[1:], dict(os.environ)]).encode())
    def log_message(self, *words):
        pass
if "fail" in sys.argv:
    sys.exit("no such model")
http.server.HTTPServer(("127.0.0.1", int(sys.argv[sys.argv.index("--port") + 1])), Handler).serve_forever()
"""


@pytest.fixture
def engine(tmp_path: Path) -> Engine:
    program = tmp_path / "engine"
    program.write_text(STAND_IN.format(python=sys.executable))
    program.chmod(0o755)
    return Engine.at(program)


@pytest.mark.skipif(os.name == "nt", reason="a script with a shebang")
def test_how_it_is_started(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LLAMA_ARG_ALIAS", "from outside")
    with Server(engine, Path("m.gguf"), ("--ctx-size", "256")) as server:
        words, variables = server.post("/", {})
        assert words == ["serve", "--host", "127.0.0.1", "--port", str(server.port), "--model", "m.gguf", "--ctx-size", "256"]
        assert "LLAMA_ARG_ALIAS" not in variables
    with Server(engine, None, command=("--server", "-v"), extra={"LLAMA_ARG_ALIAS": "asked for"}) as server:
        words, variables = server.post("/", {})
        assert words == ["--server", "-v", "--host", "127.0.0.1", "--port", str(server.port)]
        assert variables["LLAMA_ARG_ALIAS"] == "asked for"


@pytest.mark.skipif(os.name == "nt", reason="a script with a shebang")
def test_one_that_ends_at_once_is_an_error_with_its_log(engine: Engine) -> None:
    with pytest.raises(EngineError, match="did not start; it ended with exit code 1") as caught, Server(engine, None, ("fail",)):
        pass
    assert "no such model" in caught.value.details
