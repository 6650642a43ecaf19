"""The zoo as data: shapes, forms and mixes of ``gate/zoo.yaml``, checked while they are read.

A *shape* is what a model's config says (layers, heads, windows). A *form* is a quantisation (``F16``, ``Q8_0``, ``Q4_K_M``): a *mix*
of types, which the mix's rules give to the tensors. One shape in one form is one file, and one ``ZooModel``.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from enum import Enum
from pathlib import Path
from typing import Any

from ...errors import DataError
from ...schema import Node, parse_yaml, read_text


class Group(Enum):
    """What a model is for."""

    GATE = "gate"
    """Small; each runs through every configuration of a gate."""

    SPEED = "speed"
    """The exact shape of a real model with meaningless weights; for measuring only."""


@dataclass(frozen=True)
class Attention:
    """Attention of the layers that see the whole context, and of all layers where there is no window.

    ``rope_size`` is how many of the ``head_size`` dimensions are rotated; ``sections`` splits them for multi-axis RoPE.
    """

    heads: int
    kv_heads: int
    head_size: int
    rope_base: float
    rope_size: int
    rope_factor: float | None = None
    sections: tuple[int, ...] = ()
    bias: bool = False


@dataclass(frozen=True)
class Window:
    """Layers that see the last ``size`` tokens only.

    ``pattern`` has one entry a layer, True for such a layer; ``stated`` is False where the engine knows the pattern by itself.
    ``shared_values`` drops the value matrices of the other layers: their keys are their values (Gemma 4).
    """

    size: int
    pattern: tuple[bool, ...]
    stated: bool
    kv_heads: int
    head_size: int
    rope_base: float
    shared_values: bool = False


@dataclass(frozen=True)
class Experts:
    """Experts of a layer. ``shared`` is the width of the expert that every token uses, 0 for none."""

    count: int
    used: int
    feed_forward: int
    shared: int = 0


@dataclass(frozen=True)
class Recurrent:
    """A state space: Mamba 2, or the gated delta net of Qwen 3.5 with one full-attention layer in every ``interval``.

    ``heads`` is the number of value heads (the engine calls it time-step rank), ``groups`` that of key heads.
    """

    convolution: int
    inner: int
    state: int
    heads: int
    groups: int
    interval: int = 0


@dataclass(frozen=True)
class Shape:
    """A model's config. ``next_layers`` are NextN/MTP blocks behind the ``layers``; ``backbone`` is the hidden size of a drafter's target.

    ``shared_kv`` layers at the end use the keys and values of earlier ones; ``per_layer`` is the width of per-layer embeddings.
    """

    layers: int
    context: int
    hidden: int
    vocabulary: int
    feed_forward: int
    epsilon: float
    tied: bool
    attention: Attention | None = None
    window: Window | None = None
    experts: Experts | None = None
    recurrent: Recurrent | None = None
    next_layers: int = 0
    per_layer: int = 0
    shared_kv: int = 0
    shared_kv_feed_forward: int = 0
    softcap: float | None = None
    backbone: int = 0

    @property
    def blocks(self) -> int:
        """All layers, NextN blocks among them."""
        return self.layers + self.next_layers

    def slides(self, layer: int) -> bool:
        """Whether a layer sees a window only."""
        return self.window is not None and self.window.pattern[layer]

    def head_size(self, layer: int) -> int:
        """Dimensions of a head of the layer; its attention must exist."""
        assert self.attention is not None
        return self.window.head_size if self.window is not None and self.slides(layer) else self.attention.head_size

    def kv_heads(self, layer: int) -> int:
        """Key/value heads of the layer; its attention must exist."""
        assert self.attention is not None
        return self.window.kv_heads if self.window is not None and self.slides(layer) else self.attention.kv_heads

    def is_recurrent(self, layer: int) -> bool:
        """Whether the layer has a state instead of keys and values."""
        interval = 0 if self.recurrent is None else self.recurrent.interval
        return self.recurrent is not None and (interval == 0 or (layer < self.layers and (layer + 1) % interval != 0))

    def has_kv(self, layer: int) -> bool:
        """Whether the layer has keys and values of its own; no layer of a drafter with a backbone has."""
        return not self.backbone and not self.is_recurrent(layer) and layer < self.blocks - self.shared_kv


class Place(Enum):
    """Which of its tensors a rule is for."""

    ALL = "all"
    FIRST = "first"
    """The first eighth."""
    MORE = "more"
    """The first and the last eighth and every third between: where the base's quantizer spends more bits."""


class When(Enum):
    """Which models a rule is for."""

    ALWAYS = "always"
    TIED = "tied"
    """The token embeddings are the output matrix too."""
    SHARED_VALUES = "shared-values"
    """At least four heads read one value head, or there are at least four experts: value matrices are cheap."""


class Counted(Enum):
    """What the eighths of a place are eighths of."""

    LAYERS = "layers"
    TENSORS = "tensors"


