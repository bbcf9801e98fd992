# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The one renderer of tables, bars and reports. Private to gpufleet.inference.

Pure: data and a style in, text out. Colour and line drawing only add to what the words and letters say.
"""

from __future__ import annotations

import itertools
import re
import shlex
import textwrap
from dataclasses import dataclass
from typing import Any, Collection, Iterable, Mapping, Optional, Sequence, Tuple, Union

from ansible_collections.gpufleet.inference.plugins.module_utils._domain.findings import SEVERITIES, worst
from ansible_collections.gpufleet.inference.plugins.module_utils._domain.gpu_findings import ranges
from ansible_collections.gpufleet.inference.plugins.module_utils._domain.units import GIB, MIB

_COLOURS = {
    "red": "31",
    "green": "32",
    "yellow": "33",
    "blue": "34",
    "magenta": "35",
    "cyan": "36",
    "dim": "2",
    "bold": "1",
}
_ESCAPE = re.compile(r"\x1b\[[0-9;]*m")
_SEVERITY_COLOUR = {"error": "red", "warning": "yellow", "info": "cyan"}

Cell = Union[str, Tuple[str, str]]


@dataclass(frozen=True)
class Style:
    """How to draw: columns to fill, escape sequences for colour or none, line drawing or plain ASCII."""

    width: int = 100
    colour: bool = False
    unicode: bool = True


@dataclass(frozen=True)
class Part:
    """A kind of memory: its key, its name in the legend, its sign in a bar (line drawing, ASCII) and its colour."""

    key: str
    name: str
    block: str
    letter: str
    colour: str


PLAN_PARTS = (
    Part("weights", "weights", "█", "W", "blue"),
    Part("kv_cache", "KV cache", "▓", "K", "green"),
    Part("activation", "activation", "▒", "A", "magenta"),
    Part("cuda_graphs", "graphs", "░", "G", "cyan"),
    Part("non_torch", "runtime", "≡", "R", "yellow"),
    Part("foreign", "others", "x", "X", "red"),
    Part("free", "free", "·", ".", "dim"),
)
FACTS_PARTS = (
    Part("ours", "our instances", "█", "W", "green"),
    Part("foreign", "others", "x", "X", "red"),
    Part("free", "free", "·", ".", "dim"),
)


# -- pieces ------------------------------------------------------------------------------------------------------------


def paint(text: str, colour: str, style: Style) -> str:
    """Text in a colour when the style has any."""
    if not style.colour or not colour or not text:
        return text
    return f"\x1b[{_COLOURS[colour]}m{text}\x1b[0m"


def plain(text: str) -> str:
    """Text without escape sequences."""
    return _ESCAPE.sub("", text)


def shorten(text: str, width: int, style: Style) -> str:
    """At most width characters; what is cut off shows as an ellipsis."""
    if len(text) <= width:
        return text
    mark = "…" if style.unicode else "~"
    return text[: max(width - 1, 0)] + mark if width > 0 else ""


def gibibytes(count: Optional[float]) -> str:
    """Bytes as a short figure without unit: "79.6"; "?" when unknown."""
    return "?" if count is None else f"{count / GIB:.1f}"


def is_small(amount: float) -> bool:
    """Whether it is something of which GiB would show 0.0."""
    return 0 < amount < GIB / 20


def figure(amount: float) -> str:
    """Bytes as a figure in GiB without unit, small ones with theirs: "79.6", "12 MiB"."""
    if not is_small(amount):
        return gibibytes(amount)
    return f"{amount / MIB:.0f} MiB" if amount >= MIB else "<1 MiB"


def amounts_line(amounts: Mapping[str, float]) -> str:
    """Named bytes: "weights 15.0, KV cache 40.0 GiB"; each with its unit where one is small."""
    mixed = any(is_small(value) for value in amounts.values())
    words = [
        f"{name} {figure(value)}{' GiB' if mixed and not is_small(value) else ''}" for name, value in amounts.items()
    ]
    return ", ".join(words) + ("" if mixed else " GiB")


def table(
    headers: Sequence[str],
    rows: Sequence[Sequence[Cell]],
    style: Style,
    right: Iterable[int] = (),
    spare: Sequence[int] = (),
) -> str:
    """Rows under headers, in a box or with plain dashes, at most as wide as the style where six signs a column fit.

    A cell is text or (text, colour). ``right`` holds the columns with figures. Columns without any text are left out.
    When the whole is too wide, the columns in ``spare`` are left out in their order, then the widest columns are
    shortened, the first one last.
    """
    filled = [at for at in range(len(headers)) if any(row[at] not in ("", ("", "")) for row in rows)]
    for at in spare:
        if at in filled and _natural_width(headers, rows, filled, style) > style.width:
            filled.remove(at)
    right = [filled.index(at) for at in right if at in filled]
    headers = [headers[at] for at in filled]
    rows = [[row[at] for at in filled] for row in rows]
    if not headers:
        return ""
    texts = [[_words(cell) for cell in row] for row in rows]
    colours = [["" if isinstance(cell, str) else cell[1] for cell in row] for row in rows]
    columns = len(headers)
    widths = [max(len(headers[at]), *(len(row[at]) for row in texts)) for at in range(columns)]
    _shrink(widths, [len(header) for header in headers], style.width - _frame(columns, style))
    to_right = set(right)

    def line(cells: Sequence[str], paints: Sequence[str]) -> str:
        done = []
        for at, cell in enumerate(cells):
            text = shorten(cell, widths[at], style)
            gap = " " * (widths[at] - len(text))
            coloured = paint(text, paints[at], style)
            done.append(gap + coloured if at in to_right else coloured + gap)
        if style.unicode:
            return "│ " + " │ ".join(done) + " │"
        return "  ".join(done).rstrip()

    body = [line(row, paints) for row, paints in zip(texts, colours)]
    head = line(headers, ["bold"] * columns)
    if not style.unicode:
        return "\n".join([head, "  ".join("-" * width for width in widths), *body])

    def rule(left: str, middle: str, end: str) -> str:
        return left + middle.join("─" * (width + 2) for width in widths) + end

    return "\n".join([rule("┌", "┬", "┐"), head, rule("├", "┼", "┤"), *body, rule("└", "┴", "┘")])


def _words(cell: Cell) -> str:
    return cell if isinstance(cell, str) else cell[0]


def _frame(columns: int, style: Style) -> int:
    """The signs of a line that belong to no column."""
    return 3 * columns + 1 if style.unicode else 2 * (columns - 1)


def _natural_width(headers: Sequence[str], rows: Sequence[Sequence[Cell]], filled: Sequence[int], style: Style) -> int:
    widths = [max(len(headers[at]), *(len(_words(row[at])) for row in rows)) for at in filled]
    return sum(widths) + _frame(len(filled), style)


def _shrink(widths: list[int], least: Sequence[int], room: int) -> None:
    """Narrow the widest columns until the sum fits, none below its header or six characters."""
    floors = [min(width, max(6, head)) for width, head in zip(widths, least)]
    while sum(widths) > room:
        able = [at for at in range(1, len(widths)) if widths[at] > floors[at]]
        able = able or [at for at in range(1) if widths[at] > floors[at]]
        if not able:
            return
        widths[max(able, key=lambda at: widths[at])] -= 1


def memory_bar(amounts: Mapping[str, float], total: float, width: int, parts: Sequence[Part], style: Style) -> str:
    """A bar of exactly width signs, each kind in proportion; a kind that is there has at least one sign.

    What the amounts leave of the total is free. Amounts above the total are scaled down to fit.
    """
    values = [max(0.0, float(amounts.get(part.key, 0) or 0)) for part in parts[:-1]]
    used = sum(values)
    scale = max(total, used, 1.0)
    cells = [max(1, int(value / scale * width)) if value > 0 else 0 for value in values]
    while sum(cells) > width:
        cells[max(range(len(cells)), key=lambda at: cells[at])] -= 1
    spare = width - sum(cells)
    wanted = round(used / scale * width) - sum(cells)
    rests = sorted(range(len(cells)), key=lambda at: values[at] / scale * width - cells[at], reverse=True)
    for at in [at for at in rests if values[at] > 0][: max(0, min(spare, wanted))]:
        cells[at] += 1
    cells.append(width - sum(cells))
    drawn = (
        paint((part.block if style.unicode else part.letter) * count, part.colour, style)
        for part, count in zip(parts, cells)
    )
    edge = "▕▏" if style.unicode else "[]"
    return edge[0] + "".join(drawn) + edge[1]


def legend(parts: Sequence[Part], style: Style) -> str:
    """What the signs of a bar mean, in as few lines as fit."""
    lines, room = [""], style.width - 2
    for part in parts:
        sign = part.block if style.unicode else part.letter
        if len(plain(lines[-1])) + len(part.name) + 5 > room:
            lines.append("")
        gap = "   " if lines[-1] else ""
        lines[-1] += f"{gap}{paint(sign, part.colour, style)} {part.name}"
    return "\n".join(f"  {line}" for line in lines)


def heading(text: str, style: Style) -> str:
    """A title after an empty line, with a rule to the right edge."""
    rest = max(0, style.width - len(text) - 1)
    return f"\n{paint(text, 'bold', style)} {paint(('─' if style.unicode else '-') * rest, 'dim', style)}"


def findings(rows: Sequence[tuple[str, Mapping[str, Any]]], style: Style) -> str:
    """(host, finding) pairs, the worst last, where the eye is on a terminal. Equal ones of several hosts are one."""
    merged: dict[tuple[str, str, str, str], list[str]] = {}
    for host, finding in rows:
        key = (finding["severity"], finding["subject"], finding["text"], finding.get("remedy") or "")
        merged.setdefault(key, []).append(host)
    order = {severity: at for at, severity in enumerate(reversed(SEVERITIES))}
    lines = []
    for (severity, subject, text, remedy), hosts in sorted(
        merged.items(), key=lambda item: (order[item[0][0]], item[1])
    ):
        where = ", ".join(hosts) if len(hosts) <= 3 else f"{', '.join(hosts[:2])} and {len(hosts) - 2} more"
        label = f"{severity.upper():7}"
        first = f"{where}: {subject}: {text}"
        lines += _wrapped(first, label, _SEVERITY_COLOUR[severity], style)
        if remedy:
            lines += _wrapped(("→ " if style.unicode else "-> ") + remedy, " " * 7, "", style)
    return "\n".join(lines)


def _wrapped(text: str, label: str, colour: str, style: Style) -> list[str]:
    lines = textwrap.wrap(text, max(20, style.width - len(label) - 1), break_long_words=False) or [""]
    return [f"{paint(label, colour, style)} {lines[0]}", *(f"{' ' * len(label)} {line}" for line in lines[1:])]


def _joined(sections: Sequence[str]) -> str:
    """Sections one under the other, an empty line before each heading but the first."""
    return "\n".join(section for section in sections if section).lstrip("\n") + "\n"


def count(number: int, word: str) -> str:
    """A number with its word: "1 GPU", "8 GPUs"."""
    return f"{number} {word}" if number == 1 else f"{number} {word}s"


# -- the fleet as it is ------------------------------------------------------------------------------------------------


def facts_view(hosts: Mapping[str, Mapping[str, Any]], style: Style) -> str:
    """The fleet inventory: a line per host, a bar per GPU, findings.

    hosts: {name: {"status": "ok" | "unreachable" | "failed" | "unknown", "reason": text, "gpu": facts, "host": facts}}.
    """
    rows, bars, notes = [], [], []
    for name, entry in hosts.items():
        rows.append(_host_row(name, entry, style))
        if entry["status"] != "ok":
            notes.append((name, _missing(entry)))
            continue
        bars += _gpu_lines(name, entry["gpu"], style)
        notes += [(name, finding) for finding in _notes(entry)]
    headers = ("host", "GPUs", "free GiB", "driver", "CUDA", "system", "instances", "findings")
    sections = [
        heading("GPU fleet: " + _fleet_line(hosts), style),
        table(headers, rows, style, right=(2,), spare=(5, 4, 2)),
    ]
    if bars:
        sections += ["\n".join(bars), legend(FACTS_PARTS, style)]
    if notes:
        sections += [heading(_findings_line(notes), style), findings(notes, style)]
    return _joined(sections)


def _notes(entry: Mapping[str, Any]) -> list[dict[str, str]]:
    """The findings of a host, and its instances that do not serve."""
    found = [finding for kind in ("gpu", "host") for finding in (entry.get(kind) or {}).get("findings") or []]
    return found + [_idle(one) for one in entry["gpu"].get("instances") or [] if one["active_state"] != "active"]


def _idle(instance: Mapping[str, Any]) -> dict[str, str]:
    failed = instance["active_state"] == "failed"
    return {
        "severity": "error" if failed else "info",
        "subject": instance["name"],
        "text": f"{instance['unit']} is {instance['active_state']} ({instance.get('sub_state')})",
        "remedy": f"See journalctl -u {instance['unit']} on the host." if failed else "",
    }


REACH_IT = "Check its address, its power and SSH, then run again."
"""The next step for a host that does not answer; `fleet_host` says the same in its refusal."""


def _missing(entry: Mapping[str, Any]) -> dict[str, str]:
    """The finding about a host that told nothing, or not all."""
    reason = " ".join(str(entry.get("reason") or "no reason given").split())
    remedy = REACH_IT if entry["status"] == "unreachable" and REACH_IT not in reason else ""
    return {"severity": "error", "subject": entry["status"], "text": reason, "remedy": remedy}


def _fleet_line(hosts: Mapping[str, Mapping[str, Any]]) -> str:
    known = [entry for entry in hosts.values() if entry["status"] == "ok"]
    gpus = sum(len(entry["gpu"].get("devices") or entry["gpu"].get("pci") or []) for entry in known)
    text = f"{count(len(hosts), 'host')}, {count(gpus, 'GPU')}"
    missing = [entry["status"] for entry in hosts.values() if entry["status"] != "ok"]
    for status in sorted(set(missing)):
        text += f", {missing.count(status)} {status}"
    return text


def _findings_line(notes: Sequence[tuple[str, Mapping[str, Any]]]) -> str:
    kinds = [finding["severity"] for _host, finding in notes]
    words = [
        count(kinds.count(severity), severity) for severity in SEVERITIES if severity in kinds and severity != "info"
    ]
    words += [f"{kinds.count('info')} to know"] if "info" in kinds else []
    return "Findings: " + ", ".join(words)


def _host_row(name: str, entry: Mapping[str, Any], style: Style) -> list[Cell]:
    status = entry["status"]
    if status != "ok":
        return [name, (status, "red"), "", "", "", "", "", ""]
    gpu = entry["gpu"]
    devices = gpu.get("devices") or []
    free = [device["memory"]["free"] for device in devices]
    instances = gpu.get("instances") or []
    up = sum(1 for instance in instances if instance["active_state"] == "active")
    notes = _notes(entry)
    colour = _SEVERITY_COLOUR.get(worst(notes), "green")
    system = (entry.get("host") or {}).get("distribution") or {}
    return [
        name,
        _kinds(gpu, style),
        gibibytes(sum(free)) if free and None not in free else ("?" if devices else ""),
        _driver(gpu["driver"]),
        gpu.get("cuda_driver_version") or "",
        " ".join(part for part in (system.get("id"), system.get("version")) if part),
        (f"{up} of {len(instances)} up", "green" if up == len(instances) else "yellow") if instances else "",
        (_short_findings(notes), colour),
    ]


def _short_findings(notes: Sequence[Mapping[str, Any]]) -> str:
    kinds = [finding["severity"] for finding in notes]
    words = [count(kinds.count(severity), severity) for severity in SEVERITIES[:2] if severity in kinds]
    return ", ".join(words) or "none"


def _kinds(gpu: Mapping[str, Any], style: Style) -> str:
    times = "×" if style.unicode else "x"
    devices = gpu.get("devices") or []
    names = [device["name"] or "unknown" for device in devices]
    if not names:
        names = [entry["name"] or f"NVIDIA {entry['device_id']}" for entry in gpu.get("pci") or []]
    if not names:
        others = len(gpu.get("other_gpus") or [])
        return f"{others} of another vendor" if others else "none"
    return ", ".join(f"{names.count(name)} {times} {name}" for name in dict.fromkeys(names))


def _driver(driver: Mapping[str, Any]) -> str:
    running, installed = driver.get("running"), driver.get("installed")
    if running and installed and running != installed:
        return f"{running} ({installed} due)"
    if running:
        return str(running)
    return f"{installed} not loaded" if installed else "none"


def _gpu_lines(host: str, gpu: Mapping[str, Any], style: Style) -> list[str]:
    """A bar for each GPU; neighbours that look alike share one."""
    ours = {instance["unit"] for instance in gpu.get("instances") or []}
    states: list[tuple[int, Any]] = []
    for number, device in enumerate(gpu.get("devices") or []):
        memory = device["memory"]
        index = device["index"] if device["index"] is not None else number
        if memory["total"] is None:
            states.append((index, _reason(gpu.get("unavailable") or {}, number)))
            continue
        mine = sum(process["used"] or 0 for process in device["processes"] or [] if process["unit"] in ours)
        total = memory["total"] - (memory["reserved"] or 0)
        states.append((index, (mine, max(total - (memory["free"] or 0), mine), total)))
    groups = _alike(states)
    widest = max((len(label) for label, _state in groups), default=0)
    lines = []
    for label, state in groups:
        start = f"  {host} {label:{widest}}"
        if isinstance(state, str):
            reason = shorten(f"no answer: {state}", style.width - len(start) - 2, style)
            lines.append(f"{start}  {paint(reason, 'red', style)}")
            continue
        mine, taken, total = state
        figures = f"{gibibytes(taken):>6} of {gibibytes(total):>6} GiB"
        size = max(10, min(50, style.width - len(start) - len(figures) - 6))
        drawn = memory_bar({"ours": mine, "foreign": taken - mine}, total, size, FACTS_PARTS, style)
        lines.append(f"{start} {drawn} {figures}")
    return lines


def _alike(states: Sequence[tuple[Optional[int], Any]]) -> list[tuple[str, Any]]:
    """Neighbours with an equal state as one: ("GPU 1-7", state)."""
    groups = []
    for state, members in itertools.groupby(states, key=lambda entry: entry[1]):
        indices = [index for index, _state in members]
        known = [index for index in indices if index is not None]
        groups.append((f"GPU {ranges(known) if known and len(known) == len(indices) else '?'}", state))
    return groups


def _reason(unavailable: Mapping[str, str], number: int) -> str:
    paths = (f"devices.{number}.memory", f"devices.{number}", "devices", "nvml")
    return next((unavailable[path] for path in paths if path in unavailable), "unknown")


def facts_rows(hosts: Mapping[str, Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The fleet inventory for a spreadsheet: one row per GPU, and one for each host that has none or did not answer."""
    rows = []
    for name, entry in hosts.items():
        gpu = entry.get("gpu") or {}
        driver = gpu.get("driver") or {}
        base = {
            "host": name,
            "status": entry["status"],
            "driver_running": driver.get("running"),
            "driver_installed": driver.get("installed"),
            "driver_userland": driver.get("userland"),
            "flavour": driver.get("flavour"),
            "cuda": gpu.get("cuda_driver_version"),
        }
        devices = gpu.get("devices") or [
            {"pci_address": pci["address"], "name": pci["name"] or pci["device_id"]} for pci in gpu.get("pci") or []
        ]
        for device in devices or [{}]:
            memory = device.get("memory") or {}
            mig = device.get("mig") or {}
            names = [
                instance["name"]
                for instance in gpu.get("instances") or []
                if device.get("uuid") and device["uuid"] in (instance["devices"] or [])
            ]
            rows.append(
                {
                    **base,
                    "gpu": device.get("index"),
                    "uuid": device.get("uuid"),
                    "pci_address": device.get("pci_address"),
                    "name": device.get("name"),
                    "memory_total": memory.get("total"),
                    "memory_free": memory.get("free"),
                    "mig": mig.get("mode"),
                    "instances": " ".join(names),
                }
            )
    return rows


