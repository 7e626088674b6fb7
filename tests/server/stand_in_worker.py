"""A rank without an engine, which joins rank 0 in tritonserver's stub, and ends when told or with rank 0."""

import os
import sys
import time

from mpi4py import MPI

world = MPI.COMM_WORLD
word = world.bcast(None)
shared_memory = os.environ.get("OMPI_MCA_btl_sm_backing_directory", "/dev/shm")  # noqa: SIM112 - Open MPI's spelling
print(f"rank {world.rank} of {world.size} is process {os.getpid()} and heard {word}", flush=True)
print(f"libraries {os.environ.get('LD_LIBRARY_PATH', '')}", flush=True)
print(f"segments {sorted(os.listdir(shared_memory))}", flush=True)
while not world.Iprobe(source=0, tag=1):
    time.sleep(0.02)
    if not os.path.exists(f"/proc/{word}"):
        os._exit(3)
world.recv(source=0, tag=1)
print(f"rank {world.rank} ends", flush=True)
sys.stdout.flush()
MPI.Finalize()
