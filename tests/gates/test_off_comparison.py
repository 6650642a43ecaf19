"""The gate "off means off" without an engine: what it reads, what it compares, what it says."""

from __future__ import annotations

import itertools
import json
import os
import struct
import threading
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from opencoti_build.cache import Cache
from opencoti_build.cli.common import CommandContext
from opencoti_build.console import Console, Mode
from opencoti_build.errors import BuildError, DataError, UsageError
from opencoti_build.gates.off import compare, fields, matrix, models
from opencoti_build.gates.off.gate import SIDES, Subject, _Processors, _Runs
from opencoti_build.gates.off.mirror import mirror
from opencoti_build.gates.off.probe import Probe
from opencoti_build.gates.off.results import Outcome, Record, Result, read_defaults, read_dump, read_results
from opencoti_build.project import find_project
from opencoti_build.runner import SystemRunner

# ---- the table of upstream's parameters -----------------------------------------------------------------------------------------

HEADER = """
#define STRANGE { ; }
struct forward;
// struct commented { int no; };
struct common_params_model {
    std::string path = ""; // where; it lies {
    std::string get() const { if (x) { return path; } return "};"; }
};
struct common_params {
    int32_t n_ctx = 4096, n_batch = 2048; /* two; at once */
    float   split[128] = {0};
    bool    mask[GGML_MAX_N_THREADS] = {false};
    std::vector<std::string> stops = {"\\n", ";", "}"};
    std::map<std::string, std::vector<int>> table;
    enum llama_split_mode mode = LLAMA_SPLIT_MODE_LAYER;
    struct common_params_model model;
    const char * name = nullptr;
    char letter = ';';
    void (*callback)(struct ggml_tensor * t, bool ask, void * data) = nullptr;
    std::function<bool(int, float)> judge;
    int braces{7};
    struct impl;
    static constexpr int limit = 3;
    common_params() = default;
    common_params(int a, int b) : n_ctx(a) {}
    bool empty() const;
    std::vector<int> sizes = std::vector<int>(max_devices(), 1024 * 1024);
};
enum llama_example { LLAMA_EXAMPLE_COMMON, LLAMA_EXAMPLE_SERVER = 7, // the server
    LLAMA_EXAMPLE_COUNT, };
"""

LLAMA_H = "".join(f"struct {name} {{ bool one; int32_t two; }};\n" for name in fields.LLAMA)


def test_members_are_read_in_order_whatever_stands_around_them() -> None:
    found = {item.name: item.fields for item in fields.structures(HEADER)}
    assert found == {
        "common_params_model": ("path",),
        "common_params": (
            "n_ctx", "n_batch", "split", "mask", "stops", "table", "mode", "model", "name", "letter", "callback", "judge", "braces", "sizes",
        ),
    }  # fmt: skip


def test_the_table_names_every_member_and_every_program() -> None:
    text = fields.render(LLAMA_H, HEADER)
    assert text.count("void each_field(") == 2 * (len(fields.LLAMA) + 2), "declared, so that structures may hold each other, and defined"
    assert 'out.field("judge", value.judge);' in text
    assert '{ "server", LLAMA_EXAMPLE_SERVER },' in text
    assert "COUNT" not in text


@pytest.mark.parametrize(("llama", "common"), [("", HEADER), (LLAMA_H, "struct other { int x; };"), (LLAMA_H, HEADER.split("enum llama_example")[0])])
def test_a_header_that_lacks_what_is_needed_is_refused(llama: str, common: str) -> None:
    with pytest.raises(DataError, match="table cannot be written"):
        fields.render(llama, common)


# ---- the copy of a tree ---------------------------------------------------------------------------------------------------------


def listing(folder: Path) -> dict[str, tuple[str, object]]:
    found: dict[str, tuple[str, object]] = {}
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder).as_posix()
        if path.is_symlink():
            found[name] = ("link", os.readlink(path))
        elif path.is_file():
            found[name] = ("file", (path.read_bytes(), bool(path.stat().st_mode & 0o100)))
        else:
            found[name] = ("folder", None)
    return found