# -- the fleet as it is planned ----------------------------------------------------------------------------------------


def plan_view(hosts: Mapping[str, Mapping[str, Any]], style: Style) -> str:
    """The plan: per GPU every byte, per instance its figures and command line, refusals last.

    hosts: {name: {"status": …, "reason": text, "plan": plan or None, "instances": results of vllm_instances}}.
    """
    sections, refused, notes = [], [], []
    for name, entry in hosts.items():
        plan = entry.get("plan")
        if not plan:
            status = entry["status"] if entry["status"] != "ok" else "unknown"
            notes.append((name, _missing({"status": status, "reason": entry.get("reason") or "no plan was made"})))
            sections.append(heading(f"{name}: {status}", style))
            continue
        instances = [instance for instance in plan["instances"] if instance.get("state") != "absent"]
        fitting = [instance for instance in instances if instance["fits"]]
        refused += [(name, instance) for instance in instances if not instance["fits"]]
        notes += [(name, finding) for finding in plan.get("findings") or []]
        expected = any(gpu.get("expected") for gpu in plan.get("gpus") or [])
        verb = "fits" if len(instances) == 1 else "fit"
        title = f"{name}: {len(fitting)} of {count(len(instances), 'instance')} {verb}"
        sections.append(
            heading(title + (" (no driver yet: memory as expected of these GPUs)" if expected else ""), style)
        )
        sections += _plan_gpus(plan.get("gpus") or [], fitting, style)
        due = {result["name"] for result in entry.get("instances") or [] if result.get("due")}
        sections.append(_instance_table(fitting, due, style))
        sections += [_command(instance, style) for instance in fitting if instance.get("arguments")]
    if any((entry.get("plan") or {}).get("gpus") for entry in hosts.values()):
        sections.insert(0, legend(PLAN_PARTS, style))
    if notes:
        sections += [heading(_findings_line(notes), style), findings(notes, style)]
    for name, instance in refused:
        sections.append(_refusal(name, instance, style))
    return _joined(sections)


