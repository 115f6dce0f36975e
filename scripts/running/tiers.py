# SPDX-License-Identifier: Apache-2.0
"""The tiers of tests: each in its own process and environment, counted, timed and summed up."""

from __future__ import annotations

import tempfile
import time
import xml.etree.ElementTree as ElementTree
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from . import debian_blender, extension, machine
from .children import CannotRun, ask, run_through, say
from .environments import Environment, known_environments, prepare

LIMIT_S = 1800.0  # a tier that runs longer hangs
NO_TESTS = 5  # pytest's exit code for "nothing collected"


@dataclass
class Outcome:
    """What one tier did. ``trouble``: why it failed beyond single tests; ``left_out``: why it did not run at all."""

    passed: int = 0
    failed: int = 0
    skipped: int = 0
    reasons: Counter[str] = field(default_factory=Counter)
    trouble: str = ""
    left_out: str = ""
    seconds: float = 0.0

    @property
    def good(self) -> bool:
        return not self.failed and not self.trouble

    def add(self, other: Outcome) -> None:
        self.passed += other.passed
        self.failed += other.failed
        self.skipped += other.skipped
        self.reasons.update(other.reasons)
        self.trouble = self.trouble or other.trouble


class Tiers:
    """The tiers of one checkout. ``arguments`` go to pytest as they are; ``suite``: whose Debian's Blender."""

    def __init__(self, repository: Path, arguments: Sequence[str] = (), suite: str = debian_blender.SUITE) -> None:
        self.repository = repository
        self.suite = suite
        self.environments = known_environments(repository)
        self.arguments = list(arguments)
        self.named = [argument for argument in arguments if (repository / argument.split("::")[0]).exists()]
        self._zip: Path | None = None

    def run(self, names: Sequence[str]) -> int:
        """Set up what the tiers need, run them in order, print the summary; return the exit code."""
        chosen = list(names) or list(TIERS)
        prepare(self._needed(chosen), self.repository)
        outcomes: dict[str, Outcome] = {}
        for name in chosen:
            say(f"\n──── tier {name}: {TIERS[name].title} ────")
            started = time.monotonic()
            try:
                outcome = TIERS[name].run(self)
            except debian_blender.NotHere as reason:
                outcome = Outcome(left_out=str(reason))
                if names:  # asked for by name: then not having it is a failure
                    outcome.trouble = str(reason)
            if not (outcome.passed or outcome.failed or outcome.trouble or outcome.left_out or self.arguments):
                outcome.trouble = "it ran no test"
            outcome.seconds = time.monotonic() - started
            outcomes[name] = outcome
            say(line_of(name, outcome))
        if not any(outcome.passed or outcome.failed or outcome.trouble for outcome in outcomes.values()):
            say("No tier ran a test: check the arguments for pytest.")
            outcomes[chosen[-1]].trouble = "no test was selected"
        say_summary(outcomes)
        return 0 if all(outcome.good for outcome in outcomes.values()) else 1

    def _needed(self, names: Sequence[str]) -> list[tuple[Environment, tuple[str, ...]]]:
        wanted = {environment for name in names for environment in TIERS[name].environments}
        return [
            (environment, ("base", "dev", "build")) for name, environment in self.environments.items() if name in wanted
        ]

    def backend_python(self) -> Path:
        return self.environments["backend"].python

    def real_head(self) -> dict[str, str]:
        """A description of the default head for tests in Blender, which has no pillow to make one; as its variable."""
        path = self.repository / ".venv" / "reports" / "head.npz"
        path.parent.mkdir(parents=True, exist_ok=True)
        make = "import sys; from rigfit.rig.default_head import build_head_description as build; build(sys.argv[1])"
        code, output = ask([str(self.backend_python()), "-c", make, str(path)])
        if code != 0:
            raise CannotRun(f"The default head cannot be built: {output.strip().splitlines()[-1:]}")
        return {"RIGFIT_TEST_HEAD": str(path)}

    def installed(self, folder: Path) -> dict[str, str]:
        """Variables for tests of the built zip, with all that Blender and the add-on keep in an empty ``folder``."""
        if self._zip is None:  # once a run: every tier tests the same zip
            self._zip = extension.build(self.repository, self.repository / ".venv" / "extension")
        return {
            "RIGFIT_TEST_ZIP": str(self._zip),
            "RIGFIT_TEST_BACKEND": str(self.backend_python()),
            "BLENDER_USER_RESOURCES": str(folder / "blender"),
            "XDG_DATA_HOME": str(folder / "data"),
        }

    def pytest(
        self,
        tier: str,
        command: Sequence[str],
        paths: Sequence[str],
        options: Sequence[str] = (),
        environment: dict[str, str] | None = None,
    ) -> Outcome:
        """Run pytest with ``command`` over ``paths`` (of the repository) and count what its report says."""
        others = [argument for argument in self.arguments if argument not in self.named]
        if self.named:
            within = [name for name in self.named if any(_inside(name, path) for path in paths)]
            if not within:
                return Outcome()
            paths = within
        report = self.repository / ".venv" / "reports" / f"{tier}.xml"
        report.parent.mkdir(parents=True, exist_ok=True)
        report.unlink(missing_ok=True)
        code = run_through(
            [*command, *paths, "-rs", f"--junitxml={report}", *options, *others],
            cwd=self.repository,
            environment=environment,
            limit_s=LIMIT_S,
        )
        outcome = read_report(report)
        if code == 124:
            outcome.trouble = f"it ran longer than {LIMIT_S:.0f} s and was stopped"
        elif code == NO_TESTS:
            outcome.trouble = "" if self.arguments else "it ran no test"
        elif code not in (0, 1) or (code == 1) != bool(outcome.failed):
            outcome.trouble = f"it ended with exit code {code}"
        return outcome


