"""`shoal-edge`: a device that trains on its own data and uploads masked updates."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from edge_client.config import DATA_HELP, EdgeConfig
from edge_client.learning.executor.choice import AUTO, ONNX_RUNTIME, TrainerCommand, choose
from edge_client.learning.reading import Reading
from shoal.errors import NotEnrolledError, UsageError
from shoal.util.config import Layers, read
from shoal.util.console import add_version, note, run_program, say_result, working
from shoal.util.files import named
from shoal.util.options import AsJson, GrantFile, Healthy, OwnerPrint, new_app, options_of

if TYPE_CHECKING:
    from collections.abc import Mapping

    from edge_client.answers.inference import MakeBackend
    from edge_client.storage.state import OwnModel

app = new_app("Train on this device's own data; upload only masked, sealed updates.")

Directory = Annotated[Path, typer.Argument(help="Keys, membership and state of this device.")]
Node = Annotated[int | None, typer.Option(help="A node on this device's path in cfl's tree: see `path` in status.")]
Live = Annotated[
    bool, typer.Option("--live", help="Take the model of the run under way, as last saved: up to 30 s old.")
]


@app.command()
def init(
    directory: Directory,
    name: Annotated[str, typer.Option(help="The device's name in the fleet.")],
    json: AsJson = False,
) -> None:
    """Make this device's keys; prints the card to carry to the owner."""
    from edge_client import membership as enrolment
    from shoal.membership.cards import say_card

    say_card("device", name, enrolment.init(directory, name), as_json=json)


@app.command()
def join(
    directory: Directory,
    grant: GrantFile,
    owner: OwnerPrint,
    json: AsJson = False,
) -> None:
    """Accept the owner's grant."""
    from edge_client import membership as enrolment

    data = grant.read_bytes()
    with named(grant, "a grant is what shoal-fleet add-device prints the path of"):
        member = enrolment.join(directory, data, owner)
    _try_executor()
    _say_joined(directory, member.fleet, member.name, as_json=json)


def _try_executor() -> None:
    """Warn if ONNX Runtime is installed and can't be used on this machine."""
    from edge_client.learning.executor import trial

    if choose(AUTO) == ONNX_RUNTIME and (fault := trial.failure()):
        note(f"warning: {fault}")
        note(f"hint: {trial.HINT}")


def _say_joined(directory: Path, fleet: str, name: str, *, as_json: bool) -> None:
    say_result({"fleet": fleet, "device": name}, f"joined fleet {fleet} as {name}", as_json=as_json)
    note(f"next: shoal-edge run {directory} --data FILE")


@app.command()
def enrol(
    directory: Directory,
    line: Annotated[
        str,
        typer.Argument(
            help="The owner's line, a file that holds it, or - for stdin. It holds a secret, and other users of this "
            "machine can read command lines: better leave it out and paste it when asked.",
            show_default="ask, or read stdin",
        ),
    ] = "",
    name: Annotated[str, typer.Option(help="The device's name in the fleet; default: the directory's name.")] = "",
    json: AsJson = False,
) -> None:
    """Ask to join a fleet over the broker: makes this device's keys, and waits until the owner approves or the line expires.

    The device trusts only the owner and the aggregator that the line names.
    """
    from time import time

    from crypto.seal.identity import fingerprint
    from edge_client import enrolment as joining

    token = joining.read_line(line)
    joining.require_fresh(directory, token, int(time()))
    _try_executor()
    identity = joining.prepare(directory, name or directory.absolute().name)
    mine = fingerprint(identity.member)
    note(f"fingerprint {mine}")
    note(f"owner {token.owner}, aggregator {token.aggregator}")
    note(f"next: shoal-fleet approve FLEET_DIR {mine} on the owner's machine")
    way = {name: value for name, value in read(EdgeConfig).values.items() if name in ("ca", "cert", "key", "proxy")}
    member = joining.enrol(directory, token, **way, complain=note)
    _say_joined(directory, member.fleet, member.name, as_json=json)


@app.command()
@options_of(EdgeConfig)
def run(
    layers: Layers[EdgeConfig],
    json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object with the runs that have ended, at the end.")
    ] = False,
) -> None:
    """Take part in the fleet's runs; after a restart, resume the current one.

    `shoal-edge config` lists all settings. Those that are no option here are set in the file or the environment.
    """
    from edge_client.serving import serve_and_report

    serve_and_report(layers.config(), as_json=json)


@app.command()
@options_of(EdgeConfig, "dir", "data")
def doctor(
    layers: Layers[EdgeConfig],
    task: Annotated[
        str,
        typer.Option(
            metavar="FILE|NAME",
            help="Task on which data are tried: the task.toml of `shoal-fleet task compile`, its folder, or its name.",
            show_default="that of the run followed",
        ),
    ] = "",
    json: AsJson = False,
) -> None:
    """Check directory, disk, clock, broker, TLS, service, state, data, versions and executor; exit status 10 on a failure.

    Data are tried on a task: `shoal-fleet task check` lists all that is found in them.
    """
    from edge_client.doctor import diagnose
    from shoal.util.console import report

    config = layers.config(data=Path())
    with working("checking files, data and broker"):
        found = diagnose(config, with_data="data" in layers.values, task=task)
    report(found, as_json=json)


