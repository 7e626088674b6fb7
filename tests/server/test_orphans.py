"""The launcher adopts orphaned processes and leaves no zombies; its own children keep their exit status."""

import subprocess
import sys

ADOPTING = """
import os, subprocess, sys, time
import psutil
from inflight.server import orphans

orphans.adopt()
own = subprocess.Popen([sys.executable, "-c", "raise SystemExit(7)"])
orphans.claim(own)
# A parent that prints the process id of its child and ends. The child ends when its standard input ends.
child = 'import subprocess, sys; p = subprocess.Popen(["cat"], stdout=subprocess.DEVNULL); print(p.pid)'
reader, writer = os.pipe()
parent = subprocess.Popen([sys.executable, "-c", child], stdin=reader, stdout=subprocess.PIPE)
orphan = psutil.Process(int(parent.stdout.readline()))
parent.wait()
os.close(reader)
assert orphan.ppid() == os.getpid()
orphans.reap()
assert orphan.is_running()
os.close(writer)
while orphan.is_running() and orphan.status() != psutil.STATUS_ZOMBIE:
    time.sleep(0.01)
while psutil.Process(own.pid).status() != psutil.STATUS_ZOMBIE:
    time.sleep(0.01)
orphans.reap()
assert not psutil.pid_exists(orphan.pid)
assert own.wait() == 7
print("done")
"""


def test_only_orphaned_processes_are_reaped() -> None:
    done = subprocess.run([sys.executable, "-c", ADOPTING], capture_output=True, text=True, timeout=60)
    assert (done.stdout, done.stderr) == ("done\n", "")
