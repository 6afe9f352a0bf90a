"""Run a command in a memory control group of a given size, without swap, and report its peak.

    python tools/run_within.py 6GiB -- python tools/bench.py train /tmp/opt-13b --steps 1

It needs version 1 control groups and root. The peak counts resident memory and page cache; the
kernel kills processes that exceed the size.
"""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

from zo2core.ranges import parse_size


def main() -> None:
    if len(sys.argv) < 4 or sys.argv[2] != "--":
        sys.exit(__doc__)
    limit, command = parse_size(sys.argv[1]), sys.argv[3:]
    group = Path("/sys/fs/cgroup/memory") / f"zo2-{os.getpid()}"
    group.mkdir()
    try:
        (group / "memory.swappiness").write_text("0")
        (group / "memory.limit_in_bytes").write_text(str(limit))

        def join() -> None:
            (group / "cgroup.procs").write_text(str(os.getpid()))

        began = time.perf_counter()
        code = subprocess.run(command, preexec_fn=join, check=False).returncode
        report = {
            "limit_bytes": limit,
            "peak_bytes_with_cache": int((group / "memory.max_usage_in_bytes").read_text()),
            "times_at_limit": int((group / "memory.failcnt").read_text()),
            "swap_bytes": int(
                dict(map(str.split, (group / "memory.stat").read_text().splitlines())).get(
                    "swap", 0
                )
            ),
            "exit_status": code,
            "seconds": time.perf_counter() - began,
        }
    finally:
        for _ in range(50):
            try:
                group.rmdir()
                break
            except OSError:
                time.sleep(0.1)  # the kernel has not yet removed the processes
    print(json.dumps(report))
    sys.exit(code)


if __name__ == "__main__":
    main()
