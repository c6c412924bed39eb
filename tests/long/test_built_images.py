"""The device's image is built, starts its program as its own user, and answers its health check.

By docker, podman or buildah, whichever is present and works. Where no registry of images answers, buildah builds on a Debian
12 that mmdebstrap makes, in place of python:3.12-slim.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from pathlib import Path

import pytest

from tests.helpers.trees import ROOT
from tests.long.test_load import keep

DOCKERFILE = "deploy/docker/edge.Dockerfile"
DEFAULT_BASE = "docker.io/library/python:3.12-slim"
OWN_BASE, IMAGE = "localhost/shoal-test-python", "localhost/shoal-test-edge"
IN_THE_BASE = "python3-pip,python-is-python3,ca-certificates"
CERTIFICATES = "etc/ssl/certs/ca-certificates.crt"
MOST_ADDED_MB = 170
"""What the image adds to Python's."""
NOT_ENROLLED = 4
STEP_S = 900

pytestmark = [pytest.mark.long, pytest.mark.timeout(5 * STEP_S)]


def run(*command):
    """Run a command and return the finished process. Inside other containers buildah can change the root and no more."""
    where = {**os.environ, "BUILDAH_ISOLATION": "chroot"}
    return subprocess.run(command, env=where, capture_output=True, text=True, timeout=STEP_S, check=False, cwd=ROOT)


def works(tool):
    """Whether a tool is present and can list its images: docker needs a daemon, the others the rights for it."""
    return shutil.which(tool) is not None and run(tool, "images").returncode == 0


def own_base(folder):
    """Make an image with Debian 12, Python and pip in place of the default one."""
    if shutil.which("mmdebstrap") is None or os.geteuid() != 0:
        pytest.skip("no registry of images answers, and mmdebstrap is not here or may not run")
    tree = Path(folder) / "base.tar"
    # A machine's own certificates, where its registry of packages is reached through them.
    certificates = f"--customize-hook=cp /{CERTIFICATES} $1/{CERTIFICATES}"
    made = run("mmdebstrap", "--variant=minbase", f"--include={IN_THE_BASE}", certificates, "bookworm", str(tree))
    if made.returncode:
        pytest.skip(f"mmdebstrap made no base: {made.stderr.strip().splitlines()[-1]}")
    container = run("buildah", "from", "scratch").stdout.strip()
    for step in (
        ("add", "--quiet", container, str(tree), "/"),
        ("config", "--env", "PIP_BREAK_SYSTEM_PACKAGES=1", container),  # Debian's pip refuses to install otherwise
        ("commit", "--quiet", container, OWN_BASE),
        ("rm", container),
    ):
        done = run("buildah", *step)
        assert done.returncode == 0, done.stderr
    return OWN_BASE


@pytest.fixture(scope="module")
def tool():
    """Return the name of the tool, after it has built the image."""
    found = [name for name in ("docker", "podman", "buildah") if works(name)]
    if not found:
        pytest.skip("neither docker, podman nor buildah is here and works")
    tool = found[0]
    pulled = run(tool, "pull", DEFAULT_BASE).returncode == 0
    if not pulled and "buildah" not in found:
        pytest.skip("no registry of images answers, and buildah is not here")
    with tempfile.TemporaryDirectory(prefix="shoal-image-", dir="/var/tmp") as folder:
        tool, base = (tool, DEFAULT_BASE) if pulled else ("buildah", own_base(folder))
    more = ["--ignorefile", f"{DOCKERFILE}.dockerignore", "--format", "docker"] if tool == "buildah" else []
    built = run(tool, "build", *more, "--build-arg", f"PYTHON_IMAGE={base}", "-f", DOCKERFILE, "-t", IMAGE, ".")
    assert built.returncode == 0, built.stdout[-2000:] + built.stderr[-2000:]
    yield tool
    run(tool, "rmi", IMAGE)


def inside(tool, *arguments):
    """Run the image's program with these arguments; return its exit status and what it printed."""
    if tool != "buildah":
        done = run(tool, "run", "--rm", IMAGE, *arguments)
        return done.returncode, done.stdout + done.stderr
    container = run("buildah", "from", IMAGE).stdout.strip()
    program = ("python", "-c", "from edge_client.program import main; main()")
    done = run("buildah", "run", container, "--", *program, *arguments)
    run("buildah", "rm", container)
    return done.returncode, done.stdout + done.stderr


def used_mb(tool, script):
    """Run a script of Python in the image and return the number that it prints, bytes, in MB (10^6)."""
    if tool != "buildah":
        done = run(tool, "run", "--rm", "--entrypoint", "python", IMAGE, "-c", script)
    else:
        container = run("buildah", "from", IMAGE).stdout.strip()
        done = run("buildah", "run", container, "--", "python", "-c", script)
        run("buildah", "rm", container)
    return int(done.stdout.split()[0]) / 1e6


LIBRARIES_BYTES = """
import os, numpy
folders = (os.path.dirname(os.path.dirname(numpy.__file__)), "/app")
files = [os.path.join(path, name) for folder in folders for path, _, names in os.walk(folder) for name in names]
print(sum(os.lstat(file).st_blocks * 512 for file in files))
"""


def test_the_image_of_a_device_works(tool):
    status, told = inside(tool, "--version")
    assert (status, "shoal-edge" in told) == (0, True), told
    status, told = inside(tool, "status", "/state", "--check")
    assert status == NOT_ENROLLED, told
    size_mb = used_mb(tool, LIBRARIES_BYTES)
    keep("image-edge", {"tool": tool, "libraries_and_code_mb": round(size_mb, 1)})
    assert size_mb <= MOST_ADDED_MB