def amount(term: Any) -> int:
    """Bytes of a term of a budget, which is a number or {bytes, …}."""
    if isinstance(term, Mapping):
        term = term.get("bytes")
    return int(term or 0)


def _plan_gpus(gpus: Sequence[Mapping[str, Any]], instances: Sequence[Mapping[str, Any]], style: Style) -> list[str]:
    """For each GPU a bar and what each instance holds on it; neighbours with nothing on them share a bar."""
    keys = [part.key for part in PLAN_PARTS[:-2]]
    states: list[tuple[Optional[int], Any]] = []
    for gpu in gpus:
        amounts = dict.fromkeys(keys, 0)
        lines: list[str] = []
        for instance in instances:
            for part in instance.get("budget") or []:
                if part.get("uuid") == gpu.get("uuid"):
                    for key in keys:
                        amounts[key] += amount(part.get(key))
                    named = {item.name: amount(part.get(item.key)) for item in PLAN_PARTS[:-2]}
                    text = f"{instance['name']}: {amounts_line(named)}{_band(part, keys, style)}"
                    lines += textwrap.wrap(text, style.width, initial_indent=" " * 9, subsequent_indent=" " * 11)
        amounts["foreign"] = amount(gpu.get("foreign"))
        states.append((gpu.get("index"), (amounts, lines, amount(gpu.get("total")), str(gpu.get("name") or ""))))
    groups = _alike(states)
    widest = max((len(label) for label, _state in groups), default=0)
    result = []
    for label, (amounts, lines, total, name) in groups:
        start = f"  {label:{widest}}"
        figures = f"{figure(sum(amounts.values())):>6} of {gibibytes(total):>6} GiB"
        size = max(10, min(60, style.width - len(start) - len(figures) - 5))
        line = f"{start} {memory_bar(amounts, total, size, PLAN_PARTS, style)} {figures}"
        room = style.width - len(plain(line)) - 2
        result += [f"{line}  {shorten(name, room, style)}" if name and room >= 8 else line, *lines]
    return result


