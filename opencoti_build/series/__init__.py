"""The patch series: its folder, its commits, its work tree, and what can be asked of it."""

from .base import BaseTree, tree_id_of
from .chain import PatchedTree, export_repository, patched_tree
from .engine import Attempt, Outcome
from .folder import Series, SeriesFolder
from .workspace import Applied, Status, Workspace

__all__ = [
    "Applied",
    "Attempt",
    "BaseTree",
    "Outcome",
    "PatchedTree",
    "Series",
    "SeriesFolder",
    "Status",
    "Workspace",
    "export_repository",
    "patched_tree",
    "tree_id_of",
]
