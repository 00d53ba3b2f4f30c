# Moves a VM between two QEMUs by their monitors (QMP): qemu-migrate.py SOCKET ADDRESS DOWNTIME_MS. Prints one JSON object: what QEMU says of the migration.
import json, socket, sys, time

path, address, downtime = sys.argv[1], sys.argv[2], int(sys.argv[3])
connection = socket.socket(socket.AF_UNIX)
connection.connect(path)
stream = connection.makefile("rw")


def ask(command, **arguments):
    stream.write(json.dumps({"execute": command, "arguments": arguments}) + "\n")
    stream.flush()
    while True:
        answer = json.loads(stream.readline())
        if "error" in answer:
            sys.exit(f"{command}: {answer['error']['desc']}")
        if "return" in answer:
            return answer["return"]


stream.readline()
ask("qmp_capabilities")
ask("migrate-set-capabilities", capabilities=[{"capability": "auto-converge", "state": True}])
ask("migrate-set-parameters", **{"downtime-limit": downtime, "max-bandwidth": 1 << 33})
ask("migrate", uri=f"tcp:{address}")
while True:
    state = ask("query-migrate")
    if state.get("status") in ("completed", "failed", "cancelled"):
        break
    time.sleep(0.2)
print(json.dumps(state))
if state["status"] != "completed":
    sys.exit(1)
ask("quit")
