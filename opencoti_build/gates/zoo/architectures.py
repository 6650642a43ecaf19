"""What each architecture writes: the keys and tensors that the base's loader asks for, and how the tensors are filled.

Names are those of gguf-py: a key is the name of a ``GGUFWriter`` method without ``add_``, a tensor an enumerator of ``MODEL_TENSOR``.
Shapes are in ggml's order: ``shape[0]`` is the length of a row, the input side of a matrix.

The magnitudes aim at a model that reacts to everything: activations of about one everywhere, attention that prefers some tokens (scores
with a deviation of about 3), logits with a deviation of 2.5, which is neither flat nor saturated. ``src/models/*.cpp`` of the base
is the source of which tensors and keys an architecture has.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ...errors import DataError
from .shapes import Shape, ZooModel

SCORE_SPREAD = 3.0
"""Deviation of attention scores before the softmax."""

LOGIT_SPREAD = 2.5
"""Deviation of logits."""


@dataclass(frozen=True)
class Random:
    """Bell-shaped numbers around zero with this deviation."""

    deviation: float


@dataclass(frozen=True)
class Scale:
    """Multipliers between 3/4 and 5/4 of ``gain``, of either sign if ``signed``."""

    gain: float = 1.0
    signed: bool = False


@dataclass(frozen=True)
class Ramp:
    """Evenly spaced numbers from ``first`` to ``last``."""

    first: float
    last: float


@dataclass(frozen=True)
class Given:
    """These numbers."""

    values: tuple[float, ...]


Fill = Random | Scale | Ramp | Given

Value = int | float | str | Sequence[int] | Sequence[bool]


@dataclass(frozen=True)
class Tensor:
    """One tensor: its enumerator, layer (None for a tensor of the whole model), suffix, shape and filling.

    ``kept`` is the type it has in every form (``F32``, ``F16``); None for a tensor that a form's mix may quantise.
    """

    tensor: str
    layer: int | None
    suffix: str
    shape: tuple[int, ...]
    fill: Fill
    kept: str | None

    @property
    def elements(self) -> int:
        """Numbers in it."""
        return math.prod(self.shape)


@dataclass(frozen=True)
class Plan:
    """Everything a file of an architecture holds except the vocabulary."""

    keys: tuple[tuple[str, Value], ...]
    tensors: tuple[Tensor, ...]

    @property
    def parameters(self) -> int:
        """Numbers in all tensors."""
        return sum(tensor.elements for tensor in self.tensors)


def plan(model: ZooModel) -> Plan:
    """The keys and tensors of a model. Raises DataError for an architecture nobody wrote, or a shape that lacks a part."""
    writer = _WRITERS.get(model.architecture)
    if writer is None:
        raise DataError(f"gate/zoo.yaml: models.{model.family}: there is no writer for {model.architecture!r}; there are {', '.join(sorted(_WRITERS))}.")
    builder = _Builder(model.shape, model.family)
    writer(builder)
    return Plan(tuple(builder.keys), tuple(builder.tensors))


class _Builder:
    """Collects keys and tensors in the order of the file."""

    def __init__(self, shape: Shape, family: str) -> None:
        self.shape = shape
        self.family = family
        self.keys: list[tuple[str, Value]] = []
        self.tensors: list[Tensor] = []

    def lacks(self, part: str) -> DataError:
        return DataError(f"gate/zoo.yaml: models.{self.family}.shape: this architecture needs {part!r}.")

    def key(self, name: str, value: Value) -> None:
        self.keys.append((name, value))

    def add(self, tensor: str, layer: int | None, shape: tuple[int, ...], fill: Fill, *, suffix: str = "weight", kept: str | None = "F32") -> None:
        self.tensors.append(Tensor(tensor, layer, suffix, shape, fill, kept))

    def matrix(self, tensor: str, layer: int | None, rows_of: int, rows: int, *, gain: float = 1.0, experts: int = 0, kept: str | None = None) -> None:
        """A matrix that maps ``rows_of`` numbers to ``rows``, one an expert; unit input gives output of deviation ``gain``."""
        shape = (rows_of, rows, experts) if experts else (rows_of, rows)
        self.add(tensor, layer, shape, Random(gain / math.sqrt(rows_of)), kept=kept)

    def norm(self, tensor: str, layer: int | None, size: int, *, gain: float = 1.0, signed: bool = False) -> None:
        self.add(tensor, layer, (size,), Scale(gain, signed))

    # ---- parts that architectures share -----------------------------------------------------------------------------------------

    def basics(self) -> None:
        shape = self.shape
        self.key("context_length", shape.context)
        self.key("embedding_length", shape.hidden)
        self.key("block_count", shape.blocks)
        self.key("layer_norm_rms_eps", shape.epsilon)
        if shape.feed_forward:
            wide = shape.shared_kv_feed_forward
            if wide:
                self.key("feed_forward_length", [shape.feed_forward if shape.has_kv(layer) else wide for layer in range(shape.blocks)])
            else:
                self.key("feed_forward_length", shape.feed_forward)

    def attention_keys(self) -> None:
        shape, attention = self.shape, self.shape.attention
        if attention is None:
            raise self.lacks("attention")
        self.key("head_count", attention.heads)
        if shape.window is not None and shape.window.kv_heads != attention.kv_heads:
            self.key("head_count_kv", [shape.kv_heads(layer) for layer in range(shape.blocks)])
        else:
            self.key("head_count_kv", attention.kv_heads)
        self.key("key_length", attention.head_size)
        self.key("value_length", attention.head_size)
        self.key("rope_freq_base", attention.rope_base)
        self.key("rope_dimension_count", attention.rope_size)
        if attention.rope_factor is not None:
            self.key("rope_scaling_type", "linear")
            self.key("rope_scaling_factor", attention.rope_factor)
        if attention.sections:
            self.key("rope_dimension_sections", [*attention.sections, *[0] * (4 - len(attention.sections))])

    def expert_keys(self) -> None:
        experts = self.shape.experts
        if experts is None:
            raise self.lacks("experts")
        self.key("expert_count", experts.count)
        self.key("expert_used_count", experts.used)
        self.key("expert_feed_forward_length", experts.feed_forward)
        if experts.shared:
            self.key("expert_shared_feed_forward_length", experts.shared)

    def state_keys(self) -> None:
        recurrent = self.shape.recurrent
        if recurrent is None:
            raise self.lacks("recurrent")
        self.key("ssm_conv_kernel", recurrent.convolution)
        self.key("ssm_inner_size", recurrent.inner)
        self.key("ssm_state_size", recurrent.state)
        self.key("ssm_time_step_rank", recurrent.heads)
        self.key("ssm_group_count", recurrent.groups)

    def ends(self) -> None:
        """Embeddings, the last norm and, unless tied, the output matrix.

        A tied output would favour the token just read, as the residual stream still holds its embedding: signs on the last norm
        make the two independent.
        """
        shape = self.shape
        spread = LOGIT_SPREAD / math.sqrt(shape.hidden)
        self.add("TOKEN_EMBD", None, (shape.hidden, shape.vocabulary), Random(spread if shape.tied else 1.0), kept=None)
        self.norm("OUTPUT_NORM", None, shape.hidden, signed=shape.tied)
        if not shape.tied:
            self.matrix("OUTPUT", None, shape.hidden, shape.vocabulary, gain=LOGIT_SPREAD)

    def query_key_value(self, layer: int, *, normed: bool, scaled: bool = True, gated: bool = False) -> None:
        """The matrices in front of attention. ``normed``: queries and keys have norms; ``scaled``: scores are divided by the root
        of the head size; ``gated``: the query matrix brings a gate too."""
        shape, attention = self.shape, self.shape.attention
        if attention is None:
            raise self.lacks("attention")
        size = shape.head_size(layer)
        queries, keys = attention.heads * size, shape.kv_heads(layer) * size
        score = math.sqrt(SCORE_SPREAD if scaled else SCORE_SPREAD / math.sqrt(size))
        gain = 1.0 if normed else score
        self.matrix("ATTN_Q", layer, shape.hidden, queries * (2 if gated else 1), gain=gain)
        if attention.bias:
            self.add("ATTN_Q", layer, (queries,), Random(0.5), suffix="bias")
        if shape.has_kv(layer):
            self.matrix("ATTN_K", layer, shape.hidden, keys, gain=gain)
            if attention.bias:
                self.add("ATTN_K", layer, (keys,), Random(0.5), suffix="bias")
            if not (shape.window is not None and shape.window.shared_values and not shape.slides(layer)):
                self.matrix("ATTN_V", layer, shape.hidden, keys)
                if attention.bias:
                    self.add("ATTN_V", layer, (keys,), Random(0.5), suffix="bias")
        if normed:
            self.norm("ATTN_Q_NORM", layer, size, gain=score)
            if shape.has_kv(layer):
                self.norm("ATTN_K_NORM", layer, size, gain=score)
        self.matrix("ATTN_OUT", layer, queries, shape.hidden)

    def dense(self, layer: int, width: int) -> None:
        """Gate, up and down of a feed-forward network."""
        hidden = self.shape.hidden
        self.matrix("FFN_GATE", layer, hidden, width)
        self.matrix("FFN_UP", layer, hidden, width)
        self.matrix("FFN_DOWN", layer, width, hidden, gain=1.5)

    def expert_matrices(self, layer: int, *, fused: bool = False) -> None:
        """The router and the experts; ``fused``: gate and up are one tensor. The router stays F32, as the base's quantizer keeps it."""
        experts, hidden = self.shape.experts, self.shape.hidden
        if experts is None:
            raise self.lacks("experts")
        count, width = experts.count, experts.feed_forward
        self.matrix("FFN_GATE_INP", layer, hidden, count, gain=2.0, kept="F32")
        if fused:
            self.matrix("FFN_GATE_UP_EXP", layer, hidden, 2 * width, experts=count)
        else:
            self.matrix("FFN_GATE_EXP", layer, hidden, width, experts=count)
            self.matrix("FFN_UP_EXP", layer, hidden, width, experts=count)
        self.matrix("FFN_DOWN_EXP", layer, width, hidden, gain=1.5, experts=count)

    def state_constants(self, layer: int, heads: int, *, column: bool) -> None:
        """Decay and time step: between 0.2 % and two thirds are forgotten a token, differently in every head."""
        shape = (1, heads) if column else (heads,)
        self.add("SSM_DT", layer, (heads,), Ramp(-6.0, -2.0), suffix="bias")
        self.add("SSM_A", layer, shape, Ramp(-1.0, -8.0), suffix="")


