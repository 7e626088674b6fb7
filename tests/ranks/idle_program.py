"""An idle rank: `python -m tests.ranks.idle_program` under mpirun.

Every rank prints "asleep PID". Rank 0 shares an iteration for every line on its stdin until the line "end"
(mpirun does not forward the end of file); the others print the iterations that they followed.
"""

from __future__ import annotations

import sys

from inflight.core.request.request import IterationInput
from inflight.errors import Unavailable
from inflight.ranks.heartbeat import Heartbeat
from inflight.ranks.lockstep import Lockstep
from inflight.ranks.mpi import MpiWorld
from inflight.ranks.rendezvous import gather_hosts, meet


def lost(error: Unavailable) -> None:
    print(error, file=sys.stderr, flush=True)


def main() -> None:
    world = MpiWorld()
    hosts = gather_hosts(world)
    heartbeat = Heartbeat(meet(world, hosts), world.size, 5.0, lost)
    ranks = Lockstep(world, heartbeat)
    print("asleep", hosts[world.rank].pid, flush=True)
    if ranks.is_leader:
        for iteration, line in enumerate(sys.stdin):
            if line == "end\n":
                break
            ranks.share(IterationInput(iteration, 0), are_asleep=True)
        ranks.end(are_asleep=True)
    else:
        while (inputs := ranks.follow(is_asleep=True)) is not None:
            print("followed", inputs.iteration, flush=True)
    world.leave()
    heartbeat.close()


if __name__ == "__main__":
    main()
