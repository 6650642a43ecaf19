"""Checkpoint to GGUF: writes a Hugging Face folder and runs the base's own converter over it.

    python convert.py qwen3 qwen3.safetensors --llama-cpp TREE --out retrieval-qwen3.gguf --type q8_0

TREE is a llama.cpp source tree of the base (its convert_hf_to_gguf.py, conversion/ and gguf-py/ are used). The one
thing told to the converter is the name of the pre-tokenizer: it knows those by the hash of what they make of a test
string, and a byte vocabulary is in no such list. How text is split cannot matter to a vocabulary of bytes.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

import tokenizer
from configs import CONFIGS
from models import LanguageModel, export_state


def write_folder(family: str, checkpoint: Path, folder: Path) -> None:
    """A Hugging Face model folder: config, weights in float32, tokenizer."""
    model = LanguageModel(CONFIGS[family])
    state = {name: value.float() for name, value in load_file(checkpoint).items()}
    model.load_state_dict(state)
    save_file(
        {k: v.contiguous() for k, v in export_state(model, state).items()}, folder / "model.safetensors",
        metadata={"format": "pt"},
    )
    (folder / "config.json").write_text(json.dumps(CONFIGS[family], indent=1))
    tokenizer.write(folder, "gemma4" if family == "gemma4" else "qwen2")


def run_converter(tree: Path, folder: Path, out: Path, kind: str, name: str) -> None:
    sys.path[:0] = [str(tree), str(tree / "gguf-py")]
    import conversion.base as base

    base.TextModel.get_vocab_base_pre = lambda self, tokenizer: "qwen2"
    import convert_hf_to_gguf

    sys.argv = ["convert_hf_to_gguf.py", str(folder), "--outfile", str(out), "--outtype", kind, "--model-name", name]
    convert_hf_to_gguf.main()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("family", choices=CONFIGS)
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("--llama-cpp", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--type", default="q8_0", choices=("f32", "f16", "q8_0"))
    parser.add_argument("--folder", type=Path, help="keep the Hugging Face folder here")
    args = parser.parse_args()
    torch.set_num_threads(2)
    with tempfile.TemporaryDirectory() as temporary:
        folder = args.folder or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        write_folder(args.family, args.checkpoint, folder)
        partial = args.out.with_suffix(".partial")
        run_converter(args.llama_cpp.resolve(), folder, partial, args.type, f"retrieval-{args.family}")
        with partial.open("rb") as handle:
            os.fsync(handle.fileno())
        os.replace(partial, args.out)


if __name__ == "__main__":
    main()
