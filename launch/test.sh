#!/usr/bin/env bash
# All checks, in the order in which they fail fastest. Stops at the first failure.
set -euo pipefail

usage() {
    cat <<'TEXT'
usage: launch/test.sh [--quick]

Sets up the environment (launch/setup.sh -h), then: lint, types, layers; unit tests; tests on 1 to 4 ranks; tests on
2 ranks with the other MPI; whole jobs; jobs on a Slurm cluster of two nodes, both on this machine. As root on Debian
that installs slurm-wlm, munge and libpmix2. The exit code is 0 when all of it passed.

  --quick   only lint, types, layers, unit tests and 2 ranks
  MPI       openmpi (default) or mpich: the MPI that runs everything
  HPC_INFLIGHT_REQUIRE_SLURM   1: fail where no Slurm cluster can run; else its tests are skipped there with the reason
TEXT
}

quick=
case ${1:-} in
    '') ;;
    --quick) quick=1 ;;
    -h | --help)
        usage
        exit 0
        ;;
    *)
        echo "test.sh: there is no option '$1': launch/test.sh -h shows the usage." >&2
        exit 2
        ;;
esac

cd "$(dirname "${BASH_SOURCE[0]}")/.."
step_name="setup"
# The last line says how it went, whichever way the script ends.
finish() {
    local status=$?
    if ((status == 0)); then
        echo "test.sh: PASSED in $SECONDS s"
    else
        echo "test.sh: FAILED at '$step_name' with exit code $status, after $SECONDS s"
    fi
}
trap finish EXIT

# step NAME COMMAND...: run it under a heading; set -e ends the script if it fails.
step() {
    local start=$SECONDS
    step_name=$1
    printf '\n=== %s\n' "$step_name"
    shift
    "$@"
    printf -- '--- %s: %d s\n' "$step_name" $((SECONDS - start))
}

# within SIGNAL SECONDS COMMAND...: what hangs past its own deadlines ends with 124, far beyond what a slow machine
# needs. pytest gets INT, on which it ends the jobs that it started; --foreground, so that ^C goes through.
within() {
    timeout --foreground --verbose --kill-after=60 --signal="$1" "${@:2}"
}

# tests/mpi on N ranks. With plain python, a rank's failure would leave the others waiting for it: -m mpi4py ends them
# all. And -x, since a rank that went on after a failure would meet the others in another test's collective.
mpi_tests() {
    local color=no
    if [[ -t 1 ]]; then color=yes; fi # not pytest's guess: mpirun gives the ranks a terminal in any case
    # tr: Open MPI has NULs in its version and around its messages, and one of those makes a log "binary" for grep.
    within TERM 7200 launch/run.sh -n "$1" python -m mpi4py -m pytest -x --with-mpi "--color=$color" -m "$2" tests/mpi 2>&1 | tr -d '\000'
}

# The same environment with another MPI library: mpi4py takes what MPI4PY_LIBMPI names, and run.sh its launcher.
other_mpi_tests() {
    local prefix=$VIRTUAL_ENV/$1
    if [[ ! -e $prefix/lib/$2 ]]; then
        setup_pip python install \
            --no-deps --ignore-installed --prefix "$prefix" "$1"
    fi
    MPI4PY_LIBMPI=$prefix/lib/$2 mpi_tests 2 "not slow and not once"
}

slurm_tests() {
    if ((EUID == 0)); then
        within TERM 1800 python tests/slurm/cluster.py --install true || [[ -z ${HPC_INFLIGHT_REQUIRE_SLURM:-} ]]
    fi
    within INT 7200 python -m pytest tests/slurm
}

# shellcheck source=launch/setup.sh
source launch/setup.sh examples,test,dev,bench

step "ruff check" within TERM 1800 ruff check .
step "ruff format" within TERM 1800 ruff format --check .
step "mypy" within TERM 1800 mypy
step "import-linter" within TERM 1800 lint-imports --no-logo
step "shellcheck" within TERM 1800 shellcheck --external-sources launch/*.sh slurm/*.sbatch .ci/run
step "unit tests" within INT 3600 python -m pytest tests/unit
if [[ -n $quick ]]; then
    step "tests/mpi, ranks: 2" mpi_tests 2 "not slow"
    exit 0
fi
for n in 1 2 3 4; do
    # the slow ones (2^31 elements, 5,000 groups) once, at the size that has the memory for them
    which="not slow and not once"
    if ((n == 2)); then which="slow or not slow"; fi
    step "tests/mpi, ranks: $n" mpi_tests "$n" "$which"
done
case ${MPI:-openmpi} in
    openmpi) step "tests/mpi, ranks: 2, MPICH" other_mpi_tests mpich libmpi.so.12 ;;
    mpich) step "tests/mpi, ranks: 2, Open MPI" other_mpi_tests openmpi libmpi.so.40 ;;
esac
step "whole jobs" within INT 10800 python -m pytest tests/subprocess
step "Slurm" slurm_tests
