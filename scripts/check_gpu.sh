#!/usr/bin/env bash
# On a machine with a Hopper GPU, in under ten minutes: are the Triton kernels right, and how fast are they
# beside their peers? Nothing is timed unless everything is right. Rows are written as they are taken, to
# benchmarks/results/ or to the folder that OUT or --out names; a timing that fails does not stop the others.
#
#     bash scripts/check_gpu.sh                   check, then time
#     bash scripts/check_gpu.sh --wheels DIR      install peers from wheels first; needs no network
#     bash scripts/check_gpu.sh --check-only
#     bash scripts/check_gpu.sh --out DIR
#
# The peers' wheels, fetched where there is a network:
#     pip download --no-deps fla-core flash-linear-attention einops -d DIR
#
# PYTHON names the interpreter, python3 by default; it needs torch, triton and transformers.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
python=${PYTHON:-python3} wheels="" out=${OUT:-} options=(--case gpu --seconds 240)
while [ $# -gt 0 ]; do
    case $1 in
    --wheels) wheels=${2:?--wheels needs a folder} && shift 2 ;;
    --check-only) options+=(--check-only) && shift ;;
    --out) out=${2:?--out needs a folder} && shift 2 ;;
    *) sed -n '2,14s/^# \{0,1\}//p' "${BASH_SOURCE[0]}" >&2 && exit 2 ;;
    esac
done
export PYTHONPATH="$PWD:$PWD/kernels${PYTHONPATH:+:$PYTHONPATH}"
if ! "$python" -c 'import torch, sys; sys.exit(not torch.cuda.is_available())'; then
    echo "check_gpu.sh: this machine has no GPU that torch can use; nothing was checked or timed" >&2
    exit 2
fi
"$python" - <<'END'
import torch, triton
print(torch.cuda.get_device_name(), "torch", torch.__version__, "triton", triton.__version__)
END
if [ -n "$wheels" ]; then
    "$python" -m pip install --quiet --no-index --no-deps --find-links "$wheels" \
        fla-core flash-linear-attention einops ||
        echo "check_gpu.sh: the peers could not be installed from $wheels; going on without them" >&2
fi
[ -z "$out" ] || options+=(--out "$out")
timeout 590 "$python" -m benchmarks.run "${options[@]}"
