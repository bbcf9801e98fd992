# Copyright (c) The gpufleet.inference authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Entry of the host helper: `gpufleet.pyz VERB …` (private to this collection).

It runs with the host's own Python and nothing else, as a service's user or as root, without a controller.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from ansible_collections.gpufleet.inference.plugins.module_utils._domain.errors import FleetError
from ansible_collections.gpufleet.inference.plugins.module_utils._helper import about, ready, restore, start

VERBS = (start, ready, restore, about)


def parser() -> argparse.ArgumentParser:
    """The command line; every verb's module adds its own part."""
    result = argparse.ArgumentParser(prog="gpufleet", description="Host helper of the collection gpufleet.inference.")
    verbs = result.add_subparsers(dest="verb", required=True, metavar="VERB")
    for module in VERBS:
        module.register(verbs)
    return result


def main(argv: Sequence[str]) -> int:
    """Run one verb. A failure is one line on standard error, which ends up in the journal, and exit code 1."""
    arguments = parser().parse_args(argv)
    try:
        code: int = arguments.work(arguments)
    except FleetError as exc:
        sys.stderr.write(f"gpufleet {arguments.verb}: {exc.as_result()['msg']}\n")
        return 1
    return code
