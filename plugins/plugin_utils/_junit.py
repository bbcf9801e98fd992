# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Baseline results as JUnit XML, for whatever collects test reports. Private to gpufleet.inference."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET
from typing import Any, Mapping

_TAGS = {"drift": "failure", "error": "error", "unknown": "skipped"}
_NOT_XML = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd]")


def junit(hosts: Mapping[str, Mapping[str, Any]], fail_on_unknown: bool) -> str:
    """A suite for each host, a case for each component: drift is a failure, error an error.

    unknown is skipped, or an error when it is to fail. A host without components is one case of its own.
    """
    root = ET.Element("testsuites", name="baseline")
    for name, host in hosts.items():
        baseline = host.get("baseline") or {}
        title = f"baseline {baseline['number']}" if baseline else "baseline"
        bare = {"component": "host", "verdict": host["verdict"], "why": host.get("reason") or ""}
        rows = baseline.get("components") or [bare]
        tags = [_tag(row["verdict"], fail_on_unknown) for row in rows]
        suite = ET.SubElement(root, "testsuite", name=_text(name), tests=str(len(rows)))
        suite.set("failures", str(tags.count("failure")))
        suite.set("errors", str(tags.count("error")))
        suite.set("skipped", str(tags.count("skipped")))
        for row, tag in zip(rows, tags):
            case = ET.SubElement(suite, "testcase", classname=_text(f"{title}.{name}"), name=_text(row["component"]))
            if tag:
                words = [
                    f"{key} {row.get(key) or 'nothing'}" for key in ("wanted", "installed", "running") if key in row
                ]
                message = ", ".join([*words, row["why"]] if row["why"] else words)
                ET.SubElement(case, tag, message=_text(message)).text = _text(row["verdict"])
    ET.indent(root)
    return '<?xml version="1.0" encoding="utf-8"?>\n' + ET.tostring(root, encoding="unicode") + "\n"


def _tag(verdict: str, fail_on_unknown: bool) -> str:
    return "error" if verdict == "unknown" and fail_on_unknown else _TAGS.get(verdict, "")


def _text(value: Any) -> str:
    return _NOT_XML.sub("?", str(value))
