"""Reports of sanitizers: what is read out of them, and whose they are."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from opencoti_build.gates.findings import Finding, Frame, Ours, Owner, added_lines, collect, frame_of, parse, relative

USE_AFTER_FREE = """
=================================================================
==71==ERROR: AddressSanitizer: heap-use-after-free on address 0x60b0000000f0 at pc 0x55d1c5a3b7c4 bp 0x7ffd sp 0x7ffd
READ of size 1 at 0x60b0000000f0 thread T0
    #0 0x55d1c5a3b7c3 in opencoti::payload_library::copy_name[abi:cxx11]() const ./common/opencoti/payload.cpp:50
    #1 0x55d1c5a3c111 in opencoti_payload(int, char**) ./common/opencoti/payload-command.cpp:200
    #2 0x7f0000001249 in __libc_start_call_main ../sysdeps/nptl/libc_start_call_main.h:58

0x60b0000000f0 is located 0 bytes inside of 100-byte region [0x60b0000000f0,0x60b000000154)
freed by thread T0 here:
    #0 0x7f00000b7018 in operator delete(void*) ../../../../src/libsanitizer/asan/asan_new_delete.cpp:160
    #1 0x55d1c5a3b700 in std::__new_allocator<char>::deallocate(char*, unsigned long) /usr/include/c++/12/bits/new_allocator.h:158

SUMMARY: AddressSanitizer: heap-use-after-free ./common/opencoti/payload.cpp:50 in opencoti::payload_library::copy_name
Shadow bytes around the buggy address:
  0x0c167fff8000: fa fa fa fa
==71==ABORTING
"""

RACE = """
==================
WARNING: ThreadSanitizer: data race (pid=90)
  Read of size 8 at 0x55f00000a0e0 by thread T7:
    #0 opencoti::get_live_state() ./tools/server/opencoti/live-state.cpp:17 (llama+0x81c22)
    #1 opencoti::effective_json() ./tools/server/opencoti/introspection.cpp:30 (llama+0x81d00)

  Previous write of size 8 at 0x55f00000a0e0 by main thread (mutexes: write M12):
    #0 opencoti::publish_live_state(opencoti::live_state const&) ./tools/server/opencoti/live-state.cpp:12 (llama+0x81b11)
    #1 server_context_impl::update_slots() ./tools/server/server-context.cpp:3110 (llama+0x9aaaa)

  Location is global 'opencoti::published' of size 72 at 0x55f00000a0e0 (llama+0x00000240a0e0)

  Thread T7 (tid=98, running) created by main thread at:
    #0 pthread_create ../../../../src/libsanitizer/tsan/tsan_interceptors_posix.cpp:969 (libtsan.so.2+0x605b8)
    #1 httplib::ThreadPool::ThreadPool(unsigned long) ./vendor/cpp-httplib/httplib.h:700 (llama+0x33333)

SUMMARY: ThreadSanitizer: data race ./tools/server/opencoti/live-state.cpp:17 in opencoti::get_live_state()
==================
==================
WARNING: ThreadSanitizer: data race (pid=90)
  Write of size 8 at 0x1 by main thread:
    #0 common_log::pause() common/log.cpp:200 (llama+0x1)
    #1 main ./app/llama.cpp:130 (llama+0x2)

  Previous read of size 8 at 0x1 by thread T1:
    #0 memcpy <null> (libtsan.so.2+0x5)
    #1 common_log::worker() ./common/log.cpp:210 (llama+0x3)

SUMMARY: ThreadSanitizer: data race ./common/log.cpp:200 in common_log::pause()
==================
"""

LEAKS = """
=================================================================
==12==ERROR: LeakSanitizer: detected memory leaks

Direct leak of 32 byte(s) in 1 object(s) allocated from:
    #0 0x7f00000b5a27 in operator new(unsigned long) ../../../../src/libsanitizer/asan/asan_new_delete.cpp:95
    #1 0x55d1 in ggml_backend_reg_new() ./ggml/src/ggml-backend-reg.cpp:90

Indirect leak of 24 byte(s) in 1 object(s) allocated from:
    #0 0x7f00000b5a27 in malloc ../../../../src/libsanitizer/asan/asan_malloc_linux.cpp:69
    #1 0x55d1 in opencoti::never ./common/opencoti/self.cpp:3

Direct leak of 8 byte(s) in 1 object(s) allocated from:
    #0 0x7f00000b5a27 in operator new(unsigned long) ../../../../src/libsanitizer/asan/asan_new_delete.cpp:95
    #1 0x55d2 in string_join(std::vector<std::string> const&) ./common/common.cpp:12
    #2 0x55d3 in opencoti::usage_text(std::string const&) ./common/opencoti/program.cpp:80

SUMMARY: AddressSanitizer: 64 byte(s) leaked in 3 allocation(s).
"""

UNDEFINED = """
./common/opencoti/inflate.cpp:101:23: runtime error: shift exponent 40 is too large for 32-bit type 'int'
    #0 0x55aa in opencoti::inflate(unsigned char const*) ./common/opencoti/inflate.cpp:101
    #1 0x55ab in opencoti::zip::read() ./common/opencoti/zip-reader.cpp:20

