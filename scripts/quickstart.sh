#!/usr/bin/env bash
# The README's first command: makes .venv, installs, and generates with the bundled demo checkpoint.
#
#     bash scripts/quickstart.sh
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
. scripts/environment.sh
make_environment .

for prompt in "The fox" "12+34="; do
    printf '\n%s' "$prompt"
    .venv/bin/python -m minimax_hybrid generate --prompt "$prompt" --max-new-tokens 200 --seed 1 --threads 1
done
echo
echo "This was .venv/bin/minimax-hybrid generate --prompt ...; see .venv/bin/minimax-hybrid --help" >&2
