#!/usr/bin/env bash
# The README's second command: makes .venv, installs what the tests need, and runs them.
#
#     bash scripts/test.sh                       all tests
#     bash scripts/test.sh -m "not slow"         the fast lane: about two minutes on two cores
#     bash scripts/test.sh tests/model -k cache  whatever pytest takes, with paths from the repository's root
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
. scripts/environment.sh
make_environment ".[dev]"
exec .venv/bin/python -m pytest -n 2 "$@"