/tree/src/llama-vocab.cpp:77:5: runtime error: signed integer overflow: 2147483647 + 1 cannot be represented in type 'int'
"""


def test_a_use_after_free_is_the_code_that_touches_freed_memory() -> None:
    (finding,) = parse(USE_AFTER_FREE)
    assert finding.kind == "AddressSanitizer: heap-use-after-free"
    assert [len(stack) for stack in finding.stacks] == [3, 2]
    assert finding.places == (Frame("opencoti::payload_library::copy_name[abi:cxx11]() const", "common/opencoti/payload.cpp", 50),)
    assert "freed by thread" in finding.text and "Shadow bytes" not in finding.text


def test_both_sides_of_a_race_count_and_the_creation_of_a_thread_does_not() -> None:
    first, second = parse(RACE)
    assert [str(frame) for frame in first.places] == [
        "opencoti::get_live_state() tools/server/opencoti/live-state.cpp:17",
        "opencoti::publish_live_state(opencoti::live_state const&) tools/server/opencoti/live-state.cpp:12",
    ]
    assert [frame.file for frame in second.places] == ["common/log.cpp", "common/log.cpp"]


def test_direct_leaks_are_findings_of_their_own_and_indirect_ones_are_none() -> None:
    first, second = parse(LEAKS)
    assert first.places[0].file == "ggml/src/ggml-backend-reg.cpp"
    assert second.places[0].file == "common/common.cpp"


def test_undefined_behaviour_with_and_without_a_stack() -> None:
    first, second = parse(UNDEFINED, "/tree")
    assert first.kind == "UndefinedBehaviorSanitizer: shift exponent N is too large for N-bit type 'int'"
    assert [frame.line for frame in first.stacks[0]] == [101, 20]
    assert second.places == (Frame("", "src/llama-vocab.cpp", 77),)


@pytest.mark.parametrize(
    ("log", "owners"),
    [
        (USE_AFTER_FREE, [Owner.OURS]),
        (RACE, [Owner.OURS, Owner.UPSTREAM]),
        (LEAKS, [Owner.UPSTREAM, Owner.OURS]),
        (UNDEFINED, [Owner.OURS, Owner.UPSTREAM]),
    ],
)
def test_the_owner_is_who_wrote_the_code_or_called_the_helper(log: str, owners: list[Owner]) -> None:
    ours = Ours({})
    assert [ours.owner(finding) for finding in parse(log, "/tree")] == owners


def test_a_line_that_the_series_added_to_a_file_of_upstream_is_ours() -> None:
    second = list(parse(RACE))[1]
    assert Ours({"common/log.cpp": frozenset({200})}).owner(second) is Owner.OURS
    assert Ours({"common/log.cpp": frozenset({199, 201})}).owner(second) is Owner.UPSTREAM


def test_being_inside_an_outer_function_makes_nothing_ours() -> None:
    stack = (Frame("llama_server", "tools/server/server.cpp", 3), Frame("opencoti::run_with_libraries(char const*)", "common/opencoti/libraries.cpp", 400))
    finding = Finding("x", (stack,), "")
    assert Ours({}).owner(finding) is Owner.OURS
    assert Ours({}, ("opencoti::run_with_libraries",)).owner(finding) is Owner.UPSTREAM


def test_a_finding_without_a_frame_in_the_tree_is_elsewhere() -> None:
    finding = Finding("x", ((Frame("memcpy"), Frame("start", "")),), "")
    assert Ours({}).owner(finding) is Owner.ELSEWHERE


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("f(int) ./a/b.cpp:3:7 (llama+0x12) (BuildId: 00)", Frame("f(int)", "a/b.cpp", 3)),
        ("operator new(unsigned long) ../../../../src/libsanitizer/asan/x.cpp:95", Frame("operator new(unsigned long)", "", 95)),
        ("memcpy <null> (libtsan.so.2+0x5)", Frame("memcpy <null>")),
        ("start (/usr/lib/libc.so.6+0x27)", Frame("start")),
    ],
)
def test_a_frame(text: str, expected: Frame) -> None:
    assert frame_of(text) == expected


@pytest.mark.parametrize(
    ("path", "expected"),
    [("./a.cpp", "a.cpp"), ("build/./a.cpp", "a.cpp"), ("common/a.cpp", "common/a.cpp"), ("/tree/common/a.cpp", "common/a.cpp"), ("/usr/include/x.h", ""), ("./../x.h", ""), ("../csu/libc-start.c", ""), ("<null>", "")],
)
def test_only_paths_of_the_tree_are_files(path: str, expected: str) -> None:
    assert relative(path, "/tree") == expected


def test_the_same_defect_from_two_processes_is_one_finding(tmp_path: Path) -> None:
    (tmp_path / "asan.1").write_text(USE_AFTER_FREE)
    (tmp_path / "asan.2").write_text(USE_AFTER_FREE.replace("0x60b0000000f0", "0x60b0000000a0").replace("==71==", "==72=="))
    (tmp_path / "tsan.1").write_text(RACE)
    assert [finding.kind for finding in collect(tmp_path)] == ["AddressSanitizer: heap-use-after-free", "ThreadSanitizer: data race", "ThreadSanitizer: data race"]


def test_a_finding_survives_json() -> None:
    for finding in parse(USE_AFTER_FREE + RACE + LEAKS + UNDEFINED):
        assert Finding.from_dict(finding.to_dict()) == finding


@given(st.text(alphabet=st.sampled_from("=#0123456789 \n:./WARNING ERRORThreadSanitizer()abx"), max_size=400))
def test_any_text_can_be_read(text: str) -> None:
    for finding in parse(text):
        assert isinstance(finding.identity, tuple)


def test_added_lines_are_numbered_in_the_new_file() -> None:
    diff = "diff --git a/x.c b/x.c\n--- a/x.c\n+++ b/x.c\n@@ -3 +3,2 @@ int f\n one\n+two\n@@ -9,3 +10,2 @@\n keep\n-gone\n-gone\n+new\ndiff --git a/d b/d\n--- a/d\n+++ /dev/null\n@@ -1 +0,0 @@\n-x\n"
    assert added_lines(diff) == {"x.c": frozenset({4, 11})}
