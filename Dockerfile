# The server inside NVIDIA's tritonserver image (releases 24.08 and later, with Python 3.10 or 3.12). Use the newest:
# defects of its front ends are fixed from release to release. 26.09 was the newest when this was written.
#
#   docker build --build-arg TRITON_IMAGE=<NVIDIA's tritonserver image, -py3> -t inflight .
#   docker run --rm --gpus all --shm-size=1g -p 8000-8002:8000-8002 -p 9000:9000 -v /path/to/checkpoint:/model \
#       inflight --model /model
#
# --shm-size: responses are passed through /dev/shm, of which a container has 64 MB by default. docs/operating.md says
# how much they need, under Shared memory. Requests whose responses would not fit are refused.
# The flags after the image's name are those of scripts/serve.
ARG TRITON_IMAGE
FROM ${TRITON_IMAGE}

# Newer images mark their Python as externally managed; here the image is the environment.
ENV PIP_BREAK_SYSTEM_PACKAGES=1 PIP_NO_CACHE_DIR=1 PYTHONUNBUFFERED=1

WORKDIR /opt/inflight
COPY pyproject.toml constraints.txt README.md LICENSE ./
COPY backend backend
COPY client client
COPY model_repository model_repository
RUN python3 -m pip install -c constraints.txt ".[mpi]" ./client
# At each start, the compiler builds the library that tritonserver loads first (docs/production.md). The compiled layers
# are built here, for every target of the image's architecture, so that no container waits for them.
RUN apt-get update && apt-get install -yqq --no-install-recommends g++ && rm -rf /var/lib/apt/lists/* && \
    cd / && python3 -m inflight.engine.cpu.prebuild

EXPOSE 8000 8001 8002 9000
STOPSIGNAL SIGTERM
ENTRYPOINT ["python3", "-m", "inflight.server", "--tritonserver", "/opt/tritonserver/bin/tritonserver", \
            "--model-repository", "/opt/inflight/model_repository", "--host", "0.0.0.0"]