def test_a_mirror_takes_over_every_change_and_leaves_the_rest_alone(tmp_path: Path) -> None:
    source, target = tmp_path / "source", tmp_path / "target"
    for name, text in {"a.c": "one", "sub/b.c": "two", "sub/c.c": "three", "gone/d.c": "four", "tool": "#!/bin/sh\n", "turns": "file"}.items():
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        (source / name).write_text(text)
    (source / "link").symlink_to("a.c")
    (source / ".git").mkdir()
    (source / ".git" / "index").write_text("no part of the tree")
    assert mirror(source, target) > 0
    (source / ".git" / "index").unlink()
    (source / ".git").rmdir()
    assert listing(target) == listing(source)
    assert mirror(source, target) == 0
    for path in target.rglob("*.c"):
        os.utime(path, (1000, 1000))

    (source / "a.c").write_text("ONE")  # same size
    (source / "sub" / "c.c").unlink()
    (source / "gone" / "d.c").unlink()
    (source / "gone").rmdir()
    (source / "tool").chmod(0o755)
    (source / "turns").unlink()
    (source / "turns").mkdir()
    (source / "turns" / "into").write_text("a folder")
    (source / "link").unlink()
    (source / "link").symlink_to("sub/b.c")
    os.utime(source / "a.c", (500, 500))
    assert mirror(source, target) > 0
    assert listing(target) == listing(source)
    assert (target / "a.c").stat().st_mtime > 1000, "a compiler has to see the change, however old the file is"
    assert (target / "sub" / "b.c").stat().st_mtime == 1000


# ---- configurations -------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def real() -> matrix.Matrix:
    return matrix.load(find_project().root / "gate" / "off.yaml")


def test_the_matrix_covers_every_combination_that_upstream_allows(real: matrix.Matrix) -> None:
    names = {item.name for item in real.configurations}
    for fa, kv, cache, seq, mtp in itertools.product(("on", "off"), ("unified", "split"), ("f16", "q8_0", "q4_0"), (1, 4), ("on", "off")):
        value = cache if fa == "on" else "f16"
        assert f"fa={fa},kv={kv},k={cache},v={value},seq={seq},mtp={mtp},threads=1" in names
    assert all(item.v == "f16" for item in real.configurations if item.fa == "off")
    assert len(names) == len(real.configurations)


def test_wishes_choose(real: matrix.Matrix) -> None:
    chosen = real.chosen(matrix.wishes("fa=on, seq=4"), mtp=False)
    assert chosen and all(item.fa == "on" and item.seq == 4 and not item.mtp for item in chosen)
    assert any(item.mtp for item in real.chosen((), mtp=True))
    assert set(real.chosen((), mtp=True, extra=False)) == set(real.regular) and set(real.regular).isdisjoint(real.extra) and real.extra
    with pytest.raises(UsageError, match=r"did you mean seq="):
        matrix.wishes("sec=4")


DATA = """
schema: 1
workload: {context: 512, batch: 64, ubatch: 32, prompt: 88, max_window: 1024, decode: 3, rounds: 2}
matrix:
  attention: [{fa: "on", cache: [f16 f16]}]
  kv: [unified]
  sequences: [1]
  mtp: ["off"]
  threads: [1]
extra: [ "fa=off,kv=split,k=f16,v=f16,seq=4,mtp=on,threads=2" ]
"""


def test_a_small_file_is_read(tmp_path: Path) -> None:
    (tmp_path / "off.yaml").write_text(DATA)
    found = matrix.load(tmp_path / "off.yaml")
    assert [item.name for item in found.configurations] == [
        "fa=on,kv=unified,k=f16,v=f16,seq=1,mtp=off,threads=1",
        "fa=off,kv=split,k=f16,v=f16,seq=4,mtp=on,threads=2",
    ]
    assert found.words()[:4] == ["--context", "512", "--batch", "64"] and "--max-window" in found.words()


