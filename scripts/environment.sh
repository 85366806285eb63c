# Sourced by quickstart.sh and test.sh from the repository's root: the environment in .venv, and words for
# whatever keeps it from being made.

TORCH=torch==2.13.0

fail() {
    printf '%s: %s\n' "$(basename "$0")" "$*" >&2
    exit 1
}

# attempt WHAT COMMAND...: run it with its output on standard error; where it fails, say why.
attempt() {
    local what=$1 line log="" status=1
    shift
    while IFS= read -r line; do
        case $line in
        "status of the command: "*) status=${line##* } ;;
        "") ;;
        *) printf '%s\n' "$line" >&2 && log+=$line$'\n' ;;
        esac
    done < <("$@" 2>&1 && printf '\nstatus of the command: 0\n' || printf '\nstatus of the command: %s\n' $?)
    [ "$status" = 0 ] || fail "$what failed: $(reason "$log")"
}

reason() {
    case $1 in
    *"No space left on device"* | *"Disk quota exceeded"*)
        echo "the disk is full ($(df -Pk . | awk 'NR == 2 {printf "%.1f", $4 / 1e6}') GB are free here; a CPU" \
            "build of torch and the rest take about 2 GB, one with CUDA about 8 GB)" ;;
    *"ensurepip is not available"* | *"No module named ensurepip"* | *"No module named venv"*)
        echo "this Python cannot make environments; install its venv and pip" \
            "(Debian and Ubuntu: apt install python3-venv), or set PYTHON to another one" ;;
    *"No module named pip"*)
        echo "the environment has no pip; remove it (rm -r $PWD/.venv) and run this again" ;;
    *"name resolution"* | *"Name or service not known"* | *"nodename nor servname"* | *"Network is unreachable"* | \
        *"NewConnectionError"* | *"ProxyError"* | *"SSLError"* | *"timed out"* | *"Connection refused"*)
        echo "pip cannot reach its package index; check the network, the proxy and 'pip config list'" ;;
    *"from versions: none"*)
        echo "pip's package index cannot be reached or offers no such package for Python" \
            "$(version_of .venv/bin/python); check the network and 'pip config list', or set PYTHON" \
            "to another Python" ;;
    *"Permission denied"* | *"Read-only file system"*)
        echo "this user may not write to $PWD" ;;
    *"No matching distribution found for"*)
        echo "pip's package index has no fitting release for Python $(version_of .venv/bin/python)" \
            "(see the lines above); another Python can be chosen with PYTHON=python3.x" ;;
    *) echo "see the lines above" ;;
    esac
}

version_of() {
    "$1" -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null
}

is_new_enough() {
    "$1" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null
}

# A Python of at least 3.11: $PYTHON if it is set, else the first one found.
find_python() {
    local candidate
    if [ -n "${PYTHON:-}" ]; then
        command -v "$PYTHON" >/dev/null || fail "PYTHON is $PYTHON, and there is no such program"
        is_new_enough "$PYTHON" ||
            fail "PYTHON is $PYTHON, version $(version_of "$PYTHON" || echo unknown); Python 3.11 or newer is needed"
        echo "$PYTHON"
        return
    fi
    for candidate in python3 python3.13 python3.12 python3.11 python3.14 python; do
        if command -v "$candidate" >/dev/null && is_new_enough "$candidate"; then
            echo "$candidate"
            return
        fi
    done
    fail "no Python of version 3.11 or newer was found; install one, or set PYTHON to its path"
}

# make_environment REQUIREMENT: .venv with torch and this repository; nothing to do if that is there already.
make_environment() {
    local requirement=$1 python stamp found
    if [ -e .venv ] || [ -L .venv ]; then
        is_new_enough .venv/bin/python && .venv/bin/python -m pip --version >/dev/null 2>&1 ||
            fail "$PWD/.venv is broken: its Python (3.11 or newer) or pip does not start; remove it" \
                "(rm -r $PWD/.venv) and run this again"
    else
        python=$(find_python) || exit 1
        echo "making .venv with $("$python" --version)" >&2
        (attempt "making $PWD/.venv" "$python" -m venv .venv) || {
            rm -rf .venv
            exit 1
        }
    fi
    stamp=".venv/installed$(printf '%s' "$requirement" | tr -dc '[a-z]')"
    found=$(printf '%s ' "$PWD" && cksum <pyproject.toml)
    if [ ! -f "$stamp" ] || [ "$(cat "$stamp")" != "$found" ]; then
        if ! .venv/bin/python -c 'import importlib.util as u, sys; sys.exit(u.find_spec("torch") is None)'; then
            echo "installing $TORCH from pip's index; README.md says how to choose a build for the CPU" >&2
            attempt "installing torch" .venv/bin/python -m pip --disable-pip-version-check install "$TORCH"
        fi
        attempt "installing this repository" .venv/bin/python -m pip --disable-pip-version-check install -e "$requirement"
        .venv/bin/python -c 'import torch' ||
            fail "torch is installed in .venv and cannot be imported (see above); remove it (rm -r $PWD/.venv)" \
                "and run this again"
        printf '%s\n' "$found" >"$stamp"
    fi
}
