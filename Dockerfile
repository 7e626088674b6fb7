# The server inside NVIDIA's tritonserver image (releases 24.08 and later, with Python 3.10 or 3.12). The newest one is
# best: defects of its front ends are fixed from release to release. 26.10 was the newest in November 2026.
#
#   docker build -t inflight .
#   docker run --rm --gpus all --shm-size=1g -p 8000-8002:8000-8002 -p 9000:9000 -v /path/to/checkpoint:/model:ro \
#       inflight --model /model
#
# --shm-size: responses are passed through /dev/shm, of which a container has 64 MB by default. docs/operating.md says
# how much they need, under Shared memory. Requests whose responses would not fit are refused.
# The flags after the image's name are those of scripts/serve.
ARG TRITON_IMAGE=nvcr.io/nvidia/tritonserver:26.10-py3
FROM ${TRITON_IMAGE}

# Newer images mark their Python as externally managed; here the image is the environment.
ENV PIP_BREAK_SYSTEM_PACKAGES=1 PIP_NO_CACHE_DIR=1 PYTHONUNBUFFERED=1

# At each start, the compiler builds the library that tritonserver loads first (docs/production.md). Over ssh, ranks are
# started on other nodes.
RUN apt-get update && apt-get install -yqq --no-install-recommends g++ openssh-client openssh-server && \
    rm -rf /var/lib/apt/lists/*

# A layer with the dependencies, which is built again only when they change: empty packages are installed with all that
# they require, and removed.
WORKDIR /opt/inflight
COPY pyproject.toml constraints.txt ./
COPY client/pyproject.toml client/
RUN mkdir -p backend/inflight client/inflight_client && \
    touch README.md LICENSE backend/inflight/__init__.py client/inflight_client/__init__.py && \
    python3 -m pip install -c constraints.txt ".[mpi]" ./client && \
    python3 -m pip uninstall -y inflight inflight-client

# The compiled layers are built for every target of the image's architecture, so that no container waits for them.
COPY README.md LICENSE ./
COPY backend backend
COPY benchmarks benchmarks
COPY client client
COPY model_repository model_repository
RUN python3 -m pip install --no-deps . ./client && cd / && python3 -m inflight.engine.cpu.prebuild

# tritonserver's images have a user with this number. It writes to these folders, /tmp and /dev/shm only.
ENV HOME=/tmp XDG_CACHE_HOME=/var/cache/inflight HF_HOME=/models/huggingface
RUN id 1000 || useradd --uid 1000 --user-group --no-create-home --shell /bin/sh inflight; \
    mkdir -p /var/cache/inflight /models/huggingface && chown 1000:1000 /var/cache/inflight /models/huggingface
USER 1000:1000

EXPOSE 8000 8001 8002 9000
STOPSIGNAL SIGTERM
ENTRYPOINT ["python3", "-m", "inflight", "serve", "--tritonserver", "/opt/tritonserver/bin/tritonserver", \
            "--model-repository", "/opt/inflight/model_repository", "--host", "0.0.0.0"]