@pytest.mark.parametrize(
    ("old", "new", "complaint"),
    [
        ("f16 f16", "f16", "types of K and V"),
        ("f16 f16", "f16 ../f16", "types of K and V"),
        ("kv: [unified]", "kv: [shared]", "is not known"),
        ("seq=4", "seq=0", "number from 1 to 64"),
        ("threads=2", "threads=two", "number from 1 to 64"),
        ("mtp=on,", "", "a configuration is"),
        ("fa=off", "fa=of", "is not known"),
        ("rounds: 2", "rounds: 2, steps: 3", "unknown field"),
        ("schema: 1", "schema: 2", "not between"),
    ],
)
def test_a_wrong_file_is_refused_with_its_place(tmp_path: Path, old: str, new: str, complaint: str) -> None:
    assert old in DATA
    (tmp_path / "off.yaml").write_text(DATA.replace(old, new))
    with pytest.raises(DataError, match=complaint) as caught:
        matrix.load(tmp_path / "off.yaml")
    assert "off.yaml" in caught.value.message


# ---- results --------------------------------------------------------------------------------------------------------------------

RESULTS = "opencoti-gate-probe 1\nbackend\tCPU | AVX2 = 1\nconfig\ta\nhash\ta\treserved\t11\t4\nhash\ta\tlogits\t22\t9\nconfig\tb\nrefused\tb\tno context\nconfig\tc\nabsent\tc\n"


def test_results_tell_what_became_of_each_configuration() -> None:
    found = read_results(RESULTS + "end\n")
    assert found.backend == "CPU | AVX2 = 1" and found.complete
    assert found.results == (
        Result("a", Outcome.RUN, {"reserved": "11", "logits": "22"}),
        Result("b", Outcome.REFUSED, {}, "no context"),
        Result("c", Outcome.ABSENT),
    )


def test_a_probe_that_ended_early_leaves_a_crash() -> None:
    found = read_results(RESULTS + "config\td\n")
    assert not found.complete
    assert found.results[-1] == Result("d", Outcome.CRASHED)


@pytest.mark.parametrize("text", ["", "other 1\n", RESULTS + "hash\tnever\tlogits\t1\t1\n", RESULTS + "nonsense\n"])
def test_what_no_probe_writes_is_refused(text: str) -> None:
    with pytest.raises(DataError):
        read_results(text)


def test_results_differ_in_what_they_say() -> None:
    one = Result("a", Outcome.RUN, {"logits": "1", "state": "2"})
    assert one.same(replace(one))
    other = replace(one, hashes={"logits": "1", "state": "3"})
    assert not one.same(other) and one.differing(other) == ("state",)
    assert not one.same(Result("a", Outcome.REFUSED, {}, "why"))


# ---- dumps ----------------------------------------------------------------------------------------------------------------------

CONFIG = "fa=on"


def node(number: int, op: str, name: str, *, ne: str = "64,32,1,1", params: str = "", sources: Sequence[str] = (), step: str = "prompt 0", graph: int = 0) -> str:
    text = f"node\t{step}\t{graph}\t{number}\top={op}\tname={name}\ttype=f32\tne={ne}\tnb=4,256,8192,8192\tflags=16\tparams={params}\tview="
    return text + "".join(f"\tsrc{index}={source}" for index, source in enumerate(sources)) + "\ton=CPU"


GRAPH = [
    "graph\tprompt 0\t4 nodes\t1 splits",
    node(0, "GET_ROWS", "inp_embd", sources=["token_embd.weight f16 ne 64,272,1,1 nb 2,128,34816,34816 flags 0"]),
    node(1, "RMS_NORM", "norm-0", params="bd378635", sources=["#0 inp_embd"]),
    node(2, "MUL", "attn_norm-0", sources=["#1 norm-0"]),
    node(3, "MUL_MAT", "Qcur-0", sources=["blk.0.attn_q.weight f16", "#2 attn_norm-0"]),
]


