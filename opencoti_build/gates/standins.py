"""Small models that stand in for the ones upstream's tests download: the same architectures and file names, seeded random weights.

What each looks like is data (``standins`` of gate/upstream.yaml); this module turns it into GGUF files with the base's own gguf-py.
A weight is a function of its tensor's name, its index and nothing else: the bits come from Philox in counter mode, and the mapping from
an integer to a float is written out here, so that another version of numpy or another machine gives the same bytes.

The models speak text without knowing any: token embeddings and blocks are random, but nothing ever writes into the first channel of the
residual stream, where every embedding holds a one. The output rows of all tokens that must not be sampled (end of text, control and raw
bytes) are strongly negative there, so a reply has the length that was asked for and is printable.
"""

from __future__ import annotations

import hashlib
import math
import struct
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

from ..cache import digest_of
from ..errors import DataError
from ..schema import Node
from ..sources import Upstream, Workshop

SCHEMA = 2
"""Raise it when a file's bytes change without its data changing."""

FORBIDDEN = -40.0
"""Weight of the first channel in the output row of a token that must not be sampled; the channel's value is about a third."""


class Kind(Enum):
    """What a stand-in is."""

    LLAMA = "llama"
    GEMMA3 = "gemma3"
    BERT = "bert"
    PROJECTOR = "projector"
    LORA = "lora"
    IMAGE = "image"
    TEXT = "text"


@dataclass(frozen=True)
class StandIn:
    """One model (or file). The numbers are those of the architecture; unused ones are 0.

    ``context`` in tokens, ``sharpness`` is the standard deviation of the logits, ``parts`` the number of files it is split into.
    """

    name: str
    kind: Kind
    embedding: int = 0
    layers: int = 0
    heads: int = 0
    kv_heads: int = 0
    feed_forward: int = 0
    context: int = 0
    experts: int = 0
    window: int = 0
    sharpness: float = 3.0
    infill: bool = False
    ranks: bool = False
    half: bool = False
    parts: int = 1
    image_side: int = 0
    patch: int = 0
    text: str = ""

    @classmethod
    def read(cls, name: str, node: Node) -> StandIn:
        """From its entry in the YAML file. Raises DataError."""
        numbers = ("embedding", "layers", "heads", "kv_heads", "feed_forward", "context", "experts", "window", "parts", "image_side", "patch")
        made = cls(
            name,
            Kind(node.get("kind").one_of(kind.value for kind in Kind)),
            **{key: node.optional(key, Node.number, 1 if key == "parts" else 0) for key in numbers},
            sharpness=float(node.optional("sharpness", Node.number, 3)),
            **{key: node.optional(key, Node.flag, False) for key in ("infill", "ranks", "half")},
            text=node.optional("text", Node.prose, ""),
        )
        node.done()
        if made.kind in (Kind.LLAMA, Kind.GEMMA3, Kind.BERT) and (not made.heads or made.embedding % made.heads or not made.kv_heads or made.heads % made.kv_heads):
            raise node.fail("heads has to divide embedding, and kv_heads has to divide heads")
        return made


@dataclass(frozen=True)
class Pieces:
    """The vocabulary of the text models: SentencePiece-like, 3 control tokens, 256 bytes, then text, then infill tokens."""

    text: tuple[str, ...]

    SPACE = "\N{LOWER ONE EIGHTH BLOCK}"
    """What stands for a space in a piece."""

    INFILL = ("<PRE>", "<SUF>", "<MID>")
    IMAGE = ("<start_of_image>", "<end_of_image>")

    def tokens(self, extra: Sequence[str]) -> tuple[list[str], list[float], list[int]]:
        """Texts, scores and types (gguf-py's TokenType) in the order of their ids."""
        singles = [self.SPACE, *(chr(code) for code in range(33, 127)), "\n"]
        merged = [piece.replace("_", self.SPACE) for piece in self.text]
        if repeated := {piece for piece in merged if piece in singles or merged.count(piece) > 1}:
            raise DataError(f"gate/upstream.yaml: pieces: {', '.join(sorted(repeated))} are there twice or are single characters.")
        words = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *merged, *singles, *extra]
        # A higher score merges first: the longer pieces, as they were listed.
        scores = [0.0] * 259 + [-float(index) for index in range(len(merged))] + [-float(len(merged) + index) for index in range(len(singles))] + [0.0] * len(extra)
        types = [2, 3, 3] + [6] * 256 + [1] * (len(merged) + len(singles)) + [3] * len(extra)
        return words, scores, types

    @staticmethod
    def forbidden(types: Sequence[int]) -> list[int]:
        """Ids that a model must never sample: all but ordinary text."""
        return [index for index, kind in enumerate(types) if kind != 1]


