"""The command line of `vllm` as the release's own parser takes it."""

import argparse
import json
import re
import sys

from vllm import RELEASE, VERSION, __version__

SUFFIXES = {"k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
SUFFIXED = {"--max-model-len", "--max-num-batched-tokens", "--kv-cache-memory-bytes", "--long-prefill-token-threshold"}


def human_int(text):
    """`8k` is 8000 and `8K` 8192, as in vLLM from 0.9."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([kKmMgGtT])", text)
    if match:
        return int(float(match.group(1)) * SUFFIXES[match.group(2)])
    return int(text)


def length(text):
    """A model length: a number, or `auto`/-1 where the release knows it."""
    if VERSION >= (0, 14, 0) and text in ("auto", "-1"):
        return -1
    return human_int(text)


class Toggle(argparse.BooleanOptionalAction):
    """`--x` and `--no-x`."""


def add_flag(parser, name, flag):
    """One flag with the type, choices, aliases and default of this release."""
    names = [name, *flag.get("aliases", [])]
    options = {"default": flag.get("default")}
    kind = flag["type"]
    if kind == "bool":
        if flag.get("negatable"):
            options["action"] = Toggle
        else:
            options["action"] = "store_true"
    elif kind == "list":
        options["nargs"] = "+"
    elif kind == "optional-value":
        options.update(nargs="?", const=True)
    else:
        converters = {"int": int, "float": float, "json": _json}
        options["type"] = converters.get(kind, str)
        if name in SUFFIXED and VERSION >= (0, 9, 0):
            options["type"] = length if name == "--max-model-len" else human_int
        if flag.get("choices"):
            options["choices"] = [choice for choice in flag["choices"] if choice is not None]
    parser.add_argument(*names, **options)


def _json(text):
    try:
        return json.loads(text)
    except ValueError:
        if text[:1] in "[{":
            raise argparse.ArgumentTypeError(f"Value {text} cannot be converted to JSON") from None
        return text


def normalise(arguments, flags):
    """Underscores become dashes; `--flag.key value` becomes JSON, as vLLM's own parser does it first."""
    result, dotted, position = [], {}, 0
    while position < len(arguments):
        text = arguments[position]
        position += 1
        if not text.startswith("--") or text == "--":
            result.append(text)
            continue
        name, equals, value = text.partition("=")
        name = name.replace("_", "-") if "." not in name else name
        base, dot, key = name.partition(".")
        if dot and flags.get(base, {}).get("type") == "json" and VERSION >= (0, 9, 0):
            if not equals:
                value, position = (arguments[position] if position < len(arguments) else "true"), position + 1
            target = dotted.setdefault(base, {})
            *path, last = key.split(".")
            for part in path:
                target = target.setdefault(part, {})
            target[last] = _json(value)
            continue
        result.append(name + equals + value)
    for base, value in dotted.items():
        result += [base, json.dumps(value)]
    return result


def make_parser():
    """The parser of `vllm` with its `serve` sub-command."""
    parser = argparse.ArgumentParser(prog="vllm", description="vLLM CLI")
    parser.add_argument("-v", "--version", action="version", version=__version__)
    commands = parser.add_subparsers(dest="command", required=False)
    serve = commands.add_parser("serve", usage="vllm serve [model_tag] [options]")
    serve.add_argument("model_tag", nargs="?", default=None)
    for name, flag in RELEASE["flags"].items():
        add_flag(serve, name, flag)
    if RELEASE["enable_disable_pairs"]:
        for name, flag in RELEASE["flags"].items():
            for mine, other in (("--enable-", "--disable-"), ("--disable-", "--enable-")):
                twin = other + name[len(mine) :]
                if flag["type"] == "bool" and name.startswith(mine) and twin not in RELEASE["flags"]:
                    serve.add_argument(twin, dest=name[2:].replace("-", "_"), action="store_false")
    return parser, serve


def parse(arguments):
    """Parse like the release: unknown flags, bad choices and a second model end with exit 2."""
    parser, _serve = make_parser()
    options = parser.parse_args(normalise(arguments, RELEASE["flags"]))
    if options.command != "serve":
        parser.print_help()
        raise SystemExit(0 if options.command is None else 2)
    given = [text for text in arguments if text == "--model" or text.startswith("--model=")]
    if given and VERSION >= (0, 5, 5):
        if RELEASE["serve_model_flag"] == "error":
            raise ValueError(
                "With `vllm serve`, you should provide the model as a positional argument or in a config file "
                "instead of via the `--model` option."
            )
        print("With `vllm serve`, the model belongs in the positional argument.", file=sys.stderr)
    if options.model_tag is not None:
        options.model = options.model_tag
    if VERSION >= (0, 24, 0) and options.device_ids is not None:
        options.device_ids = [item for text in _listed(options.device_ids) for item in str(text).split(",")]
    return options


def _listed(value):
    return value if isinstance(value, list) else [value]


def main():
    """Entry point of the console script."""
    options = parse(sys.argv[1:])
    from vllm import server

    raise SystemExit(server.serve(options))


if __name__ == "__main__":
    main()
