"""An installation in place, killed before every single file operation.

A child process installs or uninstalls for real and is killed (SIGKILL) before its n-th file
operation, for every n until it gets through. Then the work is resumed or rolled back by the
ordinary commands, and the environment must equal the one after or the one before: bytes,
modes, and for what was restored also times. Never anything between.
"""

from __future__ import annotations

import io
import os
import shutil
import signal
import sys
from pathlib import Path

import pytest

from builder.console import Console
from builder.environment import Environment
from builder.errors import BuildError
from builder.install import FOLDER, carry_out, uninstall
from builder.install_plan import make_plan
from builder.target import Layout
from tests import small_environment, small_wheel
from tests.small_checkout import make_checkout
from tests.small_environment import snapshot
from tests.small_target import NAME, WHEELS

# What the kernel is asked to do to files, as Python's audit events call it (PEP 578).
EVENTS = frozenset(
    {"os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.chmod", "os.chown", "os.utime",
     "os.link", "os.truncate"}
)  # fmt: skip
WRITING = os.O_WRONLY | os.O_RDWR
KEPT = ("__init__.py", "cli.py", "py.typed", "scheduler/__init__.py")


@pytest.fixture(scope="module")
def checkout(tmp_path_factory):
    """A checkout whose connector is a few files: the sweep is about the moves, not the load."""
    folder = make_checkout(tmp_path_factory.mktemp("template") / "checkout")
    package = folder / "sparkcache_connector"
    for path in sorted(package.rglob("*"), reverse=True):
        if path.is_dir():
            if not any(path.iterdir()):
                path.rmdir()
        elif path.relative_to(package).as_posix() not in KEPT:
            path.unlink()
    return folder


@pytest.fixture(scope="module")
def places(scratch, checkout):
    """The environment before, and the same after an undisturbed installation."""
    root = scratch
    wheel = root / small_wheel.FILENAME
    shutil.copy(checkout / "index" / WHEELS["cuda-x86_64"], wheel)
    before = small_environment.make(root / "before", wheel)
    env = root / "env"
    shutil.copytree(before, env)
    plan = make_plan(Layout.open(checkout, NAME), Environment.open(env), None)
    install(env, plan)
    after = root / "after"
    shutil.copytree(env, after)
    shutil.rmtree(env)
    return env, before, after, plan


def install(env, plan):
    carry_out(env, lambda: plan, Console(io.StringIO()))


def take_back(env):
    uninstall(env, Console(io.StringIO()))


def killed_at(number, env, work):
    """Run ``work`` in a child that dies before its ``number``-th file operation.

    Returns whether it died; False means that it got through with fewer operations.
    """
    child = os.fork()
    if child == 0:
        count = 0

        def die(event, arguments):
            nonlocal count
            opens = event == "open" and isinstance(arguments[2], int) and arguments[2] & WRITING
            if opens or event in EVENTS:
                count += 1
                if count == number:
                    os.kill(os.getpid(), signal.SIGKILL)

        sys.addaudithook(die)
        code = 1
        try:
            work(env)
            code = 0
        finally:
            os._exit(code)
    _, status = os.waitpid(child, 0)
    if os.WIFSIGNALED(status):
        assert os.WTERMSIG(status) == signal.SIGKILL
        return True
    assert os.waitstatus_to_exitcode(status) == 0
    return False


def start_from(env: Path, state: Path) -> None:
    shutil.rmtree(env, ignore_errors=True)
    shutil.copytree(state, env)


def sweep(env, state, work, finish, expected):
    """Kill ``work`` at every operation, ``finish``, and compare; return how many there were."""
    number = 0
    while True:
        number += 1
        start_from(env, state)
        died = killed_at(number, env, work)
        finish(env)
        assert snapshot(env, times=expected["times"]) == expected["files"], f"operation {number}"
        if not died:
            return number - 1


def is_before(before):
    return {"times": True, "files": snapshot(before)}


def is_after(after):
    return {"times": False, "files": snapshot(after, times=False)}


def finish_back(env):
    """Roll back whatever there is to roll back."""
    if (env / FOLDER).exists():
        take_back(env)
    else:
        with pytest.raises(BuildError, match="expected an installation in place, found none"):
            take_back(env)


def test_an_installation_killed_anywhere_is_resumed_to_the_end(places):
    env, before, after, plan = places
    work = lambda env: install(env, plan)  # noqa: E731
    count = sweep(env, before, work, work, is_after(after))
    assert count > 80, count


def test_an_installation_killed_anywhere_is_rolled_back_to_the_beginning(places):
    env, before, _, plan = places
    count = sweep(env, before, lambda env: install(env, plan), finish_back, is_before(before))
    assert count > 80, count


def test_a_rollback_killed_anywhere_is_finished(places):
    env, before, after, _ = places
    count = sweep(env, after, take_back, finish_back, is_before(before))
    assert count > 60, count


def test_an_interrupted_rollback_cannot_be_mistaken_for_an_installation(places):
    env, before, after, plan = places
    seen = set()
    for number in (8, 14, 20):
        start_from(env, after)
        assert killed_at(number, env, take_back)
        with pytest.raises(BuildError, match="an uninstallation was interrupted; finish it first"):
            install(env, plan)
        seen.add(repr(snapshot(env)))
        take_back(env)
        assert snapshot(env) == snapshot(before)
    assert len(seen) == 3
