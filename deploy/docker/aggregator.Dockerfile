# The aggregator's image. crypto/mask, edge_client and the owner's code are not copied: what is not in the image can't be loaded.
#   docker build -f deploy/docker/aggregator.Dockerfile -t shoal-aggregator .
#   docker run --rm -v shoal:/state shoal-aggregator init /state
# The lock has the hash of torch's CPU build for this Python.
ARG PYTHON_IMAGE=python:3.11-slim
FROM $PYTHON_IMAGE

WORKDIR /app
COPY deploy/locks/aggregator.txt ./
RUN pip install --no-cache-dir --no-deps --require-hashes --extra-index-url https://download.pytorch.org/whl/cpu -r aggregator.txt

COPY shoal/__init__.py shoal/errors.py shoal/limits.py shoal/hints.py shoal/types.py shoal/address.py shoal/digests.py shoal/version.py shoal/
COPY shoal/util shoal/util
COPY shoal/protocol shoal/protocol
COPY shoal/transport shoal/transport
COPY shoal/membership shoal/membership
COPY shoal/page shoal/page
COPY crypto/__init__.py crypto/
COPY crypto/seal crypto/seal
COPY crypto/sums crypto/sums
COPY aggregator aggregator

RUN useradd --system --uid 10001 --create-home --home-dir /state --shell /usr/sbin/nologin shoal && chmod 0700 /state
USER shoal
VOLUME /state
ENV PYTHONPATH=/app PYTHONUNBUFFERED=1 ORT_DISABLE_TELEMETRY=1
# Any status but 0 is unhealthy: 11 if the program does not run, is not connected, or has shown no sign of life.
HEALTHCHECK --interval=60s --timeout=30s --start-period=60s --retries=3 \
    CMD ["python", "-c", "from aggregator.cli import main; main()", "status", "/state", "--check"]
ENTRYPOINT ["python", "-c", "from aggregator.cli import main; main()"]
CMD ["serve", "/state"]