def _inside(argument: str, folder: str) -> bool:
    path = argument.split("::")[0].rstrip("/")
    return path == folder or path.startswith(folder + "/") or folder.startswith(path + "/")


def read_report(report: Path) -> Outcome:
    """The counts of a JUnit file; a file that is missing or broken is trouble."""
    outcome = Outcome()
    try:
        cases = list(ElementTree.parse(report).iter("testcase"))
    except (OSError, ElementTree.ParseError):
        outcome.trouble = "it ended without a report"
        return outcome
    for case in cases:
        skipped = case.find("skipped")
        if case.find("failure") is not None or case.find("error") is not None:
            outcome.failed += 1
        elif skipped is not None:
            outcome.skipped += 1
            outcome.reasons[skipped.get("message") or "no reason given"] += 1
        else:
            outcome.passed += 1
    return outcome


def line_of(name: str, outcome: Outcome) -> str:
    """The closing line of a tier."""
    if outcome.left_out:
        return f"tier {name}: {'FAILED' if outcome.trouble else 'skipped'} ({outcome.left_out})"
    why = "; ".join(f"{reason} ×{count}" if count > 1 else reason for reason, count in outcome.reasons.items())
    parts = [f"{outcome.passed} tests passed"]
    if outcome.failed:
        parts.append(f"{outcome.failed} FAILED")
    parts.append(f"{outcome.skipped} skipped" + (f" ({why})" if why else ""))
    if outcome.trouble:
        parts.append(f"FAILED: {outcome.trouble}")
    return f"tier {name}: {', '.join(parts)}, {outcome.seconds:.0f} s"


def say_summary(outcomes: dict[str, Outcome]) -> None:
    """The table over all tiers, and the plain line that ends the run."""
    say(f"\n{'tier':<10} {'passed':>7} {'failed':>7} {'skipped':>8} {'seconds':>8}")
    for name, outcome in outcomes.items():
        note = outcome.left_out or outcome.trouble
        say(
            f"{name:<10} {outcome.passed:>7} {outcome.failed:>7} {outcome.skipped:>8} {outcome.seconds:>8.0f}"
            + (f"  {'FAILED: ' if outcome.trouble else 'skipped: '}{note}" if note else "")
        )
    # Trouble that no single test stands for counts as one failure, so that the line never hides it.
    failed = sum(max(outcome.failed, int(bool(outcome.trouble))) for outcome in outcomes.values())
    passed = sum(outcome.passed for outcome in outcomes.values())
    skipped = sum(outcome.skipped + int(bool(outcome.left_out) and outcome.good) for outcome in outcomes.values())
    say(f"\n{passed} passed, {failed} failed, {skipped} skipped")