@app.command("config")
@options_of(EdgeConfig, "dir")
def show_config(layers: Layers[EdgeConfig], json: AsJson = False) -> None:
    """Print every value that run would use, and its source."""
    from edge_client.membership import DeviceMembership

    values, origins = layers.values, layers.origins
    if not values["broker"] and "dir" in values:
        with suppress(NotEnrolledError):
            values["broker"], origins["broker"] = DeviceMembership(values["dir"]).broker, "the grant"
    if values["executor"] == AUTO:
        values["executor"] = f"{AUTO} ({choose(AUTO)})"
    layers.show(as_json=json)


@app.command()
def status(directory: Directory, check: Healthy = False, json: AsJson = False) -> None:
    """Print whether this device is running and connected, its stage and figures."""
    from edge_client.status import status as found
    from edge_client.status import status_lines

    data = found(directory, check=check)
    say_result(data, *status_lines(data), as_json=json)


@app.command()
def predict(
    directory: Directory,
    data: Annotated[Path, typer.Option(help=DATA_HELP)],
    node: Node = None,
    ensemble: Annotated[
        bool, typer.Option("--ensemble", help="Average the outputs of all models from the cluster to the root.")
    ] = False,
    live: Live = False,
    probabilities: Annotated[
        bool,
        typer.Option("--probabilities", help="Print the probability of each class, in the order of the task's labels."),
    ] = False,
    json: AsJson = False,
) -> None:
    """Answer with this device's finished model, or others on its path in cfl's tree: one line a sample.

    The answers are the task's labels if it names them, and else the numbers of the classes.

    After a run the device chooses between its cluster's model and models that it trained further: see `status`, and
    `personalise` to choose again. A node is always one of the run's own models.

    The newest finished model answers, unless an older one of the same task does better on this device's validation share:
    see `models`, and `rollback` to choose another.
    """
    from edge_client.answers.inference import choose

    settings = read(EdgeConfig).values
    chosen = choose(directory, live=live, backend=_backend(settings))
    reading = Reading(settings["label"], settings["separator"])
    labels = chosen.bundle.manifest.data.labels
    ask = chosen.probabilities if probabilities else chosen.predict
    with working("computing the answers"):
        outputs = ask(data, node=node, ensemble=ensemble, reading=reading)
    _note_unfinished(live, chosen.live, chosen.own)
    answers, names = ("probabilities", ()) if probabilities else ("predictions", labels)
    listed = {"labels": list(labels)} if labels else {}
    say_result(
        {answers: outputs.tolist(), **listed, **chosen.document(node, ensemble=ensemble)},
        *(" ".join(names[v] if names else f"{v:g}" for v in row.tolist()) for row in outputs.reshape(len(outputs), -1)),
        as_json=json,
    )


@app.command()
@options_of(EdgeConfig, "label", file=False)
def evaluate(
    layers: Layers[EdgeConfig],
    directory: Directory,
    data: Annotated[Path, typer.Argument(metavar="FILE", help=f"Samples with labels: {DATA_HELP}")],
    json: AsJson = False,
) -> None:
    """Compare this device's answers with the labels of a file, and with the most common label, or the mean for numbers.

    The same model answers as for predict without options. Nothing leaves the device.
    """
    from edge_client.answers.inference import choose
    from edge_client.learning.evaluation import ClassFigures
    from edge_client.status import evaluation_lines

    chosen = choose(directory, live=False, backend=_backend(layers.values))
    # Who compares answers wants every sample.
    reading = Reading(layers.values["label"], layers.values["separator"], skip_bad=0)
    with working("computing the answers"):
        figures = chosen.evaluate(data, reading)
    _note_unfinished(False, chosen.live, chosen.own)
    names = chosen.bundle.manifest.data.labels
    document = figures.document(names) if isinstance(figures, ClassFigures) else figures.document()
    found = {**document, "no_better": figures.is_no_better, **chosen.document(None)}
    say_result(found, *evaluation_lines(document), as_json=json)
    if figures.is_no_better:
        note("warning: the model is no better than a guess that looks at no sample")


