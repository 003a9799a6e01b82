"""Settings of a program's hub that `aiorl launch` gives it, by environment variables.

    AIORL_BIND            address to listen at
    AIORL_ADVERTISE       host at which others reach it, if that is another one
    AIORL_KEYS_DIR        directory of keys
    AIORL_INSECURE        1: everyone who can reach the address may join
    AIORL_RUN_DIR         directory for what the program saves; the hub writes run.json there
    AIORL_NUM_JOINING     processes that join from other hosts
    AIORL_NUM_HERE        processes for which the program's own host has room

The first hub of a program takes them, so that actors, which inherit the environment, don't listen
there, too. Only AIORL_RUN_DIR stays.
"""

from __future__ import annotations

import logging
import os
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from aiorl.config.addresses import RUN_FILE, dialable, split_address
from aiorl.errors import ConfigError
from aiorl.process.machine import usable_cores
from aiorl.process.replaced_file import write_json

logger = logging.getLogger(__name__)

ANOTHER_TURN: Final = threading.Event()
"""Set when an engine ends the program and may start it again: its processes wait for that."""
_HAS_BEEN_TAKEN: Final = threading.Event()
_VARIABLES: Final = {
    "bind": "AIORL_BIND",
    "advertise": "AIORL_ADVERTISE",
    "keys": "AIORL_KEYS_DIR",
    "insecure": "AIORL_INSECURE",
    "run_dir": "AIORL_RUN_DIR",
    "num_joining": "AIORL_NUM_JOINING",
    "num_here": "AIORL_NUM_HERE",
}
"""Attribute of `Launched` -> its variable."""


@dataclass(frozen=True, kw_only=True)
class Launched:
    """Settings of a hub that its launcher gives; each is None if there is none.

    Attributes:
        bind: "tcp://HOST:PORT" to listen at.
        advertise: host at which others reach it, as the option ``--advertise`` takes it.
        keys: directory of CURVE keys.
        insecure: "1" to let everyone join.
        run_dir: directory for what the program saves.
        num_joining: number of processes that join.
        num_here: number of processes for which the hub's own host has room.
    """

    bind: str | None = None
    advertise: str | None = None
    keys: str | None = None
    insecure: str | None = None
    run_dir: str | None = None
    num_joining: int | None = None
    num_here: int | None = None

    def variables(self) -> dict[str, str]:
        """Return the environment variables that hold these settings."""
        values = {variable: getattr(self, name) for name, variable in _VARIABLES.items()}
        return {variable: str(value) for variable, value in values.items() if value is not None}

    def check_keys(self, keys: Path | str | None) -> None:
        """Warn of keys that the launcher's processes do not have.

        Args:
            keys: directory that the program itself names, or None.
        """
        if (
            keys is None
            or self.keys is None
            or os.path.realpath(keys) == os.path.realpath(self.keys)
        ):
            return
        logger.warning(
            "Actors() has the keys in %s, but the processes that aiorl launch starts have those of"
            " %s: they can't join; leave the argument keys out",
            keys,
            self.keys,
        )

    def announce(self, address: str, hub_id: str) -> None:
        """Write ``run.json``, by which the launcher's processes find the hub.

        Args:
            address: address that it is bound to.
            hub_id: its id.

        Raises:
            ConfigError: ``advertise`` can't be dialled.
            OSError: the file can't be written.
        """
        if self.bind is None or self.run_dir is None:
            return
        addresses = dialable(address, self.advertise)
        facts = {
            "run_id": hub_id,
            "address": addresses[0],
            "addresses": addresses,
            "port": split_address(address)[1],
        }
        write_json(Path(self.run_dir) / RUN_FILE, facts)

    def num_processes(self, *, can_join: bool) -> tuple[int, int]:
        """Return the numbers of processes that join, and of those for which this host has room.

        Args:
            can_join: True if the hub listens for others.

        Raises:
            ConfigError: others can join, and no launcher has said how many will.
        """
        if not can_join:
            return 0, usable_cores() if self.num_here is None else self.num_here
        if self.num_joining is None:
            raise ConfigError(
                "No launcher has said how many processes will join.",
                key="count",
                hint="Give the number: await actors.wait_for_processes(8).",
            )
        return self.num_joining, self.num_here or 0


def take_settings(*, is_for_others: bool) -> Launched:
    """Return the settings in this process's environment, and remove them there.

    Args:
        is_for_others: True if the program itself says where its hub listens for others.

    Raises:
        ConfigError: a variable holds no number where there must be one, or AIORL_INSECURE is not 1.
    """
    is_given = _VARIABLES["bind"] in os.environ
    if _HAS_BEEN_TAKEN.is_set() and not is_given and not is_for_others:
        logger.warning(
            "the processes that aiorl launch starts join the first Actors() of a program; this is"
            " another one, for this host alone"
        )
    settings: dict[str, str | int | None] = {}
    for name, variable in _VARIABLES.items():
        text = os.environ.get(variable) or None
        if text is None:
            continue
        settings[name] = text
        if name.startswith("num_"):
            settings[name] = _number(variable, text)
        # "0" or "false" must not let everyone in
        if name == "insecure" and text != "1":
            raise ConfigError(
                f"{variable} is {text!r:.50}, expected 1, or no such variable.",
                key=variable,
                value=text,
            )
    if is_given:
        _HAS_BEEN_TAKEN.set()
    for name in settings.keys() - {"run_dir"}:
        del os.environ[_VARIABLES[name]]
    return Launched(**settings)  # type: ignore[arg-type]  # numbers where numbers belong


def _number(variable: str, text: str) -> int:
    if not text.isdecimal() or len(text) > 6:
        raise ConfigError(
            f"{variable} is {text!r:.50}, expected a number of processes.", key=variable, value=text
        )
    return int(text)
