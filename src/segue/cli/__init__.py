"""The `segue` command: one file a subcommand. Exit status 0, 2 for bad usage, 1 for a failure.

Every error is one line on standard error, those of argparse too; `--debug` shows the traceback. transformers is imported
inside subcommands, so that `segue --help` and usage errors do not wait for it.
"""

from __future__ import annotations

import argparse
import io
import os
import sys
import traceback
from collections.abc import Sequence
from typing import NoReturn

from segue.cli import doctor, generate
from segue.errors import SegueError

_COMMANDS = (generate, doctor)


class _Parser(argparse.ArgumentParser):
    """Says what is wrong in one line, without the usage that argparse puts before it."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message} (see {self.prog} --help)\n")


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one subcommand and returns the exit status. Arguments that cannot be parsed, and --help, raise SystemExit."""
    parser = _Parser(prog="segue", description="PyTorch inference without launch overhead.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for module in _COMMANDS:
        name = module.__name__.rpartition(".")[2]
        command = commands.add_parser(name, help=module.HELP, description=module.HELP)
        module.add_arguments(command)
        command.add_argument("--json", metavar="FILE", help="write the result to FILE as JSON")
        command.add_argument("--debug", action="store_true", help="show the traceback of an error")
        command.set_defaults(run=module.run)
    options = parser.parse_args(arguments)
    if isinstance(sys.stdout, io.TextIOWrapper):  # a model may write what the terminal cannot show
        sys.stdout.reconfigure(errors="replace")
    try:
        return int(options.run(options))
    except BrokenPipeError:  # the reader went away: no further output, no complaint
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except KeyboardInterrupt:
        print("segue: interrupted", file=sys.stderr)
        return 130
    except Exception as error:
        if options.debug:
            traceback.print_exc()
        is_usage = isinstance(error, ValueError) and not isinstance(error, SegueError)
        text = " ".join(str(error).split()) or type(error).__name__
        print(f"segue: {text}", file=sys.stderr)
        return 2 if is_usage else 1
