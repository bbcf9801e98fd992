#!/usr/bin/env bash
# Checks on a machine with NVIDIA GPUs that our readings are the driver's: read-only, no network, at most 5 minutes.
#
#   tests/hardware/run.sh                 prints each comparison; exit 0 when all agree, 1 when one does not
#   tests/hardware/run.sh --require-gpu   the same, and a machine without a GPU is a failure
#
# Needs: the driver with nvidia-smi, Python 3.9+, and pynvml (the one file of nvidia-ml-py): on the Python path, in
# .venv, or named by GPUFLEET_PYNVML. Results go to $OUT (default: nothing is kept).
set -uo pipefail
cd "$(dirname "$0")/../.." || exit 2
need_gpu=0
[ "${1:-}" = --require-gpu ] && need_gpu=1

nothing() {
  echo "hardware: $1 Nothing was checked."
  exit "$need_gpu"
}

command -v nvidia-smi >/dev/null || nothing "nvidia-smi is not on this machine: it has no NVIDIA driver."
scratch=$(mktemp -d)
mps=
clean_up() {
  if [ -n "$mps" ]; then
    echo quit | timeout 20 nvidia-cuda-mps-control >/dev/null 2>&1
    wait "$mps" 2>/dev/null
  fi
  rm -rf "$scratch"
}
trap clean_up EXIT

timeout 60 nvidia-smi -q -x >"$scratch/smi.xml" 2>"$scratch/smi.err" ||
  nothing "nvidia-smi ended with $?: $(head -c 300 "$scratch/smi.xml" "$scratch/smi.err" | tr '\n' ' ')"
[ -n "${OUT:-}" ] && cp "$scratch/smi.xml" "$OUT/nvidia-smi.xml"

python=
for name in .venv/bin/python python3; do
  "$name" -c 'import sys; assert sys.version_info >= (3, 9)' 2>/dev/null && python=$name && break
done
[ -n "$python" ] || nothing "there is no Python 3.9 or newer."

# A daemon of our own with its own pipe directory; without a client it starts no server and touches no GPU.
if command -v nvidia-cuda-mps-control >/dev/null; then
  mkdir -p "$scratch/pipe" "$scratch/log"
  export CUDA_MPS_PIPE_DIRECTORY=$scratch/pipe CUDA_MPS_LOG_DIRECTORY=$scratch/log
  timeout 120 nvidia-cuda-mps-control -f >"$scratch/mps.out" 2>&1 &
  mps=$!
  for _ in $(seq 50); do
    [ -e "$scratch/pipe/control" ] && break
    sleep 0.1
  done
fi

timeout 180 "$python" tests/hardware/compare.py --smi "$scratch/smi.xml" ${mps:+--mps "$scratch/pipe"} \
  ${OUT:+--out "$OUT/hardware.json"}
