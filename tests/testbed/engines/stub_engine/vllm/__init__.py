"""Stand-in for vLLM: its command line, HTTP interface, log lines and signal behaviour, without computing anything."""

import json
import os

with open(os.path.join(os.path.dirname(__file__), "release.json"), encoding="utf-8") as _source:
    RELEASE = json.load(_source)

__version__ = RELEASE["version"]


def version_tuple(text):
    """`0.8.5.post1` as (0, 8, 5, 1), so that releases compare."""
    return tuple(int(part.replace("post", "")) for part in text.split("."))


VERSION = version_tuple(__version__)
