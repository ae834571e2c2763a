"""The flags of `resile run`: one table, and the parser made from it.

`resile run` takes every flag of torchrun and of dlrover-run, so a command line written for either runs unchanged:
both spellings (`--max-restarts`, `--max_restarts`), torchrun's abbreviations, and environment variables in place of
flags (`PET_MAX_RESTARTS=3`; the flag wins). This module converts values to their types; `options.py` interprets them.
It imports little more than argparse, because every recovery that starts a new agent waits for it.
"""

from __future__ import annotations

import argparse
import enum
import functools
import os
import textwrap
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, NoReturn

from resile import __version__
from resile.cli.run.devices import DEVICE_OF_ACCELERATOR
from resile.cli.run.help import DESCRIPTION, EPILOG, GROUPS, HELP_WIDTH

PET = "PET_"
RESILE = "RESILE_"


class FlagError(ValueError):
    """Raised if a flag or variable cannot be used; the message is one sentence that names it."""


class Kind(enum.Enum):
    WORD = "word"
    WHOLE = "whole"
    SECONDS = "seconds"
    SWITCH = "switch"
    """The flag takes no value; its variable is 0 for off, or another number for on."""
    WORDS = "words"
    """Words separated by commas; two commas stand for a comma in a word."""


class Flag(NamedTuple):
    """One flag. `name` is the spelling with dashes; the one with underscores is derived from it."""

    name: str
    group: str
    kind: Kind = Kind.WORD
    default: Any = None
    metavar: str = ""
    short: str = ""
    choices: tuple[str, ...] = ()
    env: str = PET
    """The prefix of the environment variable that can replace the flag; empty if none can."""
    torchrun: bool = True

    @property
    def dest(self) -> str:
        return self.name.lstrip("-").replace("-", "_")

    @property
    def spellings(self) -> tuple[str, ...]:
        underscored = "--" + self.dest
        both = (self.name,) if underscored == self.name else (self.name, underscored)
        return (self.short, *both) if self.short else both

    @property
    def variable(self) -> str:
        return self.env + self.dest.upper() if self.env else ""


def _torchrun(name: str, group: str, kind: Kind = Kind.WORD, default: Any = None, **more: Any) -> Flag:
    return Flag(name, group, kind, False if kind is Kind.SWITCH else default, **more)


def _dlrover(name: str, group: str, kind: Kind = Kind.SWITCH, default: Any = False, **more: Any) -> Flag:
    return Flag(name, group, kind, default, torchrun=False, **more)


def _own(name: str, group: str, kind: Kind = Kind.WORD, **more: Any) -> Flag:
    return Flag(name, group, kind, env=RESILE, torchrun=False, **more)


NUMA_MODES = ("node", "socket", "exclusive", "core-complex")
ACCELERATORS = tuple(DEVICE_OF_ACCELERATOR)
SIGNALS = "SIGTERM,SIGINT,SIGHUP,SIGQUIT"

