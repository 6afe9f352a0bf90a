"""Kills of a command at named places, from which a first-order run has to resume with the same bits."""

from __future__ import annotations

from pathlib import Path


def strike(folder: Path, module: str, owner: str, name: str, at: int, moment: str) -> str:
    """Python that kills its process at a call: before it, after it, or with half of what it writes."""
    return f"""
import importlib, itertools, os, signal
os.chdir({str(folder)!r})
owner, calls = importlib.import_module({module!r}), itertools.count(1)
owner = getattr(owner, {owner!r}) if {owner!r} else owner
real = getattr(owner, {name!r})
def die():
    os.kill(os.getpid(), signal.SIGKILL)
def struck(*args, **kwargs):
    call = next(calls)  # one step of the interpreter: threads call too
    if call == {at} and {moment!r} == "before":
        die()
    if call == {at} and {moment!r} == "half":
        path, content = args
        whole = b"".join(content)
        path.with_name("." + path.name + ".partial").write_bytes(whole[: len(whole) // 2])
        die()
    if call == {at} and {moment!r} == "SIGTERM":
        os.kill(os.getpid(), signal.SIGTERM)
    result = real(*args, **kwargs)
    if call == {at} and {moment!r} == "after":
        die()
    return result
setattr(owner, {name!r}, struck)
"""


TRAINER, JOURNAL, SNAPSHOTS = "zo2adapters.trainers.trainer", "zo2core.journal", "zo2core.checkpoint.snapshots"
PLACES = {
    "before the first commit": (JOURNAL, "Journal", "append", 1, "before"),
    "a commit is durable, and no parameter has changed": (JOURNAL, "Journal", "append", 4, "after"),
    "before a row of metrics": (TRAINER, "", "write_row", 6, "before"),
    "a snapshot is half written": (SNAPSHOTS, "", "replace_file", 2, "half"),
    "a snapshot is durable, and the older ones are still there": (SNAPSHOTS, "", "replace_file", 3, "after"),
    "an evaluation is made, and not noted": (JOURNAL, "Journal", "note_evaluation", 3, "before"),
    "the last step is taken, and not exported": (TRAINER, "Trainer", "_export", 1, "before"),
}
