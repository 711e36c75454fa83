#!/usr/bin/env bash
# All checks, in the order in which they fail fastest. Stops at the first failure.
set -euo pipefail

usage() {
    cat <<'TEXT'
usage: launch/test.sh [--quick]

Sets up the environment (launch/setup.sh -h), then: lint, types, layers; unit tests; tests on 1 to 4 ranks, those of 4 on a
Slurm cluster of two nodes where one can run on this machine; tests on 2 ranks with the other MPI; whole jobs; jobs on
that cluster. As root on Debian it installs slurm-wlm, munge and libpmix2. The exit code is 0 when all of it passed.

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
# Where it is set, each of the hundreds of processes would compile every module anew.
unset PYTHONDONTWRITEBYTECODE
step_name="setup"
beside_pid='' beside_name='' beside_log=''
# The last line says how it went, whichever way the script ends.
finish() {
    local status=$?
    if [[ -n $beside_pid ]]; then
        # INT: pytest ends the jobs that it started, the Slurm cluster among them
        kill -INT -- "-$beside_pid" 2>/dev/null || true
        wait "$beside_pid" || true
        rm -f "$beside_log"
        echo "test.sh: stopped '$beside_name', which ran beside it"
    fi
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

# beside NAME COMMAND...: run it while the steps up to `join` run. Its output is kept, so that no lines mix.
beside() {
    beside_name=$1 beside_log=$(mktemp)
    shift
    # Job control makes it a process group of its own, which can be ended as one, and leaves INT to it.
    set -m
    (
        set +m
        start=$SECONDS
        "$@"
        printf -- '--- %s: %d s, beside the steps above\n' "$beside_name" $((SECONDS - start))
    ) </dev/null >"$beside_log" 2>&1 &
    beside_pid=$!
    set +m
}

# Wait for what runs beside, print what it printed, and judge it.
join() {
    local status=0
    step_name=$beside_name
    wait "$beside_pid" || status=$?
    beside_pid=''
    printf '\n=== %s\n' "$step_name"
    cat "$beside_log"
    rm -f "$beside_log"
    return "$status"
}

# within SIGNAL SECONDS COMMAND...: what hangs past its own deadlines ends with 124, far beyond what a slow machine
# needs. pytest gets INT, on which it ends the jobs that it started; --foreground, so that ^C goes through.
within() {
    timeout --foreground --verbose --kill-after=60 --signal="$1" "${@:2}"
}

# mpi_tests N MARKERS [FILES]: tests/mpi on N ranks. With plain python, a rank's failure would leave the others waiting
# for it: -m mpi4py ends them all. And -x, since a rank that went on after a failure would meet the others in another
# test's collective.
mpi_tests() {
    local color=no
    if (($# == 2)); then set -- "$@" tests/mpi; fi
    if [[ -t 1 ]]; then color=yes; fi # not pytest's guess: mpirun gives the ranks a terminal in any case
    # tr: Open MPI has NULs in its version and around its messages, and one of those makes a log "binary" for grep.
    within TERM 7200 launch/run.sh -n "$1" python -m mpi4py -m pytest -x --with-mpi "--color=$color" -m "$2" "${@:3}" 2>&1 | tr -d '\000'
}

# The same environment with another MPI library: mpi4py takes what MPI4PY_LIBMPI names, and run.sh its launcher.
other_mpi_tests() {
    local prefix=$VIRTUAL_ENV/$1
    if [[ ! -e $prefix/lib/$2 ]]; then
        setup_pip python install \
            --no-deps --ignore-installed --prefix "$prefix" "$1"
    fi
    # not again what compiles, or stands in for NCCL: to both, the MPI library is one and the same
    MPI4PY_LIBMPI=$prefix/lib/$2 mpi_tests 2 "not slow and not once" \
        tests/mpi --ignore=tests/mpi/test_{autograd_collectives,matrix_nccl,pooled_embeddings}.py
}

find_slurm() {
    if ((EUID == 0)) && within TERM 1800 python tests/slurm/cluster.py --install true; then
        slurm=1
    else
        echo "no Slurm cluster runs here, so one node has all ranks"
    fi
}

whole_jobs=tests/subprocess
waiting=("$whole_jobs"/test_{c10d_suite,drills,watchdog_jobs}.py)

# What waits most of its time, for the scheduler and for deadlines.
waiting_tests() {
    within INT 7200 python -m pytest tests/slurm --ignore=tests/slurm/test_suite.py
    within INT 3600 python -m pytest "${waiting[@]}"
}

# shellcheck source=launch/setup.sh
source launch/setup.sh examples,test,dev,bench

# These use one core at a time; so does what has one rank.
if [[ -z $quick ]]; then beside "tests/mpi, ranks: 1" mpi_tests 1 "not slow and not once"; fi
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
join
# the slow ones (2^31 elements, 5,000 groups) once, at the size that has the memory for them
step "tests/mpi, ranks: 2" mpi_tests 2 "slow or not slow"
# What an odd number of ranks decides: parts that do not divide, roots, rings, a rank without a table. 2 and 4 ranks show
# the rest.
step "tests/mpi, ranks: 3" mpi_tests 3 "not slow and not once" \
    tests/mpi/test_{collectives,groups,matrix,matrix_nccl,p2p,pooled_embeddings}.py
case ${MPI:-openmpi} in
    openmpi) step "tests/mpi, ranks: 2, MPICH" other_mpi_tests mpich libmpi.so.12 ;;
    mpich) step "tests/mpi, ranks: 2, Open MPI" other_mpi_tests openmpi libmpi.so.40 ;;
esac
slurm=''
step "a Slurm cluster of two nodes" find_slurm
if [[ -n $slurm ]]; then
    step "tests/mpi, ranks: 2 on each node" within INT 7200 python -m pytest tests/slurm/test_suite.py
else
    step "tests/mpi, ranks: 4" mpi_tests 4 "not slow and not once"
fi
beside "Slurm, PyTorch's own suite, drills" waiting_tests
step "whole jobs" within INT 10800 python -m pytest --durations=8 "$whole_jobs" "${waiting[@]/#/--ignore=}"
join
