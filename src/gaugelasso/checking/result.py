"""What a check found: a list of findings, and their table as text."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

Level = Literal["pass", "note", "fail"]


@dataclass(frozen=True)
class Finding:
    """`check` is the part of the check, `subject` an axis or a tensor, `message` what to change."""

    check: str
    level: Level
    subject: str
    message: str

    @property
    def failed(self) -> bool:
        return self.level == "fail"


def passed(check: str, subject: str, message: str) -> Finding:
    return Finding(check, "pass", subject, message)


def noted(check: str, subject: str, message: str) -> Finding:
    return Finding(check, "note", subject, message)


def failed(check: str, subject: str, message: str) -> Finding:
    return Finding(check, "fail", subject, message)


@dataclass(frozen=True)
class CheckResult:
    """All findings of a check, in order. True if none of them is a failure."""

    findings: tuple[Finding, ...]

    @property
    def passed(self) -> bool:
        return not self.failures

    @property
    def failures(self) -> tuple[Finding, ...]:
        return tuple(finding for finding in self.findings if finding.failed)

    def __bool__(self) -> bool:
        return self.passed

    def rows(self) -> list[tuple[str, str, str, str]]:
        """(check, result, subject, message) of each finding; the passes of a check are one row."""
        rows, counted = [], set()
        for finding in self.findings:
            same = [f for f in self.findings if f.check == finding.check and f.level == "pass"]
            if finding.level == "pass" and len(same) > 1:
                if finding.check not in counted:
                    counted.add(finding.check)
                    rows.append((finding.check, "pass", f"{len(same)} axes", finding.message))
            else:
                rows.append((finding.check, finding.level, finding.subject, finding.message))
        return rows

    def __str__(self) -> str:
        return "\n".join(_lines(self.rows()))


def _lines(rows: Sequence[tuple[str, ...]]) -> list[str]:
    widths = [max((len(row[k]) for row in rows), default=0) for k in range(3)]
    return [
        "  ".join([*(cell.ljust(size) for cell, size in zip(row, widths, strict=False)), row[3]])
        for row in rows
    ]
