"""Trains one family from scratch or onward from a checkpoint.

    python train.py qwen3 --plan 256:800,1024:800,4096:400,17408:300 --save qwen3.safetensors
    python train.py qwen3 --resume qwen3.safetensors --plan 4096:200,17408:400 --decay 0.8 --save qwen3.safetensors

A plan is a list of sequence length : steps. Checkpoints are float16 (small enough to move about); the optimiser starts
anew with each run.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

import data
from configs import CONFIGS
from models import LanguageModel, initialise
from optimiser import Optimiser
from tokenizer import PAD_ID, encode

TEXT_WEIGHT = 0.2
DRAFT_WEIGHTS = (0.3, 0.15, 0.1)
TEXT, ANSWER = 1, 2


class Stream(IterableDataset):
    """Endless training sequences of one length: ids [length] and kind [length] (0 padding, 1 text, 2 answer)."""

    def __init__(self, seed: str, length: int, bank: data.Bank, bos: bool, tools_share: float) -> None:
        self.seed, self.length, self.bank, self.bos, self.tools_share = seed, length, bank, bos, tools_share

    def __iter__(self) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        worker = get_worker_info()
        rng = data.Rng("train", self.seed, worker.id if worker else 0)
        while True:
            ids: list[int] = []
            kinds: list[np.ndarray] = []
            for text, answer in data.sequence(rng, self.length, self.bank, self.bos, self.tools_share):
                part = encode(text)
                ids += part
                kinds.append(np.full(len(part), ANSWER if answer else TEXT, np.int64))
            missing = max(0, self.length - len(ids))
            kind = np.concatenate((*kinds, np.zeros(missing, np.int64)))[: self.length]
            yield np.array(ids + [PAD_ID] * missing, np.int64)[: self.length], kind


def losses(logits: Tensor, ids: Tensor, kind: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Mean cross entropy of answer tokens and of other text, and the share of answer tokens predicted right."""
    target, kind = ids[:, 1:].flatten(), kind[:, 1:].flatten()
    logits = logits[:, :-1].flatten(0, 1)
    each = F.cross_entropy(logits, target, reduction="none")
    answer, text = (kind == ANSWER).float(), (kind == TEXT).float()
    right = ((logits.argmax(-1) == target).float() * answer).sum() / answer.sum().clamp(min=1)
    return (each * answer).sum() / answer.sum().clamp(min=1), (each * text).sum() / text.sum().clamp(min=1), right


def objective(model: LanguageModel, ids: Tensor, kind: Tensor, drafts: int) -> tuple[Tensor, list[Tensor]]:
    """The loss to descend and figures to print: answer, text, share right, then share right of each draft."""
    hidden = model.hidden(ids)
    answer, text, right = losses(model.head(hidden), ids, kind)
    loss, figures = answer + TEXT_WEIGHT * text, [answer.detach(), text.detach(), right]
    if hasattr(model, "mtp"):
        state = hidden
        for weight in DRAFT_WEIGHTS[:drafts]:
            state = model.draft(state, ids)
            draft_answer, draft_text, right = losses(model.head(state), ids, kind)
            loss = loss + weight * (draft_answer + TEXT_WEIGHT * draft_text)
            figures.append(right)
    return loss, figures


def parse_plan(text: str) -> list[tuple[int, int]]:
    return [(int(length), int(steps)) for length, steps in (part.split(":") for part in text.split(","))]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("family", choices=CONFIGS)
    parser.add_argument("--plan", type=parse_plan, required=True)
    parser.add_argument("--save", type=Path, required=True)
    parser.add_argument("--resume", type=Path)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--tokens", type=int, default=65536, help="tokens of one step")
    parser.add_argument("--lr", type=float, default=0.02, help="of the matrices; the rest has a sixth of it")
    parser.add_argument("--decay", type=float, default=0.0, help="last share of the steps, over which the rates fall")
    parser.add_argument("--drafts", type=int, default=2, help="chained drafts that the NextN block is trained for")
    parser.add_argument("--tools", type=float, default=0.12, help="share of documents that are chats with a tool")
    parser.add_argument("--seconds", type=float, default=1e9, help="stop and save after this long")
    parser.add_argument("--workers", type=int, default=4)
    args = parser.parse_args()

    began = time.monotonic()
    torch.set_float32_matmul_precision("high")
    device = torch.device("cuda")
    model = LanguageModel(CONFIGS[args.family])
    initialise(model, args.seed)
    if args.resume:
        model.load_state_dict({k: v.float() for k, v in load_file(args.resume).items()})
    model.to(device)
    optimiser = Optimiser(model, args.lr, args.lr / 6)
    model.bfloat16()
    # bfloat16() replaces the weights' storage; the optimiser's lists hold the same parameter objects
    print(f"{args.family}: {sum(p.numel() for p in model.parameters()):,} parameters", flush=True)
    bank = data.Bank(("train", args.seed), 20000)
    total = sum(steps for _, steps in args.plan)
    done = 0
    for stage, (length, steps) in enumerate(args.plan):
        seed = f"{args.seed}/{os.path.basename(args.resume) if args.resume else 'new'}/{stage}/{length}"
        stream = Stream(seed, length, bank, args.family == "gemma4", args.tools)
        loader = iter(DataLoader(stream, max(1, args.tokens // length), num_workers=args.workers, prefetch_factor=4, pin_memory=True))
        mark, mark_step = time.monotonic(), 0
        for step in range(1, steps + 1):
            ids, kind = (t.to(device, non_blocking=True) for t in next(loader))
            loss, figures = objective(model, ids, kind, args.drafts)
            loss.backward()
            scale = min(1.0, (done + 1) / 60)
            if args.decay and done > total * (1 - args.decay):
                scale *= max(0.03, (total - done) / (total * args.decay))
            optimiser.step(scale)
            done += 1
            late = time.monotonic() - began > args.seconds
            if step % 50 == 0 or step == steps or late:
                values = " ".join(f"{v:.3f}" for v in torch.stack(figures).tolist())
                now = time.monotonic()
                rate = (step - mark_step) * ids.numel() / (now - mark)
                print(
                    f"{args.family} {now - began:6.1f}s L={length} step {step}/{steps} answer/text/right/drafts {values}"
                    f" {rate / 1e6:.2f} Mtok/s", flush=True,
                )
                mark, mark_step = now, step
            if late:
                break
        del loader
        if time.monotonic() - began > args.seconds:
            break
    partial = args.save.with_suffix(".partial")
    save_file({k: v.half().contiguous() for k, v in optimiser.state(model).items()}, partial)
    os.replace(partial, args.save)
    peak = torch.cuda.max_memory_allocated() / 2**30
    print(f"{args.family}: saved after {done} steps, {time.monotonic() - began:.0f} s, peak {peak:.1f} GiB", flush=True)


if __name__ == "__main__":
    main()
