"""Plans, from trees alone."""

from __future__ import annotations

import io
import os
import subprocess
from pathlib import Path

import pytest
from cut_builder import C1, C2, C3, Checkout, binary, make
from hypothesis import given, settings
from hypothesis import strategies as st

from opencoti_build import release_layout
from opencoti_build.console import Console, Mode
from opencoti_build.errors import ChecksumError, PublishError
from opencoti_build.publish import cut, plan
from opencoti_build.publish.plan import Action, Plan
from opencoti_build.publish.tree import Content, Tree, content_of, difference

LAYOUT = release_layout.load()
QUIET = Console(io.StringIO(), mode=Mode.QUIET)
PARENT = "0" * 40


def as_hub(tree: Tree) -> dict[str, Content]:
    """How a hub lists a tree: one hash a file."""
    large = (".exe", ".llamafile", ".dll", ".so")
    return {path: Content(item.size, sha256=item.sha256) if path.endswith(large) else Content(item.size, blob=item.blob) for path, item in tree.items()}


def planned(checkout: Checkout, published: Tree) -> Plan:
    return plan.make(cut.read(checkout.cut, checkout.root, LAYOUT, QUIET), published, PARENT, LAYOUT, large=2000)


def carried_out(made: Plan, published: Tree) -> Tree:
    """What the changes, one by one, make of the tree."""
    tree = dict(published)
    for change in made.changes:
        if change.action is Action.COPY:
            assert published[change.source].same(change.content)
            tree[change.path] = published[change.source]
        elif change.action is Action.DELETE:
            del tree[change.path]
        else:
            assert (change.path in published) is (change.action is Action.REPLACE)
            assert change.file is not None
            tree[change.path] = content_of(change.file.path.read_bytes())
    return tree


def first(tmp_path: Path) -> dict[str, Content]:
    """The tree after c1."""
    made = planned(make(tmp_path / "c1"), {})
    return as_hub(made.result)


def test_a_first_cut(tmp_path: Path) -> None:
    checkout = make(tmp_path)
    made = planned(checkout, {"README.md": Content(1, blob="a"), ".gitattributes": Content(2, blob="b")})
    assert {path: item.sha256 for path, item in made.result.items() if item.sha256} == checkout.published()
    assert made.result.keys() - checkout.published().keys() == {"README.md", ".gitattributes"}
    assert {change.action for change in made.changes} == {Action.ADD}
    # The bare engine has two names and is sent once.
    sizes = [change.content.size for change in made.changes]
    assert made.sent == sum(sizes) - len(binary("x"))
    assert not difference(made.result, carried_out(made, {"README.md": Content(1, blob="a"), ".gitattributes": Content(2, blob="b")}))


def test_the_same_cut_again_changes_nothing(tmp_path: Path) -> None:
    tree = first(tmp_path)
    made = planned(make(tmp_path / "again"), tree)
    assert made.changes == () and made.sent == 0 and "nothing to send" in made.summary


def test_a_new_cut_archives_the_old_one_without_sending_its_large_files(tmp_path: Path) -> None:
    tree = first(tmp_path)
    old, new = make(tmp_path / "c1"), make(tmp_path / "c2", C2, cuda="cuda-1")
    made = planned(new, tree)
    wanted = new.published() | old.archived()
    assert made.result.keys() == wanted.keys()
    assert not difference(made.result, carried_out(made, tree))
    assert made.superseded == (C1,)
    root = sorted(path for path in made.result if "/" not in path)
    assert root == sorted([*(C2.artifact(suffix) for suffix in LAYOUT.single_files), "USAGE.md"])
    copies = made.of(Action.COPY)
    assert {change.path for change in copies} == set(old.archived())
    assert sum(change.sent for change in copies if change.content.stored_large) == 0
    # A component that did not change stays where it is and is in the archive as well.
    assert "components/cuda/cuda-1/ggml-cuda-x86_64.so" not in {change.path for change in made.changes}
    assert f"releases/archived/{C1.full_tag}/components/cuda/cuda-1/ggml-cuda-x86_64.so" in made.result


def test_bytes_that_the_hub_holds_elsewhere_are_copied_there(tmp_path: Path) -> None:
    tree = first(tmp_path)
    new = make(tmp_path / "c2", C2, cuda="cuda-1")
    (new.cut / "components/cuda/cuda-1").rename(new.cut / "components/cuda/cuda-2")
    new.sums()
    made = planned(new, tree)
    change = next(change for change in made.changes if change.path == "components/cuda/cuda-2/ggml-cuda-x86_64.so")
    assert (change.action, change.sent, change.source) == (Action.COPY, 0, "components/cuda/cuda-1/ggml-cuda-x86_64.so")


