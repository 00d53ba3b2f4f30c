#!/usr/bin/env python3
"""Runs tests of rdma-core one by one and prints, as a JSON line each, what reached the driver's commands to its device meanwhile.

Arguments: folder of the tests, device, GID index, seconds per test, and full names of tests.

Two probes of the kernel's tracing do that. `app` sits at the entry of libibverbs' ibv_create_qp: what the test asked for. `cmd` sits at the
entry of vmw_pvrdma's pvrdma_cmd_post, through which every command to the device goes: what the device was asked for. Offsets:
struct ibv_qp_init_attr (four pointers, then cap.max_send_wr and max_recv_wr), struct pvrdma_cmd_hdr and pvrdma_cmd_create_qp.
"""
import ctypes
import json
import os
import re
import subprocess
import sys

folder, device, gid, limit, names = sys.argv[1], sys.argv[2], sys.argv[3], sys.argv[4], sys.argv[5:]
tracing = "/sys/kernel/tracing/"
if not os.path.exists(tracing + "trace"):
    subprocess.run(["mount", "-t", "tracefs", "tracefs", tracing], check=True)


def write(name, text):
    with open(tracing + name, "w") as f:
        f.write(text)


def file_offset(library, function):
    """Where a function begins in its library's file, from where it is in this process."""
    address = ctypes.cast(getattr(ctypes.CDLL(library), function), ctypes.c_void_p).value
    with open("/proc/self/maps") as maps:
        for line in maps:
            fields = line.split()
            start, end = (int(x, 16) for x in fields[0].split("-"))
            if start <= address < end:
                return fields[5], address - start + int(fields[2], 16)
    raise SystemExit("no mapping holds " + function)


def stop():
    for name in ("app", "cmd"):
        if os.path.exists(tracing + "events/lab/" + name):
            write("events/lab/%s/enable" % name, "0")
    write("kprobe_events", "")
    write("uprobe_events", "")


def traced(name):
    """Runs a test once: its verdicts, and what both probes saw."""
    write("trace", "")
    for event in ("app", "cmd"):
        write("events/lab/%s/enable" % event, "1")
    runner = os.path.dirname(os.path.abspath(__file__)) + "/pyverbs-run.py"
    command = [sys.executable, "-W", "ignore", runner, folder, device, gid, limit, name]
    run = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    for event in ("app", "cmd"):
        write("events/lab/%s/enable" % event, "0")
    verdicts = [json.loads(x[8:]) for x in run.stdout.splitlines() if x.startswith("PYVERBS {")]
    asked, commands = [], []
    with open(tracing + "trace") as trace:
        for line in trace:
            fields = {k: int(v) for k, v in re.findall(r"\b(code|send|recv)=(\d+)", line)}
            if " app: " in line:
                asked.append(fields)
            elif " cmd: " in line:
                commands.append(fields)
    return verdicts, asked, commands


stop()
path, offset = file_offset("libibverbs.so.1", "ibv_create_qp")
write("uprobe_events", "p:lab/app %s:0x%x send=+32(%%si):u32 recv=+36(%%si):u32\n" % (path, offset))
write("kprobe_events", "p:lab/cmd vmw_pvrdma:pvrdma_cmd_post code=+8(%si):u32 send=+40(%si):u32 recv=+44(%si):u32\n")
try:
    for name in names:
        # Where the driver leaves sizes unset, what it answers is what the kernel's memory held before: such a test passes now and then.
        for _ in range(5):
            verdicts, asked, commands = traced(name)
            if any(v["verdict"] == "failed" for v in verdicts):
                break
        print("TRACED " + json.dumps({"test": name, "verdicts": verdicts, "asked": asked, "commands": commands}), flush=True)
finally:
    stop()
print("TRACED-END", flush=True)
