"""Layered configuration: flag, then SHOAL_* environment, then systemd's credential, then TOML file, then default.

Unknown keys are refused. A credential (``LoadCredential=NAME:FILE``) has the name of the key: its text is the value of a secret
text such as ``broker``, and its file the value of a path.
"""

from __future__ import annotations

import dataclasses
import os
import tomllib
import typing
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

from shoal.address import BrokerAddress
from shoal.errors import ConfigError
from shoal.util.service_manager import credential, read_credential
from shoal.util.wanted import wanted

C = TypeVar("C")


@dataclass(frozen=True, slots=True)
class Loaded(Generic[C]):
    """A configuration and the origin of each value: ``flag``, the variable, the file or ``default``."""

    values: C
    origins: Mapping[str, str]


def shown(loaded: Loaded[C]) -> dict[str, dict[str, Any] | None]:
    """Return name -> value and source of each field; an address that may contain a password is shown without it."""
    values = {f.name: getattr(loaded.values, f.name) for f in dataclasses.fields(loaded.values)}  # type: ignore[arg-type]
    return document(type(loaded.values), values, loaded.origins)


def lines(kind: type[Any], values: Mapping[str, Any], origins: Mapping[str, str]) -> Iterator[str]:
    """Yield the lines of `shown` for ``kind``; ``values`` and ``origins`` come from `gather` and may lack fields."""
    for name, found in document(kind, values, origins).items():
        yield f"{name} = (not set)" if found is None else f"{name} = {found['value']}  # {found['source']}"


def document(
    kind: type[Any], values: Mapping[str, Any], origins: Mapping[str, str]
) -> dict[str, dict[str, Any] | None]:
    """Return name -> value and source of each field, as for `lines`; None for a field that is not set."""
    found: dict[str, dict[str, Any] | None] = {}
    for field in dataclasses.fields(kind):
        if field.name not in values:
            found[field.name] = None
            continue
        value = values[field.name]
        if value and not field.repr:
            value = str(BrokerAddress.parse(value))
        elif isinstance(value, Path):
            value = str(value)
        found[field.name] = {"value": value, "source": origins[field.name]}
    return found


def load(
    kind: type[C],
    *,
    section: str,
    file: Path | None,
    flags: Mapping[str, Any],
    environment: Mapping[str, str] | None = None,
) -> Loaded[C]:
    """Return a ``kind`` (a frozen dataclass of str, int, float, bool and Path fields) filled from all layers.

    Args:
        kind: the dataclass; its fields are the only valid keys.
        section: the table of the TOML file, and the middle of the variables: SHOAL_<SECTION>_<KEY>.
        file: the TOML file, or None for none.
        flags: values from the command line; None means not given.
        environment: defaults to the process's environment.

    Raises:
        ConfigError: an unknown key, a missing value, a value of the wrong type, or a file that can't be read.
    """
    values, origins = gather(kind, section=section, file=file, flags=flags, environment=environment)
    for field in dataclasses.fields(kind):  # type: ignore[arg-type]
        if field.name not in values:
            variable = _variable(section, field.name)
            raise ConfigError(
                f"{field.name} is not set",
                hint=f"give it on the command line, as {variable}, or as {field.name} in [{section}] of a TOML file",
            )
    return Loaded(kind(**values), origins)


def gather(
    kind: type[Any],
    *,
    section: str,
    file: Path | None,
    flags: Mapping[str, Any],
    environment: Mapping[str, str] | None = None,
) -> tuple[dict[str, Any], dict[str, str]]:
    """Return the values from all layers and their origins; arguments and errors as for `load`.

    A field without a default that no layer sets is missing from both.
    """
    environment = os.environ if environment is None else environment
    fields = {f.name: f for f in dataclasses.fields(kind)}
    hints = typing.get_type_hints(kind)
    table = _table(file, section)
    unknown = sorted(set(table) - set(fields))
    if unknown:
        raise ConfigError(
            f"{file}: unknown key {unknown[0]!r} in [{section}]", hint=f"known keys: {', '.join(sorted(fields))}"
        )
    values: dict[str, Any] = {}
    origins: dict[str, str] = {}
    for name, field in fields.items():
        variable = _variable(section, name)
        if flags.get(name) is not None:
            values[name], origins[name] = flags[name], "flag"
        elif variable in environment:
            values[name], origins[name] = _parse(environment[variable], hints[name], variable), variable
        elif (secret := _credential(name, field, hints[name], environment)) is not None:
            values[name], origins[name] = secret, f"credential {name}"
        elif name in table:
            values[name], origins[name] = _parse(table[name], hints[name], f"{file}: {name}"), str(file)
        elif field.default is not dataclasses.MISSING:
            values[name], origins[name] = field.default, "default"
    return values, origins


def _credential(name: str, field: Any, hint: Any, environment: Mapping[str, str]) -> str | Path | None:
    """Return a field's value from the service manager: for secret texts, which ``repr`` does not show, and for paths."""
    path = credential(name, environment)
    if path is None:
        return None
    if hint is Path or Path in typing.get_args(hint):
        return path
    return None if field.repr else read_credential(path)


def _variable(section: str, name: str) -> str:
    return f"SHOAL_{section}_{name}".upper()


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


def _parse(value: Any, hint: Any, where: str) -> Any:
    """Return ``value`` as ``hint`` (str, int, float, bool, Path, or one of them | None)."""
    kinds = [a for a in typing.get_args(hint) if a is not type(None)] or [hint]
    kind = kinds[0]
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