def dump(tmp_path: Path, aspect: str, lines: Sequence[str], name: str = "dump") -> dict[tuple[str, str], tuple[Record, ...]]:
    path = tmp_path / name
    path.write_text("".join(f"{CONFIG}\t{aspect}\t{line}\n" for line in lines))
    return dict(read_dump(path))


def only(tmp_path: Path, aspect: str, base: Sequence[str], ours: Sequence[str]) -> compare.Finding:
    found = compare.differences(CONFIG, dump(tmp_path, aspect, base, "base"), dump(tmp_path, aspect, ours, "ours"), model="llama-f16")
    assert [item.aspect for item in found] == [aspect]
    assert found[0].model == "llama-f16" and found[0].configuration == CONFIG
    return found[0]


@pytest.mark.parametrize("aspect", ["reserved", "computed"])
def test_equal_graphs_have_no_difference(tmp_path: Path, aspect: str) -> None:
    both = dump(tmp_path, aspect, GRAPH)
    assert compare.differences(CONFIG, both, dump(tmp_path, aspect, GRAPH, "other"), model="m") == []


def test_an_extra_node_is_named(tmp_path: Path) -> None:
    ours = ["graph\tprompt 0\t5 nodes\t1 splits", *GRAPH[1:3], node(2, "SCALE", "extra", params="0000803f"), node(3, "MUL", "attn_norm-0", sources=["#1 norm-0"]), node(4, "MUL_MAT", "Qcur-0")]
    found = only(tmp_path, "reserved", GRAPH, ours)
    assert found.place == "node 2 of graph 0 of 'prompt 0'"
    assert found.pristine == "MUL 'attn_norm-0' (f32, 64 x 32 x 1 x 1)"
    assert found.patched == "an extra SCALE 'extra' (f32, 64 x 32 x 1 x 1) before it"


def test_a_missing_node_is_named(tmp_path: Path) -> None:
    found = only(tmp_path, "computed", GRAPH, [*GRAPH[:2], node(1, "MUL", "attn_norm-0"), node(2, "MUL_MAT", "Qcur-0")])
    assert found.place.startswith("node 1 ")
    assert found.pristine == "RMS_NORM 'norm-0' (f32, 64 x 32 x 1 x 1) before it"
    assert found.patched == "MUL 'attn_norm-0' (f32, 64 x 32 x 1 x 1) at once"


def test_a_node_at_the_end_is_named(tmp_path: Path) -> None:
    found = only(tmp_path, "computed", GRAPH, [*GRAPH, node(4, "ADD", "more")])
    assert (found.place, found.pristine) == ("node 4 of graph 0 of 'prompt 0'", "no such node")
    assert found.patched.startswith("ADD 'more'")


@pytest.mark.parametrize(
    ("change", "what", "base", "ours"),
    [
        ({"params": "be378635"}, "parameters of the operation", "'bd378635'", "'be378635'"),
        ({"sources": ["#0 other"]}, "source 0", "'#0 inp_embd'", "'#0 other'"),
        ({"sources": []}, "source 0", "'#0 inp_embd'", "none"),
    ],
)
def test_a_changed_field_is_named_with_both_values(tmp_path: Path, change: dict[str, object], what: str, base: str, ours: str) -> None:
    values: dict[str, object] = {"params": "bd378635", "sources": ["#0 inp_embd"], **change}
    found = only(tmp_path, "reserved", GRAPH, [*GRAPH[:2], node(1, "RMS_NORM", "norm-0", **values), *GRAPH[3:]])  # type: ignore[arg-type]
    assert found.place == f"node 1 of graph 0 of 'prompt 0' (RMS_NORM 'norm-0'), {what}"
    assert (found.pristine, found.patched) == (base, ours)


def test_another_number_of_splits_is_named(tmp_path: Path) -> None:
    found = only(tmp_path, "reserved", GRAPH, ["graph\tprompt 0\t4 nodes\t2 splits", *GRAPH[1:]])
    assert (found.place, found.pristine, found.patched) == ("graph 'prompt 0'", "'1 splits'", "'2 splits'")


