"""Exact-match accuracy on held-out examples and, for a model with a NextN block, how many drafts would be accepted.

    python evaluate.py qwen3 qwen3.safetensors --lengths 1024,4096,16384 --count 400 --json qwen3.json

Answers are judged under greedy decoding: an answer is right when the model's first choice is right at every one of
its tokens, the end marker included, which is the same as generating it. Seeds start at one million; training never
uses ``data.make``.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import torch
from safetensors.torch import load_file

import data
from configs import CONFIGS
from models import LanguageModel
from tokenizer import PAD_ID, encode

FIRST_SEED = 1_000_000
STYLES = (*data.TASKS, "tool_chat", "needle_plain")


def example(job: tuple[str, int, int, bool]) -> tuple[list[int], list[int], float]:
    """Prompt and answer ids of one held-out example and its depth, which is uniform and drawn from its seed."""
    style, length, seed, bos = job
    depth = data.Rng("depth", style, length, seed).unit()
    if style == "tool_chat":
        item = data.make_tool_chat(length, depth, seed)
    else:
        item = data.make(style.removesuffix("_plain"), length, depth, seed)
    text = data.render_plain(item) if style.endswith("_plain") else data.render_chat(item)
    return encode((data.BOS if bos else "") + text), encode(item.answer + data.IM_END), depth


def batches(examples: list, tokens: int) -> Iterator[list]:
    size = max(1, tokens // max(len(p) + len(a) for p, a, _ in examples))
    for start in range(0, len(examples), size):
        yield examples[start : start + size]


def round_trip_q8_0(weight: torch.Tensor) -> torch.Tensor:
    """What Q8_0 keeps of a matrix: blocks of 32 along a row, one float16 scale, whole numbers up to 127."""
    blocks = weight.float().view(-1, 32)
    scale = blocks.abs().amax(dim=-1, keepdim=True) / 127
    whole = torch.where(scale > 0, (blocks / scale).round(), 0.0)
    return (whole * scale.half().float()).view_as(weight)


def accepted(right: list[list[bool]], start: int, end: int, most: int) -> tuple[int, int]:
    """(drafted, accepted) of generating tokens start..end - 1, where ``right[c][j]``: draft c + 1 made at j fits j + 1."""
    drafted = kept = 0
    at = start  # the newest token; the target chose it itself
    while at < end - 1:
        room = min(most, end - 1 - at)
        good = 0
        while good < room and right[good][at + good]:
            good += 1
        drafted, kept, at = drafted + room, kept + good, at + good + 1
    return drafted, kept


@torch.inference_mode()
def judge(model: LanguageModel, examples: list, device: torch.device, tokens: int) -> dict[str, float | list[float]]:
    """Share of exact answers, whole and by quarter of depth; with a NextN block also accepted / drafted for chains of
    1 and of 3 drafts."""
    exact: list[tuple[float, bool]] = []
    counts = {1: [0, 0], 3: [0, 0]}
    for group in batches(examples, tokens):
        longest = max(len(p) + len(a) for p, a, _ in group)
        longest = -(-longest // 512) * 512
        ids = torch.full((len(group), longest), PAD_ID)
        for row, (prompt, answer, depth) in enumerate(group):
            ids[row, : len(prompt) + len(answer)] = torch.tensor(prompt + answer)
        ids = ids.to(device)
        hidden = model.hidden(ids)
        states = [hidden]
        if hasattr(model, "mtp"):
            for _ in range(3):
                states.append(model.draft(states[-1], ids))
        fits = [(model.head(s).argmax(-1)[:, :-1] == ids[:, 1:]).cpu() for s in states]
        for row, (prompt, answer, depth) in enumerate(group):
            start, end = len(prompt), len(prompt) + len(answer)
            good = bool(fits[0][row, start - 1 : end - 1].all())
            exact.append((depth, good))
            if good and len(fits) > 1:
                chain = [f[row].tolist() for f in fits[1:]]
                for most, count in counts.items():
                    drafted, kept = accepted(chain, start, end, most)
                    count[0] += drafted
                    count[1] += kept
    result: dict[str, float | list[float]] = {"exact": sum(good for _, good in exact) / len(exact)}
    quarters = [[good for depth, good in exact if q <= 4 * depth < q + 1] for q in range(4)]
    result["by_depth"] = [round(sum(quarter) / max(1, len(quarter)), 4) for quarter in quarters]
    if hasattr(model, "mtp"):
        result |= {f"accepted_{most}": kept / max(1, drafted) for most, (drafted, kept) in counts.items()}
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("family", choices=CONFIGS)
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("--lengths", default="1024,4096")
    parser.add_argument("--styles", default=",".join(STYLES))
    parser.add_argument("--count", type=int, default=400)
    parser.add_argument("--tokens", type=int, default=131072)
    parser.add_argument("--q8-0", action="store_true", help="round the matrices as the Q8_0 file does")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.set_float32_matmul_precision("high")
    model = LanguageModel(CONFIGS[args.family])
    state = {k: v.float() for k, v in load_file(args.checkpoint).items()}
    if args.q8_0:
        state = {k: round_trip_q8_0(v) if v.ndim == 2 else v for k, v in state.items()}
    model.load_state_dict(state)
    model.to(device).bfloat16()
    table = []
    with ProcessPoolExecutor(5) as pool:
        for length in map(int, args.lengths.split(",")):
            for style in args.styles.split(","):
                jobs = [(style, length, FIRST_SEED + i, args.family == "gemma4") for i in range(args.count)]
                examples = list(pool.map(example, jobs, chunksize=20))
                row = {"style": style, "length": length, "count": args.count, **judge(model, examples, device, args.tokens)}
                table.append(row)
                print(args.family, " ".join(f"{k}={v:.4g}" if isinstance(v, float) else f"{k}={v}" for k, v in row.items()), flush=True)
    if args.json:
        args.json.write_text(json.dumps(table, indent=1))


if __name__ == "__main__":
    main()
