"""Reads `--rdzv-conf key=value,…`, with the keys of torchrun's and DLRover's rendezvous."""

from __future__ import annotations

from typing import NamedTuple

from resile.cli.run.flags import FlagError

_SAME = {"lastcall_timeout": "last_call_timeout", "timeout": "join_timeout"}
"""Keys of DLRover and of older torchrun backends, each with the present name of the same setting."""

_TIMES = ("join_timeout", "last_call_timeout", "pend_timeout")
_NO_EFFECT = {
    "close_timeout": "a round closes the moment every node knows of it",
    "heartbeat_timeout": "heartbeats follow --recovery-budget",
    "keep_alive_interval": "heartbeats follow --recovery-budget",
    "keep_alive_max_attempt": "heartbeats follow --recovery-budget",
    "read_timeout": "waits follow --recovery-budget",
    "rank": "--node-rank gives the place",
}
_KNOWN = (*_TIMES, *_SAME, *_NO_EFFECT, "is_host", "store_type")
_YES, _NO = ("1", "true", "t", "yes", "y"), ("0", "false", "f", "no", "n")


class RdzvConf(NamedTuple):
    """The settings in `--rdzv-conf`; None for those that are not given. Times are in seconds."""

    join_timeout: float | None = None
    last_call_timeout: float | None = None
    pend_timeout: float | None = None
    is_host: bool | None = None
    notices: tuple[str, ...] = ()


def read_rdzv_conf(name: str, text: str) -> RdzvConf:
    """Read the `key=value` pairs in `text`, which are separated by commas.

    `name` is the flag or variable of `text`. Raises `FlagError`, which begins with `name`, if a pair cannot be used.
    """
    times: dict[str, float] = {}
    is_host: bool | None = None
    notices: list[str] = []
    for pair in filter(None, (pair.strip() for pair in text.split(","))):
        key, equals, value = (part.strip() for part in pair.partition("="))
        if not (key and equals and value):
            raise FlagError(f"{name}: {pair!r} is not KEY=VALUE, such as join_timeout=600")
        if key not in _KNOWN:
            raise FlagError(f"{name}: {key!r} is no known key; {_nearest(key)}")
        meaning = _SAME.get(key, key)
        if meaning in _TIMES:
            times[meaning] = _seconds(f"{name}: {key}", value)
        elif key == "is_host":
            if value.lower() not in _YES + _NO:
                raise FlagError(f"{name}: is_host: {value!r} is neither 1 nor 0")
            is_host = value.lower() in _YES
        elif key == "store_type":
            if value.lower() != "tcp":
                raise FlagError(f"{name}: store_type: {value!r} is not tcp; nodes meet at a master, not in a file")
        else:
            notices.append(f"{name}: {key}: accepted; {_NO_EFFECT[key]}")
    return RdzvConf(**times, is_host=is_host, notices=tuple(notices))


def _seconds(name: str, value: str) -> float:
    try:
        seconds = float(value)
    except ValueError:
        seconds = -1.0
    if not 0 < seconds < float("inf"):
        raise FlagError(f"{name}: {value!r} is not a number of seconds above 0")
    return seconds


def _nearest(key: str) -> str:
    from difflib import get_close_matches  # imported for errors only

    near = get_close_matches(key, _KNOWN, n=1)
    return f"did you mean {near[0]}?" if near else f"known are {', '.join(_KNOWN)}"
