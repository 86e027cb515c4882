"""`segue bench`: what graphs cost and bring on this machine, with random weights of a real shape. One file a bench.

A bench is a module with `HELP`, `add_arguments(parser)` and `run(options)`, like every subcommand; to add one, list it
in `COMMANDS`.
"""

from __future__ import annotations

from segue.cli.bench import build, decode, matrix, memory, padding, prefill, throughput

HELP = "measure what graphs cost and bring here"
COMMANDS = (decode, prefill, build, throughput, memory, padding, matrix)
