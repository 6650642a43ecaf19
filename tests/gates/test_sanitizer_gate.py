"""The data of the sanitizers' gate, its planted defects, and the copy of the tree it builds in."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from opencoti_build.errors import DataError
from opencoti_build.gates import sanitizer_data
from opencoti_build.gates.sanitizer_data import Plant
from opencoti_build.gates.sanitizers import Run, planted, synchronize
from opencoti_build.project import find_project
from opencoti_build.sources import Tree

ROOT = find_project().root
DATA = ROOT / "gate" / "sanitizers.yaml"
PLANT = Plant("p", "address", "a/b.cpp", "one\n", "two\n", "k", ())


def tree(folder: Path, **files: str) -> Tree:
    for name, text in files.items():
        path = folder / name.replace("__", "/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return Tree(folder, "a" * 40)


def content(folder: Path) -> dict[str, str]:
    return {path.relative_to(folder).as_posix(): path.read_text() for path in folder.rglob("*") if path.is_file()}


def test_the_copy_has_the_trees_files_and_a_defect_only_while_it_is_planted(tmp_path: Path) -> None:
    source, copy = tree(tmp_path / "tree", a__b="x", a__c="y"), tmp_path / "copy"
    (source.path / "a" / "b.cpp").write_text("zero\none\n")
    (source.path / ".git").mkdir()
    (source.path / ".git" / "HEAD").write_text("ref")
    assert synchronize(source, copy, None).path == copy
    clean = {"a/b": "x", "a/c": "y", "a/b.cpp": "zero\none\n"}
    assert content(copy) == clean
    times = {name: (copy / name).stat().st_mtime_ns for name in clean}
    synchronize(source, copy, PLANT)
    assert content(copy) == {**clean, "a/b.cpp": "zero\ntwo\n"}
    assert {name: (copy / name).stat().st_mtime_ns for name in ("a/b", "a/c")} == {name: times[name] for name in ("a/b", "a/c")}
    (source.path / "a" / "c").unlink()
    synchronize(source, copy, None)
    assert content(copy) == {"a/b": "x", "a/b.cpp": "zero\none\n"}
    assert (source.path / "a" / "b.cpp").read_text() == "zero\none\n"


@pytest.mark.parametrize("text", ["none", "one\none\n"])
def test_a_plant_that_no_longer_fits_says_so(text: str) -> None:
    with pytest.raises(DataError, match="adapt it"):
        planted(text.encode(), PLANT)


def test_a_plant_in_a_file_that_is_gone_says_so(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=re.escape("a/b.cpp")):
        synchronize(tree(tmp_path / "tree", other="x"), tmp_path / "copy", PLANT)


def test_the_projects_own_data() -> None:
    data = sanitizer_data.load(DATA)
    assert set(data.sanitizers) == {"address", "thread"}
    assert {plant.sanitizer for plant in data.plants.values()} == set(data.sanitizers), "each sanitizer is proven by a planted defect"
    for entry in (*data.plain, *data.left_out, *data.known):
        assert entry.reason
    for word in (*data.tests, *(entry.what for entry in data.left_out), *(test for plant in data.plants.values() for test in plant.tests)):
        name, _, function = word.partition("::")
        assert function.partition("[")[0] in (ROOT / name).read_text()


def test_every_planted_defect_fits_the_series() -> None:
    """The plants' texts stand in the patches, as added lines one below the other."""
    series = [path.read_text("utf-8", "replace") for path in sorted((ROOT / "patches" / "llama.cpp").glob("*.patch"))]
    added = "\n".join(line[1:] for patch in series for line in patch.splitlines() if line.startswith("+"))
    for plant in sanitizer_data.load(DATA).plants.values():
        assert plant.text in added + "\n", f"{plant.name}: adapt gate/sanitizers.yaml to the series"


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (("sanitizer: address", "sanitizer: adress"), "'address'"),
        (("    kind: \"ThreadSanitizer", "    knd: \"ThreadSanitizer"), "kind"),
        (("known:\n", "known:\n  - {match: '(', reason: x}\n"), "regular expression"),
    ],
)
def test_a_mistake_in_the_data_names_its_place(tmp_path: Path, change: tuple[str, str], says: str) -> None:
    text = DATA.read_text()
    assert change[0] in text
    (tmp_path / "sanitizers.yaml").write_text(text.replace(*change, 1))
    with pytest.raises(DataError, match=says):
        sanitizer_data.load(tmp_path / "sanitizers.yaml")


def test_a_run_survives_json() -> None:
    run = Run("address", (), {"passed": 3}, ("x",), 1.5)
    assert Run.from_dict(run.to_dict()) == run
    with pytest.raises(ValueError):
        Run.from_dict({**run.to_dict(), "schema": 99})
