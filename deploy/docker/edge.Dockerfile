# A device's image: numpy and ONNX Runtime, no torch; neither the aggregator's code nor the owner's. Without ONNX Runtime, for tasks
# without convolutions: --build-arg EXTRA=edge-lite
#   docker build -f deploy/docker/edge.Dockerfile -t shoal-edge .
#   docker run --rm -v device:/state shoal-edge init /state --name dev-01
FROM python:3.12-slim

ARG EXTRA=edge
WORKDIR /app
COPY pyproject.toml ./
RUN python -c "import tomllib; p = tomllib.load(open('pyproject.toml', 'rb'))['project']; print(*p['dependencies'], *p['optional-dependencies']['$EXTRA'], sep='\n')" > requirements.txt \
    && pip install --no-cache-dir -r requirements.txt

COPY shoal/__init__.py shoal/errors.py shoal/limits.py shoal/hints.py shoal/types.py shoal/address.py shoal/version.py shoal/
COPY shoal/util shoal/util
COPY shoal/protocol shoal/protocol
COPY shoal/transport shoal/transport
COPY shoal/membership shoal/membership
COPY shoal/task shoal/task
COPY crypto crypto
COPY edge_client edge_client

RUN useradd --system --uid 10001 --create-home --home-dir /state --shell /usr/sbin/nologin shoal && chmod 0700 /state
USER shoal
VOLUME ["/state", "/data"]
ENV PYTHONPATH=/app PYTHONUNBUFFERED=1 ORT_DISABLE_TELEMETRY=1
ENTRYPOINT ["python", "-c", "from edge_client.cli import main; main()"]
CMD ["run", "/state", "--data", "/data"]