FLAGS: tuple[Flag, ...] = (
    _torchrun("--module", "what", Kind.SWITCH, short="-m"),
    _torchrun("--no-python", "what", Kind.SWITCH),
    _torchrun("--run-path", "what", Kind.SWITCH),
    _torchrun("--role", "what", default="default", metavar="NAME"),
    _own("--job-name", "what", metavar="NAME"),
    _torchrun("--nnodes", "many", default="1:1", metavar="N|MIN:MAX"),
    _torchrun("--nproc-per-node", "many", default="1", metavar="N|gpu|cpu|auto"),
    _dlrover("--node-unit", "many", Kind.WHOLE, 1, metavar="N"),
    _dlrover("--auto-config", "many"),
    _dlrover("--accelerator", "many", Kind.WORD, ACCELERATORS[0], choices=ACCELERATORS, metavar="KIND"),
    _torchrun("--virtual-local-rank", "many", Kind.SWITCH),
    _torchrun("--standalone", "meet", Kind.SWITCH),
    _torchrun("--rdzv-endpoint", "meet", default="", metavar="HOST:PORT"),
    _torchrun("--rdzv-id", "meet", default="none", metavar="ID"),
    _torchrun("--rdzv-backend", "meet", default="static", metavar="NAME"),
    _torchrun("--rdzv-conf", "meet", default="", metavar="KEY=VALUE,…"),
    _torchrun("--master-addr", "meet", default="127.0.0.1", metavar="HOST"),
    _torchrun("--master-port", "meet", Kind.WHOLE, metavar="PORT"),
    _torchrun("--node-rank", "meet", Kind.WHOLE, 0, metavar="N"),
    _torchrun("--local-addr", "meet", metavar="HOST"),
    _torchrun("--max-restarts", "recover", Kind.WHOLE, 0, metavar="N"),
    _own("--recovery-budget", "recover", Kind.SECONDS, metavar="SECONDS"),
    _torchrun("--shutdown-timeout", "recover", Kind.WHOLE, metavar="SECONDS"),
    _torchrun("--signals-to-handle", "recover", default=SIGNALS, metavar="NAME,…"),
    _own("--standbys", "recover", Kind.WHOLE, metavar="N"),
    _own("--preload", "recover", Kind.WORDS, default=(), metavar="MODULE,…"),
    _own("--state-dir", "recover", metavar="DIR"),
    _torchrun("--log-dir", "logs", metavar="DIR"),
    _torchrun("--redirects", "logs", default="0", short="-r", metavar="STD"),
    _torchrun("--tee", "logs", default="0", short="-t", metavar="STD"),
    _torchrun("--local-ranks-filter", "logs", default="", metavar="RANK,…"),
    _own("--token-file", "secure", metavar="FILE"),
    _own("--tls-cert", "secure", metavar="FILE"),
    _own("--tls-key", "secure", metavar="FILE"),
    _own("--tls-ca", "secure", metavar="FILE"),
    _own("--tls-name", "secure", metavar="HOST"),
    _torchrun("--monitor-interval", "compat", Kind.SECONDS, 0.1, metavar="SECONDS"),
    _torchrun("--start-method", "compat", default="spawn", choices=("spawn", "fork", "forkserver"), metavar="NAME"),
    _torchrun("--event-log-handler", "compat", default="null", metavar="NAME"),
    _torchrun("--logs-specs", "compat", metavar="NAME", env=""),
    _torchrun("--duplicate-stdout-filters", "compat", Kind.WORDS, (), metavar="WORD,…"),
    _torchrun("--duplicate-stderr-filters", "compat", Kind.WORDS, (), metavar="WORD,…"),
    _torchrun("--numa-binding", "compat", choices=NUMA_MODES, metavar="MODE", env=""),
    _dlrover("--numa-affinity", "compat"),
    _dlrover("--membind-policy", "compat", Kind.WORD, "preferred", metavar="NAME"),
    _dlrover("--network-check", "compat"),
    _dlrover("--precheck", "compat", Kind.WHOLE, 0, choices=("0", "1", "2"), metavar="0|1|2"),
    _dlrover("--comm-perf-test", "compat"),
    _dlrover("--exclude-straggler", "compat"),
    _dlrover("--auto-tunning", "compat"),
    _dlrover("--save-at-breakpoint", "compat"),
    _dlrover("--training-port", "compat", Kind.WHOLE, 60000, metavar="PORT"),
    _dlrover("--ucp-device-type", "compat", Kind.WORD, "cpu", metavar="NAME"),
)

_NOT_GIVEN: Any = object()


class Given(NamedTuple):
    """The values of all flags, and the source of each value that the user has set."""

    values: dict[str, Any]
    source: dict[str, str]
    """By `dest`, the flag or variable that has set the value, such as `PET_NNODES`; no entry for defaults."""

    def named(self, dest: str) -> str:
        """The flag or environment variable that has set `dest`, for messages. If none has, the name of the flag."""
        return self.source.get(dest, "--" + dest.replace("_", "-"))

    def error(self, dest: str, problem: str) -> FlagError:
        """Make an error that names the flag or environment variable of `dest`."""
        return FlagError(f"{self.named(dest)}: {problem}")


_NUMBERS: dict[Kind, tuple[Callable[[str], Any], str]] = {
    Kind.WHOLE: (int, "is not a whole number"),
    Kind.SECONDS: (float, "is not a number of seconds"),
    Kind.SWITCH: (lambda text: bool(int(text)), "is neither 1 (on) nor 0 (off)"),
}
"""How a number is read from text, and the sentence's end for a text that is none."""


def convert(flag: Flag, text: str) -> Any:
    """Convert the text of a flag or variable to the flag's type. Raises `ArgumentTypeError` if that is not possible.

    The error's message is, for example, `'x' is not a whole number`. Callers put the flag's name before it.
    """
    if flag.choices and text not in flag.choices:
        raise argparse.ArgumentTypeError(f"{text!r} is not one of {', '.join(flag.choices)}")
    if flag.kind is Kind.WORD:
        return text
    if flag.kind is Kind.WORDS:
        comma = "\0"
        return [word.replace(comma, ",") for word in text.replace(",,", comma).split(",")]
    number_of, problem = _NUMBERS[flag.kind]
    try:
        return number_of(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} {problem}") from None


class _HelpFormatter(argparse.HelpFormatter):
    """Shows one spelling of each flag; lines are no wider than the terminal and `HELP_WIDTH`."""

    def __init__(self, prog: str) -> None:
        columns = os.environ.get("COLUMNS", "")
        width = min(HELP_WIDTH, int(columns) - 2 if columns.isdigit() and int(columns) > 40 else HELP_WIDTH)
        super().__init__(prog, max_help_position=30, width=width)

    def _format_action_invocation(self, action: argparse.Action) -> str:
        names = [name for name in action.option_strings if "_" not in name]
        if not names:
            return super()._format_action_invocation(action)
        value = f" {action.metavar}" if action.nargs != 0 else ""
        return ", ".join(names) + value

    def _split_lines(self, text: str, width: int) -> list[str]:
        return textwrap.wrap(text, width, break_on_hyphens=False)

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        return "\n".join(indent + line for line in text.strip().splitlines())


