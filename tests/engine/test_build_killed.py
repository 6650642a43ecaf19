"""``invoke build`` killed at random moments: what lies in the folder is whole or not there, and the next run completes."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from opencoti_build import verify
from opencoti_build.cli.common import CommandContext


@pytest.mark.skipif(os.name != "posix", reason="kill -9 is a POSIX signal")
def test_build_killed_at_any_moment(universal: Path, workshop: CommandContext, tmp_path: Path) -> None:
    words = [sys.executable, "-m", "invoke", "build", "--variant", "universal", "--out", str(tmp_path)]
    out = tmp_path / universal.name
    moments = random.Random(11)
    whole = 0
    for _ in range(10):
        child = subprocess.Popen(words, cwd=workshop.project.root, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True)
        time.sleep(moments.uniform(0.3, 1.6))
        os.killpg(child.pid, signal.SIGKILL)
        child.wait()
        if out.exists():
            whole += 1
            assert out.read_bytes() == universal.read_bytes()
            for path in tmp_path.iterdir():
                path.unlink()
    done = subprocess.run(words, cwd=workshop.project.root, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert verify.artifact(out).outcome is verify.Outcome.VERIFIED
    assert out.read_bytes() == universal.read_bytes()
    assert whole < 10, "no run was killed before it was finished"
