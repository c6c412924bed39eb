"""The container images and compose.yaml name commands, options, variables and files that there are."""

from __future__ import annotations

import importlib
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
import typer

from shoal.transport.local_broker import find_mosquitto, start_broker
from tests.helpers.trees import ONE_THREAD, PROGRAMS, ROOT

yaml = pytest.importorskip("yaml")

DOCKER = ROOT / "deploy" / "docker"
COMPOSE = DOCKER / "compose.yaml"
SERVICES = yaml.safe_load(COMPOSE.read_text())["services"]
IMAGES = {"shoal-edge": "edge.Dockerfile", "shoal-aggregator": "aggregator.Dockerfile"}
RUN_S = 90.0
UNHEALTHY = 11


def lines(dockerfile):
    """Return a Dockerfile's instructions as (name, rest), with continued lines joined."""
    text = re.sub(r"^#.*\n", "", (DOCKER / dockerfile).read_text(), flags=re.MULTILINE).replace("\\\n", " ")
    return [tuple(line.split(maxsplit=1)) for line in text.splitlines() if line.strip()]


def last(dockerfile, name):
    """Return the rest of the last instruction of that name."""
    return [rest for found, rest in lines(dockerfile) if found == name][-1]


def parsed(program, words):
    """Parse a program's arguments as it would, without running it; return the command's name and its values."""
    group = typer.main.get_command(importlib.import_module(PROGRAMS[program]).app)
    context = group.commands[words[0]].make_context(words[0], list(words[1:]))
    return words[0], context.params


def entry_point(dockerfile):
    """Return the module of the image's ENTRYPOINT."""
    python, flag, script = json.loads(last(dockerfile, "ENTRYPOINT"))
    assert (python, flag) == ("python", "-c")
    return re.fullmatch(r"from ([\w.]+) import main; main\(\)", script)[1]


@pytest.mark.parametrize("program", IMAGES)
def test_image_starts_with_valid_arguments(program):
    """An image starts its program with arguments that it takes."""
    dockerfile = IMAGES[program]
    assert entry_point(dockerfile) == PROGRAMS[program]
    command, values = parsed(program, json.loads(last(dockerfile, "CMD")))
    assert command in ("run", "serve")
    assert values["dir"] == Path("/state")


@pytest.mark.parametrize("program", IMAGES)
def test_image_has_a_health_check(program):
    """An image has a health check that asks its program."""
    check = last(IMAGES[program], "HEALTHCHECK")
    _, _, script, *words = json.loads(check[check.index("[") :])
    assert script == json.loads(last(IMAGES[program], "ENTRYPOINT"))[2]
    command, values = parsed(program, words)
    assert (command, values["check"], values["directory"]) == ("status", True, Path("/state"))


@pytest.mark.parametrize("program", IMAGES)
def test_copied_files_reach_the_builder(program):
    """The ignore file leaves everything out but what it names."""
    dockerfile = IMAGES[program]
    sent = [line[1:] for line in (DOCKER / f"{dockerfile}.dockerignore").read_text().split() if line.startswith("!")]
    copied = [source for name, rest in lines(dockerfile) if name == "COPY" for source in rest.split()[:-1]]
    assert copied
    for source in copied:
        assert (ROOT / source).exists()
        assert any(source == path or source.startswith(f"{path}/") for path in sent), source
    assert all(
        any(source == path or source.startswith(f"{path}/") for source in copied) for path in sent if path != "**"
    )


@pytest.mark.parametrize("program", IMAGES)
def test_images_python_is_supported(program):
    """An images python is one that we support."""
    (default,) = [rest for name, rest in lines(IMAGES[program]) if name == "ARG" and rest.startswith("PYTHON_IMAGE=")]
    version = re.fullmatch(r"PYTHON_IMAGE=python:(3\.\d+)-slim", default)[1]
    assert f"Programming Language :: Python :: {version}" in (ROOT / "pyproject.toml").read_text()