def test_the_node_that_a_removed_one_moves_does_not_hide_in_the_next_graph(tmp_path: Path) -> None:
    second = node(0, "GET_ROWS", "inp_embd", step="decode 0")
    found = only(tmp_path, "computed", [*GRAPH, second], [*GRAPH[:-1], second])
    assert found.place.startswith("node 3 ") and "Qcur-0" in found.pristine
    assert "decode 0" in found.patched or "inp_embd" in found.patched


def data_line(text: str, data: bytes) -> list[str]:
    return [f"{text}\t{len(data)}\t{hash(data)}", f"bytes\t{data.hex()}"]


def test_a_changed_mask_value_is_named_by_its_place(tmp_path: Path) -> None:
    values = [0.0] * 12
    base = data_line("input\tprompt 0\t1\tattn_inp_kq_mask\tf16\t4,3,1,1", struct.pack("<12e", *values))
    values[6] = -1.5
    found = only(tmp_path, "inputs", base, data_line("input\tprompt 0\t1\tattn_inp_kq_mask\tf16\t4,3,1,1", struct.pack("<12e", *values)))
    assert found.place == "input 'attn_inp_kq_mask' (f16, 4 x 3 x 1 x 1) of graph 1 of 'prompt 0', value [2, 1]"
    assert (found.pristine, found.patched) == ("0.0 (0000)", "-1.5 (00be)")


def test_a_changed_logit_is_named_by_token_and_index(tmp_path: Path) -> None:
    base, ours = (data_line("logits\tdecode 2\t3\t91\t17", struct.pack("<3f", 1.0, value, 3.0)) for value in (0.5, 0.50000006))
    found = only(tmp_path, "logits", base, ours)
    assert found.place == "'decode 2', sequence 3, position 91, token 17, logit 1"
    assert found.pristine == "0.5 (0000003f)" and found.patched.endswith("(0100003f)")


def test_a_changed_state_is_named_by_its_byte_or_its_size(tmp_path: Path) -> None:
    blob = bytes(range(32))
    base = data_line("state\tafter decode\tsequence 1", blob)
    found = only(tmp_path, "state", base, data_line("state\tafter decode\tsequence 1", blob[:20] + b"\xff" + blob[21:]))
    assert found.place == "sequence 1 after decode, byte 20 of 32"
    assert found.pristine.startswith("14 15") and found.patched.startswith("ff 15")
    found = only(tmp_path, "state", base, data_line("state\tafter decode\tsequence 1", blob + b"\0"))
    assert (found.place, found.pristine, found.patched) == ("sequence 1 after decode, size", "32 bytes", "33 bytes")


def test_memory_and_drafts_are_named(tmp_path: Path) -> None:
    found = only(tmp_path, "memory", ["memory\tcontext\tCPU\tmodel=10\tcontext=20\tcompute=30"], ["memory\tcontext\tCPU\tmodel=10\tcontext=21\tcompute=30"])
    assert (found.place, found.pristine, found.patched) == ("context, buffers of type CPU, context", "20", "21")
    found = only(tmp_path, "drafts", ["draft\tround 0\t1\t5 6 7"], ["draft\tround 0\t1\t5 6 8"])
    assert (found.place, found.pristine, found.patched) == ("draft of 'round 0', sequence 1", "'5 6 7'", "'5 6 8'")


def test_a_record_too_many_and_another_order_are_named(tmp_path: Path) -> None:
    line = "memory\tcontext\tCPU\tmodel=1\tcontext=2\tcompute=3"
    found = only(tmp_path, "memory", [line], [line, line.replace("CPU", "CPU_REPACK")])
    assert (found.pristine, found.patched) == ("nothing", "it") and "CPU_REPACK" in found.place
    found = only(tmp_path, "drafts", ["draft\tround 0\t0\t1"], ["remove\tround 0\t0\t9\tyes\tyes"])
    assert found.place == "the order of what happens"