def test_three_cuts_leave_two_archives(tmp_path: Path) -> None:
    tree: Tree = first(tmp_path)
    for identity in (C2, C3):
        made = planned(make(tmp_path / identity.tag, identity, cuda=identity.tag), tree)
        tree = as_hub(made.result)
    archives = {path.split("/")[2] for path in tree if path.startswith("releases/archived/")}
    assert archives == {C1.full_tag, C2.full_tag}
    assert {path.split("/")[1] for path in tree if path.startswith("releases/")} == {"archived", C3.full_tag}


def test_mirrors_follow_the_checkout_and_the_rest_stays(tmp_path: Path) -> None:
    tree = first(tmp_path)
    tree |= {"docs/old.md": Content(3, blob="c"), "README.md": Content(3, blob="d"), "bench/report.html": Content(3, blob="e")}
    again = make(tmp_path / "again")
    (again.root / "docs" / "features" / "kvarn.md").write_text("KVarN, more of it\n")
    (again.root / "docs" / "new.md").write_text("new\n")
    made = planned(again, tree)
    assert {(change.path, change.action) for change in made.changes} == {
        ("docs/old.md", Action.DELETE),
        ("docs/features/kvarn.md", Action.REPLACE),
        ("docs/new.md", Action.ADD),
    }


def test_what_is_not_in_the_checkout_at_all_is_left_as_it_is(tmp_path: Path) -> None:
    tree = first(tmp_path)
    again = make(tmp_path / "again")
    for path in sorted((again.root / "patches").rglob("*"), reverse=True):
        path.rmdir() if path.is_dir() else path.unlink()
    (again.root / "patches").rmdir()
    assert planned(again, tree).changes == ()


def test_only_what_git_tracks_is_mirrored(tmp_path: Path) -> None:
    checkout = make(tmp_path)
    env = {"PATH": os.environ["PATH"], "HOME": str(tmp_path), "GIT_CONFIG_NOSYSTEM": "1"}
    subprocess.run(["git", "init", "-q", "."], cwd=tmp_path, env=env, check=True)
    subprocess.run(["git", "add", "docs", "patches", "pin"], cwd=tmp_path, env=env, check=True)
    checkout.put("docs/notes-to-myself.txt", b"not for publication\n")
    assert "docs/notes-to-myself.txt" not in planned(checkout, {}).result
    assert "docs/features/kvarn.md" in planned(checkout, {}).result
    (tmp_path / "docs" / "USAGE.md").unlink()
    with pytest.raises(PublishError, match="USAGE.md is under version control and not there"):
        planned(checkout, {})


@pytest.mark.skipif(os.name == "nt", reason="links")
def test_a_mirror_that_is_a_link(tmp_path: Path) -> None:
    checkout = make(tmp_path)
    (tmp_path / "docs").rename(tmp_path / "texts")
    (tmp_path / "docs").symlink_to("texts")
    with pytest.raises(PublishError, match="docs is a symbolic link"):
        planned(checkout, {})


@pytest.mark.parametrize("what", ["other bytes", "missing", "one more", "a component less"])
def test_a_published_cut_does_not_change(tmp_path: Path, what: str) -> None:
    tree = first(tmp_path)
    again = make(tmp_path / "again")
    if what == "other bytes":
        (again.cut / C1.artifact("x86_64.llamafile")).write_bytes(b"MZ\0 another build")
    elif what == "missing":
        (again.cut / C1.artifact("x86_64.llamafile")).unlink()
    elif what == "one more":
        (again.cut / "sbom.json").write_text("{}")
    else:
        (again.cut / "components/cuda/cuda-1/ggml-cuda-x86_64.so").unlink()
    again.sums()
    with pytest.raises(PublishError, match="a published cut does not change; raise the tag"):
        planned(again, tree)


def test_an_archived_cut_is_not_published_again(tmp_path: Path) -> None:
    tree = as_hub(planned(make(tmp_path / "c2", C2), first(tmp_path)).result)
    with pytest.raises(PublishError, match="is archived there already"):
        planned(make(tmp_path / "again"), tree)


def test_the_archive_is_never_overwritten(tmp_path: Path) -> None:
    tree = first(tmp_path) | {f"releases/archived/{C1.full_tag}/SHA256SUMS": Content(5, blob="f" * 40)}
    with pytest.raises(PublishError, match="the archive is never overwritten"):
        planned(make(tmp_path / "c2", C2), tree)


