"""Holds the modules here against independent computations: the chunked delta rule against one token after another, and
a written Hugging Face folder against transformers' model and tokenizer.

    python verify.py qwen35 FOLDER
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from safetensors.torch import load_file

import data
from configs import CONFIGS
from models import LanguageModel, gated_delta, gated_delta_stepwise
from tokenizer import encode


def check_delta() -> float:
    """Largest difference between the chunked rule and the step-by-step one (float64), gradients included."""
    torch.manual_seed(0)
    shape = (2, 256, 2, 32)
    unit = lambda t: t / t.norm(dim=-1, keepdim=True)
    tensors = [unit(torch.randn(shape, dtype=torch.float64)) for _ in range(2)]
    tensors += [torch.randn(shape, dtype=torch.float64)]
    tensors += [-torch.rand(shape[:3], dtype=torch.float64), torch.rand(shape[:3], dtype=torch.float64)]
    probe = torch.randn(shape, dtype=torch.float64)
    results = []
    for rule in (gated_delta, gated_delta_stepwise):
        inputs = [t.clone().requires_grad_() for t in tensors]
        out = rule(*inputs)
        (out * probe).sum().backward()
        results.append([out.detach(), *(t.grad for t in inputs)])
    return max(float((a - b).abs().max()) for a, b in zip(*results))


def check_folder(family: str, folder: Path) -> tuple[float, float]:
    """Largest logit difference to transformers over 1536 tokens in float32, and the share of equal first choices."""
    from transformers import AutoModelForCausalLM

    reference = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    state = {k: v.float() for k, v in load_file(folder / "model.safetensors").items()}
    own = LanguageModel(CONFIGS[family])
    if CONFIGS[family]["model_type"] == "qwen3_5_text":  # undo export_state
        state = {
            k: v + 1.0 if k.endswith("norm.weight") and not k.endswith("linear_attn.norm.weight") else v
            for k, v in state.items()
        }
    own.load_state_dict(state)
    item = data.make("multikey", 2048, 0.4, 5)
    ids = torch.tensor([encode(data.render_chat(item))[:1536]])
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    with torch.inference_mode():
        a, b = own.to(device)(ids.to(device)), reference.to(device)(ids.to(device)).logits.float()
    return float((a - b).abs().max()), float((a.argmax(-1) == b.argmax(-1)).float().mean())


def check_tokenizer(folder: Path) -> bool:
    from transformers import AutoTokenizer

    text = f"{data.IM_START}user\nCafé  x = 1\n\n\n\t\u20ac \u4f60 don't 12345{data.IM_END}\n{data.CALL_OPEN}"
    return AutoTokenizer.from_pretrained(folder).encode(text, add_special_tokens=False) == encode(text)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("family", choices=CONFIGS)
    parser.add_argument("folder", type=Path)
    args = parser.parse_args()
    delta = check_delta()
    same_ids = check_tokenizer(args.folder)
    logits, choices = check_folder(args.family, args.folder)
    print(f"{args.family}: delta rule differs by at most {delta:.1e}, ids {'equal' if same_ids else 'DIFFER'}")
    print(f"{args.family}: logits differ from transformers' by at most {logits:.1e}, {choices:.2%} of first choices are equal")
    if delta > 1e-9 or not same_ids or logits > 1e-2:
        raise SystemExit(f"{args.family}: does not match; see the lines above")


if __name__ == "__main__":
    main()
