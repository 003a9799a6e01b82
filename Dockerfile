# Images of aiorl, with the versions that are tested together:
#
#   docker build --target base -t aiorl:base .           # workers, a quarter of the size
#   docker build -t aiorl:learner .                      # learner and workers
#   docker build --build-arg EXTRAS=atari,mujoco ...     # with the packages of other environments
#
# An environment of yours: FROM aiorl:learner, RUN pip install its packages, COPY its module to /app.
ARG PYTHON=3.11

FROM docker.io/library/python:${PYTHON}-slim AS build
ARG EXTRAS=classic-control
WORKDIR /src
COPY pyproject.toml hatch_build.py README.md LICENSE ./
COPY aiorl aiorl
RUN python -m venv /opt/aiorl \
    && /opt/aiorl/bin/pip install --no-cache-dir -c aiorl/constraints.txt ".[${EXTRAS}]"

FROM build AS build-learner
ARG EXTRAS=classic-control
RUN /opt/aiorl/bin/pip install --no-cache-dir -c aiorl/constraints.txt ".[learner,${EXTRAS}]"

# The root directory can be read-only: what is written goes to the run's directory, and to HOME and /tmp.
FROM docker.io/library/python:${PYTHON}-slim AS runtime
ENV PATH=/opt/aiorl/bin:$PATH HOME=/tmp PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1
WORKDIR /app
USER 1000:1000
CMD ["aiorl", "--help"]

FROM runtime AS base
COPY --from=build /opt/aiorl /opt/aiorl

FROM runtime AS learner
COPY --from=build-learner /opt/aiorl /opt/aiorl