def _band(part: Mapping[str, Any], keys: Sequence[str], style: Style) -> str:
    """How far off the sum may be, when the terms say so."""
    terms = [part.get(key) for key in keys]
    spread = max(
        sum(term.get("high", 0) - term.get("bytes", 0) for term in terms if isinstance(term, Mapping)),
        sum(term.get("bytes", 0) - term.get("low", 0) for term in terms if isinstance(term, Mapping)),
    )
    sign = "±" if style.unicode else "+-"
    return f" {sign} {gibibytes(spread)} GiB" if spread >= GIB / 20 else ""


def _instance_table(instances: Sequence[Mapping[str, Any]], due: Collection[str], style: Style) -> str:
    rows: list[list[Cell]] = []
    for instance in instances:
        tokens = instance.get("kv_cache_tokens")
        concurrency = instance.get("max_concurrency")
        rows.append(
            [
                str(instance["name"]),
                str(instance.get("model") or ""),
                str(instance.get("engine_version") or ""),
                str(len(instance.get("devices") or [])),
                f"{instance.get('listen_address') or ''}:{instance.get('port') or ''}".strip(":"),
                str(instance.get("max_model_len") or ""),
                f"{tokens:,}" if tokens else "",
                f"{concurrency:.1f}×" if concurrency and style.unicode else str(concurrency or ""),
                _plan_state(instance, due),
            ]
        )
    headers = ("instance", "model", "vLLM", "GPUs", "listens on", "length", "KV tokens", "at full length", "state")
    return table(headers, rows, style, right=(3, 5, 6, 7), spare=(2, 7, 8))