# ---- architectures --------------------------------------------------------------------------------------------------------------


def _llama_like(builder: _Builder, *, normed: bool) -> None:
    """Llama, Qwen 2, Qwen 3 and Qwen 3 MoE: a norm, attention, a norm, a feed-forward network."""
    shape = builder.shape
    builder.basics()
    builder.attention_keys()
    if shape.experts is not None:
        builder.expert_keys()
    builder.ends()
    for layer in range(shape.layers):
        builder.norm("ATTN_NORM", layer, shape.hidden)
        builder.query_key_value(layer, normed=normed)
        builder.norm("FFN_NORM", layer, shape.hidden)
        if shape.experts is not None:
            builder.expert_matrices(layer)
        else:
            builder.dense(layer, shape.feed_forward)


def _plain(builder: _Builder) -> None:
    _llama_like(builder, normed=False)


def _query_key_normed(builder: _Builder) -> None:
    _llama_like(builder, normed=True)


def _gemma3(builder: _Builder) -> None:
    shape = builder.shape
    if shape.window is None:
        raise builder.lacks("window")
    builder.basics()
    builder.attention_keys()
    builder.key("sliding_window", shape.window.size)
    if shape.window.stated:
        builder.key("sliding_window_pattern", list(shape.window.pattern))
    builder.key("rope_freq_base_swa", shape.window.rope_base)
    builder.ends()
    for layer in range(shape.layers):
        builder.norm("ATTN_NORM", layer, shape.hidden)
        builder.query_key_value(layer, normed=True)
        builder.norm("ATTN_POST_NORM", layer, shape.hidden)
        builder.norm("FFN_PRE_NORM", layer, shape.hidden)
        builder.dense(layer, shape.feed_forward)
        builder.norm("FFN_POST_NORM", layer, shape.hidden)


