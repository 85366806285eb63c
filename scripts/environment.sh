# Sourced by the other scripts from the repository's root: makes .venv and installs into it, once.

TORCH=torch==2.13.0

fail() {
    printf '%s: %s\n' "$(basename "$0")" "$*" >&2
    exit 1
}

is_new_enough() {
    "$1" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null
}

# $PYTHON if it is set, else the first one of at least 3.11.
find_python() {
    local candidate
    for candidate in ${PYTHON:-python3 python3.13 python3.12 python3.11 python3.14 python}; do
        is_new_enough "$candidate" && echo "$candidate" && return
    done
    fail "no Python 3.11 or newer: ${PYTHON:-python3} is absent or older; install one, or set PYTHON to its path"
}

# install REQUIREMENT...: pip's own output, and a hint where it fails.
install() {
    .venv/bin/python -m pip --disable-pip-version-check install "$@" >&2 ||
        fail "pip could not install $* (its message is above). Unreachable index: check the network, the proxy" \
            "and 'pip config list'. Disk full: torch for a CPU and the rest take 2 GB, with CUDA 8 GB;" \
            "$(df -Ph . | awk 'NR == 2 {print $4}') are free. No such version: set PYTHON to another Python" \
            "and remove .venv"
}

# make_environment REQUIREMENT: nothing to do if .venv has it already, for this folder and this pyproject.toml.
make_environment() {
    local python stamp found
    if [ ! -e .venv ] && [ ! -L .venv ]; then
        python=$(find_python) || exit 1
        "$python" -m venv .venv >&2 || {
            rm -rf .venv
            fail "$python could not make .venv (its message is above);" \
                "Debian and Ubuntu need 'apt install python3-venv'"
        }
    fi
    is_new_enough .venv/bin/python || fail "$PWD/.venv has no working Python 3.11; remove it and run this again"
    stamp=".venv/installed$(printf '%s' "$1" | tr -dc '[a-z]')"
    found=$(printf '%s ' "$PWD" && cksum <pyproject.toml)
    [ "$(cat "$stamp" 2>/dev/null)" != "$found" ] || return 0
    .venv/bin/python -c 'import importlib.util as u, sys; sys.exit(u.find_spec("torch") is None)' || install "$TORCH"
    install -e "$1"
    printf '%s\n' "$found" >"$stamp"
}