def ensure(workshop: Workshop, upstream: Upstream, models: Mapping[str, StandIn], pieces: Pieces) -> dict[str, tuple[Path, ...]]:
    """The files of every stand-in, in order of their parts, from the cache or written now.

    Raises ToolchainError when numpy is not installed, DataError when the data does not fit together.
    """
    found: dict[str, tuple[Path, ...]] = {}
    cache = workshop.cache
    # gguf-py writes the files, and the BERT stand-ins take their vocabulary from that tree.
    base = upstream.base.identified().tree_id
    with workshop.console.progress("Stand-in models", len(models)) as meter:
        for name, model in models.items():
            key = digest_of([SCHEMA, base, repr(model), list(pieces.text)])
            directory = cache.result("standin", key)
            if not directory.is_dir():
                source = upstream.pristine().path
                with cache.producing("standin", key) as scratch:
                    _write(model, scratch, _Writer(source, pieces))
            found[name] = tuple(sorted(path for path in directory.iterdir()))
            meter.advance()
    return found


@dataclass(frozen=True)
class _Writer:
    """What writing needs: the base's tree and the text pieces."""

    source: Path
    pieces: Pieces

    @property
    def gguf(self) -> Any:
        from .zoo import library  # needs numpy, which reading the data does not

        return library.load(self.source / "gguf-py")


def uniform(label: str, shape: Sequence[int], scale: float) -> Any:
    """Float32 numbers in [-scale, scale), a function of the label alone: 24 bits of Philox4x64 each."""
    import numpy

    key = int.from_bytes(hashlib.sha256(label.encode()).digest()[:16], "little")
    bits = numpy.random.Philox(key=key).random_raw(math.prod(shape)) >> numpy.uint64(40)
    return ((bits.astype(numpy.float64) / float(1 << 23) - 1.0) * scale).astype(numpy.float32).reshape(tuple(shape))


def _unit(label: str, rows: int, columns: int) -> Any:
    """A matrix that keeps the variance of what it is applied to (a uniform variable on [-a, a) has the variance a*a/3)."""
    return uniform(label, (rows, columns), math.sqrt(3.0 / columns))


