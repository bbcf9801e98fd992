#!/usr/bin/env bash
# Print the real path of a Python 3.11 that can make virtual environments. A version manager's shim may answer to
# the name without having that version, so each candidate is asked for its own executable.
set -eu
wanted=${1:-3.11}
probe='import sys, venv, ensurepip
assert "%d.%d" % sys.version_info[:2] == sys.argv[1]
print(sys.executable)'
for name in "python$wanted" "/usr/bin/python$wanted" "/usr/local/bin/python$wanted" python3; do
  if found=$("$name" -c "$probe" "$wanted" 2>/dev/null) && [ -x "$found" ]; then
    echo "$found"
    exit 0
  fi
done
echo "find-python: no Python $wanted with venv and ensurepip on this machine; on Debian: apt-get install python$wanted-venv" >&2
exit 1