def _plan_state(instance: Mapping[str, Any], due: Collection[str]) -> Cell:
    """What becomes of an instance: it stays as it runs, waits for a restart with consent, or gets its wanted state."""
    if instance["name"] in due:
        return ("due", "yellow")
    return ("kept", "cyan") if instance.get("kept") else str(instance.get("state") or "")


def _command(instance: Mapping[str, Any], style: Style) -> str:
    """The command line, to be pasted into a shell; arguments that leave the program out are vLLM's."""
    words = [shlex.quote(str(word)) for word in instance["arguments"]]
    if words[0] == "serve":
        words.insert(0, "vllm")
    lines, line = [], f"  {instance['name']} $"
    for word in words:
        if len(line) + len(word) + 3 > style.width and line.strip():
            lines.append(line + " \\")
            line = "     "
        line += f" {word}"
    return "\n".join(paint(text, "dim", style) for text in [*lines, line])


NO_WAY_OUT = (
    "No setting that was tried makes it fit here: take a smaller or more quantised model, or more or larger GPUs."
)


def _refusal(host: str, instance: Mapping[str, Any], style: Style) -> str:
    reason = instance.get("reason") or {}
    text = (
        f"{host}: {instance['name']} does not fit: {reason.get('text', 'no reason given')} ({reason.get('code', '?')})"
    )
    lines = _wrapped(text, "REFUSED", "red", style)
    for way in ways_out(instance) or [NO_WAY_OUT] * is_about_memory(instance):
        lines += _wrapped(("→ " if style.unicode else "-> ") + way, " " * 7, "", style)
    return "\n".join(lines)


