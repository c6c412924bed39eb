# A device's image: numpy and ONNX Runtime, no torch; neither the aggregator's code nor the owner's. Without ONNX Runtime, for tasks
# without convolutions: --build-arg EXTRA=edge-lite
# Removed as in the Debian package: a second copy of ONNX Runtime's library, 29 MB that nothing links, and the libraries' tests.
#   docker build -f deploy/docker/edge.Dockerfile -t shoal-edge .
#   docker run --rm -v device:/state shoal-edge init /state --name dev-01
ARG PYTHON_IMAGE=python:3.12-slim
FROM $PYTHON_IMAGE

ARG EXTRA=edge
WORKDIR /app
COPY deploy/locks/edge.txt deploy/locks/edge-lite.txt ./
RUN pip install --no-cache-dir --no-deps --require-hashes -r "$EXTRA.txt" \
    && find / -xdev -path '*/onnxruntime/capi/libonnxruntime.so.*' -delete \
    && find / -xdev -type d -path '*-packages/*' \( -name tests -o -name f2py -o -name distutils \) -prune -exec rm -rf {} +

COPY shoal/__init__.py shoal/errors.py shoal/limits.py shoal/hints.py shoal/types.py shoal/address.py shoal/digests.py shoal/version.py shoal/
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
# Any status but 0 is unhealthy: 11 if the program does not run, is not connected, or has shown no sign of life.
HEALTHCHECK --interval=60s --timeout=30s --start-period=60s --retries=3 \
    CMD ["python", "-c", "from edge_client.program import main; main()", "status", "/state", "--check"]
ENTRYPOINT ["python", "-c", "from edge_client.program import main; main()"]
CMD ["run", "/state", "--data", "/data"]
