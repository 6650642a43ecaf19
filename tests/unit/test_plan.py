from __future__ import annotations

import io

from opencoti_build.console import Console, Mode
from opencoti_build.plan import Part, Plan, State, Timings

PLAN = Plan(
    "x.llamafile",
    (
        Part("engine a", "zig", State.BUILD, estimate=100.0),
        Part("engine b", "zig", State.BUILD),
        Part("library", "with engine a", State.BUILD, estimate=0.0),
        Part("engine c", "zig", State.READY, estimate=50.0),
        Part("ggml-cuda.so", "component cuda", State.MISSING, "no such file"),
    ),
)


def test_only_what_is_to_be_built_counts_for_the_estimate():
    assert PLAN.estimate == 100.0
    assert [part.name for part in PLAN.missing] == ["ggml-cuda.so"]


def test_the_table_names_every_part_and_why_one_is_missing():
    stream = io.StringIO()
    PLAN.show(Console(stream, mode=Mode.PLAIN))
    text = stream.getvalue()
    for word in ("engine a", "engine b", "engine c", "ggml-cuda.so", "no such file", "1 min 40 s"):
        assert word in text
    assert "0.0 s" not in text
    assert "3 to build, about 1 min 40 s (some were never timed here); 1 missing" in text


def test_timings_survive_and_a_damaged_file_is_no_error(tmp_path):
    timings = Timings(tmp_path / "timings.json")
    assert timings.get("engine a") is None
    timings.put("engine a", 12.34)
    timings.put("engine b", 5)
    timings.put("engine a", 0.4)
    assert (timings.get("engine a"), timings.get("engine b")) == (12.3, 5.0)
    (tmp_path / "timings.json").write_bytes(b"\xff{")
    assert timings.get("engine a") is None
    timings.put("engine c", 1)
    assert timings.get("engine c") == 1.0
