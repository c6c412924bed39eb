"""`shoal-fleet`: the owner's program for keys, roster, tasks and runs."""

from __future__ import annotations

import math
import textwrap
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperCommand

from shoal import limits
from shoal.errors import ConfigError, UsageError
from shoal.owner.cli import enrolment as admission_cli
from shoal.owner.cli import models as models_cli
from shoal.owner.cli import upkeep as upkeep_cli
from shoal.owner.enrolment.reminders import broker_users
from shoal.owner.runs import defaults
from shoal.util.console import add_version, counted, mask_words, note, run_program, say, say_json
from shoal.util.wanted import wanted

if TYPE_CHECKING:
    from shoal.task.manifest import TaskManifest

MOST_ROUNDS = 2**32 - 2
"""A plan stores 32 bits, and the final round is one more."""

app = typer.Typer(
    help="Own a fleet: its keys, its roster, its tasks and its runs. Keep this machine's directory off the server.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
task_app = typer.Typer(help="Compile models into tasks that devices train without torch.", no_args_is_help=True)
app.add_typer(task_app, name="task")
app.add_typer(models_cli.app, name="models")

Directory = Annotated[Path, typer.Argument(help="The owner's directory.")]
CardFile = Annotated[Path, typer.Argument(help="The card that init printed.", exists=True, dir_okay=False)]
Expected = Annotated[str, typer.Option(help="Refuse the card unless it has this fingerprint.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]


@app.command()
def init(
    directory: Directory,
    name: Annotated[str, typer.Option(help="The fleet's name: a-z, 0-9 and '-'.")],
    broker: Annotated[str, typer.Option(help="mqtt://host:port or mqtts://host:port.")],
    passphrase: Annotated[
        bool,
        typer.Option(
            "--passphrase",
            help="Encrypt owner key and secrets under a passphrase (Argon2id), asked for at the terminal or read from the "
            "private file that SHOAL_PASSPHRASE_FILE names.",
        ),
    ] = False,
) -> None:
    """Make a fleet: the owner's key, the fleet's secrets, an empty roster."""
    from shoal.owner.keys.directory import FleetDirectory
    from shoal.owner.keys.unlock import ask

    fleet = FleetDirectory.create(directory, name, broker, ask(twice=True) if passphrase else None)
    say(f"owner {fleet.fingerprint}")
    note("next: shoal-aggregator init DIR on the server, then shoal-fleet add-aggregator")


@app.command()
def show(directory: Directory, json: AsJson = False) -> None:
    """Print the owner's fingerprint, the roster with its expiry and members, and each run with its mask mode."""
    from crypto.seal.identity import fingerprint
    from shoal.owner.keys.run_list import signed_plans, summary
    from shoal.owner.keys.unlock import open_fleet
    from shoal.owner.keys.vault import is_under_passphrase
    from shoal.util.times import day

    fleet = open_fleet(directory)
    roster = fleet.roster
    runs = [summary(plan) for plan in signed_plans(fleet, note)]
    data = {
        "fleet": fleet.name,
        "owner": fleet.fingerprint,
        "broker": fleet.broker,
        "roster": roster.sequence,
        "expires": day(roster.expires_at_s),
        "expires_at_s": roster.expires_at_s,
        "aggregator": fingerprint(roster.aggregator) if roster.aggregator else None,
        "passphrase": is_under_passphrase(directory),
        "devices": [
            {"name": d.name, "fingerprint": fingerprint(d), "revoked": d.name in roster.revoked} for d in roster.devices
        ],
        "runs": runs,
    }
    if json:
        say_json(data)
        return
    ends = "expired" if time.time() > roster.expires_at_s else "expires"
    say(f"fleet {data['fleet']}, roster {data['roster']}, {ends} {data['expires']}")
    say(f"owner {data['owner']}")
    say(f"aggregator {data['aggregator'] or '-'}")
    for device in roster.devices:
        say(f"{device.name} {fingerprint(device)}{' revoked' if device.name in roster.revoked else ''}")
    for r in runs:
        blur = f", norm noise of {r['norm_noise']:g}" if r["norm_noise"] else ""
        what = f"{r['algorithm']}, mask {mask_words(r['mode'])}, {counted(r['rounds'], 'round')}"
        cap = f", weight cap {r['weight_cap']:g}" if r["weight_cap"] else ", no weight cap"
        rule = f", robust {r['robust']}"
        ways = {r["precision_up"], r["precision_down"]}
        thin = "" if ways == {"float32"} else f", {r['precision_up']} up, {r['precision_down']} down"
        weights = f"{r['weighting']}{cap if r['weighting'] == 'samples' else ''}"
        say(f"run {r['run']}: {what}, weighting {weights}{rule}{blur}{thin}")


@app.command("add-device")
def add_device(directory: Directory, card: CardFile, fingerprint: Expected = "") -> None:
    """Add a device; prints the grant to carry back to it."""
    from shoal.owner.keys.unlock import open_fleet

    fleet = open_fleet(directory)
    keys_since = fleet.roster.keys_since
    grant = fleet.add_device(card.read_bytes(), fingerprint)
    say(str(grant))
    note(f"owner {fleet.fingerprint}")
    note(f"next: shoal-edge join DIR GRANT --owner {fleet.fingerprint}")
    if fleet.roster.keys_since > keys_since:
        drawn = admission_cli.drawn_for(fleet, 1)
        note(f"{drawn}: shoal-fleet publish {directory}, or carry roster.signed and grants/ to them")
    else:
        note(f"hand {directory / 'roster.signed'} to the aggregator, into its directory")
    broker_users(fleet, f"accepts {grant.stem}, unless --device named it before", published=False)


@app.command("add-aggregator")
def add_aggregator(directory: Directory, card: CardFile, fingerprint: Expected = "") -> None:
    """Name the aggregator; prints the grant to carry back to it, which contains no secret of a mask."""
    from shoal.owner.keys.unlock import open_fleet

    fleet = open_fleet(directory)
    say(str(fleet.add_aggregator(card.read_bytes(), fingerprint)))
    note(f"next: shoal-aggregator join DIR GRANT --owner {fleet.fingerprint}")


@app.command()
def renew(directory: Directory) -> None:
    """Sign the roster for another year."""
    from shoal.owner.keys.unlock import open_fleet
    from shoal.owner.keys.vault import ROSTER_FILE

    open_fleet(directory).renew()
    say(str(directory / ROSTER_FILE))
    note(f"next: shoal-fleet publish {directory}, or hand this file to the aggregator, into its directory")


@task_app.command("compile")
def compile_(
    directory: Directory,
    source: Annotated[str, typer.Argument(help="linear, logistic, mlp, cnn, lstm, or file.py:function.")],
    out: Annotated[Path, typer.Option(help="Directory to write the signed task to.")],
    option: Annotated[list[str] | None, typer.Option(help="Size of a built-in, NAME=NUMBER; repeatable.")] = None,
    shared: Annotated[list[str] | None, typer.Option(help="Prefix of parameters that all clusters share.")] = None,
    private: Annotated[
        list[str] | None,
        typer.Option(
            help="Prefix of parameters that never leave a device: each trains its own, from the model's initial values; "
            "repeatable."
        ),
    ] = None,
    name: Annotated[str, typer.Option(help="The task's name; default: the source's.")] = "",
) -> None:
    """Compile a torch model and its loss to ONNX, check it against torch, and sign it."""
    from shoal.owner.keys.outputs import check_output
    from shoal.owner.keys.unlock import open_fleet
    from shoal.owner.task_compiler.builtin import build, load_user
    from shoal.owner.task_compiler.compile import compile_task
    from shoal.owner.task_compiler.signed import SIGNATURE_FILE, TASK_FILES, Source, write_signed

    fleet = open_fleet(directory)
    check_output(fleet.path, out, ours=TASK_FILES, last=SIGNATURE_FILE)
    options = {k: _whole(v, k) for k, v in _pairs(option or []).items()}
    if options and ":" in source:
        raise UsageError(
            f"--option is for built-ins, and {source} is not one", hint="write the sizes into the function"
        )
    made = load_user(source) if ":" in source else build(source, **options)
    bundle = compile_task(
        made.model,
        made.loss,
        made.example,
        name=name or (source if ":" not in source else Path(source.split(":")[0]).stem.lower().replace("_", "-")),
        kind=made.kind,
        hyper=made.hyper,
        shared=shared or (),
        private=private or (),
    )
    write_signed(bundle, Source(source, options), fleet.owner, out)
    say(
        f"{out}: {bundle.length} coordinates, {sum(map(len, (bundle.score, bundle.grad, bundle.predict)))} bytes of graphs"
    )
    if bundle.private:
        say(private_words(bundle.manifest))


def private_words(manifest: TaskManifest) -> str:
    """Return a line about the parameters that stay on each device; the task has some."""
    names = ", ".join(p.name for p in manifest.private_parameters)
    return f"private: {names}: {manifest.private_length} of {manifest.length} coordinates never leave a device"


admission_cli.register(app)
upkeep_cli.register(app)


class RunCommand(TyperCommand):
    """`shoal-fleet run`, whose help ends with the algorithms and settings as the strategies define them."""

    def format_epilog(self, _ctx: Any, formatter: Any) -> None:
        """Write each algorithm with its settings."""
        from shoal.owner.runs.algorithms import describe  # imports numpy, so only when help is printed

        formatter.write("\nAlgorithms, and what --set takes for each:\n")
        for text in describe():
            formatter.write(f"\n{textwrap.indent(text, '  ')}\n")


@app.command(cls=RunCommand)
def run(
    directory: Directory,
    task: Annotated[Path, typer.Option(help="A task that `task compile` wrote.", exists=True, file_okay=False)],
    algorithm: Annotated[str, typer.Option(help="Name of an algorithm listed below.")],
    setting: Annotated[
        list[str] | None, typer.Option("--set", help="Setting of the algorithm, NAME=VALUE; repeatable.")
    ] = None,
    local: Annotated[
        list[str] | None,
        typer.Option(
            help="Local training, NAME=VALUE: epochs, steps (instead of epochs, with epochs=0), batch_size, lr, lr_decay, "
            "momentum, clip, prox_mu."
        ),
    ] = None,
    pretrain: Annotated[
        list[str] | None,
        typer.Option(
            help="Local training where devices train alone (cold starts, one-shot), NAME=VALUE; defaults to --local's "
            "values."
        ),
    ] = None,
    rounds: Annotated[int, typer.Option(help="Rounds, including those of cold starts.", min=1, max=MOST_ROUNDS)] = (
        defaults.DEFAULT_ROUNDS
    ),
    mode: Annotated[
        str,
        typer.Option(
            "--mode",
            "--mask",
            help="Mask mode: rotation (secret permutation, signs, Hadamard), permutation, signed-permutation or none.",
        ),
    ] = defaults.DEFAULT_MODE,
    norm_limit: Annotated[
        float,
        typer.Option(
            help="Largest l2 norm of one update; an update above ten times the median norm is left out in any case."
        ),
    ] = defaults.DEFAULT_NORM_LIMIT,
    max_samples: Annotated[
        int,
        typer.Option(
            help="Largest sample count that a device reports, even if it has more samples.", min=1, max=2**32 - 1
        ),
    ] = defaults.DEFAULT_MAX_SAMPLES,
    weight_cap: Annotated[
        float,
        typer.Option(
            help="Largest weight of a device in a mean, in median weights of its cluster, at least 1; 0: no limit."
        ),
    ] = defaults.DEFAULT_WEIGHT_CAP,
    robust: Annotated[
        str,
        typer.Option(
            help=f"Weights of the updates in a cluster's mean, against false ones: {', '.join(limits.ROBUST_RULES)}."
        ),
    ] = defaults.DEFAULT_ROBUST,
    precision: Annotated[
        str,
        typer.Option(
            help=f"Encoding of devices' updates, from the most bytes to the fewest: {', '.join(limits.PRECISIONS)}."
        ),
    ] = defaults.DEFAULT_PRECISION,
    precision_down: Annotated[
        str, typer.Option(help="Encoding of the means that devices receive, of the same list.")
    ] = defaults.DEFAULT_PRECISION,
    min_contributors: Annotated[int, typer.Option(help="Fewest devices in a mean that is broadcast.", min=1)] = (
        defaults.DEFAULT_MIN_CONTRIBUTORS
    ),
    quorum: Annotated[float, typer.Option(help="Share of the devices that closes a round after its deadline.")] = (
        defaults.DEFAULT_QUORUM
    ),
    participation: Annotated[float, typer.Option(help="Share of the devices drawn for a round.")] = (
        defaults.DEFAULT_PARTICIPATION
    ),
    deadline_s: Annotated[float, typer.Option(help="Seconds until a round closes with a quorum.")] = (
        defaults.DEFAULT_DEADLINE_S
    ),
    weighting: Annotated[
        str, typer.Option(help="samples, or uniform: devices then report no sample counts.")
    ] = defaults.DEFAULT_WEIGHTING,
    norm_noise: Annotated[
        float,
        typer.Option(
            help="Relative standard deviation of a random factor on each update, 0 to 0.2, against guessing a device's "
            "data by the update's norm; 0 is off.",
            min=0,
            max=limits.MAX_NORM_NOISE,
        ),
    ] = defaults.DEFAULT_NORM_NOISE,
    evaluate_every: Annotated[
        int, typer.Option(help="Rounds between accuracy reports; 0: at the end only.", min=0, max=MOST_ROUNDS)
    ] = defaults.DEFAULT_EVALUATE_EVERY,
    seed: Annotated[
        int | None,
        typer.Option(
            help="Seed of participation and batch order, which the aggregator knows; not of origins; default: random.",
            min=0,
            max=2**64 - 1,
        ),
    ] = None,
    epoch_rounds: Annotated[int | None, typer.Option(hidden=True)] = None,
) -> None:
    """Sign a run and print its file: the plan, which limits the aggregator, and the sealed task and origins."""
    if not (weight_cap == 0 or 1 <= weight_cap < math.inf):
        raise UsageError(
            f"--weight-cap {weight_cap:g} is neither 0 nor at least 1",
            hint=f"0 turns it off; {defaults.DEFAULT_WEIGHT_CAP:g} is the default; below 1 even the median device would weigh "
            "less than its samples",
        )
    if robust not in limits.ROBUST_RULES:
        raise UsageError(f"--robust {robust} is no rule", hint=f"there are {', '.join(limits.ROBUST_RULES)}")
    for option, chosen in (("--precision", precision), ("--precision-down", precision_down)):
        if chosen not in limits.PRECISIONS:
            raise UsageError(f"{option} {chosen} is no precision", hint=f"there are {', '.join(limits.PRECISIONS)}")
    if epoch_rounds is not None:
        raise ConfigError(
            "there is no --epoch-rounds any more: each round has a mask of its own",
            hint="leave it out; `shoal-fleet rotate` and `shoal-fleet revoke` replace the keys at the next round",
        )
    from shoal.owner.keys.unlock import open_fleet
    from shoal.owner.runs.checks import check_devices, check_roster, doubts, roster_doubts
    from shoal.owner.runs.plan import RunOptions, draft_plan, make_plan, write_run
    from shoal.owner.runs.training import local_training
    from shoal.owner.task_compiler.signed import read_signed

    fleet = open_fleet(directory)
    now_s = int(time.time())
    check_roster(fleet.roster, now_s)
    bundle, source = read_signed(task, fleet.owner)
    training = local_training(bundle.manifest.hyper, _pairs(local or []))
    options = RunOptions(
        algorithm=algorithm,
        settings=_pairs(setting or []),
        rounds=rounds,
        mode=mode,
        local=training,
        pretrain=local_training(training, _pairs(pretrain or [])),
        norm_limit=norm_limit,
        min_contributors=min_contributors,
        quorum=quorum,
        participation=participation,
        deadline_s=deadline_s,
        weighting=weighting,
        norm_noise=norm_noise,
        max_samples=max_samples,
        weight_cap=weight_cap,
        robust=robust,
        evaluate_every=evaluate_every,
        seed=seed,
        precision_up=precision,
        precision_down=precision_down,
    )
    draft = draft_plan(fleet, bundle, options)
    if bundle.private:
        note(private_words(bundle.manifest))
    devices = fleet.roster.active()
    check_devices(draft, devices)
    for doubt in (*doubts(draft, devices), *roster_doubts(fleet.roster, now_s)):
        note(f"warning: {doubt}")
    from shoal.owner.task_compiler.origin import make_origins  # torch: imported only after the checks

    # The aggregator reads the plan and with it the seed: origins come from the operating system's random source.
    origins = make_origins(source.spec, draft.origins, None, manifest=bundle.manifest, **source.options)
    with fleet.changing():  # no other program may take the plan's keys or its number
        plan = make_plan(fleet, bundle, options)
        path = write_run(fleet, plan, bundle, origins)
    say(str(path))
    note("next: put this file into the aggregator's runs directory; devices get it through the broker")


def _pairs(items: list[str]) -> dict[str, str]:
    pairs = {}
    for item in items:
        name, equals, value = item.partition("=")
        if not equals or not name or not value:
            raise UsageError(f"{item!r} is not NAME=VALUE", hint=f"write {name or 'NAME'}=VALUE")
        pairs[name] = value
    return pairs


def _whole(text: str, name: str) -> int:
    try:
        return int(text)
    except ValueError as error:
        raise UsageError(f"{name} is {wanted(int)}, not {text!r}") from error


def main() -> None:
    """Run the program."""
    add_version(app, prog="shoal-fleet")
    run_program(app, prog="shoal-fleet", secret=True)