def ways_out(instance: Mapping[str, Any]) -> list[str]:
    """What was planned again and does fit, each as a text."""
    return [text for text in map(_alternative, instance.get("alternatives") or []) if text]


def is_about_memory(instance: Mapping[str, Any]) -> bool:
    """Whether an instance was refused because it does not fit into the memory of the GPUs."""
    return (instance.get("reason") or {}).get("code") in ("oom_risk", "refused_kv")


def _alternative(alternative: Any) -> str:
    if not isinstance(alternative, Mapping):
        return str(alternative)
    if alternative.get("text"):
        return str(alternative["text"])
    change = alternative.get("change") or alternative.get("set") or alternative
    return ", ".join(f"{key}: {value}" for key, value in change.items() if not isinstance(value, (dict, list)))


# -- what a run did ----------------------------------------------------------------------------------------------------


def site_view(hosts: Mapping[str, Mapping[str, Any]], style: Style) -> str:
    """After a run: each instance with its state, and what is due.

    hosts: {name: {"status": …, "reason": text, "gpu": facts, "instances": results of vllm_instances, "findings": […]}}.
    """
    rows: list[list[Cell]] = []
    notes: list[tuple[str, Mapping[str, Any]]] = []
    for name, entry in hosts.items():
        notes += [(name, finding) for finding in entry.get("findings") or []]
        if entry["status"] != "ok":
            notes.append((name, _missing(entry)))
            rows.append([name, "", (entry["status"], "red"), "", ""])
            continue
        results = entry.get("instances") or []
        if not results:
            rows.append([name, "no instance", "", "", ""])
        for result in results:
            state = str(result.get("state") or "")
            colour = {"active": "green", "started": "green", "running": "green", "failed": "red"}.get(state, "yellow")
            note = "due: run upgrade" if result.get("due") else ("changed" if result.get("changed") else "")
            why = " ".join(str(result.get("reason") or "").split())
            rows.append([name, str(result.get("name") or ""), (state, colour), note, why])
    sections = [heading(f"Instances on {count(len(hosts), 'host')}", style)]
    sections.append(table(("host", "instance", "state", "run", "reason"), rows, style))
    if notes:
        sections += [heading(_findings_line(notes), style), findings(notes, style)]
    return _joined(sections)


