"""Asks a running engine the held-out questions over HTTP and prints what it got right.

    python engine_check.py qwen35 retrieval-qwen35.gguf --engine "sh opencoti-llamafile.llamafile --server" \\
        --lengths 1024:100,4096:50 --styles needle,multikey --mtp

Checks first that the engine gives a text the ids of training and renders a chat as training did. The server it starts
listens on 127.0.0.1 and is stopped at the end. Needs the standard library only.
"""

from __future__ import annotations

import argparse
import json
import shlex
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

import data
from tokenizer import encode

FIRST_SEED = 2_000_000
STYLES = (*data.TASKS, "tool_chat", "needle_plain")


class Server:
    """The engine as a server of one model; a context manager."""

    def __init__(self, command: list[str], log: Path) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        self._log = log.open("wb")
        self._process = subprocess.Popen(
            [*command, "--host", "127.0.0.1", "--port", str(self.port)], stdout=self._log, stderr=subprocess.STDOUT
        )

    def __enter__(self) -> Server:
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline and self._process.poll() is None:
            try:
                with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/health", timeout=2) as reply:
                    if reply.status == 200:
                        return self
            except (urllib.error.URLError, OSError):
                time.sleep(0.2)
        self.__exit__()
        raise SystemExit(f"the engine did not start: read {self._log.name}")

    def __exit__(self, *_: object) -> None:
        self._process.terminate()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
        self._log.close()

    def post(self, path: str, body: dict) -> dict:
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.port}{path}", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=300) as reply:
            return json.load(reply)


def check_ids(server: Server, bos: bool) -> None:
    """Raises SystemExit if the engine's ids or its rendering of a chat differ from those of training."""
    example = data.make("multikey", 1024, 0.5, 1)
    tools = data.make_tool_chat(1024, 0.5, 1)
    texts = [data.render_chat(example), data.render_chat(tools) + tools.answer, "Caf\u00e9  x = 1\n\n\n\t\u20ac \u4f60 don't 12345"]
    for text in texts:
        body = {"content": text, "add_special": True, "parse_special": True}
        got, want = server.post("/tokenize", body)["tokens"], encode((data.BOS if bos else "") + text)
        if got != want:
            where = next((i for i, (a, b) in enumerate(zip(got, want)) if a != b), min(len(got), len(want)))
            raise SystemExit(f"ids differ at {where}: engine {got[where:where + 8]}, training {want[where:where + 8]}")
    for item in (example, tools):
        body = {"messages": item.messages} | ({"tools": list(item.tools)} if item.tools else {})
        got = server.post("/apply-template", body)["prompt"]
        if got.removeprefix(data.BOS) != data.render_chat(item):
            raise SystemExit(f"the chat rendering differs: engine {got[:400]!r}, training {data.render_chat(item)[:400]!r}")


def ask(server: Server, style: str, item: data.Example) -> tuple[bool, str, dict]:
    """Whether the reply is the expected answer, the reply, and the engine's timings."""
    common = {"temperature": 0, "cache_prompt": False}
    if style.endswith("_plain"):
        reply = server.post("/completion", {**common, "prompt": data.render_plain(item), "n_predict": 200})
        return reply["content"] == item.answer, reply["content"], reply.get("timings", {})
    body = {**common, "messages": item.messages, "max_tokens": 200}
    if item.tools:
        body["tools"] = list(item.tools)
    reply = server.post("/v1/chat/completions", body)
    message = reply["choices"][0]["message"]
    if item.tools:
        calls = [c["function"] for c in message.get("tool_calls") or []]
        good = [{"name": c["name"], "arguments": json.loads(c["arguments"])} for c in calls] == [json.loads(item.value)]
        return good, json.dumps(message), reply.get("timings", {})
    return message["content"] == item.answer, message["content"], reply.get("timings", {})


def run(server: Server, style: str, length: int, count: int) -> dict:
    right = drafted = accepted = 0
    began = time.monotonic()
    for seed in range(FIRST_SEED, FIRST_SEED + count):
        depth = data.Rng("depth", style, length, seed).unit()
        if style == "tool_chat":
            item = data.make_tool_chat(length, depth, seed)
        else:
            item = data.make(style.removesuffix("_plain"), length, depth, seed)
        good, reply, timings = ask(server, style, item)
        right += good
        drafted += timings.get("draft_n", 0)
        accepted += timings.get("draft_n_accepted", 0)
        if not good:
            print(f"  wrong ({style} {length} {seed}): {reply!r} instead of {item.answer!r}", flush=True)
    row = {"style": style, "length": length, "count": count, "right": right, "seconds": round(time.monotonic() - began, 1)}
    return row | ({"drafted": drafted, "accepted": accepted} if drafted else {})


def free_text(server: Server, count: int = 4) -> dict:
    """Drafted and accepted while the model writes on freely, where much cannot be foreseen."""
    drafted = accepted = 0
    for seed in range(count):
        text = data.haystack(data.Rng("free", seed), 800, [], data.Bank(0)) + " "
        body = {"prompt": text, "n_predict": 200, "temperature": 1.0, "seed": seed, "cache_prompt": False}
        timings = server.post("/completion", body).get("timings", {})
        drafted += timings.get("draft_n", 0)
        accepted += timings.get("draft_n_accepted", 0)
    return {"style": "free text", "drafted": drafted, "accepted": accepted}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("family", choices=("qwen3", "gemma4", "qwen35"))
    parser.add_argument("model", type=Path)
    parser.add_argument("--engine", required=True, help="command that starts a server, without its arguments")
    parser.add_argument("--lengths", default="1024:50,4096:30", help="length:count, ...")
    parser.add_argument("--styles", default=",".join(STYLES))
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--mtp", action="store_true", help="speculate with the model's own NextN block")
    parser.add_argument("--log", type=Path, default=Path("engine_check.log"))
    parser.add_argument("--arguments", default="", help="more arguments for the server")
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the server is stopped as well
    pairs = [tuple(map(int, part.split(":"))) for part in args.lengths.split(",")]
    context = max(length for length, _ in pairs) + 512
    command = [*shlex.split(args.engine), "-m", str(args.model), "-c", str(context), "-np", "1", "-t", str(args.threads)]
    command += ["--spec-type", "draft-mtp"] if args.mtp else []
    with Server(command + shlex.split(args.arguments), args.log) as server:
        check_ids(server, args.family == "gemma4")
        print(f"{args.family}: ids and chat rendering equal those of training", flush=True)
        for length, count in pairs:
            for style in args.styles.split(","):
                print(args.family, json.dumps(run(server, style, length, count)), flush=True)
        if args.mtp:
            print(args.family, json.dumps(free_text(server)), flush=True)


if __name__ == "__main__":
    main()
