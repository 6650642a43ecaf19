"""The model zoo: small models of every architecture for the gates, and models of real shapes for measuring speed.

Nothing is downloaded: the shapes are data (``gate/zoo.yaml``), the weights are random and the same bytes on every machine. Needs numpy,
PyYAML and gguf-py of the base; ``python -m opencoti_build.gates.zoo`` runs where nothing else is installed.

    models = zoo.load(project.root / "gate" / "zoo.yaml")
    paths = zoo.ensure(workshop, ["qwen3", "gemma4-q8_0"])     # from the cache, or written now
"""

from .architectures import Plan, plan
from .provide import choose, ensure, gguf_folder, write_all, zoo_file
from .shapes import Group, ZooModel, load
from .writer import WRITER_VERSION, data_size, write

__all__ = ["WRITER_VERSION", "Group", "Plan", "ZooModel", "choose", "data_size", "ensure", "gguf_folder", "load", "plan", "write", "write_all", "zoo_file"]
