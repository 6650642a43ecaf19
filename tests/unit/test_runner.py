from __future__ import annotations

import os
import sys
import time

import pytest

from opencoti_build.errors import BuildError, ToolchainError
from opencoti_build.runner import SystemRunner


def python(code: str) -> list[str]:
    return [sys.executable, "-c", code]


def test_output_is_captured_and_every_line_seen():
    seen: list[str] = []
    done = SystemRunner().run(python("import sys; print('a'); print('b', file=sys.stderr)"), on_line=seen.append)
    assert done.code == 0 and sorted(seen) == ["a", "b"]


def test_a_failure_raises_the_callers_error_with_the_end_of_the_log(tmp_path):
    log = tmp_path / "log"
    with pytest.raises(ToolchainError) as caught:
        SystemRunner().run(python("for i in range(500): print('line', i)\nraise SystemExit(7)"), error=ToolchainError, log=log)
    assert "exit code 7" in caught.value.message and str(log) in caught.value.message
    assert "line 499" in caught.value.details and "line 1\n" not in caught.value.details
    assert log.read_text().splitlines()[0] == "line 0"


def test_without_check_the_code_is_returned():
    assert SystemRunner().run(python("raise SystemExit(3)"), check=False).code == 3


def test_a_program_that_is_not_there_is_one_sentence():
    with pytest.raises(BuildError, match="Cannot start no-such-program"):
        SystemRunner().run(["no-such-program"])


def test_the_environment_is_the_given_one():
    done = SystemRunner().run(python("import os; print(sorted(os.environ))"), env={"ONLY": "1", "PATH": os.environ["PATH"]})
    assert "'ONLY'" in done.output and "HOME" not in done.output


@pytest.mark.skipif(os.name == "nt", reason="process groups are a POSIX matter")
def test_an_exception_ends_the_whole_group(tmp_path):
    """A grandchild of an interrupted build must not go on writing."""
    beat = tmp_path / "beat"
    grandchild = f"import time\nwhile True:\n    open({str(beat)!r}, 'a').write('x')\n    time.sleep(0.02)"
    code = f"import subprocess, sys\np = subprocess.Popen([sys.executable, '-c', {grandchild!r}])\nprint('started', flush=True)\np.wait()"

    def stop(line: str) -> None:
        while not beat.exists():
            time.sleep(0.01)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        SystemRunner().run(python(code), on_line=stop)
    size = beat.stat().st_size
    time.sleep(0.3)
    assert beat.stat().st_size == size
