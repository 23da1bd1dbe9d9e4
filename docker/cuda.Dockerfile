# Runs the README's test command with CUDA 13.0, for which the torch on PyPI is built. Only docker run needs a GPU:
#
#   docker build -f docker/cuda.Dockerfile -t dltrain_ext:cuda .
#   docker run --rm --gpus all dltrain_ext:cuda
FROM nvidia/cuda:13.0.1-devel-ubuntu24.04

RUN apt-get update \
    && apt-get install -y --no-install-recommends g++ git python3-dev python3-venv \
    && rm -rf /var/lib/apt/lists/*

RUN useradd --create-home --uid 10001 trainer && install --directory --owner=10001 /home/trainer/dltrain_ext
USER 10001
WORKDIR /home/trainer/dltrain_ext
ENV PIP_NO_CACHE_DIR=1

RUN python3 -m venv .venv && .venv/bin/pip install torch==2.13.0

COPY --chown=10001 . .
# With 1, a build without CUDA is an error, instead of a build for the CPU only.
ENV DLTRAIN_CUDA=1
RUN .venv/bin/pip install '.[test]'

CMD [".venv/bin/pytest", "-m", "gpu"]
