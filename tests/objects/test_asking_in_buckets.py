"""A job in a bucket of a real S3 server is asked, followed and pinned, from other processes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import holdfast as hf
from command_line import call, call_json
from holdfast.testing.processes import Workers, python
from whole_runs import check_whole

PATIENCE_SECONDS = 100.0

JOB = """
import sys, time, numpy, holdfast
w = numpy.zeros(1000)
with holdfast.resumable(sys.argv[1], w=w, save_every=100, keep=1) as run:
    print("begun", flush=True)
    for step in run.steps(10**6):
        w += 1
        time.sleep(0.01)
"""


def test_a_job_in_a_bucket_is_asked_and_followed(url: str, tmp_path: Path) -> None:
    with Workers(tmp_path) as workers:
        job = workers.start(python("-c", JOB, url))
        workers.wait_line(job, "begun", PATIENCE_SECONDS)
        # With keep=1 the next save removes it: on a busy machine it may be gone before it is pinned.
        for _ in range(10):
            saved = call_json("ask", url, "save")
            assert saved["committed_step"] > 0
            if (pinned := call("pin", f"{url}@{saved['committed_step']}")).exit_code == 0:
                break
        assert pinned.exit_code == 0, pinned.output
        command = [sys.executable, "-m", "holdfast", "follow", "--json", "--every", "--idle", "8s", url]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as reader:
            assert reader.stdout is not None
            first = json.loads(reader.stdout.readline())
            second = json.loads(reader.stdout.readline())
            assert first["step"] < second["step"]
            stopped = hf.ask(url, "stop")
            assert workers.wait(PATIENCE_SECONDS) == [130], workers.report(job)
            rest = [json.loads(line)["step"] for line in reader.stdout]
        assert reader.returncode == 0
        steps = [first["step"], second["step"], *rest]
        assert steps == sorted(set(steps))
        assert steps[-1] == stopped.committed_step
        kept = check_whole(hf.open_storage(url))
        assert {saved["committed_step"], stopped.committed_step} <= set(kept)
        assert call("ask", url, "status").exit_code == 7
