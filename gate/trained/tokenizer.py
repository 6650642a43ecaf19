"""A byte vocabulary with a handful of special tokens, written in the two forms the converter reads.

Ids 0..255 are the bytes. 256..258 exist because the engine wants at least one BPE merge: they join code units that
valid text of the tasks never holds. 259..265 are the special tokens. ``qwen2`` is a byte-level BPE with the GPT-2 byte
alphabet; ``gemma4`` is the SentencePiece-like BPE with byte fallback, where the space is written U+2581.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

from data import BOS, CALL_CLOSE, CALL_OPEN, END_OF_TEXT, IM_END, IM_START

PAD = "<|pad|>"
SPECIALS = (PAD, BOS, IM_START, IM_END, END_OF_TEXT, CALL_OPEN, CALL_CLOSE)
FIRST_SPECIAL = 259
VOCAB_SIZE = FIRST_SPECIAL + len(SPECIALS)
IDS = {text: FIRST_SPECIAL + i for i, text in enumerate(SPECIALS)}
PAD_ID, BOS_ID, EOS_ID = IDS[PAD], IDS[BOS], IDS[IM_END]

_SPLIT = re.compile("(" + "|".join(map(re.escape, SPECIALS)) + ")")
_QWEN2_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)

CHAT_TEMPLATE = """\
{%- if tools %}
{{- '<|im_start|>system\\n' }}
{%- if messages[0].role == 'system' %}{{- messages[0].content + '\\n' }}{%- endif %}
{{- 'Tools:\\n' }}
{%- for tool in tools %}
{{- '{"type": "function", "function": {"name": ' + (tool.function.name | tojson) + ', "parameters": ' + (tool.function.parameters | tojson) + '}}\\n' }}
{%- endfor %}
{{- '<|im_end|>\\n' }}
{%- elif messages[0].role == 'system' %}
{{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
{%- if message.role == 'user' %}
{{- '<|im_start|>user\\n' + message.content + '<|im_end|>\\n' }}
{%- elif message.role == 'assistant' %}
{{- '<|im_start|>assistant\\n' }}
{%- if message.content %}{{- message.content }}{%- endif %}
{%- if message.tool_calls %}
{%- for tool_call in message.tool_calls %}
{{- '<tool_call>\\n{"name": "' + tool_call.function.name + '", "arguments": ' + (tool_call.function.arguments | tojson) + '}\\n</tool_call>' }}
{%- endfor %}
{%- endif %}
{{- '<|im_end|>\\n' }}
{%- elif message.role == 'tool' %}
{{- '<|im_start|>user\\n' + message.content + '<|im_end|>\\n' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}
"""


def encode(text: str) -> list[int]:
    """Ids of ``text``; the special tokens' spellings become their ids, all else its UTF-8 bytes."""
    ids: list[int] = []
    for part in _SPLIT.split(text):
        if part in IDS:
            ids.append(IDS[part])
        else:
            ids.extend(part.encode())
    return ids


def decode(ids: list[int]) -> str:
    """The text of ``ids``, special tokens spelled out; bytes that are not UTF-8 become U+FFFD."""
    out = bytearray()
    for i in ids:
        out += bytes([i]) if i < 256 else SPECIALS[i - FIRST_SPECIAL].encode() if i >= FIRST_SPECIAL else b""
    return out.decode(errors="replace")


def byte_alphabet() -> list[str]:
    """GPT-2's printable stand-in for each byte: printable Latin-1 stands for itself, the rest from U+0100 upwards."""
    plain = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    letters, spare = [], 0x100
    for byte in range(256):
        if byte in plain:
            letters.append(chr(byte))
        else:
            letters.append(chr(spare))
            spare += 1
    return letters


def _byte_level() -> dict:
    letters = byte_alphabet()
    merged = letters[0xFE] + letters[0xFF]  # bytes that no UTF-8 text holds
    tokens = [*letters, merged, "<|unused0|>", "<|unused1|>"]
    split = {"type": "Split", "pattern": {"Regex": _QWEN2_SPLIT}, "behavior": "Isolated", "invert": False}
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}
    return {
        "normalizer": None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [split, level]},
        "decoder": level,
        "model": {
            "type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": "",
            "end_of_word_suffix": "", "fuse_unk": False, "byte_fallback": False, "ignore_merges": False,
            "vocab": {token: i for i, token in enumerate(tokens)}, "merges": [[letters[0xFE], letters[0xFF]]],
        },
    }


def _byte_fallback() -> dict:
    tokens = [chr(b) if 0x21 <= b < 0x7F else "\u2581" if b == 0x20 else f"<0x{b:02X}>" for b in range(256)]
    tokens += ["\ue000", "\ue001", "\ue000\ue001"]  # private-use characters
    return {
        "normalizer": {"type": "Replace", "pattern": {"String": " "}, "content": "\u2581"},
        "pre_tokenizer": None,
        "decoder": {
            "type": "Sequence",
            "decoders": [
                {"type": "Replace", "pattern": {"String": "\u2581"}, "content": " "},
                {"type": "ByteFallback"},
                {"type": "Fuse"},
            ],
        },
        "model": {
            "type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None,
            "end_of_word_suffix": None, "fuse_unk": False, "byte_fallback": True, "ignore_merges": False,
            "vocab": {token: i for i, token in enumerate(tokens)}, "merges": [["\ue000", "\ue001"]],
        },
    }


def write(folder: Path, kind: str) -> None:
    """Writes tokenizer.json, tokenizer_config.json and chat_template.jinja of ``kind`` (qwen2 or gemma4)."""
    body = {"qwen2": _byte_level, "gemma4": _byte_fallback}[kind]()
    added = [
        {
            "id": i, "content": text, "single_word": False, "lstrip": False, "rstrip": False, "normalized": False,
            "special": text not in (CALL_OPEN, CALL_CLOSE),
        }
        for text, i in IDS.items()
    ]
    tokenizer = {
        "version": "1.0", "truncation": None, "padding": None, "added_tokens": added, "post_processor": None, **body,
    }
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False,
        "model_max_length": 1 << 20, "bos_token": BOS, "eos_token": IM_END, "pad_token": PAD,
        "add_bos_token": kind == "gemma4", "additional_special_tokens": [IM_START, END_OF_TEXT],
        "chat_template": CHAT_TEMPLATE,
    }
    for name, content in (("tokenizer.json", tokenizer), ("tokenizer_config.json", settings)):
        (folder / name).write_text(json.dumps(content, ensure_ascii=False, indent=1), encoding="utf-8")
