"""gguf-py of the base: found in its tree and loaded from there, so that the names match the engine exactly."""

from __future__ import annotations

import hashlib
import importlib
import sys
from pathlib import Path
from typing import Any

from ...errors import DataError, ToolchainError


def load(folder: Path) -> Any:
    """The module ``gguf`` of a ``gguf-py`` folder.

    Raises DataError when the folder has none, ToolchainError when it cannot be imported or another gguf is loaded already.
    """
    package = folder / "gguf"
    if not (package / "gguf_writer.py").is_file():
        raise DataError(f"{folder} holds no gguf-py: give the folder of that name in the tree of the engine's base.")
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))
    try:
        module = importlib.import_module("gguf")
    except ImportError as error:
        raise ToolchainError(f"gguf-py of {folder} cannot be loaded ({error}): 'pip install numpy PyYAML' brings what it needs.") from error
    loaded = Path(module.__file__ or "").resolve().parent
    if loaded != package.resolve():
        raise ToolchainError(f"Another gguf is loaded already, from {loaded}: start a new process to use the one of {folder}.")
    return module


def digest(folder: Path) -> str:
    """Hex sha256 over the names and bytes of the package's Python files: what a written file depends on besides the data."""
    found = hashlib.sha256()
    for path in sorted((folder / "gguf").glob("*.py")):
        data = path.read_bytes()
        found.update(f"{path.name}\0{len(data)}\0".encode())
        found.update(data)
    return found.hexdigest()
