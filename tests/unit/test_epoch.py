from __future__ import annotations

import pytest

from opencoti_build import components
from opencoti_build.cache import Cache
from opencoti_build.cli.common import job_count
from opencoti_build.epoch import EARLIEST, LATEST, source_date
from opencoti_build.errors import UsageError


def test_the_variable_is_seconds_or_nothing():
    assert source_date({}) is None and source_date({"SOURCE_DATE_EPOCH": ""}) is None
    for seconds in (EARLIEST, 1790000000, LATEST):
        assert source_date({"SOURCE_DATE_EPOCH": str(seconds)}) == seconds


@pytest.mark.parametrize("wish", ["abc", "-1", "0", "1.5", str(EARLIEST - 1), str(LATEST + 1), "9" * 17, "9" * 5000, "١٧٩٠٠٠٠٠٠٠"])
def test_anything_else_is_refused(wish):
    with pytest.raises(UsageError, match="SOURCE_DATE_EPOCH"):
        source_date({"SOURCE_DATE_EPOCH": wish})


@pytest.mark.parametrize("content", ['{"schema": 99}', "not json", '{"schema": 1, "key": "ab"}'])
def test_a_component_that_cannot_be_read_is_left_where_it_is(tmp_path, content):
    """Another toolkit's cache entry, or a passing read error, must not cost half an hour of building."""
    folder = Cache(tmp_path).result(components.KIND, "ab" * 32)
    folder.mkdir(parents=True)
    (folder / "component.json").write_text(content)
    assert components.find_component(Cache(tmp_path), "ab" * 32) is None
    assert (folder / "component.json").read_text() == content


def test_a_bad_epoch_is_told_and_costs_no_component(tmp_path, monkeypatch):
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "99999999999999999")
    folder = Cache(tmp_path).result(components.KIND, "ab" * 32)
    folder.mkdir(parents=True)
    (folder / "component.json").write_text('{"schema": 1, "key": "%s"}' % ("ab" * 32))
    with pytest.raises(UsageError):
        components.find_component(Cache(tmp_path), "ab" * 32)
    assert (folder / "component.json").exists()


def test_jobs_is_a_positive_number_or_not_given():
    assert job_count("") is None and job_count("3") == 3
    for text in ("0", "-1", "x", "1.5", "9" * 400):
        with pytest.raises(UsageError, match="--jobs"):
            job_count(text)
