# Runs the README's test command in a clean Debian:
#
#   docker build -f docker/cpu.Dockerfile -t dltrain_ext:cpu .
#   docker run --rm dltrain_ext:cpu
FROM python:3.11-slim-bookworm

RUN apt-get update \
    && apt-get install -y --no-install-recommends g++ git \
    && rm -rf /var/lib/apt/lists/*

RUN useradd --create-home --uid 10001 trainer && install --directory --owner=10001 /home/trainer/dltrain_ext
USER 10001
WORKDIR /home/trainer/dltrain_ext
ENV PIP_NO_CACHE_DIR=1

# The wheel on PyPI depends on gigabytes of CUDA libraries; this index has the wheel for the CPU.
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
RUN python3 -m venv .venv && PIP_INDEX_URL="$TORCH_INDEX" .venv/bin/pip install torch==2.13.0

COPY --chown=10001 . .
RUN .venv/bin/pip install '.[test]'

CMD [".venv/bin/pytest"]