def test_compose_has_a_small_fleet():
    """Compose has a broker, an aggregator, a keeper and three devices."""
    assert {name: service["image"] for name, service in SERVICES.items()} == {
        "broker": "eclipse-mosquitto:2",
        "aggregator": "shoal-aggregator",
        "keeper": "shoal-aggregator",
        "dev-1": "shoal-edge",
        "dev-2": "shoal-edge",
        "dev-3": "shoal-edge",
    }


@pytest.mark.parametrize("name", ["aggregator", "dev-1", "dev-2"])
def test_a_service_of_compose_fits_its_image(name):
    service = SERVICES[name]
    assert service["build"]["dockerfile"] == f"deploy/docker/{IMAGES[service['image']]}"
    assert (DOCKER / service["build"]["context"]).resolve() == ROOT
    _, values = parsed(service["image"], service["command"])
    assert values["dir"] == Path("/state")
    mounts = [mount.split(":")[1] for mount in service["volumes"]]
    assert "/state" in mounts
    if "data" in values:
        assert str(values["data"].parent) in mounts


def in_place(service, word, folder):
    """Return a word of a service's command with the place on this machine of a path in the container."""
    for mount in service["volumes"]:
        outside, inside = mount.split(":")[:2]
        if word == inside or word.startswith(f"{inside}/"):
            return str(folder / outside) + word.removeprefix(inside)
    return word


def health(service, folder):
    """Return the exit status of a service's health check, run on this machine."""
    check = last(IMAGES[service["image"]], "HEALTHCHECK")
    words = json.loads(check[check.index("[") :])
    words = [sys.executable, *(in_place(service, word, folder) for word in words[1:])]
    return subprocess.run(
        words, cwd=ROOT, env=environment(), capture_output=True, timeout=RUN_S, check=False
    ).returncode


def environment(**more):
    return {**os.environ, **ONE_THREAD, "PYTHONPATH": str(ROOT), **more}


@pytest.mark.long
@pytest.mark.broker
@pytest.mark.process
@pytest.mark.torch
@pytest.mark.timeout(4 * RUN_S)
@pytest.mark.skipif(find_mosquitto() is None, reason="mosquitto is not installed")
def test_the_fleet_of_compose_trains(tmp_path):
    """make-fleet.sh makes all that is mounted; the services' commands, without containers, finish the run and are healthy."""
    shutil.copy(DOCKER / "make-fleet.sh", tmp_path)
    programs = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    command = ["sh", str(tmp_path / "make-fleet.sh")]
    made = subprocess.run(
        command, env=environment(PATH=programs), capture_output=True, text=True, timeout=RUN_S, check=False
    )
    assert made.returncode == 0, made.stderr
    settings = dict(line.split("=") for line in (tmp_path / ".env").read_text().split())
    assert settings == {"SHOAL_USER": f"{os.getuid()}:{os.getgid()}"}
    ours = {name: service for name, service in SERVICES.items() if service["image"] in IMAGES}
    for service in ours.values():
        assert all((tmp_path / mount.split(":")[0]).is_dir() for mount in service["volumes"])
    assert health(ours["dev-1"], tmp_path) == health(ours["aggregator"], tmp_path) == UNHEALTHY
    started = []
    with start_broker("mosquitto", tmp_path / "broker") as broker:
        try:
            for name, service in ours.items():
                words = json.loads(last(IMAGES[service["image"]], "ENTRYPOINT"))[1:]
                words += [in_place(service, word, tmp_path) for word in service["command"]]
                where = environment(SHOAL_EDGE_BROKER=broker.url, SHOAL_AGGREGATOR_BROKER=broker.url)
                with (tmp_path / f"{name}.log").open("wb") as log:
                    started.append(
                        subprocess.Popen([sys.executable, *words], cwd=ROOT, env=where, stdout=log, stderr=log)
                    )
            end = time.monotonic() + RUN_S
            while "run finished" not in (tmp_path / "aggregator.log").read_text():
                assert time.monotonic() < end, shlex.join(command) + (tmp_path / "aggregator.log").read_text()
                assert all(process.poll() is None for process in started)
                time.sleep(0.2)
            assert [health(service, tmp_path) for service in ours.values()] == [0, 0, 0]
        finally:
            for process in started:
                process.terminate()
            for process in started:
                process.wait(RUN_S)
