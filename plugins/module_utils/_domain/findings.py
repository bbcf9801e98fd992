# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What a reader of a host wants to tell a person. Private to gpufleet.inference."""

from __future__ import annotations

from dataclasses import dataclass

SEVERITIES = ("error", "warning", "info")


@dataclass(frozen=True)
class Finding:
    """One observation: ``subject`` is the thing it is about (a GPU, unit or path), ``remedy`` the next step."""

    code: str
    severity: str
    subject: str
    text: str
    remedy: str = ""

    def __post_init__(self) -> None:
        if self.severity not in SEVERITIES:
            raise ValueError(f"severity {self.severity!r} of finding {self.code!r} is none of {', '.join(SEVERITIES)}")

    def to_dict(self) -> dict[str, str]:
        """Plain data for facts and reports."""
        return {
            "code": self.code,
            "severity": self.severity,
            "subject": self.subject,
            "text": self.text,
            "remedy": self.remedy,
        }


def worst(findings: list[dict[str, str]]) -> str:
    """The highest severity among findings in their plain form; "" when there are none."""
    found = {finding["severity"] for finding in findings}
    return next((severity for severity in SEVERITIES if severity in found), "")
