"""Writes a model of the zoo: a GGUF file through gguf-py of the base, one piece of a tensor in memory at a time."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any

from ... import files
from ...errors import DataError, DiskError
from . import vocabulary
from .architectures import Plan, Tensor, plan
from .mixes import size_of, types_of
from .shapes import ZooModel

WRITER_VERSION = 1
"""Raise it when the same data would give other bytes than before."""

_EXACT = ("F16", "Q8_0")
"""Mixes of these types hold the family's own numbers; all others hold random blocks."""


def data_size(model: ZooModel) -> int:
    """Bytes of a model's tensors, which are all of its file but a few megabytes; no library is needed to tell."""
    tensors = plan(model).tensors
    return sum(size_of(tensor, type_name) for tensor, type_name in zip(tensors, types_of(model, tensors), strict=True))


def write(model: ZooModel, folder: Path, *, gguf: Any, progress: Callable[[int], None] = lambda count: None) -> Path:
    """Write ``model`` into ``folder`` and return the file's path; it appears under its name when it is whole.

    The bytes depend on the model's data, this module's version and gguf-py alone. ``gguf`` is that module (``library.load``),
    ``progress`` gets the number of bytes of every piece. Raises DiskError when the file does not fit, DataError when the base's tables
    do not know an architecture or a tensor.
    """
    made = plan(model)
    types = types_of(model, made.tensors)
    _check_space(folder, sum(size_of(tensor, type_name) for tensor, type_name in zip(made.tensors, types, strict=True)))
    names = [_name(gguf, model, tensor) for tensor in made.tensors]
    target = folder / model.file
    files.remove_stale(folder, f".{model.file}.*.tmp")
    with files.atomic_file(target) as stream:
        writer = gguf.GGUFWriter(None, model.architecture)
        _add_keys(writer, gguf, model, made)
        for name, tensor, type_name in zip(names, made.tensors, types, strict=True):
            writer.add_tensor_info(name, tensor.shape[::-1], _numpy_type(), size_of(tensor, type_name), raw_dtype=gguf.GGMLQuantizationType[type_name])
        # gguf-py opens the file by its (still temporary) name; atomic_file renames it when all is in it.
        writer.write_header_to_file(Path(stream.name))
        try:
            writer.write_kv_data_to_file()
            writer.write_ti_data_to_file()
            for name, tensor, type_name in zip(names, made.tensors, types, strict=True):
                pieces = _pieces(gguf, model, name, tensor, type_name)
                writer.write_tensor_data(_Stream(name, size_of(tensor, type_name), pieces, progress), tensor_endianess=gguf.GGUFEndian.LITTLE)
        finally:
            writer.close()
    return target


class _Stream:
    """A tensor that is made while it is written; of an array gguf-py asks for these two things."""

    def __init__(self, name: str, nbytes: int, pieces: Iterator[Any], progress: Callable[[int], None]) -> None:
        self.name = name
        self.nbytes = nbytes
        self._pieces = pieces
        self._progress = progress

    def tofile(self, file: IO[bytes]) -> None:
        """Write all pieces."""
        written = 0
        for piece in self._pieces:
            file.write(piece)
            written += piece.nbytes
            self._progress(piece.nbytes)
        if written != self.nbytes:
            raise AssertionError(f"{self.name} has {written} bytes instead of {self.nbytes}")


def _numpy_type() -> Any:
    import numpy as np

    # Any type but bytes: gguf-py then takes the shape as numbers, not as bytes of blocks.
    return np.dtype(np.float32)


def _pieces(gguf: Any, model: ZooModel, name: str, tensor: Tensor, type_name: str) -> Iterator[Any]:
    from . import fill

    exact = model.mix.type in _EXACT
    return fill.pieces(model.family, name, tensor, type_name, exact=exact, quantize=lambda numbers: gguf.quants.quantize(numbers, gguf.GGMLQuantizationType[type_name]))


def _add_keys(writer: Any, gguf: Any, model: ZooModel, made: Plan) -> None:
    writer.add_name(model.family)
    writer.add_file_type(gguf.LlamaFileType[model.mix.file_type])
    for key, value in made.keys:
        getattr(writer, f"add_{key}")(gguf.RopeScalingType(value) if key == "rope_scaling_type" else value)
    vocabulary.write(writer, gguf, model.shape.vocabulary)


def _name(gguf: Any, model: ZooModel, tensor: Tensor) -> str:
    """A tensor's name in the file, if the base knows it for the architecture."""
    by_name = {name: arch for arch, name in gguf.MODEL_ARCH_NAMES.items()}
    if model.architecture not in by_name:
        raise DataError(f"The base knows no architecture {model.architecture!r}: gate/zoo.yaml, models.{model.family}, needs another.")
    known = {item.name: item for item in gguf.MODEL_TENSORS[by_name[model.architecture]]}
    if tensor.tensor not in known:
        raise DataError(f"The base's {model.architecture} has no tensor {tensor.tensor}: the zoo's writer and the base no longer agree.")
    base: str = gguf.TENSOR_NAMES[known[tensor.tensor]].format(bid=tensor.layer)
    return f"{base}.{tensor.suffix}" if tensor.suffix else base


def _check_space(folder: Path, needed: int) -> None:
    with files.disk_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
        free = shutil.disk_usage(folder).free
    # Names of tokens and the directory of the tensors come on top.
    if needed + (64 << 20) > free:
        raise DiskError(f"{folder} has {free / (1 << 30):.1f} GiB left and the model needs {needed / (1 << 30):.1f} GiB: free some, or choose another folder with --out.")