@dataclass(frozen=True)
class Rule:
    """Tensors (by their names in gguf-py) that get another type than the mix's own."""

    tensors: tuple[str, ...]
    type: str
    place: Place = Place.ALL
    when: When = When.ALWAYS
    of: Counted = Counted.LAYERS


@dataclass(frozen=True)
class Mix:
    """The types of a form. ``file_type`` is the name of the GGUF file type; the first rule that fits a tensor counts."""

    name: str
    file_type: str
    type: str
    rules: tuple[Rule, ...]
    fallbacks: tuple[tuple[str, str], ...]

    def fallback(self, type_name: str) -> str:
        """The type for rows whose length is no multiple of a block of ``type_name``; F16 when there is none."""
        return dict(self.fallbacks).get(type_name, "F16")


@dataclass(frozen=True)
class ZooModel:
    """One file of the zoo: a shape in a form.

    ``family`` is the shape's name, shared by its forms, and the seed of the weights: F16 and Q8_0 of a family have the same ones.
    ``target`` is the family a drafter drafts for.
    """

    family: str
    group: Group
    architecture: str
    about: str
    source: str
    shape: Shape
    mix: Mix
    target: str | None = None

    @property
    def name(self) -> str:
        """What the file is called, without its extension: ``qwen3-q8_0``."""
        return f"{self.family}-{self.mix.name.lower()}"

    @property
    def file(self) -> str:
        """The file's name."""
        return f"{self.name}.gguf"

    @property
    def is_drafter(self) -> bool:
        """Whether it runs beside a target only."""
        return self.target is not None

    @property
    def has_next(self) -> bool:
        """Whether it drafts for itself with a NextN/MTP block."""
        return self.shape.next_layers > 0 and not self.is_drafter

    def identity(self) -> dict[str, Any]:
        """Everything about the model that its bytes depend on, JSON-able."""
        return {"family": self.family, "architecture": self.architecture, "shape": asdict(self.shape), "mix": _plain(asdict(self.mix))}


def _plain(value: Any) -> Any:
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return value


def load(path: Path) -> tuple[ZooModel, ...]:
    """All models of a zoo file, in its order. Raises DataError naming the place and what is wrong there."""
    return parse(read_text(path), path.name)


def parse(text: str, where: str) -> tuple[ZooModel, ...]:
    """``load`` of a text; ``where`` names it in errors."""
    root = Node(parse_yaml(text, where), where).mapping()
    fallbacks = root.get("fallbacks")
    pairs = tuple((name, fallbacks.get(name).text()) for name in fallbacks.names())
    mixes_node = root.get("mixes")
    mixes = {name: _mix(name, mixes_node.get(name), pairs) for name in mixes_node.names()}
    models_node = root.get("models")
    found: list[ZooModel] = []
    for family in models_node.names():
        found.extend(_models(family, models_node.get(family), mixes))
    root.done()
    families = {model.family: model for model in found}
    for model in found:
        if model.target is not None:
            _check_pair(model, families.get(model.target), where)
    return tuple(found)


def _check_pair(drafter: ZooModel, target: ZooModel | None, where: str) -> None:
    place = f"{where}: models.{drafter.family}.target"
    if target is None:
        raise DataError(f"{place}: there is no model {drafter.target!r}.")
    if target.shape.hidden != drafter.shape.backbone:
        raise DataError(f"{place}: the drafter's backbone is {drafter.shape.backbone}, the target's hidden size {target.shape.hidden}; they must be equal.")
    if target.shape.vocabulary != drafter.shape.vocabulary:
        raise DataError(f"{place}: drafter and target need one vocabulary, {drafter.shape.vocabulary} is not {target.shape.vocabulary}.")


def _mix(name: str, node: Node, fallbacks: tuple[tuple[str, str], ...]) -> Mix:
    rules = node.optional("rules", lambda listed: tuple(_rule(item) for item in listed.items(empty=True)), ())
    mix = Mix(name, node.get("file_type").text(), node.get("type").text(), rules, fallbacks)
    node.done()
    return mix


def _rule(node: Node) -> Rule:
    rule = Rule(
        tensors=tuple(item.text() for item in node.get("tensors").items()),
        type=node.get("type").text(),
        place=Place(node.optional("place", lambda n: n.one_of(item.value for item in Place), Place.ALL.value)),
        when=When(node.optional("when", lambda n: n.one_of(item.value for item in When), When.ALWAYS.value)),
        of=Counted(node.optional("of", lambda n: n.one_of(item.value for item in Counted), Counted.LAYERS.value)),
    )
    node.done()
    return rule


def _models(family: str, node: Node, mixes: dict[str, Mix]) -> list[ZooModel]:
    forms = [item.one_of(mixes) for item in node.get("forms").items()]
    group = Group(node.get("group").one_of(group.value for group in Group))
    architecture, about, source = (node.get(name).text() for name in ("architecture", "about", "source"))
    shape, target = _shape(node.get("shape")), node.optional("target", Node.text)
    node.done()
    return [ZooModel(family, group, architecture, about, source, shape, mixes[form], target) for form in forms]