def _write(model: StandIn, folder: Path, writer: _Writer) -> None:
    if model.kind is Kind.TEXT:
        (folder / model.name).write_text(model.text, "utf-8", newline="\n")
        return
    if model.kind is Kind.IMAGE:
        (folder / f"{model.name}.png").write_bytes(png(model.name, model.image_side))
        return
    keys, tensors = {
        Kind.LLAMA: _llama,
        Kind.GEMMA3: _gemma3,
        Kind.BERT: _bert,
        Kind.PROJECTOR: _projector,
        Kind.LORA: _lora,
    }[model.kind](model, writer)
    gguf = writer.gguf
    made = list(tensors)
    limit = -(-len(made) // model.parts) if model.parts > 1 else 0
    out = gguf.GGUFWriter(folder / f"{model.name}.gguf", keys.pop("general.architecture"), split_max_tensors=limit)
    for key, value in keys.items():
        _put(out, key, value, gguf)
    import numpy

    for name, values in made:
        # What is added to an activation has to have its type.
        matrix = values.ndim > 1 and "position" not in name and "token_types" not in name
        out.add_tensor(name, values.astype(numpy.float16) if model.half and matrix else values)
    out.write_header_to_file()
    out.write_kv_data_to_file()
    out.write_tensors_to_file()
    out.close()


def _put(out: Any, key: str, value: Any, gguf: Any) -> None:
    kinds = gguf.GGUFValueType
    if isinstance(value, bool):
        out.add_key_value(key, value, kinds.BOOL)
    elif isinstance(value, int):
        out.add_key_value(key, value, kinds.UINT32)
    elif isinstance(value, float):
        out.add_key_value(key, value, kinds.FLOAT32)
    elif isinstance(value, str):
        out.add_key_value(key, value, kinds.STRING)
    else:
        out.add_array(key, value)


_Made = tuple[dict[str, Any], Iterator[tuple[str, Any]]]


def _text_keys(model: StandIn, architecture: str, pieces: Pieces, extra: Sequence[str]) -> tuple[dict[str, Any], list[int]]:
    """The keys that the text architectures share, and the types of the vocabulary."""
    words, scores, types = pieces.tokens(extra)
    prefix = f"{architecture}."
    keys: dict[str, Any] = {
        "general.architecture": architecture,
        "general.name": model.name,
        prefix + "block_count": model.layers,
        prefix + "context_length": model.context,
        prefix + "embedding_length": model.embedding,
        prefix + "feed_forward_length": model.feed_forward,
        prefix + "attention.head_count": model.heads,
        prefix + "attention.head_count_kv": model.kv_heads,
        prefix + "attention.layer_norm_rms_epsilon": 1e-5,
        prefix + "vocab_size": len(words),
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": words,
        "tokenizer.ggml.scores": scores,
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
        "tokenizer.ggml.add_bos_token": True,
        "tokenizer.ggml.add_eos_token": False,
    }
    if model.infill:
        for role, word in zip(("fim_pre", "fim_suf", "fim_mid"), Pieces.INFILL, strict=True):
            keys[f"tokenizer.ggml.{role}_token_id"] = words.index(word)
    return keys, types


def _embeddings(model: StandIn, types: Sequence[int], scale: float) -> Iterator[tuple[str, Any]]:
    """Token embeddings with the constant first channel, output norm, and output rows that forbid what is no text."""
    size = len(types)
    embedding = uniform(f"{model.name}/token_embd", (size, model.embedding), math.sqrt(3.0) * scale)
    embedding[:, 0] = scale
    yield "token_embd.weight", embedding
    yield "output_norm.weight", uniform(f"{model.name}/norm", (model.embedding,), 0.0) + 1.0
    output = uniform(f"{model.name}/output", (size, model.embedding), model.sharpness * math.sqrt(3.0 / model.embedding))
    output[:, 0] = 0.0
    output[Pieces.forbidden(types), 0] = FORBIDDEN
    yield "output.weight", output


def _closed(matrix: Any) -> Any:
    """A matrix that writes into the residual stream: nothing into the first channel."""
    matrix[0, ...] = 0.0
    return matrix


def _attention(model: StandIn, block: str, head: int) -> Iterator[tuple[str, Any]]:
    width = model.embedding
    yield f"{block}.attn_q.weight", _unit(f"{model.name}/{block}/q", model.heads * head, width)
    yield f"{block}.attn_k.weight", _unit(f"{model.name}/{block}/k", model.kv_heads * head, width)
    yield f"{block}.attn_v.weight", _unit(f"{model.name}/{block}/v", model.kv_heads * head, width)
    yield f"{block}.attn_output.weight", _closed(_unit(f"{model.name}/{block}/o", width, model.heads * head))


def _llama(model: StandIn, writer: _Writer) -> _Made:
    keys, types = _text_keys(model, "llama", writer.pieces, Pieces.INFILL if model.infill else ())
    keys["llama.rope.dimension_count"] = model.embedding // model.heads
    if model.experts:
        keys |= {"llama.expert_count": model.experts, "llama.expert_used_count": 2}

    def tensors() -> Iterator[tuple[str, Any]]:
        import numpy

        width, inner, ones = model.embedding, model.feed_forward, numpy.ones(model.embedding, numpy.float32)
        yield from _embeddings(model, types, 1.0)
        for index in range(model.layers):
            block = f"blk.{index}"
            yield f"{block}.attn_norm.weight", ones
            yield from _attention(model, block, width // model.heads)
            yield f"{block}.ffn_norm.weight", ones
            if not model.experts:
                yield f"{block}.ffn_gate.weight", _unit(f"{model.name}/{block}/gate", inner, width)
                yield f"{block}.ffn_up.weight", _unit(f"{model.name}/{block}/up", inner, width)
                yield f"{block}.ffn_down.weight", _closed(_unit(f"{model.name}/{block}/down", width, inner))
                continue
            yield f"{block}.ffn_gate_inp.weight", _unit(f"{model.name}/{block}/router", model.experts, width)
            yield f"{block}.ffn_gate_exps.weight", numpy.stack([_unit(f"{model.name}/{block}/gate/{n}", inner, width) for n in range(model.experts)])
            yield f"{block}.ffn_up_exps.weight", numpy.stack([_unit(f"{model.name}/{block}/up/{n}", inner, width) for n in range(model.experts)])
            yield f"{block}.ffn_down_exps.weight", numpy.stack([_closed(_unit(f"{model.name}/{block}/down/{n}", width, inner)) for n in range(model.experts)])

    return keys, tensors()


def _gemma3(model: StandIn, writer: _Writer) -> _Made:
    keys, types = _text_keys(model, "gemma3", writer.pieces, Pieces.IMAGE)
    head = model.embedding // model.heads
    keys |= {"gemma3.attention.key_length": head, "gemma3.attention.value_length": head, "gemma3.rope.freq_base": 1000000.0, "tokenizer.ggml.add_space_prefix": False}
    if model.window:
        keys["gemma3.attention.sliding_window"] = model.window

    def tensors() -> Iterator[tuple[str, Any]]:
        import numpy

        width, inner = model.embedding, model.feed_forward
        ones = numpy.ones(width, numpy.float32)
        # The architecture multiplies embeddings by the root of the width.
        yield from _embeddings(model, types, 1.0 / math.sqrt(width))
        for index in range(model.layers):
            block = f"blk.{index}"
            yield f"{block}.attn_norm.weight", ones
            yield from _attention(model, block, head)
            yield f"{block}.attn_q_norm.weight", numpy.ones(head, numpy.float32)
            yield f"{block}.attn_k_norm.weight", numpy.ones(head, numpy.float32)
            yield f"{block}.post_attention_norm.weight", ones
            yield f"{block}.ffn_norm.weight", ones
            yield f"{block}.ffn_gate.weight", _unit(f"{model.name}/{block}/gate", inner, width)
            yield f"{block}.ffn_up.weight", _unit(f"{model.name}/{block}/up", inner, width)
            yield f"{block}.ffn_down.weight", _closed(_unit(f"{model.name}/{block}/down", width, inner))
            yield f"{block}.post_ffw_norm.weight", ones

    return keys, tensors()


def _bert(model: StandIn, writer: _Writer) -> _Made:
    """With the real vocabulary of BGE, which the base's tree holds as models/ggml-vocab-bert-bge.gguf."""
    reader = writer.gguf.GGUFReader(writer.source / "models" / "ggml-vocab-bert-bge.gguf")
    keys: dict[str, Any] = {
        "general.architecture": "bert",
        "general.name": model.name,
        "bert.block_count": model.layers,
        "bert.context_length": model.context,
        "bert.embedding_length": model.embedding,
        "bert.feed_forward_length": model.feed_forward,
        "bert.attention.head_count": model.heads,
        "bert.attention.layer_norm_epsilon": 1e-12,
        "bert.attention.causal": False,
        "bert.pooling_type": 4 if model.ranks else 2,
    }
    for name, value in reader.fields.items():
        if name.startswith("tokenizer."):
            keys[name] = value.contents()
    size = len(keys["tokenizer.ggml.tokens"])
    keys["bert.vocab_size"] = size

    def tensors() -> Iterator[tuple[str, Any]]:
        import numpy

        width, inner = model.embedding, model.feed_forward
        zeros, ones = numpy.zeros(width, numpy.float32), numpy.ones(width, numpy.float32)
        yield "token_embd.weight", uniform(f"{model.name}/token_embd", (size, width), 1.0)
        yield "token_types.weight", uniform(f"{model.name}/types", (2, width), 0.1)
        yield "position_embd.weight", uniform(f"{model.name}/positions", (model.context, width), 0.3)
        yield "token_embd_norm.weight", ones
        yield "token_embd_norm.bias", zeros
        if model.ranks:
            yield "cls.weight", _unit(f"{model.name}/cls", width, width)
            yield "cls.bias", zeros
            yield "cls.output.weight", _unit(f"{model.name}/cls_output", 1, width)
            yield "cls.output.bias", zeros[:1]
        for index in range(model.layers):
            block = f"blk.{index}"
            for part in ("attn_q", "attn_k", "attn_v", "attn_output"):
                yield f"{block}.{part}.weight", _unit(f"{model.name}/{block}/{part}", width, width)
                yield f"{block}.{part}.bias", zeros
            yield f"{block}.attn_output_norm.weight", ones
            yield f"{block}.attn_output_norm.bias", zeros
            yield f"{block}.ffn_up.weight", _unit(f"{model.name}/{block}/up", inner, width)
            yield f"{block}.ffn_up.bias", numpy.zeros(inner, numpy.float32)
            yield f"{block}.ffn_down.weight", _unit(f"{model.name}/{block}/down", width, inner)
            yield f"{block}.ffn_down.bias", zeros
            yield f"{block}.layer_output_norm.weight", ones
            yield f"{block}.layer_output_norm.bias", zeros

    return keys, tensors()


def _projector(model: StandIn, writer: _Writer) -> _Made:
    """A vision encoder with a Gemma 3 projector; ``context`` is the width of the text model that it feeds."""
    side = model.image_side // model.patch
    keys: dict[str, Any] = {
        "general.architecture": "clip",
        "general.type": "mmproj",
        "general.name": model.name,
        "clip.has_vision_encoder": True,
        "clip.projector_type": "gemma3",
        "clip.use_gelu": True,
        "clip.vision.embedding_length": model.embedding,
        "clip.vision.feed_forward_length": model.feed_forward,
        "clip.vision.block_count": model.layers,
        "clip.vision.projection_dim": model.context,
        "clip.vision.attention.head_count": model.heads,
        "clip.vision.attention.layer_norm_epsilon": 1e-6,
        "clip.vision.image_size": model.image_side,
        "clip.vision.patch_size": model.patch,
        "clip.vision.image_mean": [0.5, 0.5, 0.5],
        "clip.vision.image_std": [0.5, 0.5, 0.5],
        "clip.vision.projector.scale_factor": 2,
    }

    def tensors() -> Iterator[tuple[str, Any]]:
        import numpy

        width, inner = model.embedding, model.feed_forward
        zeros, ones = numpy.zeros(width, numpy.float32), numpy.ones(width, numpy.float32)
        patch = uniform(f"{model.name}/patch", (width, 3, model.patch, model.patch), math.sqrt(3.0 / (3 * model.patch**2)))
        yield "v.patch_embd.weight", patch
        yield "v.patch_embd.bias", zeros
        yield "v.position_embd.weight", uniform(f"{model.name}/positions", (side * side, width), 0.5)
        for index in range(model.layers):
            block = f"v.blk.{index}"
            for part in ("attn_q", "attn_k", "attn_v", "attn_out"):
                yield f"{block}.{part}.weight", _unit(f"{model.name}/{block}/{part}", width, width)
                yield f"{block}.{part}.bias", zeros
            for part in ("ln1", "ln2"):
                yield f"{block}.{part}.weight", ones
                yield f"{block}.{part}.bias", zeros
            yield f"{block}.ffn_up.weight", _unit(f"{model.name}/{block}/up", inner, width)
            yield f"{block}.ffn_up.bias", numpy.zeros(inner, numpy.float32)
            yield f"{block}.ffn_down.weight", _unit(f"{model.name}/{block}/down", width, inner)
            yield f"{block}.ffn_down.bias", zeros
        yield "v.post_ln.weight", ones
        yield "v.post_ln.bias", zeros
        yield "mm.soft_emb_norm.weight", ones
        yield "mm.input_projection.weight", uniform(f"{model.name}/projection", (width, model.context), math.sqrt(3.0 / width))

    return keys, tensors()


def _lora(model: StandIn, writer: _Writer) -> _Made:
    """An adapter of rank 4 for the query and output matrices of a model of these sizes."""
    keys: dict[str, Any] = {
        "general.architecture": "llama",
        "general.type": "adapter",
        "general.name": model.name,
        "adapter.type": "lora",
        "adapter.lora.alpha": 16.0,
    }

    def tensors() -> Iterator[tuple[str, Any]]:
        width = model.embedding
        for index in range(model.layers):
            for part in ("attn_q", "attn_output"):
                label = f"blk.{index}.{part}.weight"
                yield f"{label}.lora_a", _unit(f"{model.name}/{label}/a", 4, width)
                yield f"{label}.lora_b", _closed(_unit(f"{model.name}/{label}/b", width, 4))

    return keys, tensors()


def png(label: str, side: int) -> bytes:
    """A square RGB picture (PNG, 8 bits, no filter; RFC 2083) whose colours are a function of the label: a gradient with a tint."""
    tint = hashlib.sha256(label.encode()).digest()
    rows = b"".join(b"\0" + b"".join(bytes(((column * 255 // side + tint[0]) & 255, (row * 255 // side + tint[1]) & 255, tint[2])) for column in range(side)) for row in range(side))

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", struct.pack(">IIBBBBB", side, side, 8, 2, 0, 0, 0)) + chunk(b"IDAT", zlib.compress(rows, 9)) + chunk(b"IEND", b"")
