from __future__ import annotations

from pathlib import Path

import pytest

from opencoti_build.cache import Cache, default_root, digest_of


def test_the_root_is_the_users_choice_or_the_cache_folder():
    assert default_root({"OPENCOTI_CACHE": "/somewhere"}) == Path("/somewhere")
    assert default_root({"XDG_CACHE_HOME": "/c"}).parent == Path("/c")


def test_a_digest_ignores_order_and_sees_every_value():
    assert digest_of({"a": 1, "b": [1, 2]}) == digest_of({"b": [1, 2], "a": 1})
    assert len({digest_of(value) for value in ({"a": 1}, {"a": "1"}, {"a": 2}, {"b": 1}, [["a", 1]])}) == 5


def test_a_result_exists_only_when_it_is_complete(tmp_path):
    cache = Cache(tmp_path)
    with pytest.raises(RuntimeError), cache.producing("kind", "key") as directory:
        (directory / "f").write_text("half")
        raise RuntimeError
    assert not cache.result("kind", "key").exists()
    with cache.producing("kind", "key") as directory:
        (directory / "f").write_text("whole")
    assert (cache.result("kind", "key") / "f").read_text() == "whole"
