# Images of aiorl, with the versions that are tested together:
#
#   docker build --target base -t aiorl:base .           # workers, a quarter of the size
#   docker build -t aiorl:learner .                      # learner and workers
#   docker build --target server -t aiorl:server .       # aiorl serve and aiorl watch, no environments
#   docker build --build-arg EXTRAS=atari,mujoco ...     # with the packages of other environments
#
# An environment of yours: FROM aiorl:learner, RUN pip install its packages, COPY its module to /app.
ARG PYTHON=3.11

FROM docker.io/library/python:${PYTHON}-slim AS sources
WORKDIR /src
COPY pyproject.toml hatch_build.py README.md LICENSE ./
COPY aiorl aiorl
RUN python -m venv /opt/aiorl

FROM sources AS build-server
RUN /opt/aiorl/bin/pip install --no-cache-dir -c aiorl/constraints.txt ".[serve]"

FROM sources AS build
ARG EXTRAS=classic-control
RUN /opt/aiorl/bin/pip install --no-cache-dir -c aiorl/constraints.txt ".[${EXTRAS}]"

FROM build AS build-learner
ARG EXTRAS=classic-control
RUN /opt/aiorl/bin/pip install --no-cache-dir -c aiorl/constraints.txt ".[learner,${EXTRAS}]"

# The root directory can be read-only: what is written goes to the run's directory, and to HOME and /tmp.
FROM docker.io/library/python:${PYTHON}-slim AS runtime
ENV PATH=/opt/aiorl/bin:$PATH HOME=/tmp PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1
WORKDIR /app
# a volume that is mounted there belongs to the user of the image
RUN mkdir /runs /tokens && chown 1000:1000 /runs /tokens
USER 1000:1000
CMD ["aiorl", "--help"]

FROM runtime AS base
COPY --from=build /opt/aiorl /opt/aiorl

FROM runtime AS server
COPY --from=build-server /opt/aiorl /opt/aiorl
EXPOSE 8000
# 503 until a policy is there; a token is not asked for
HEALTHCHECK --interval=15s --timeout=5s --start-period=30s \
    CMD ["python", "-c", "import urllib.request as r; r.urlopen('http://127.0.0.1:8000/v2/health/ready', timeout=4)"]
CMD ["aiorl", "serve", "/runs/mine", "--follow", "--host", "0.0.0.0", "--token-file", "/tokens/serve"]

FROM runtime AS learner
COPY --from=build-learner /opt/aiorl /opt/aiorl