def test_components_of_nobody_knows_which_cut(tmp_path: Path) -> None:
    tree = first(tmp_path) | {C3.artifact("x86_64.llamafile"): Content(5, sha256="f" * 64)}
    with pytest.raises(PublishError, match="cannot be told.*c1, .*c3"):
        planned(make(tmp_path / "c2", C2), tree)


@pytest.mark.parametrize(
    ("harm", "error", "sentence"),
    [
        (lambda folder: (folder / "SHA256SUMS").unlink(), PublishError, "is not whole: SHA256SUMS is missing"),
        (lambda folder: (folder / "RELEASE_NOTES.md").write_text("other"), ChecksumError, "RELEASE_NOTES.md is not the file that SHA256SUMS names"),
        (lambda folder: (folder / "more.txt").write_text("x"), ChecksumError, "more.txt is not in SHA256SUMS"),
        (lambda folder: (folder / C1.artifact("aarch64.llamafile")).unlink(), ChecksumError, "which is not in"),
        (lambda folder: (folder / "link").symlink_to("SHA256SUMS"), PublishError, "link is a symbolic link: put the file itself there"),
        (lambda folder: (folder / "folder").symlink_to(folder.parent, target_is_directory=True), PublishError, "folder is a symbolic link"),
        (lambda folder: os.mkfifo(folder / "pipe"), PublishError, "pipe is neither file nor folder"),
    ],
)
@pytest.mark.skipif(os.name == "nt", reason="links and pipes")
def test_folders_that_are_no_cut(tmp_path: Path, harm: object, error: type[Exception], sentence: str) -> None:
    checkout = make(tmp_path)
    harm(checkout.cut)  # type: ignore[operator]
    with pytest.raises(error, match=sentence):
        planned(checkout, {})


def test_no_folder_and_a_wrong_name(tmp_path: Path) -> None:
    with pytest.raises(PublishError, match="There is no cut at"):
        cut.read(tmp_path / "nothing", tmp_path, LAYOUT, QUIET)
    (tmp_path / "c1").mkdir()
    with pytest.raises(PublishError, match="is not named as a cut is"):
        cut.read(tmp_path / "c1", tmp_path, LAYOUT, QUIET)


def test_the_table_and_the_document(tmp_path: Path) -> None:
    tree = first(tmp_path)
    made = planned(make(tmp_path / "c2", C2), tree)
    said = io.StringIO()
    made.show(Console(said, mode=Mode.PLAIN), "owner/engine")
    text = said.getvalue()
    assert f"Plan: {C2.full_tag} to owner/engine" in text and f"moves to releases/archived/{C1.full_tag}/" in text and made.summary in text
    document = made.to_dict()
    assert document["bytes_sent"] == made.sent and len(document["changes"]) == len(made.changes) and document["superseded"] == [C1.full_tag]
    assert document["result"].keys() == made.result.keys()


NAMES = st.sampled_from(
    [f"{folder}{name}" for folder in ("docs/", "pin/", "bench/", "", f"releases/{C1.full_tag}/", f"releases/archived/{C3.full_tag}/", "components/cuda/b/") for name in ("one.md", "two.so", "three.exe")]
    + [C1.artifact(suffix) for suffix in LAYOUT.single_files]
)


@settings(max_examples=60, deadline=None)
@given(st.dictionaries(NAMES, st.integers(0, 3)))
def test_the_changes_always_give_the_result(tmp_path_factory: pytest.TempPathFactory, drawn: dict[str, int]) -> None:
    folder = tmp_path_factory.getbasetemp() / "any"
    checkout = Checkout(folder, C2) if folder.exists() else make(folder, C2)
    published = as_hub({path: content_of(binary(str(seed), 2500)) for path, seed in drawn.items()})
    try:
        made = planned(checkout, published)
    except PublishError:
        # Components and no cut they could belong to.
        assert any(path.startswith("components/") for path in drawn)
        return
    assert not difference(made.result, carried_out(made, published))
    assert set(checkout.published()) <= made.result.keys()
    assert not any("c1" in path for path in made.result if "/" not in path)
    assert {path for path in drawn if path.startswith("bench/")} <= made.result.keys()
    kept = {content.sha256 or content.blob for path, content in published.items() if not path.startswith(("docs/", "pin/"))}
    assert kept <= {key for content in made.result.values() for key in (content.sha256, content.blob)}, "bytes of a cut got lost"
