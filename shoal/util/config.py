"""A program's settings, each declared once: a field of a dataclass, with a `Setting` beside its type.

The value comes from the first layer that has it: option of the command line, SHOAL_* environment, systemd's credential, TOML
file, default. Unknown keys are refused. A credential (``LoadCredential=NAME:FILE``) has the name of the key: its text is the
value of a secret text such as ``broker``, and its file the value of a path. `shoal.util.options` makes the command line's part.
"""

from __future__ import annotations

import os
import tomllib
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, fields, replace
from pathlib import Path
from typing import Annotated, Any, Generic, TypeVar, get_args, get_type_hints

from shoal.address import shown
from shoal.errors import ConfigError
from shoal.hints import wanted
from shoal.util.console import say, say_json
from shoal.util.service_manager import credential, read_credential

C = TypeVar("C")


@dataclass(frozen=True, slots=True)
class Setting:
    """A setting of a program.

    Attributes:
        help: its meaning, one or two sentences.
        metavar: the form of its value, if the type does not say enough.
        shown: the default in words, where the value would say too little.
        off: name of the option that turns a switch off.
        argument: whether it is an argument of the command line, and no option.
        rare: whether it is for special machines: it stands in the file or the environment, and is no option of its own.
        name, kind, default, secret: name of its field, type without None, default, and whether its value may hold a password;
            `settings_in` fills them in.
    """

    help: str
    metavar: str | None = None
    shown: str = ""
    off: str = ""
    argument: bool = False
    rare: bool = False
    name: str = ""
    kind: type[Any] = str
    default: Any = None
    secret: bool = False

    @property
    def option(self) -> str:
        """The name of its option."""
        return f"--{self.name.replace('_', '-')}"


# How each program that serves reaches the broker.
Broker = Annotated[str, Setting("mqtt:// or mqtts:// address; it may hold a password.", shown="the grant's", rare=True)]
Ca = Annotated[Path | None, Setting("CA certificates for mqtts.", shown="the grant's or the system's", rare=True)]
Cert = Annotated[Path | None, Setting("Client certificate for mqtts.", rare=True)]
Key = Annotated[Path | None, Setting("Client certificate's key.", rare=True)]
Proxy = Annotated[
    str,
    Setting(
        "Proxy to an encrypted broker: http://[user:password@]host:port or socks5://...",
        shown="https_proxy's",
        rare=True,
    ),
]
ChunkBytes = Annotated[int, Setting("Largest chunk to send, for a broker that takes small packets only.", rare=True)]


def settings_in(kind: type[Any]) -> dict[str, Setting]:
    """Return the settings of a configuration by name: a dataclass of str, int, float, bool and Path, each perhaps None."""
    hints = get_type_hints(kind, include_extras=True)
    found = {}
    for field in fields(kind):
        annotated, setting = get_args(hints[field.name])
        (base,) = {*(get_args(annotated) or (annotated,))} - {type(None)}
        found[field.name] = replace(setting, name=field.name, kind=base, default=field.default, secret=not field.repr)
    return found


@dataclass(frozen=True, slots=True)
class Layers(Generic[C]):
    """The values of a configuration from all layers, and where each is from: ``flag``, the variable, the file or ``default``.

    A field that has no default and is in no layer is missing.
    """

    kind: type[C]
    values: dict[str, Any]
    origins: dict[str, str]

    def config(self, **otherwise: Any) -> C:
        """Return the configuration.

        Args:
            otherwise: values of settings that no layer has.

        Raises:
            ConfigError: a value is missing, or the configuration refuses one.
        """
        values = {**otherwise, **self.values}
        for name in settings_in(self.kind):
            if name not in values:
                raise ConfigError(
                    f"{name} is not set",
                    hint=f"give it on the command line, as {variable_of(self.kind, name)}, or as {name} in "
                    f"[{table_of(self.kind)}] of a TOML file",
                )
        return self.kind(**values)

    def document(self) -> dict[str, dict[str, Any] | None]:
        """Return name -> value and source of each field, None if it is not set; an address is shown without its password."""
        found: dict[str, dict[str, Any] | None] = dict.fromkeys(settings_in(self.kind))
        for name, setting in settings_in(self.kind).items():
            if name in self.values:
                value = self.values[name]
                if value and setting.secret:
                    value = shown(value)
                elif isinstance(value, Path):
                    value = str(value)
                found[name] = {"value": value, "source": self.origins[name]}
        return found

    def show(self, *, as_json: bool) -> None:
        """Print `document`, as JSON or as lines of text."""
        if as_json:
            say_json(self.document())
            return
        for name, found in self.document().items():
            say(f"{name} = (not set)" if found is None else f"{name} = {found['value']}  # {found['source']}")


