"""Ask an installed vLLM whether its own command line takes these words.

Run by the interpreter of that vLLM: ``python ask_parser.py QUESTIONS.json``, a list of command lines without the
program's name. Prints one JSON answer per line: what the parser made of the planned settings, or why it refused.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import sys
from pathlib import Path
from typing import Any

os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("VLLM_TARGET_DEVICE", "cpu")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
SETTINGS = ("max_model_len", "max_num_seqs", "max_num_batched_tokens", "gpu_memory_utilization", "port")


def command_line() -> Any:
    """The parser of ``vllm serve``, put together as the program does it, and its own check of the result."""
    try:
        from vllm.utils.argparse_utils import FlexibleArgumentParser
    except ImportError:
        from vllm.utils import FlexibleArgumentParser
    from vllm.entrypoints.cli import serve

    parser = FlexibleArgumentParser()
    commands = parser.add_subparsers(dest="subparser")
    (command,) = serve.cmd_init()
    command.subparser_init(commands)
    return parser, command


def main() -> None:
    import vllm

    parser, command = command_line()
    for words in json.loads(Path(sys.argv[1]).read_text(encoding="utf-8")):
        said = io.StringIO()
        answer: dict[str, Any] = {"version": vllm.__version__}
        try:
            with contextlib.redirect_stderr(said):
                found = parser.parse_args(words)
                command.validate(found)
            answer.update(ok=True, settings={name: getattr(found, name) for name in SETTINGS})
            answer["settings"]["model"] = getattr(found, "model_tag", None) or found.model
            answer["settings"]["kv_cache_memory_bytes"] = getattr(found, "kv_cache_memory_bytes", None)
        except SystemExit:
            answer.update(ok=False, error=said.getvalue()[-400:])
        except Exception as error:
            answer.update(ok=False, error=f"{type(error).__name__}: {error}"[:400])
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
