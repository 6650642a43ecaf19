#!/usr/bin/env python3
"""A small program in the place of an engine: ``serve`` and ``perplexity`` with the interface that the quality gate uses.

It finds needles by reading, so that its answers are right for a reason. Flags make it worse: ``--forget SHARE`` (of the questions, those
with a low checksum), ``--noise NATS`` (KLD it reports, and other distributions when above 0), ``--part PLACE`` (continuations differ there),
``--draft`` (reports drafts), ``--crash`` (ends at once). Every start is a line in ``starts`` beside it.
"""

import json
import re
import struct
import sys
import zlib
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

WORDS = sys.argv[1:]


def flag(name, default=None):
    return WORDS[WORDS.index(name) + 1] if name in WORDS else default


def find(prompt):
    question = prompt.rsplit("\n\n", 1)[1]
    key = re.search(r"(?:value of|belongs to) (\S+?)[?.]$", question)[1]
    found = re.search(rf"{re.escape(key)} (?:is|=|was set to) (\S+?)\.", prompt)
    return found[1] if found else "nothing"


def reply_to(path, body):
    if path == "/v1/chat/completions":
        prompt = body["messages"][0]["content"]
        answer = find(prompt)
        if zlib.crc32(prompt.encode()) % 1000 < 1000 * float(flag("--forget", 0)):
            answer = "forgotten"
        return {"choices": [{"message": {"role": "assistant", "content": answer}}], "usage": {"prompt_tokens": len(prompt)}}
    if path == "/apply-template":
        return {"prompt": f"<user>{body['messages'][0]['content']}<assistant>"}
    count = body["n_predict"]
    tokens = [zlib.crc32(f"{body['prompt']}{n}".encode()) % 200 for n in range(count)]
    if (place := flag("--part")) is not None and int(place) < count:
        tokens[int(place)] += 1000
    answer = {"tokens": tokens, "timings": {"predicted_n": count, "predicted_ms": 10.0 * count}}
    if "--draft" in WORDS:
        answer["timings"] |= {"draft_n": 2 * count, "draft_n_accepted": count, "predicted_ms": 5.0 * count}
    if body.get("n_probs"):
        answer["completion_probabilities"] = [{"top_logprobs": [{"id": t, "logprob": -0.5}, {"id": t + 1000, "logprob": -0.75}, {"id": 7777, "logprob": -9.0}]} for t in tokens]
    return answer


class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        self.send({"status": "ok"})

    def do_POST(self):
        self.send(reply_to(self.path, json.loads(self.rfile.read(int(self.headers["Content-Length"])))))

    def send(self, value):
        data = json.dumps(value).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_):
        pass


def rows(context):
    return context - 1 - context // 2


def perplexity():
    context, chunks, noise = int(flag("--ctx-size")), int(flag("--chunks")), float(flag("--noise", 0))
    base = Path(flag("--kl-divergence-base"))
    if "--kl-divergence" in WORDS:
        assert base.read_bytes().startswith(b"_logits_")
        for chunk in range(chunks):
            print(f"{chunk + 1:4d}       8.7921 ±    1.0000       0.00001 ±    0.00001       {noise:.5f} ±    0.00001     0.100 ±  0.010 %    99.000 ±  0.100 %")
        print(f"Mean PPL(Q)                   : {8.79:10.6f} ± {1:10.6f}\nMean PPL(base)                : {8.79:10.6f} ± {1:10.6f}")
        print(f"Mean    KLD: {noise:10.6f} ± {noise / 50:10.6f}\nMaximum KLD: {20 * noise:10.6f}\n99.9%   KLD: {10 * noise:10.6f}\n99.0%   KLD: {5 * noise:10.6f}")
        print(f"Same top p: {100 - 100 * noise:6.3f} ± {0.1:5.3f} %")
        return
    text = Path(flag("--file")).read_bytes()
    vocabulary = 15
    with base.open("wb") as out:
        out.write(b"_logits_" + struct.pack("<Iii", context, vocabulary, chunks))
        out.write(struct.pack(f"<{context * chunks}i", *text[: context * chunks]))
        for number in range(chunks * rows(context)):
            out.write(struct.pack("<ff16H", 0.001, -9.0 - (noise if number >= rows(context) + 3 else 0), *(zlib.crc32(bytes([number % 256, n])) % 65536 for n in range(16))))
    print("Final estimate: PPL = 8.7900 +/- 1.00000")


if __name__ == "__main__":
    with Path(__file__).with_name("starts").open("a") as log:
        log.write(" ".join(WORDS) + "\n")
    if "--crash" in WORDS:
        sys.exit("the stand-in was told to crash")
    if WORDS[0] == "serve":
        ThreadingHTTPServer(("127.0.0.1", int(flag("--port"))), Handler).serve_forever()
    else:
        perplexity()