def read(
    kind: type[C],
    *,
    file: Path | None = None,
    flags: Mapping[str, Any] | None = None,
    environment: Mapping[str, str] | None = None,
) -> Layers[C]:
    """Return the settings of ``kind`` from all layers.

    Args:
        kind: a configuration, see `settings_in`; ``TABLE`` names the table of the file, and SHOAL_<TABLE>_<KEY> the variables.
        file: the TOML file, if any.
        flags: values from the command line; None means not given.
        environment: defaults to the process's environment.

    Raises:
        ConfigError: an unknown key, a value of the wrong type, or a file that can't be read.
    """
    environment, flags = os.environ if environment is None else environment, flags or {}
    settings = settings_in(kind)
    table = _table(file, table_of(kind))
    unknown = sorted(set(table) - set(settings))
    if unknown:
        raise ConfigError(
            f"{file}: unknown key {unknown[0]!r} in [{table_of(kind)}]",
            hint=f"known keys: {', '.join(sorted(settings))}",
        )
    values: dict[str, Any] = {}
    origins: dict[str, str] = {}
    for name, setting in settings.items():
        variable = variable_of(kind, name)
        if flags.get(name) is not None:
            values[name], origins[name] = flags[name], "flag"
        elif variable in environment:
            values[name], origins[name] = _parse(environment[variable], setting.kind, variable), variable
        elif (secret := _credential(setting, environment)) is not None:
            values[name], origins[name] = secret, f"credential {name}"
        elif name in table:
            values[name], origins[name] = _parse(table[name], setting.kind, f"{file}: {name}"), str(file)
        elif setting.default is not MISSING:
            values[name], origins[name] = setting.default, "default"
    return Layers(kind, values, origins)


def table_of(kind: type[Any]) -> str:
    """Return the name of a configuration's table in a TOML file."""
    return str(kind.TABLE)


def variable_of(kind: type[Any], name: str) -> str:
    """Return the environment's variable for a setting."""
    return f"SHOAL_{table_of(kind)}_{name}".upper()


def _credential(setting: Setting, environment: Mapping[str, str]) -> str | Path | None:
    """Return a setting's value from the service manager: for secret texts and for paths."""
    path = credential(setting.name, environment)
    if path is None or setting.kind is Path:
        return path
    return read_credential(path) if setting.secret else None


def _table(file: Path | None, section: str) -> dict[str, Any]:
    if file is None:
        return {}
    try:
        document = tomllib.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"can't read {file}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{file} is not valid TOML: {str(error)[:200]}") from error
    unknown = sorted(set(document) - {section})
    if unknown:
        raise ConfigError(f"{file}: unknown table or key {unknown[0]!r}", hint=f"everything belongs in [{section}]")
    table = document.get(section, {})
    if not isinstance(table, dict):
        raise ConfigError(f"{file}: [{section}] is not a table")
    return table


def _parse(value: Any, kind: type[Any], where: str) -> Any:
    """Return ``value`` as a str, int, float, bool or Path."""
    try:
        if kind is bool and isinstance(value, str):
            return {"1": True, "true": True, "yes": True, "0": False, "false": False, "no": False}[value.lower()]
        if kind is bool and not isinstance(value, bool):
            raise ValueError(value)
        if kind in (int, float) and isinstance(value, bool):
            raise ValueError(value)  # TOML's true is an int to Python
        if kind in (str, Path) and not isinstance(value, str):
            raise ValueError(value)
        return kind(value)
    except (ValueError, TypeError, KeyError) as error:
        what = "true or false" if kind is bool else wanted(kind)
        raise ConfigError(f"{where} is {what}, not {value!r}") from error