# -- the baseline ------------------------------------------------------------------------------------------------------

_VERDICT_COLOUR = {"ok": "green", "drift": "red", "error": "red", "unknown": "yellow"}


def verdict_counts(hosts: Mapping[str, Mapping[str, Any]]) -> dict[str, int]:
    """How many hosts have each verdict; all four are there."""
    verdicts = [entry["verdict"] for entry in hosts.values()]
    return {verdict: verdicts.count(verdict) for verdict in ("ok", "drift", "unknown", "error")}


def baseline_view(hosts: Mapping[str, Mapping[str, Any]], style: Style, whole: bool = False) -> str:
    """Each host against its baseline: what differs, component by component.

    hosts: {name: {"verdict": …, "status": …, "reason": text, "baseline": comparison or None, "version_findings": […]}}.
    Components that are as wanted share a line, unless ``whole``, or where no more than three hosts are shown.
    """
    whole = whole or len(hosts) <= 3
    rows: list[list[Cell]] = []
    notes: list[tuple[str, Mapping[str, Any]]] = []
    for name, entry in hosts.items():
        notes += [(name, finding) for finding in entry.get("version_findings") or []]
        compared = entry.get("baseline")
        if not compared:
            notes.append((name, _missing(entry)))
            rows.append([name, "", "", "", "", "", "", _verdict(entry["verdict"]), "not compared"])
            continue
        notes += [
            (name, {"severity": "error", "subject": item["component"], "text": item["why"]})
            for item in compared["components"]
            if item["verdict"] == "error"
        ]
        number = str(compared["number"])
        same = [item for item in compared["components"] if item["verdict"] == "ok"]
        shown = [item for item in compared["components"] if whole or item["verdict"] != "ok"]
        rows += [[name, number, *_component(item)] for item in shown]
        if same and not whole:
            all_of_them = len(same) == len(compared["components"])
            words = f"{'all' if all_of_them else 'other'} {count(len(same), 'component')}"
            rows.append([name, number, words, "", "", "", "", _verdict("ok"), ""])
    numbers = ", ".join(f"{number} {verdict}" for verdict, number in verdict_counts(hosts).items() if number)
    sections = [heading(f"Baseline of {count(len(hosts), 'host')}: {numbers or 'nothing to compare'}", style)]
    headers = ("host", "set", "component", "wanted", "installed", "running", "held", "verdict", "why")
    sections.append(table(headers, rows, style, spare=(6, 1)))
    if notes:
        sections += [heading(_findings_line(notes), style), findings(notes, style)]
    return _joined(sections)


def _verdict(verdict: str) -> Cell:
    return (verdict, _VERDICT_COLOUR[verdict])


def _component(item: Mapping[str, Any]) -> list[Cell]:
    held = {True: "yes", False: "no", None: ""}[item["held"]]
    texts = [str(item[key] or "") for key in ("component", "wanted", "installed", "running")]
    return [*texts, held, _verdict(item["verdict"]), str(item["why"])]
