"""The `segue` command: one file a subcommand. Exit status 0, 2 for bad usage, 1 for a failure.

Every error is one line on standard error, those of argparse too; `--debug` shows the traceback. torch and transformers are
imported inside subcommands, after all that can be checked without them (`import_torch`), so that `segue --help` and usage
errors do not wait. The installed command enters by `segue_command`.
"""

from __future__ import annotations

import argparse
import contextlib
import errno
import io
import os
import sys
import traceback
from collections.abc import Sequence
from typing import Any, NoReturn

from segue.cli import bench, doctor, generate
from segue.cli.output import note
from segue.cli.usage import UsageError, name_options
from segue_command import leaving_at_once, noticing_interrupts

_COMMANDS = (generate, bench, doctor)


class _Parser(argparse.ArgumentParser):
    """Says what is wrong in one line, without the usage that argparse puts before it."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message} (see {self.prog} --help)\n")


class _Version(argparse.Action):
    """Looks the version up when it is asked for, which takes as long as all of the parser."""

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> NoReturn:
        print(f"segue {_version()}")
        parser.exit()


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one subcommand and returns the exit status. Arguments that cannot be parsed, and --help, raise SystemExit."""
    if sys.stderr is None:  # closed by the caller: print() would write to standard output instead
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115
    with leaving_at_once():
        options = _parser().parse_args(arguments)
    if sys.stdout is None:
        note("segue: standard output is closed, so nothing could be printed")
        return 1
    if isinstance(sys.stdout, io.TextIOWrapper):  # a model may write what the terminal cannot show
        sys.stdout.reconfigure(errors="replace")
    try:
        with noticing_interrupts():
            return int(options.run(options))
    except BrokenPipeError:  # the reader went away: no further output, no complaint
        with contextlib.suppress(OSError, ValueError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except (Exception, KeyboardInterrupt) as error:
        if _is_interrupt(error):
            note("segue: interrupted")
            return 130
        if options.debug:
            note(traceback.format_exc().rstrip())
        text = " ".join(str(error).split()) or type(error).__name__
        if isinstance(error, OSError) and error.errno == errno.ENOSPC and error.filename is None:
            text = f"the output cannot be written: {error.strerror}"
        note(f"segue: {name_options(text, vars(options))}")
        return 2 if isinstance(error, UsageError) else 1


def _parser() -> _Parser:
    parser = _Parser(prog="segue", description="PyTorch inference without launch overhead.")
    parser.add_argument("--version", action=_Version, nargs=0, help="show the version and exit")
    _add_commands(parser, _COMMANDS)
    return parser


def _add_commands(parser: argparse.ArgumentParser, modules: Sequence[Any]) -> None:
    """A subcommand for each module; one that lists `COMMANDS` of its own has these below it."""
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for module in modules:
        name = module.__name__.rpartition(".")[2]
        command = commands.add_parser(name, help=module.HELP, description=module.HELP)
        if "COMMANDS" in vars(module):
            _add_commands(command, module.COMMANDS)
            continue
        module.add_arguments(command)
        command.add_argument("--json", metavar="FILE", help="write the result to FILE as JSON")
        command.add_argument("--debug", action="store_true", help="show the traceback of an error")
        command.set_defaults(run=module.run)


def _is_interrupt(error: BaseException | None) -> bool:
    """Whether an interrupt is behind `error`: Python and libraries under import turn one into errors of their own."""
    while error is not None and not isinstance(error, KeyboardInterrupt):
        error = error.__cause__ or error.__context__
    return error is not None


def _version() -> str:
    from importlib import metadata

    try:
        return metadata.version("segue")
    except metadata.PackageNotFoundError:
        return "(not installed: run from its source)"