def _lint(tiers: Tiers) -> Outcome:
    """Style, format and types; each of the three counts as one test."""
    backend = tiers.environments["backend"]
    outcome = Outcome()
    if tiers.named:
        return outcome
    for command in (
        [str(backend.program("ruff")), "check", "."],
        [str(backend.program("ruff")), "format", "--check", "."],
        [str(backend.program("pyright")), "--pythonpath", str(backend.python)],
    ):
        title = " ".join([Path(command[0]).stem, *command[1:3]]) if "ruff" in command[0] else "pyright"
        say(f"$ {title}")
        if run_through(command, cwd=tiers.repository, limit_s=LIMIT_S) == 0:
            outcome.passed += 1
        else:
            outcome.failed += 1
    return outcome


def _backend(tiers: Tiers) -> Outcome:
    """The backend and the parts of the add-on without bpy, in an environment that has no bpy."""
    python = str(tiers.backend_python())
    code, _output = ask([python, "-c", "import importlib.util as u, sys; sys.exit(u.find_spec('bpy') is not None)"])
    if code != 0:
        raise CannotRun("bpy is installed in .venv/backend, where it must not be: delete .venv/backend and run again.")
    environment = {"RIGFIT_BLENDER": str(tiers.environments["bpy-5.0"].python)}
    return tiers.pytest("backend", [python, "-m", "pytest"], ("tests/backend", "tests/addon"), environment=environment)


def _bpy(version: str) -> Callable[[Tiers], Outcome]:
    def run(tiers: Tiers) -> Outcome:
        tier = f"bpy-{version}"
        command = [str(tiers.environments[tier].python), "-m", "pytest"]
        outcome = tiers.pytest(tier, command, ("tests/blender",), environment=tiers.real_head())
        # In a process of its own: the add-on is there once, under the name that Blender gives it.
        with tempfile.TemporaryDirectory(prefix="rigfit-blender-") as folder:
            environment = tiers.installed(Path(folder))
            outcome.add(tiers.pytest(f"{tier}-extension", command, ("tests/extension",), environment=environment))
        return outcome

    return run


def _blender(tiers: Tiers) -> Outcome:
    """The add-on inside a real Blender executable, then the backend's tests of the worker with that Blender."""
    blender = str(debian_blender.blender(tiers.repository, tiers.suite))
    inner = str(tiers.repository / "scripts" / "running" / "pytest_in_blender.py")
    command = [blender, "-b", "--factory-startup", "--python-exit-code", "3", "--python", inner, "--"]
    # The cache folder is another Python's: its byte code and last-failed lists would only be in the way.
    outcome = tiers.pytest("blender-inside", command, ("tests/blender",), ("-p", "no:cacheprovider"), tiers.real_head())
    worker = [str(tiers.backend_python()), "-m", "pytest"]
    environment = {"RIGFIT_BLENDER": blender}
    outcome.add(tiers.pytest("blender-worker", worker, ("tests/backend",), ("-m", "blender"), environment))
    return outcome


def _window(tiers: Tiers) -> Outcome:
    """The built zip in a Blender with a window, on a screen of its own: real mouse, real keys, pictures from outside."""
    try:
        machine.require_programs(machine.SCREEN_PROGRAMS, tiers.repository / ".venv" / "logs" / "system.log")
    except CannotRun as error:
        raise debian_blender.NotHere(str(error)) from error
    blender = debian_blender.blender(tiers.repository, tiers.suite)
    with tempfile.TemporaryDirectory(prefix="rigfit-window-") as folder:
        environment = {**tiers.installed(Path(folder)), "RIGFIT_TEST_WINDOW": str(blender)}
        command = [str(tiers.backend_python()), "-m", "pytest"]
        return tiers.pytest("window", command, ("tests/window",), environment=environment)


@dataclass(frozen=True)
class Tier:
    title: str
    environments: tuple[str, ...]
    run: Callable[[Tiers], Outcome]


TIERS: dict[str, Tier] = {
    "lint": Tier("style, format and types", ("backend",), _lint),
    "backend": Tier("the backend and the add-on's plain parts, without bpy", ("backend", "bpy-5.0"), _backend),
    "bpy-4.5": Tier("the add-on in Blender 4.5 as a Python module", ("bpy-4.5", "backend"), _bpy("4.5")),
    "bpy-5.0": Tier("the add-on in Blender 5.0 as a Python module", ("bpy-5.0", "backend"), _bpy("5.0")),
    "blender": Tier("the add-on and the worker in a Blender executable", ("backend",), _blender),
    "window": Tier("the installed add-on in a real window", ("backend",), _window),
}
