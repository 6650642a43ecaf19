"""Which type each tensor of a model gets: the rules of its mix, as the base's quantizer would choose (``src/llama-quant.cpp``)."""

from __future__ import annotations

from .architectures import Tensor
from .blocks import FORMATS
from .shapes import Counted, Place, Rule, When, ZooModel

_PLAIN_BYTES = {"F32": 4, "F16": 2}


def types_of(model: ZooModel, tensors: tuple[Tensor, ...]) -> tuple[str, ...]:
    """The type of every tensor, by its name in gguf-py, in the order of ``tensors``."""
    chosen: dict[Tensor, str] = {}
    for rule in model.mix.rules:
        if not _applies(rule, model):
            continue
        # The quantizer goes through a file by layer and name, and counts as it goes.
        matching = sorted((tensor for tensor in tensors if tensor.kept is None and tensor.tensor in rule.tensors), key=lambda t: (t.layer or 0, t.tensor))
        for index, tensor in enumerate(matching):
            if tensor not in chosen and _within(rule.place, index, len(matching) if rule.of is Counted.TENSORS else model.shape.blocks):
                chosen[tensor] = rule.type
    return tuple(tensor.kept or _fitting(model, tensor, chosen.get(tensor, model.mix.type)) for tensor in tensors)


def size_of(tensor: Tensor, type_name: str) -> int:
    """Bytes of a tensor in a type; its rows must fit the type's blocks."""
    if type_name in _PLAIN_BYTES:
        return tensor.elements * _PLAIN_BYTES[type_name]
    kind = FORMATS[type_name]
    return tensor.elements // kind.weights * kind.size


def _applies(rule: Rule, model: ZooModel) -> bool:
    shape = model.shape
    if rule.when is When.TIED:
        return shape.tied
    if rule.when is When.SHARED_VALUES:
        grouped = shape.attention is not None and shape.attention.heads >= 4 * shape.kv_heads(0)
        return grouped or (shape.experts is not None and shape.experts.count >= 4)
    return True


def _within(place: Place, index: int, count: int) -> bool:
    if place is Place.FIRST:
        return index < count // 8
    if place is Place.MORE:
        return index < count // 8 or index >= 7 * count // 8 or (index - count // 8) % 3 == 2
    return True


def _fitting(model: ZooModel, tensor: Tensor, type_name: str) -> str:
    """The type, or what takes its place where rows are no multiple of its block."""
    is_output = tensor.tensor == "OUTPUT" or (model.shape.tied and tensor.tensor in ("TOKEN_EMBD", "PER_LAYER_TOKEN_EMBD"))
    # The quantizer gives an output matrix that fits no large block the best of the small ones.
    for candidate in (type_name, "Q8_0" if is_output else model.mix.fallback(type_name)):
        if candidate in _PLAIN_BYTES or tensor.shape[0] % FORMATS[candidate].weights == 0:
            return candidate
    return "F16"