def _gemma4_keys(builder: _Builder) -> None:
    shape = builder.shape
    if shape.window is None:
        raise builder.lacks("window")
    builder.basics()
    builder.attention_keys()
    builder.key("key_length_swa", shape.window.head_size)
    builder.key("value_length_swa", shape.window.head_size)
    builder.key("rope_dimension_count_swa", shape.window.head_size)
    builder.key("rope_freq_base_swa", shape.window.rope_base)
    builder.key("sliding_window", shape.window.size)
    builder.key("sliding_window_pattern", list(shape.window.pattern))


def _proportional_rope(builder: _Builder) -> None:
    """Layers that see everything rotate a quarter of their dimensions: the factors of the others stop them."""
    attention = builder.shape.attention
    assert attention is not None
    turned = attention.head_size // 8
    factors = (1.0,) * turned + (1e30,) * (attention.head_size // 2 - turned)
    builder.add("ROPE_FREQS", None, (len(factors),), Given(factors))


def _gemma4_block(builder: _Builder, layer: int) -> None:
    """What a layer of Gemma 4 and one of its drafter have in common."""
    shape = builder.shape
    width = shape.shared_kv_feed_forward if shape.shared_kv_feed_forward and not shape.has_kv(layer) else shape.feed_forward
    builder.norm("ATTN_NORM", layer, shape.hidden)
    builder.query_key_value(layer, normed=True, scaled=False)
    builder.norm("ATTN_POST_NORM", layer, shape.hidden)
    builder.add("LAYER_OUT_SCALE", layer, (1,), Scale())
    builder.norm("FFN_PRE_NORM", layer, shape.hidden)
    builder.dense(layer, width)
    builder.norm("FFN_POST_NORM", layer, shape.hidden)


def _gemma4(builder: _Builder) -> None:
    shape, experts = builder.shape, builder.shape.experts
    _gemma4_keys(builder)
    builder.key("shared_kv_layers", shape.shared_kv)
    builder.key("embedding_length_per_layer_input", shape.per_layer)
    if shape.softcap is not None:
        builder.key("final_logit_softcapping", shape.softcap)
    if experts is not None:
        builder.expert_keys()
    builder.ends()
    _proportional_rope(builder)
    if shape.per_layer:
        width = shape.per_layer * shape.layers
        builder.add("PER_LAYER_TOKEN_EMBD", None, (width, shape.vocabulary), Random(1 / math.sqrt(shape.per_layer)), kept=None)
        # The quantizer leaves this one as it is.
        builder.matrix("PER_LAYER_MODEL_PROJ", None, shape.hidden, width, kept="F16")
        builder.norm("PER_LAYER_PROJ_NORM", None, shape.per_layer)
    for layer in range(shape.layers):
        _gemma4_block(builder, layer)
        if experts is not None:
            builder.expert_matrices(layer, fused=True)
            # The router sees a unit vector; this brings it back to numbers of about one.
            builder.add("FFN_GATE_INP", layer, (shape.hidden,), Scale(math.sqrt(shape.hidden)), suffix="scale")
            builder.add("FFN_DOWN_EXP", layer, (experts.count,), Scale(), suffix="scale")
            builder.norm("FFN_PRE_NORM_2", layer, shape.hidden)
            builder.norm("FFN_POST_NORM_1", layer, shape.hidden)
            builder.norm("FFN_POST_NORM_2", layer, shape.hidden)
        if shape.per_layer:
            builder.matrix("PER_LAYER_INP_GATE", layer, shape.hidden, shape.per_layer)
            builder.matrix("PER_LAYER_PROJ", layer, shape.per_layer, shape.hidden)
            builder.norm("PER_LAYER_POST_NORM", layer, shape.hidden)


def _gemma4_assistant(builder: _Builder) -> None:
    """The drafter of Gemma 4: queries only, the keys and values are those of the target's last two layers."""
    shape = builder.shape
    if not shape.backbone:
        raise builder.lacks("backbone")
    _gemma4_keys(builder)
    builder.key("shared_kv_layers", shape.layers)
    builder.key("embedding_length_out", shape.backbone)
    builder.key("nextn_predict_layers", shape.layers)
    builder.ends()
    _proportional_rope(builder)
    builder.matrix("NEXTN_PROJ_PRE", None, 2 * shape.backbone, shape.hidden)
    builder.matrix("NEXTN_PROJ_POST", None, shape.hidden, shape.backbone)
    for layer in range(shape.layers):
        _gemma4_block(builder, layer)


def _qwen35(builder: _Builder) -> None:
    """Qwen 3.5, dense or with experts: gated delta nets, every fourth layer gated attention, and a NextN block behind them."""
    shape, recurrent = builder.shape, builder.shape.recurrent
    builder.basics()
    builder.attention_keys()
    builder.state_keys()
    assert recurrent is not None
    if not recurrent.interval:
        raise builder.lacks("recurrent.interval")
    builder.key("full_attention_interval", recurrent.interval)
    if shape.experts is not None:
        builder.expert_keys()
    if shape.next_layers:
        builder.key("nextn_predict_layers", shape.next_layers)
    builder.ends()
    for layer in range(shape.blocks):
        builder.norm("ATTN_NORM", layer, shape.hidden)
        if shape.is_recurrent(layer):
            _delta_net(builder, layer)
        else:
            builder.query_key_value(layer, normed=True, gated=True)
        builder.norm("ATTN_POST_NORM", layer, shape.hidden)
        if shape.experts is not None:
            builder.expert_matrices(layer)
            _shared_expert(builder, layer)
        else:
            builder.dense(layer, shape.feed_forward)
        if layer >= shape.layers:
            builder.matrix("NEXTN_EH_PROJ", layer, 2 * shape.hidden, shape.hidden)
            builder.norm("NEXTN_ENORM", layer, shape.hidden)
            builder.norm("NEXTN_HNORM", layer, shape.hidden)
            builder.norm("NEXTN_SHARED_HEAD_NORM", layer, shape.hidden, signed=shape.tied)


def _delta_net(builder: _Builder, layer: int) -> None:
    hidden, recurrent = builder.shape.hidden, builder.shape.recurrent
    assert recurrent is not None
    channels = 2 * recurrent.groups * recurrent.state + recurrent.inner
    builder.matrix("ATTN_QKV", layer, hidden, channels)
    builder.matrix("ATTN_GATE", layer, hidden, recurrent.inner)
    builder.add("SSM_CONV1D", layer, (recurrent.convolution, channels), Random(1 / math.sqrt(recurrent.convolution)))
    builder.state_constants(layer, recurrent.heads, column=False)
    builder.matrix("SSM_BETA", layer, hidden, recurrent.heads)
    builder.matrix("SSM_ALPHA", layer, hidden, recurrent.heads)
    builder.norm("SSM_NORM", layer, recurrent.inner // recurrent.heads)
    builder.matrix("SSM_OUT", layer, recurrent.inner, hidden, gain=1.5)


def _shared_expert(builder: _Builder, layer: int) -> None:
    hidden, experts = builder.shape.hidden, builder.shape.experts
    assert experts is not None
    if not experts.shared:
        raise builder.lacks("experts.shared")
    builder.add("FFN_GATE_INP_SHEXP", layer, (hidden,), Random(1 / math.sqrt(hidden)))
    builder.matrix("FFN_GATE_SHEXP", layer, hidden, experts.shared)
    builder.matrix("FFN_UP_SHEXP", layer, hidden, experts.shared)
    builder.matrix("FFN_DOWN_SHEXP", layer, experts.shared, hidden, gain=1.5)


def _mamba2(builder: _Builder) -> None:
    shape, recurrent = builder.shape, builder.shape.recurrent
    builder.basics()
    builder.state_keys()
    assert recurrent is not None
    channels = recurrent.inner + 2 * recurrent.groups * recurrent.state
    builder.ends()
    for layer in range(shape.layers):
        builder.norm("ATTN_NORM", layer, shape.hidden)
        builder.matrix("SSM_IN", layer, shape.hidden, recurrent.inner + channels + recurrent.heads)
        builder.add("SSM_CONV1D", layer, (recurrent.convolution, channels), Random(1 / math.sqrt(recurrent.convolution)))
        builder.add("SSM_CONV1D", layer, (channels,), Random(0.1), suffix="bias")
        builder.state_constants(layer, recurrent.heads, column=True)
        builder.add("SSM_D", layer, (1, recurrent.heads), Ramp(0.5, 1.5), suffix="")
        builder.add("SSM_NORM", layer, (recurrent.inner // recurrent.groups, recurrent.groups), Scale())
        builder.matrix("SSM_OUT", layer, recurrent.inner, shape.hidden, gain=1.5)


_WRITERS: dict[str, Callable[[_Builder], None]] = {
    "llama": _plain,
    "qwen2": _plain,
    "qwen3": _query_key_normed,
    "qwen3moe": _query_key_normed,
    "qwen35": _qwen35,
    "qwen35moe": _qwen35,
    "gemma3": _gemma3,
    "gemma4": _gemma4,
    "gemma4-assistant": _gemma4_assistant,
    "mamba2": _mamba2,
}