@given(st.lists(st.sampled_from(GRAPH[1:]), max_size=6), st.lists(st.sampled_from(GRAPH[1:]), max_size=6))
def test_any_two_graphs_are_told_apart(base: list[str], ours: list[str]) -> None:
    records = [tuple(Record(tuple(line.split("\t"))) for line in lines) for lines in (base, ours)]
    found = compare.first_difference("reserved", records[0], records[1])
    assert (found is None) == (base == ours)
    assert found is None or (found.place and found.pristine != found.patched)


# ---- defaults -------------------------------------------------------------------------------------------------------------------

DEFAULTS = (
    "field\tllama_context_params.n_batch\t2048\nfield\tserver common_params.port\t8080\n"
    "option\tserver\t-c --ctx-size\thelp\t\"size\"\noption\tserver\t-c --ctx-size\tvalues\tN\n"
)


def test_upstreams_defaults_must_stay_and_ours_are_listed_apart() -> None:
    added = 'option\tserver\t--gpu\thelp\t"ours"\n'
    found = compare.compare_defaults(read_defaults(DEFAULTS), read_defaults(DEFAULTS + added))
    assert found.findings == () and found.added == (("server", "--gpu"),)


@pytest.mark.parametrize(
    ("old", "new", "place", "base", "ours"),
    [
        ("n_batch\t2048", "n_batch\t1024", "llama_context_params.n_batch", "2048", "1024"),
        ("field\tserver common_params.port\t8080\n", "", "server common_params.port", "8080", "no such field"),
        ('"size"', '"other size"', "option -c, --ctx-size of server, help", '"size"', '"other size"'),
        ("-c --ctx-size", "--ctx-size", "option -c, --ctx-size of server", "it", "none with these names"),
    ],
)
def test_a_changed_default_is_named(old: str, new: str, place: str, base: str, ours: str) -> None:
    found = compare.compare_defaults(read_defaults(DEFAULTS), read_defaults(DEFAULTS.replace(old, new))).findings
    assert (found[0].place, found[0].pristine, found[0].patched) == (place, base, ours)


def test_an_option_of_ours_may_not_take_a_name_of_upstreams() -> None:
    found = compare.compare_defaults(read_defaults(DEFAULTS), read_defaults(DEFAULTS + 'option\tserver\t-c --cache\thelp\t"ours"\n'))
    assert [(item.place, item.patched) for item in found.findings] == [("option -c of server", "another with that name (-c --cache)")]


# ---- the run --------------------------------------------------------------------------------------------------------------------

STAND_IN = """#!/usr/bin/env python3
# Stands in for a probe: writes the hashes that its side is told to, or ends in the middle.
import json, os, sys
from pathlib import Path
words = sys.argv[2:]
values = dict(zip(words[::2], words[1::2]))
place = Path(__file__)
told = json.loads(place.with_suffix(".json").read_text())
names = [word for word in words if "=" in word]
with place.with_suffix(".log").open("a") as log:
    log.write(json.dumps({"names": names, "environment": sorted(os.environ)}) + "\\n")
with open(values["--out"], "w") as out:
    print("opencoti-gate-probe 1", "backend\\tCPU", sep="\\n", file=out)
    for name in names:
        print("config", name, sep="\\t", file=out, flush=True)
        if told.get(name) == "crash":
            print("GGML_ASSERT(that) failed", flush=True)
            os.abort()
        print("hash", name, "logits", told.get(name, "same"), 1, sep="\\t", file=out)
    print("end", file=out)
if "--dump" in values:
    with open(values["--dump"], "w") as out:
        for name in names:
            print(name, "logits", "logits", "decode 0", 0, 7, 3, 4, told.get(name, "same"), sep="\\t", file=out)
            print(name, "logits", "bytes", "0000803f" if told.get(name, "same") == "same" else "0000903f", sep="\\t", file=out)
"""


@pytest.fixture
def lab(tmp_path: Path, real: matrix.Matrix) -> _Lab:
    return _Lab(tmp_path, real)


