"""What a judge found, and what it means: findings, the verdict and the exit code.

Every finding carries a check id of :mod:`verify.catalogue`, the path, what was expected,
what was found and what to do next. Any failed check makes the verdict *failed*; else any
undecided one makes it *undecided*; notes never change it.
"""

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from verify.catalogue import CHECKS


class Status(enum.StrEnum):
    """What one finding says about its check."""

    PASS = "pass"  # noqa: S105 - a verdict
    FAIL = "fail"
    UNDECIDED = "undecided"
    NOTE = "note"


class Verdict(enum.StrEnum):
    """What the whole report says."""

    PASSED = "passed"
    FAILED = "failed"
    UNDECIDED = "undecided"


EXIT_CODES = {Verdict.PASSED: 0, Verdict.FAILED: 1, Verdict.UNDECIDED: 3}
EXIT_USAGE = 2
EXIT_INTERNAL = 4
EXIT_INTERRUPTED = 130


@dataclass(frozen=True, slots=True)
class Finding:
    """One sentence of the verdict. ``path`` is inside the subject, or null for all of it."""

    check: str
    status: Status
    message: str
    path: str | None = None
    expected: str | None = None
    actual: str | None = None
    hint: str | None = None


@dataclass(frozen=True, slots=True)
class Report:
    """The findings about one subject, in the order of the checks."""

    kind: str
    subject: str
    target: str | None
    base: str | None
    state: str | None
    anchor: str
    anchor_sha256: str | None
    findings: tuple[Finding, ...]

    @property
    def verdict(self) -> Verdict:
        """Failed beats undecided beats passed; a report without any finding proves nothing."""
        seen = {finding.status for finding in self.findings}
        if Status.FAIL in seen:
            return Verdict.FAILED
        if Status.UNDECIDED in seen or Status.PASS not in seen:
            return Verdict.UNDECIDED
        return Verdict.PASSED

    @property
    def exit_code(self) -> int:
        """The process's exit code (docs/exit-codes.md)."""
        return EXIT_CODES[self.verdict]

    def with_status(self, status: Status) -> Iterator[Finding]:
        """Return the findings of one status."""
        return (finding for finding in self.findings if finding.status is status)

    def checks(self) -> dict[str, Status]:
        """Return every check that ran with its worst status, in the catalogue's order."""
        rank = (Status.FAIL, Status.UNDECIDED, Status.NOTE, Status.PASS)
        found: dict[str, Status] = {}
        for finding in self.findings:
            worst = found.get(finding.check, finding.status)
            found[finding.check] = min(worst, finding.status, key=rank.index)
        return {check: found[check] for check in CHECKS if check in found}


@dataclass(slots=True)
class Recorder:
    """Collects findings while checks run; refuses ids that the catalogue does not have."""

    prefix: str = ""
    _findings: list[Finding] = field(default_factory=list)

    def fail(
        self,
        check: str,
        path: str | None,
        message: str,
        *,
        expected: str | None = None,
        actual: str | None = None,
        hint: str | None = None,
    ) -> None:
        """Record a difference; without ``hint``, the catalogue's advice is given."""
        self._add(Status.FAIL, check, path, message, expected, actual, hint)

    def undecided(
        self,
        check: str,
        path: str | None,
        message: str,
        *,
        expected: str | None = None,
        actual: str | None = None,
        hint: str | None = None,
    ) -> None:
        """Record that the evidence for or against is missing."""
        self._add(Status.UNDECIDED, check, path, message, expected, actual, hint)

    def note(self, check: str, path: str | None, message: str) -> None:
        """Record something that a reader should know and that decides nothing."""
        self._findings.append(
            Finding(CHECKS[check].id, Status.NOTE, printable(message), self._place(path))
        )

    def passed(self, check: str, message: str) -> None:
        """Record that ``check`` ran to its end, unless it failed or is undecided already.

        A recorder with a prefix judges a part; the parts of one check pass separately.
        """
        if not self.tripped(check):
            self._findings.append(
                Finding(CHECKS[check].id, Status.PASS, printable(message), self._place(None))
            )

    def tripped(self, *checks: str) -> bool:
        """Whether one of ``checks`` failed or is undecided."""
        return any(
            finding.check in checks and finding.status in (Status.FAIL, Status.UNDECIDED)
            for finding in self._findings
        )

    def below(self, prefix: str) -> Recorder:
        """Return a recorder for a part whose paths are shown below ``prefix``."""
        return Recorder(prefix=self._place(prefix) or prefix)

    def absorb(self, part: Recorder) -> None:
        """Take over what a part's recorder holds."""
        self._findings.extend(part._findings)

    def findings(self) -> tuple[Finding, ...]:
        """Return what was found, in the catalogue's order, then by path."""
        order = {check: position for position, check in enumerate(CHECKS)}
        return tuple(sorted(self._findings, key=lambda each: (order[each.check], each.path or "")))

    def _add(
        self,
        status: Status,
        check: str,
        path: str | None,
        message: str,
        expected: str | None,
        actual: str | None,
        hint: str | None,
    ) -> None:
        self._findings.append(
            Finding(
                CHECKS[check].id,
                status,
                printable(message),
                self._place(path),
                None if expected is None else printable(expected),
                None if actual is None else printable(actual),
                printable(hint or CHECKS[check].hint),
            )
        )

    def _place(self, path: str | None) -> str | None:
        if path is None:
            return self.prefix or None
        return printable(f"{self.prefix}/{path}" if self.prefix else path)


def printable(text: str) -> str:
    """Return ``text`` as one line that any terminal, JSON or XML reader can take.

    File names come from what is judged: control characters, terminal escapes and bytes that
    are not UTF-8 are written as backslash escapes.
    """
    return "".join(char if char.isprintable() else _escape(char) for char in text)


def _escape(char: str) -> str:
    code = ord(char)
    if 0xDC80 <= code <= 0xDCFF:  # an undecodable byte, as os.fsdecode keeps it
        return f"\\x{code - 0xDC00:02x}"
    return char.encode("unicode_escape").decode("ascii")


def tally(findings: Iterable[Finding]) -> Counter[Status]:
    """Count the findings of each status."""
    return Counter(finding.status for finding in findings)
