# SPDX-License-Identifier: Apache-2.0
"""The sub-commands of ``scripts/run.py``."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from . import debian_blender, extension
from .children import CannotRun, end_children, run_through, say, stop_on_terminate
from .environments import known_environments, prepare
from .tiers import TIERS, Tiers

DEMO_BLENDER = "bpy-5.0"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="run.py",
        description="Set up and run rigfit. Everything that is installed lies under .venv/ of the checkout.",
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    demo = commands.add_parser("demo", help="fit a photo to the default head and show the result in demo/")
    demo.add_argument("--out", default="demo", help="folder for the result (default: demo, in the checkout)")
    test = commands.add_parser(
        "test", help="run the tests", epilog="Other arguments go to pytest, for example -k NAME or -x."
    )
    test.add_argument(
        "--tier", action="append", choices=list(TIERS), default=[], help="only this tier (may be given more than once)"
    )
    test.add_argument(
        "--suite",
        default=debian_blender.SUITE,
        help="the Debian suite whose Blender the tiers blender and window use (default: %(default)s; newer: sid)",
    )
    zip_of = commands.add_parser("extension", help="build the zip that is installed in Blender")
    zip_of.add_argument("--out", default="dist", help="folder for the zip (default: dist, in the checkout)")
    bench = commands.add_parser("bench", help="run `rigfit bench ...` in the environment of the demo", add_help=False)
    bench.add_argument("rest", nargs=argparse.REMAINDER)
    return parser


def _rigfit(repository: Path, arguments: Sequence[str], cwd: Path) -> int:
    """Run the `rigfit` command in its environment, with the Blender that was installed for it."""
    environments = known_environments(repository)
    prepare([(environments["backend"], ("base",)), (environments[DEMO_BLENDER], ("base",))], repository)
    environment = {"RIGFIT_BLENDER": str(environments[DEMO_BLENDER].python)}
    return run_through([str(environments["backend"].program("rigfit")), *arguments], cwd=cwd, environment=environment)


def _demo(repository: Path, out: str) -> int:
    folder = repository / out  # an absolute path stays what it is
    code = _rigfit(repository, ["demo", "--out", str(folder)], repository)
    if code == 0:
        for path in sorted(folder.glob("*.png")):
            say(f"Picture: {path}")
        say(f"Everything: {folder}")
    return code


def main(arguments: Sequence[str], repository: Path) -> int:
    parser = _parser()
    options, others = parser.parse_known_args(arguments)
    if others and options.command != "test":
        parser.error(f"unrecognized arguments: {' '.join(others)}")
    stop_on_terminate()
    try:
        if options.command == "demo":
            return _demo(repository, options.out)
        if options.command == "extension":
            say(f"To install in Blender: {extension.build(repository, repository / options.out)}")
            return 0
        if options.command == "bench":
            return _rigfit(repository, ["bench", *options.rest], Path.cwd())
        return Tiers(repository, [other for other in others if other != "--"], options.suite).run(options.tier)
    except CannotRun as error:
        print(error, file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        end_children()
        print("\nStopped. What was half installed is done again next time.", file=sys.stderr)
        return 130
    except OSError as error:
        where = f" ({error.filename})" if error.filename else ""
        print(f"{error.strerror or error}{where}: mend this, then run the same command again.", file=sys.stderr)
        return 2
