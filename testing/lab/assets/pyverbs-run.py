#!/usr/bin/env python3
"""Runs rdma-core's own Python tests, each in a process of its own with a time limit, and prints one JSON line per test.

Arguments: folder of the tests, device, GID index, seconds per test, and words that test names must contain (any of them).
"""
import json
import os
import select
import signal
import sys
import time
import unittest

folder, device, gid, limit, words = sys.argv[1], sys.argv[2], sys.argv[3], float(sys.argv[4]), sys.argv[5:]
sys.path.insert(0, folder)
sys.argv = ["run_tests.py", "--dev", device, "--port", "1", "--gid", gid]

from importlib.machinery import SourceFileLoader  # noqa: E402

from args_parser import parser  # noqa: E402

tests = SourceFileLoader("tests", os.path.join(folder, "__init__.py")).load_module()
parser.parse_args()


def flat(suite):
    for item in suite:
        if isinstance(item, unittest.TestSuite):
            yield from flat(item)
        else:
            yield item


def last_line(text):
    lines = [line for line in text.strip().splitlines() if line.strip()]
    where = [line.strip() for line in lines if line.strip().startswith("File ")]
    return (lines[-1].strip() if lines else "") + (" at " + where[-1] if where else "")


def run_one(test, pipe):
    """In a child: the verdict goes into the pipe."""
    os.setsid()
    result = unittest.TestResult()
    unittest.TestSuite([test]).run(result)
    wrong = result.failures + result.errors
    if wrong or result.unexpectedSuccesses:
        verdict = ("failed", last_line(wrong[0][1]) if wrong else "unexpected success")
    elif result.skipped:
        verdict = ("skipped", result.skipped[0][1])
    else:
        verdict = ("passed", "")
    os.write(pipe, json.dumps(verdict).encode()[:60000])
    os.close(pipe)


def verdict_of(test):
    """Runs a test in a child and waits for it, but not for ever."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reader)
        try:
            run_one(test, writer)
        finally:
            os._exit(0)
    os.close(writer)
    until, text = time.monotonic() + limit, b""
    while True:
        ready, _, _ = select.select([reader], [], [], max(0, until - time.monotonic()))
        if not ready:
            break
        part = os.read(reader, 65536)
        if not part:
            break
        text += part
        try:
            json.loads(text)
            break
        except ValueError:
            continue
    os.close(reader)
    # Children of the test too; it leads a group of its own once it has begun.
    for kill in (os.killpg, os.kill):
        try:
            kill(child, signal.SIGKILL)
        except (ProcessLookupError, PermissionError):
            pass
    _, status = os.waitpid(child, 0)
    if text:
        try:
            return json.loads(text)
        except ValueError:
            pass
    if time.monotonic() >= until:
        return "failed", "hung for %.0f s" % limit
    return "failed", "the test's process ended with status %d and no verdict" % status


# What is loaded before isn't loaded again by every child.
for test in flat(unittest.defaultTestLoader.loadTestsFromModule(tests)):
    name = test.id().replace("tests.", "", 1)
    if words and not any(word in name for word in words):
        continue
    start = time.monotonic()
    verdict, why = verdict_of(test)
    line = {"test": name, "verdict": verdict, "why": why, "seconds": round(time.monotonic() - start, 1)}
    print("PYVERBS " + json.dumps(line), flush=True)
print("PYVERBS-END", flush=True)
