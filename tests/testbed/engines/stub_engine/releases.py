"""Make `releases.json`: what the stub engine must know about each vLLM release.

Run by hand when a release is added: `releases.py RELEASE_FACTS.json > releases.json`. The input is the matrix read
out of the real wheels (flags with their history, key rules, Python range); the output keeps only what a command line,
an HTTP server and a start need. A flag's history entry holds from its `since` on.
"""

from __future__ import annotations

import json
import sys
from typing import Any

KEEP = ("since", "type", "default", "choices", "aliases", "negatable")


def reduce(facts: dict[str, Any]) -> dict[str, Any]:
    """The stub's table from the full matrix."""
    versions = {}
    for version, entry in facts["versions"].items():
        versions[version] = {
            "requires_python": entry["requires_python"],
            "guarded": entry["api_key"]["guarded_prefixes"],
            "key_precedence": entry["api_key"]["precedence"],
            "serve_model_flag": entry["cli"]["serve_model_flag"],
            "enable_disable_pairs": entry["cli"]["enable_disable_pairs"],
            "endpoints": sorted(e for e in entry["endpoints"] if e in ENDPOINTS),
        }
    flags = {}
    for name, flag in facts["flags"].items():
        history = [{key: step[key] for key in KEEP if step.get(key) is not None} for step in flag["history"]]
        for step in history:
            step["type"] = step["type"].split(":")[0]
            if not isinstance(step.get("default"), (int, float, str)):
                step.pop("default", None)
        flags[name] = {"last": flag["last_seen"], "history": _without_repeats(history)}
    return {"order": list(facts["versions"]), "versions": versions, "flags": flags}


def _without_repeats(history: list[dict[str, Any]]) -> list[dict[str, Any]]:
    kept: list[dict[str, Any]] = []
    for step in history:
        if not kept or {**step, "since": ""} != {**kept[-1], "since": ""}:
            kept.append(step)
    return kept


ENDPOINTS = [
    *("/health", "/ping", "/version", "/metrics", "/load", "/tokenize", "/detokenize"),
    *("/v1/models", "/v1/completions", "/v1/chat/completions", "/v1/embeddings"),
]

if __name__ == "__main__":
    with open(sys.argv[1], encoding="utf-8") as source:
        table = reduce(json.load(source))
    print(json.dumps(table, indent=None, separators=(",", ":"), sort_keys=False).replace('},"--', '},\n"--'))