class _Lab:
    def __init__(self, folder: Path, real: matrix.Matrix) -> None:
        self.folder = folder
        made = CommandContext(find_project(), Console(mode=Mode.QUIET), SystemRunner(), Cache(folder / "cache"), offline=True, dry_run=False)
        (folder / "model.gguf").write_bytes(b"model")
        self.subject = Subject("model", folder / "model.gguf")
        self.chosen = [item for item in real.configurations if not item.mtp][:4]
        self.names = [item.name for item in self.chosen]
        self.runs = _Runs(made, real, folder, fresh=False)
        for side in SIDES:
            (folder / f"{side}.py").write_text(STAND_IN)
            (folder / f"{side}.py").chmod(0o755)
            self.tell(side, {})

    def tell(self, side: str, what: dict[str, str]) -> None:
        (self.folder / f"{side}.json").write_text(json.dumps(what))

    def probe(self, side: str, key: str = "") -> Probe:
        return Probe(side, "0" * 40, key or side, self.folder / f"{side}.py")

    @property
    def probes(self) -> tuple[Probe, Probe]:
        return self.probe("pristine"), self.probe("patched")

    def calls(self, side: str) -> list[dict[str, list[str]]]:
        path = self.folder / f"{side}.log"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def test_results_are_kept_by_probe_model_and_configurations(lab: _Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENCOTI_LLAMAFILE_GPU", "nvidia")
    monkeypatch.setenv("LLAMA_ARG_CTX_SIZE", "7")
    first = lab.runs.results(lab.probe("patched"), lab.subject, lab.chosen)
    assert [item.configuration for item in first.results] == lab.names
    assert lab.runs.results(lab.probe("patched"), lab.subject, lab.chosen) == first
    assert len(lab.calls("patched")) == 1
    assert not [name for name in lab.calls("patched")[0]["environment"] if name.startswith(("OPENCOTI", "LLAMA", "GGML"))]
    lab.runs.results(lab.probe("patched", key="another"), lab.subject, lab.chosen)
    (lab.folder / "model.gguf").write_bytes(b"other")
    lab.runs.results(lab.probe("patched"), lab.subject, lab.chosen)
    lab.runs.results(lab.probe("patched"), lab.subject, lab.chosen[:2])
    assert len(lab.calls("patched")) == 4
    replace(lab.runs, fresh=True).results(lab.probe("patched"), lab.subject, lab.chosen)
    assert len(lab.calls("patched")) == 5


def test_a_crash_costs_one_configuration_and_is_not_kept(lab: _Lab) -> None:
    lab.tell("patched", {lab.names[1]: "crash"})
    found = lab.runs.results(lab.probe("patched"), lab.subject, lab.chosen)
    assert [item.outcome for item in found.results] == [Outcome.RUN, Outcome.CRASHED, Outcome.RUN, Outcome.RUN]
    assert found.results[1].reason == "GGML_ASSERT(that) failed"
    assert [call["names"] for call in lab.calls("patched")] == [lab.names, lab.names[2:]]
    lab.tell("patched", {})
    assert all(item.outcome is Outcome.RUN for item in lab.runs.results(lab.probe("patched"), lab.subject, lab.chosen).results)


def test_a_crash_of_the_last_configuration_ends_the_run(lab: _Lab) -> None:
    lab.tell("patched", {lab.names[-1]: "crash"})
    found = lab.runs.results(lab.probe("patched"), lab.subject, lab.chosen)
    assert [item.outcome for item in found.results] == [Outcome.RUN] * 3 + [Outcome.CRASHED]
    assert len(lab.calls("patched")) == 1


def test_a_probe_that_does_not_start_is_an_error(lab: _Lab) -> None:
    (lab.folder / "patched.py").write_text("#!/bin/sh\necho no library; exit 3\n")
    with pytest.raises(BuildError, match="does not start") as caught:
        lab.runs.results(lab.probe("patched"), lab.subject, lab.chosen)
    assert "no library" in caught.value.details


def judged(lab: _Lab) -> tuple[int, list[compare.Finding]]:
    sides = [lab.runs.results(probe, lab.subject, lab.chosen) for probe in lab.probes]
    report, findings = lab.runs.judge(lab.probes, lab.subject, lab.chosen, sides[0], sides[1])
    return len(report.differing), findings


def test_equal_sides_have_no_findings(lab: _Lab) -> None:
    assert judged(lab) == (0, [])


def test_a_difference_is_run_again_and_named_once(lab: _Lab) -> None:
    lab.tell("patched", {lab.names[1]: "changed", lab.names[3]: "changed"})
    count, findings = judged(lab)
    assert count == 2
    assert [(item.aspect, item.configuration, item.pristine, item.patched) for item in findings] == [("logits", lab.names[1], "1.0 (0000803f)", "1.125 (0000903f)")]
    assert findings[0].text.startswith(f"model, {lab.names[1]}: logits: 'decode 0', sequence 0, position 7, token 3, logit 0:")


def test_a_crash_on_one_side_is_a_finding(lab: _Lab) -> None:
    lab.tell("patched", {lab.names[2]: "crash"})
    count, findings = judged(lab)
    assert count == 1
    assert [(item.aspect, item.configuration, item.pristine, item.patched) for item in findings] == [
        ("outcome", lab.names[2], "a result", "'crashed: GGML_ASSERT(that) failed'")
    ]


def test_a_side_that_changes_from_run_to_run_is_found(lab: _Lab) -> None:
    lab.tell("patched", {lab.names[0]: "changed"})
    sides = [lab.runs.results(probe, lab.subject, lab.chosen) for probe in lab.probes]
    lab.tell("patched", {lab.names[0]: "changed again"})
    _, findings = lab.runs.judge(lab.probes, lab.subject, lab.chosen, sides[0], sides[1])
    assert [(item.aspect, item.place) for item in findings] == [("logits", "the patched side")]
    assert "run again" in findings[0].patched


def test_processors_are_never_overbooked_and_a_wide_job_gets_its_turn() -> None:
    processors = _Processors(2)
    busy, most = 0, 0
    guard = threading.Lock()

    def work(wish: int) -> None:
        nonlocal busy, most
        for _ in range(50):
            with processors.taken(wish):
                with guard:
                    busy += min(wish, 2)
                    most = max(most, busy)
                with guard:
                    busy -= min(wish, 2)

    threads = [threading.Thread(target=work, args=(wish,)) for wish in (1, 1, 2, 5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=30)
    assert not any(thread.is_alive() for thread in threads)
    assert most == 2 and busy == 0


# ---- models ---------------------------------------------------------------------------------------------------------------------


def test_a_drafter_runs_beside_its_target_and_not_alone(lab: _Lab) -> None:
    pytest.importorskip("numpy", reason="the zoo needs it; the test extra brings it: pip install -e '.[test]'")
    from opencoti_build.gates import zoo

    known = zoo.load(zoo.zoo_file(find_project().root))
    drafters = [model for model in known if model.is_drafter]
    assert drafters
    for drafter in drafters:
        target = next(model for model in known if model.family == drafter.target and model.mix.name == drafter.mix.name)
        assert models.drafter_of(target, known) == drafter
        with pytest.raises(UsageError, match=f"drafts for {drafter.target}"):
            models.subjects(lab.runs.workshop, [drafter.name])
    alone = next(model for model in known if model.target is None and model.family not in {drafter.target for drafter in drafters})
    assert models.drafter_of(alone, known) is None


def test_a_file_is_a_model_too(lab: _Lab, tmp_path: Path) -> None:
    found = models.subjects(lab.runs.workshop, [str(tmp_path / "model.gguf")], drafter=str(tmp_path / "model.gguf"))
    assert [(item.name, item.drafter, item.mtp, item.extra) for item in found] == [("model", (tmp_path / "model.gguf").resolve(), True, True)]
    with pytest.raises(UsageError, match="is no file"):
        models.subjects(lab.runs.workshop, [str(tmp_path / "absent.gguf")])
    with pytest.raises(UsageError, match="--drafter belongs"):
        models.subjects(lab.runs.workshop, ["qwen2"], drafter=str(tmp_path / "model.gguf"))
