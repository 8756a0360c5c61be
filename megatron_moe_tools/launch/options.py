"""torchrun's options as `megatron-moe train` takes them: a table, and how many ranks a command line asks for.

torch's own parser reads the values in the end, when flags and options have been checked: it comes with torch, which
takes seconds to load. A test compares the table with that parser.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from megatron_moe.config.errors import ConfigError
from megatron_moe.platform import host

VALUE, SWITCH, NUMBER, SECONDS = "VALUE", "", "N", "S"
"""What follows an option: any word, nothing, a whole number, or a number of seconds."""

TAKEN = {
    "--nnodes": NUMBER,
    "--nproc-per-node": VALUE,
    "--node-rank": NUMBER,
    "--master-addr": VALUE,
    "--master-port": NUMBER,
    "--local-addr": VALUE,
    "--standalone": SWITCH,
    "--rdzv-backend": VALUE,
    "--rdzv-endpoint": VALUE,
    "--rdzv-id": VALUE,
    "--rdzv-conf": VALUE,
    "--monitor-interval": SECONDS,
    "--shutdown-timeout": NUMBER,
    "--log-dir": VALUE,
    "--redirects": VALUE,
    "--tee": VALUE,
    "--local-ranks-filter": VALUE,
    "--duplicate-stdout-filters": VALUE,
    "--duplicate-stderr-filters": VALUE,
    "--event-log-handler": VALUE,
    "--role": VALUE,
    "--numa-binding": VALUE,
}
"""Option -> what follows it."""

SHORT = {"-r": "--redirects", "-t": "--tee", "-m": "--module"}

_PROGRAM = "the ranks run megatron_moe_tools.pretrain; for another program use torchrun"
REFUSED = {
    "--max-restarts": "a rank that dies ends the job; start the same command again, with --load it continues from its "
    "newest checkpoint",
    "--module": _PROGRAM,
    "--no-python": _PROGRAM,
    "--run-path": _PROGRAM,
    "--start-method": _PROGRAM,
    "--logs-specs": "use --log-dir, --redirects and --tee",
    "--signals-to-handle": "SIGTERM, SIGINT, SIGHUP, SIGQUIT and SIGUSR1 are passed on to the ranks; leave it out",
    "--virtual-local-rank": "ranks find their device, and one another, by LOCAL_RANK; leave it out",
}
"""torchrun's other options -> why they are refused, and what works."""


@dataclass(frozen=True)
class LaunchOptions:
    """The launch options of a command line.

    Attributes:
        words: as torch's parser reads them, with the number of ranks per node as a number.
        nnodes, nproc_per_node: nodes of the job, and ranks on each.
        where: the rendezvous as it was given, for messages.
    """

    words: tuple[str, ...]
    nnodes: int
    nproc_per_node: int
    where: str

    @property
    def world_size(self) -> int:
        """Ranks of the job."""
        return self.nnodes * self.nproc_per_node


def split(argv: Sequence[str], environment: Mapping[str, str] = os.environ) -> tuple[LaunchOptions | None, list[str]]:
    """Return the launch options, None where there are none, and the other words of a command line, in their order.

    Like torchrun, it takes the options also with underscores, as `--nnodes=2`, and from variables such as PET_NNODES.

    Raises:
        ConfigError: an option is refused, is given twice, lacks its value, or has one of the wrong kind.
    """
    given, rest = {}, []
    waiting = list(argv)
    while waiting:
        word = waiting.pop(0)
        typed, equals, value = word.partition("=")
        name = SHORT.get(typed, typed.replace("_", "-"))
        if name in REFUSED:
            raise ConfigError(f"{typed}: {REFUSED[name]}")
        if name not in TAKEN:
            rest.append(word)
            continue
        if name in given:
            raise ConfigError(f"{typed}: is given twice; keep one")
        if TAKEN[name] != SWITCH and not equals:
            if not waiting or waiting[0].startswith("--"):
                raise ConfigError(f"{typed}: a value is missing, as in {typed} {_example(name)}")
            value = waiting.pop(0)
        given[name] = value
    variables = {name: environment.get("PET_" + name[2:].replace("-", "_").upper()) for name in TAKEN}
    from_variables = {name: value for name, value in variables.items() if value is not None and name not in given}
    if not given and not {"--nnodes", "--nproc-per-node"} & from_variables.keys():
        return None, rest
    if "RANK" in environment:
        raise ConfigError(
            f"{next(iter(given or from_variables))}: RANK={environment['RANK']} is set, so this process is a rank that "
            "a launcher has started; leave the launch options out, or unset RANK"
        )
    return _options(given, {**from_variables, **given}), rest


def _options(given: Mapping[str, str], all_of_them: Mapping[str, str]) -> LaunchOptions:
    for name, value in all_of_them.items():
        _check(name, value)
    nproc_per_node = _nproc_per_node(all_of_them.get("--nproc-per-node", "1"))
    words = [f"{name}={value}" if value else name for name, value in given.items() if name != "--nproc-per-node"]
    default = ":".join(all_of_them.get(name, "") for name in ("--master-addr", "--master-port")).strip(":")
    return LaunchOptions(
        (*words, f"--nproc-per-node={nproc_per_node}"),
        int(all_of_them.get("--nnodes", "1").split(":")[0]),
        nproc_per_node,
        all_of_them.get("--rdzv-endpoint") or default or "this machine",
    )


def _check(name: str, value: str) -> None:
    """Refuse a value that is not of the option's kind; `--nnodes` may be a range of one number."""
    kind, text = TAKEN[name], value
    if kind == SWITCH:
        if value:
            raise ConfigError(f"{name} {value}: takes no value; leave {value!r} out")
        return
    if not value:
        raise ConfigError(f"{name}: its value is empty; write {name} {_example(name)}, or leave it out")
    if name == "--nnodes" and ":" in value:
        least, _, most = value.partition(":")
        if least != most:
            raise ConfigError(
                f"--nnodes {value}: layout and batch need the number of ranks before they start; give one number"
            )
        text = least
    if kind == NUMBER and not (text.isdecimal() and (int(text) > 0 or name != "--nnodes")):
        raise ConfigError(f"{name} {value}: is no number of this kind; e.g. {name} {_example(name)}")
    if kind == SECONDS and not text.replace(".", "", 1).isdecimal():
        raise ConfigError(f"{name} {value}: is no number of seconds; e.g. {name} 0.1")


def _nproc_per_node(value: str) -> int:
    """Return the ranks on each node: the number, or the devices or processors that a word asks for."""
    if value in ("gpu", "auto") and host.visible_devices():
        return host.visible_devices()
    if value in ("cpu", "auto"):
        return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    if value == "gpu":
        raise ConfigError("--nproc-per-node gpu: there is no NVIDIA device here; give a number, or cpu")
    if not value.isdecimal() or int(value) < 1:
        raise ConfigError(f"--nproc-per-node {value}: is neither a number above 0 nor gpu, cpu or auto")
    return int(value)


def _example(name: str) -> str:
    examples = {"--nproc-per-node": "8", "--master-addr": "node1", "--master-port": "29500", "--rdzv-backend": "c10d"}
    return examples.get(name, {NUMBER: "2", SECONDS: "0.1"}.get(TAKEN[name], "VALUE"))