@app.command()
def export(
    directory: Directory,
    output: Annotated[Path, typer.Argument(help="The ONNX file to write.", dir_okay=False)],
    node: Node = None,
    live: Live = False,
    certified: Annotated[
        bool,
        typer.Option(
            "--certified", help="Write a file for the owner's `run start --from`, and no ONNX file: see above."
        ),
    ] = False,
    json: AsJson = False,
) -> None:
    """Write the model that predict answers with, or one above it, as a self-contained ONNX file.

    With --certified the file holds the newest models of the current run that enough devices have signed, with the signatures.
    They are one to ten rounds old. The owner can begin a run with them when the aggregator is lost.
    """
    if certified:
        if live or node is not None:
            raise UsageError("--certified takes all certified models", hint="leave --live and --node away")
        _export_certified(directory, output, json=json)
        return
    from edge_client.answers.inference import choose
    from edge_client.status import choice_name

    chosen = choose(directory, live=live)
    with working("writing the model"):
        model = chosen.export(output, node=node)
    _note_unfinished(live, chosen.live, model)
    found = chosen.document(node)
    choice = found["choice"]
    own = "" if choice in ("cluster", f"node-{model.cluster}") else f", personal model: {choice_name(choice)}"
    at = f", round {model.round}" if chosen.live else ""
    line = f"{output}: cluster {model.cluster} of run {model.run}{at}{own}"
    say_result({"file": str(output), **found}, line, as_json=json)


def _export_certified(directory: Path, output: Path, *, json: bool) -> None:
    from edge_client.membership import DeviceMembership
    from edge_client.models.store import certified_file
    from shoal.util.files import write_atomic

    DeviceMembership(directory)  # checks that it is a device's
    data, round_ = certified_file(directory)
    write_atomic(output, data)
    say_result({"file": str(output), "round": round_}, f"{output}: certified models up to round {round_}", as_json=json)
    note("next: shoal-fleet run start DIR --from FILE on the owner's machine; it holds the model in clear")


def _backend(settings: Mapping[str, Any]) -> MakeBackend:
    """Return the maker of what answers, by settings: own training code, for a task that names one, or the usual executor."""
    from edge_client.learning.trainer.model import make_model

    spec, most_s, most_mb = settings["trainer"], settings["trainer_s"], settings["trainer_mb"]
    return make_model(AUTO, TrainerCommand(spec, most_s, most_mb) if spec else None)


def _note_unfinished(wanted: bool, live: bool, model: OwnModel) -> None:
    """Print a note if the model of an unfinished run answers though --live was not given."""
    if live and not wanted:
        note(
            f"no run has finished on this device yet: this is the model of run {model.run} under way, round {model.round}"
        )


@app.command()
@options_of(EdgeConfig, "dir", "data")
def personalise(
    layers: Layers[EdgeConfig],
    cluster: Annotated[bool, typer.Option("--cluster", help="Go back to the cluster's model.")] = False,
    json: AsJson = False,
) -> None:
    """Choose again, now, between the cluster's model and models that this device trains further; or go back with --cluster.

    `shoal-edge run` does this by itself once after each run, and may be running meanwhile. Nothing leaves the device.
    """
    from edge_client.answers.model_in_use import publish
    from edge_client.membership import DeviceMembership
    from edge_client.run.finishing import back_to_cluster
    from edge_client.run.finishing import personalise as choose_again
    from edge_client.status import personal_line
    from edge_client.storage.finished_models import FinishedModels

    config = layers.config(data=Path())
    if cluster:
        DeviceMembership(config.dir)
        model, choice = back_to_cluster(FinishedModels(config.dir))
    elif "data" not in layers.values:
        raise UsageError("personalise needs this device's samples", hint="give --data, or --cluster to train nothing")
    else:
        with working("training candidates"):
            model, choice = choose_again(config)
    publish(config.dir)
    document = {"run": model.run, **choice.document()}
    say_result(document, personal_line(document), as_json=json)


@app.command()
def models(directory: Directory, json: AsJson = False) -> None:
    """List the last finished models, newest first, with their fit to this device's validation share."""
    from edge_client.membership import DeviceMembership
    from edge_client.status import model_line
    from edge_client.storage.finished_models import FinishedModels

    DeviceMembership(directory)
    found = FinishedModels(directory).standing().documents()
    if not found:
        note("no run has finished on this device yet")
    say_result({"models": found}, *(model_line(model) for model in found), as_json=json)


@app.command()
def rollback(
    directory: Directory,
    run: Annotated[
        int | None,
        typer.Argument(
            metavar="[RUN]",
            help="Number of the run whose model is to answer: see `models`.",
            show_default="the run that finished before the one in use",
        ),
    ] = None,
    json: AsJson = False,
) -> None:
    """Let an earlier finished model answer, at once and until a later run finishes; RUN may also be the newest again.

    `shoal-edge run` may be running meanwhile.
    """
    from edge_client.membership import DeviceMembership
    from edge_client.storage.finished_models import FinishedModels

    DeviceMembership(directory)
    chosen = FinishedModels(directory).rollback(run)
    from edge_client.answers.model_in_use import publish  # with numpy, which a refusal needs not

    publish(directory)
    say_result(
        {"run": chosen.run, "round": chosen.round, "cluster": chosen.own.cluster},
        f"run {chosen.run} answers until a later run finishes",
        as_json=json,
    )


def main() -> None:
    """Run the program."""
    add_version(app, prog="shoal-edge")
    run_program(app, prog="shoal-edge", secret=True)