def _count(node: Node) -> int:
    return node.number(minimum=1, maximum=1 << 24)


def _decimal(node: Node) -> float:
    if isinstance(node.value, bool) or not isinstance(node.value, (int, float)) or not 0 < node.value < float("inf"):
        raise node.fail(f"expected a positive number such as 1.0e-6, found {node.value!r}")
    return float(node.value)


def _shape(node: Node) -> Shape:
    layers = _count(node.get("layers"))
    attention = node.optional("attention", _attention)
    shape = Shape(
        layers=layers,
        context=_count(node.get("context")),
        hidden=_count(node.get("hidden")),
        vocabulary=_count(node.get("vocabulary")),
        feed_forward=node.optional("feed_forward", _count, 0),
        epsilon=_decimal(node.get("epsilon")),
        tied=node.get("tied").flag(),
        attention=attention,
        window=node.optional("window", lambda n: _window(n, layers, attention)),
        experts=node.optional("experts", _experts),
        recurrent=node.optional("recurrent", _recurrent),
        next_layers=node.optional("next_layers", _count, 0),
        per_layer=node.optional("per_layer", _count, 0),
        shared_kv=node.optional("shared_kv", _count, 0),
        shared_kv_feed_forward=node.optional("shared_kv_feed_forward", _count, 0),
        softcap=node.optional("softcap", _decimal),
        backbone=node.optional("backbone", _count, 0),
    )
    node.done()
    if shape.attention is None and shape.recurrent is None:
        raise node.fail("a model needs 'attention' or 'recurrent'")
    if shape.shared_kv >= shape.layers:
        raise node.fail(f"shared_kv is {shape.shared_kv} of {shape.layers} layers; some must have keys of their own")
    return shape


def _attention(node: Node) -> Attention:
    head_size = _count(node.get("head_size"))
    attention = Attention(
        heads=_count(node.get("heads")),
        kv_heads=_count(node.get("kv_heads")),
        head_size=head_size,
        rope_base=_decimal(node.get("rope_base")),
        rope_size=node.optional("rope_size", _count, head_size),
        rope_factor=node.optional("rope_factor", _decimal),
        sections=node.optional("sections", lambda n: tuple(item.number() for item in n.items()), ()),
        bias=node.optional("bias", Node.flag, False),
    )
    node.done()
    if attention.heads % attention.kv_heads:
        raise node.fail(f"{attention.heads} heads cannot share {attention.kv_heads} key/value heads evenly")
    if attention.sections and 2 * sum(attention.sections) != attention.rope_size:
        raise node.fail(f"the sections add up to {sum(attention.sections)}, half of rope_size is {attention.rope_size // 2}")
    return attention


def _window(node: Node, layers: int, attention: Attention | None) -> Window:
    if attention is None:
        raise node.fail("a window needs 'attention'")
    window = Window(
        size=_count(node.get("size")),
        pattern=_pattern(node.get("pattern"), layers),
        stated=node.get("stated").flag(),
        kv_heads=node.optional("kv_heads", _count, attention.kv_heads),
        head_size=node.optional("head_size", _count, attention.head_size),
        rope_base=_decimal(node.get("rope_base")),
        shared_values=node.optional("shared_values", Node.flag, False),
    )
    node.done()
    return window


def _pattern(node: Node, layers: int) -> tuple[bool, ...]:
    text = node.text()
    if set(text) - set("SF"):
        raise node.fail(f"a pattern consists of S (sliding) and F (full), found {text!r}")
    if layers < len(text):
        raise node.fail(f"the pattern has {len(text)} letters for {layers} layers")
    # Shorter ones repeat; the last repetition may be cut, as in Gemma 3 1B with 26 layers.
    return tuple(text[layer % len(text)] == "S" for layer in range(layers))


def _experts(node: Node) -> Experts:
    experts = Experts(
        count=_count(node.get("count")),
        used=_count(node.get("used")),
        feed_forward=_count(node.get("feed_forward")),
        shared=node.optional("shared", _count, 0),
    )
    node.done()
    if experts.used > experts.count:
        raise node.fail(f"{experts.used} of {experts.count} experts cannot be used")
    return experts


def _recurrent(node: Node) -> Recurrent:
    recurrent = Recurrent(
        convolution=_count(node.get("convolution")),
        inner=_count(node.get("inner")),
        state=_count(node.get("state")),
        heads=_count(node.get("heads")),
        groups=_count(node.get("groups")),
        interval=node.optional("interval", _count, 0),
    )
    node.done()
    if recurrent.inner % recurrent.heads or recurrent.heads % recurrent.groups:
        raise node.fail(f"{recurrent.inner} channels, {recurrent.heads} heads and {recurrent.groups} groups do not divide evenly")
    return recurrent
