# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The one error of the collection. Private to gpufleet.inference."""

from __future__ import annotations

from typing import Any


class FleetError(Exception):
    """A refusal or failure that a person must act on.

    ``code`` is stable and machine readable, ``message`` says what was wanted, what was found (in figures) and why that
    does not work, ``hint`` is the next step. ``details`` holds plain data for programs.
    """

    def __init__(self, code: str, message: str, hint: str = "", **details: Any) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.hint = hint
        self.details = details

    def as_result(self) -> dict[str, Any]:
        """The arguments for ``fail_json``: msg (ends with the next step), error_code, hint and, if any, details."""
        text = f"{self.message} {self.hint}" if self.hint else self.message
        result: dict[str, Any] = {"msg": text, "error_code": self.code, "hint": self.hint}
        if self.details:
            result["details"] = dict(self.details)
        return result
