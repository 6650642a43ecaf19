"""The one vocabulary of the zoo: a token is a byte, its number the byte's value; then the special tokens, then fillers.

It is written as a byte-level BPE vocabulary (GPT-2's scheme) without merges, so that every text is as many tokens as it has bytes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ...errors import DataError

BOS = "<bos>"
END_OF_TEXT = "<|endoftext|>"
TURN = "<|im_start|>"
END_OF_TURN = "<|im_end|>"
PADDING = "<pad>"

CONTROL = (PADDING, BOS, END_OF_TEXT, TURN, END_OF_TURN, "<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>")
"""Tokens that are never text."""

MARKUP = ("<think>", "</think>", "<tool_call>", "</tool_call>")
"""Tokens that are shown."""

RESERVED = 4
"""Unused tokens that round the vocabulary to a multiple of 16."""

SIZE = 256 + len(CONTROL) + len(MARKUP) + RESERVED
"""Tokens without fillers: 272."""

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message.role + '\\n' + (message.content or '') + '<|im_end|>\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
"""ChatML; the engine puts the BOS token in front by itself."""

MERGE = "\u0100 \u0100"
"""A merge list may not be empty in the format; this one joins two NUL bytes, which no text holds."""


@dataclass(frozen=True)
class Token:
    """A token's text as the file holds it, and the name of its type in gguf-py's ``TokenType``."""

    text: str
    type: str


def tokens(size: int) -> tuple[Token, ...]:
    """The vocabulary, filled up to ``size`` with tokens nobody uses. Raises DataError when ``size`` is too small."""
    if size < SIZE:
        raise DataError(f"A vocabulary of {size} tokens is too small: bytes and special tokens need {SIZE}.")
    found = [Token(byte_text(value), "NORMAL") for value in range(256)]
    found += [Token(text, "CONTROL") for text in CONTROL]
    found += [Token(text, "USER_DEFINED") for text in MARKUP]
    found += [Token(f"<|reserved_{number}|>", "UNUSED") for number in range(size - len(found))]
    return tuple(found)


def token_id(text: str) -> int:
    """The number of a special token."""
    return 256 + (*CONTROL, *MARKUP).index(text)


def byte_text(value: int) -> str:
    """How byte-level BPE writes a byte: printable Latin-1 characters stand for themselves, the others move behind U+00FF in order."""
    hidden = [code for code in range(256) if not _visible(code)]
    return chr(value) if _visible(value) else chr(256 + hidden.index(value))


def _visible(code: int) -> bool:
    return 0x21 <= code <= 0x7E or 0xA1 <= code <= 0xAC or 0xAE <= code <= 0xFF


def write(writer: Any, gguf: Any, size: int) -> None:
    """Add the vocabulary to a ``GGUFWriter`` of the module ``gguf``."""
    listed = tokens(size)
    writer.add_tokenizer_model("gpt2")
    # Of the known splitters this one neither drops nor cleans white space.
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list([token.text for token in listed])
    writer.add_token_types([gguf.TokenType[token.type] for token in listed])
    writer.add_token_merges([MERGE])
    writer.add_bos_token_id(token_id(BOS))
    writer.add_eos_token_id(token_id(END_OF_TEXT))
    writer.add_eot_token_id(token_id(END_OF_TURN))
    writer.add_pad_token_id(token_id(PADDING))
    writer.add_add_bos_token(True)
    writer.add_chat_template(CHAT_TEMPLATE)