class _Parser(argparse.ArgumentParser):
    """argparse with torchrun's rules for abbreviations, and with errors that are raised instead of printed."""

    def error(self, message: str) -> NoReturn:
        raise FlagError(message)

    def _get_option_tuples(self, option_string: str) -> list[Any]:
        """Return the flags that `option_string` may abbreviate. If some are flags of torchrun, return only these.

        A flag with two spellings, `--a-b` and `--a_b`, is returned once.
        """
        by_dest: dict[str, Any] = {}
        for match in super()._get_option_tuples(option_string):
            by_dest.setdefault(match[0].dest, match)
        of_torchrun = [match for dest, match in by_dest.items() if dest in _TORCHRUN_DESTS]
        return of_torchrun or list(by_dest.values())


_TORCHRUN_DESTS = frozenset(flag.dest for flag in FLAGS if flag.torchrun) | {"help"}


def build_parser(prog: str = "resile run") -> argparse.ArgumentParser:
    """Build the parser of the command line. It knows no defaults and no environment variables; `parse` adds these."""
    parser = _Parser(
        prog=prog,
        usage=f"{prog} [flags] script [arguments of the script]",
        description=DESCRIPTION,
        epilog=EPILOG.replace("resile run", prog),
        formatter_class=_HelpFormatter,
        exit_on_error=False,
        add_help=False,
        argument_default=_NOT_GIVEN,
    )
    groups = {key: parser.add_argument_group(title) for key, (title, _) in GROUPS.items()}
    for flag in FLAGS:
        kind: dict[str, Any] = {"action": "store_true", "default": _NOT_GIVEN}
        if flag.kind is not Kind.SWITCH:
            kind = {"type": functools.partial(convert, flag), "metavar": flag.metavar}
        _, texts = GROUPS[flag.group]
        groups[flag.group].add_argument(*flag.spellings, dest=flag.dest, help=texts[flag.name], **kind)
    what = groups["what"]
    script = what.add_argument("training_script", metavar="script", help="the program that each process runs")
    rest = what.add_argument(
        "training_script_args", metavar="…", nargs=argparse.REMAINDER, help="all that follows is for it"
    )
    script.required = rest.required = False  # `parse` raises an error with a better sentence
    what.add_argument("-h", "--help", action="help", help="show this and end")
    what.add_argument("--version", action="version", version=f"resile {__version__}", help="show it and end")
    return parser


def parse(argv: Sequence[str], environ: Mapping[str, str], prog: str = "resile run") -> Given:
    """Take each flag's value from the command line, else from its environment variable, else from its default.

    If a flag is given, its variable is not read, so a wrong value in the variable does no harm. Raises `FlagError` for
    unknown flags, wrong values and a missing script. Raises `SystemExit` after printing the help.
    """
    parser = build_parser(prog)
    try:
        namespace, unknown = parser.parse_known_args(list(argv))
    except argparse.ArgumentError as error:
        raise FlagError(_sentence(error)) from None
    if unknown:
        raise FlagError(_unknown(unknown[0]))
    values: dict[str, Any] = {}
    source: dict[str, str] = {}
    for flag in FLAGS:
        value = getattr(namespace, flag.dest)
        if value is not _NOT_GIVEN:
            source[flag.dest] = flag.name
        elif flag.variable and flag.variable in environ:
            source[flag.dest] = flag.variable
            try:
                value = convert(flag, environ[flag.variable])
            except argparse.ArgumentTypeError as error:
                raise FlagError(f"{flag.variable}: {error}") from None
        else:
            value = list(flag.default) if flag.kind is Kind.WORDS else flag.default
        values[flag.dest] = value
    if namespace.training_script is _NOT_GIVEN or namespace.training_script is None:
        raise FlagError(f"nothing to run: name a script, as in `{prog} train.py`")
    values["training_script"] = namespace.training_script
    values["training_script_args"] = namespace.training_script_args
    return Given(values, source)


def _sentence(error: argparse.ArgumentError) -> str:
    name = next((part for part in (error.argument_name or "").split("/") if part.startswith("--")), "")
    what = error.message
    if what.startswith("expected"):
        what = "needs a value"
    elif what.startswith("ignored explicit"):
        what = "is on or off and takes no value"
    return f"{name}: {what}" if name else what


def _unknown(word: str) -> str:
    from difflib import get_close_matches  # imported for errors only

    name = word.split("=", 1)[0]
    known = [spelling for flag in FLAGS for spelling in flag.spellings if "_" not in spelling]
    spelt = name.replace("_", "-")
    begins = spelt.rstrip("s")  # --nprocs means the flag that begins with --nproc
    near = [flag for flag in known if flag.startswith(begins)] if len(begins) > 4 else []
    near = near or get_close_matches(spelt, known, n=1)
    hint = f"did you mean {near[0]}?" if near else "--help lists all flags"
    return f"{name}: no such flag; {hint}"
