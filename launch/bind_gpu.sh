#!/usr/bin/env bash
# Give a rank its GPU and the cores beside it, and become the command: for launchers that do neither.
set -euo pipefail

usage() {
    cat <<'TEXT'
usage: LAUNCHER [OPTIONS] launch/bind_gpu.sh [--gpus G] [--no-cores] [--dry-run] [--] COMMAND...

Sets CUDA_VISIBLE_DEVICES to the G GPUs (default: 1) of this rank, by the rank's place on its node, and binds the rank
to the cores of that GPU's NUMA node, shared out among the ranks there. GPUs are taken from CUDA_VISIBLE_DEVICES where
it is set, else from nvidia-smi, MIG instances included. For example
    mpirun -n 4 launch/bind_gpu.sh python train.py

  --gpus G     GPUs for each rank
  --no-cores   leave the cores as they are
  --dry-run    print what would be set, and run nothing

2 says that the command was not started.
TEXT
}

fail() {
    echo "bind_gpu.sh: $1" >&2
    exit 2
}

# 0-3,8 -> one number a line
expand() {
    local part low
    for part in ${1//,/ }; do
        low=${part%-*}
        seq "$low" "${part#*-}"
    done
}

gpus=1 cores=1 dry_run=''
while (($# > 0)); do
    case $1 in
        -h | --help)
            usage
            exit 0
            ;;
        --gpus)
            [[ ${2:-} =~ ^[1-9][0-9]{0,2}$ ]] || fail "--gpus wants a number from 1 on, and got '${2:-}'."
            gpus=$2
            shift
            ;;
        --no-cores) cores='' ;;
        --dry-run) dry_run=1 ;;
        --)
            shift
            break
            ;;
        -*) fail "there is no option $1: launch/bind_gpu.sh -h shows the usage." ;;
        *) break ;;
    esac
    shift
done
(($# > 0)) || fail "say what to run: launch/bind_gpu.sh COMMAND..."
command -v -- "$1" >/dev/null || fail "there is no command '$1' on PATH."

# The innermost launcher's word: within mpirun in a Slurm job, SLURM_LOCALID is that of mpirun's helper.
if [[ -n ${OMPI_COMM_WORLD_LOCAL_RANK:-} ]]; then
    rank=$OMPI_COMM_WORLD_LOCAL_RANK size=${OMPI_COMM_WORLD_LOCAL_SIZE:-1}
elif [[ -n ${MPI_LOCALRANKID:-} ]]; then
    rank=$MPI_LOCALRANKID size=${MPI_LOCALNRANKS:-1}
elif [[ -n ${SLURM_STEP_ID:-} ]]; then
    rank=${SLURM_LOCALID:-0} size=1
    # 2(x3),1: the ranks on each node, in the order of the nodes
    node=${SLURM_NODEID:-0}
    for part in ${SLURM_STEP_TASKS_PER_NODE:-1}; do
        for run in ${part//,/ }; do
            [[ $run =~ ^([0-9]+)(\(x([0-9]+)\))?$ ]] || fail "SLURM_STEP_TASKS_PER_NODE is '$part'; expected 2(x3),1."
            times=${BASH_REMATCH[3]:-1} size=${BASH_REMATCH[1]}
            ((node < times)) && break 2
            node=$((node - times))
        done
    done
else
    rank=0 size=1 # no launcher
fi

if [[ -n ${CUDA_VISIBLE_DEVICES+set} ]]; then
    IFS=', ' read -r -a all <<<"$CUDA_VISIBLE_DEVICES"
else
    listed=$(nvidia-smi -L 2>/dev/null) || fail "nvidia-smi finds no GPU on $(hostname)."
    # CUDA uses a GPU in MIG mode through its instances alone, which follow it in the list.
    mapfile -t all < <(awk '
        match($0, /MIG-[0-9a-f\/-]+/) { print substr($0, RSTART, RLENGTH); parent = ""; next }
        { if (parent) print parent; parent = "" }
        match($0, /GPU-[0-9a-f-]+/) { parent = substr($0, RSTART, RLENGTH) }
        END { if (parent) print parent }' <<<"$listed")
fi
# One list for all: a launcher that showed this rank its own GPUs has chosen already.
if ((${#all[@]} == gpus)); then
    mine=("${all[@]}")
elif ((${#all[@]} >= (rank + 1) * gpus)); then
    mine=("${all[@]:rank * gpus:gpus}")
else
    fail "local rank $rank on $(hostname) wants GPU $((rank * gpus + 1)) of ${#all[@]}: start fewer ranks per node."
fi

# The cores of the NUMA node of a GPU, as a list for taskset; empty where the machine does not say.
node_cpus() {
    local bus node sys=${BIND_GPU_SYS:-/sys}
    bus=$(nvidia-smi --query-gpu=pci.bus_id --format=csv,noheader -i "$1" 2>/dev/null) || return 0
    bus=${bus,,}
    bus=${bus#????} # 00000000:3b:00.0 -> 0000:3b:00.0
    node=$(cat "$sys/bus/pci/devices/$bus/numa_node" 2>/dev/null) || return 0
    ((node >= 0)) || return 0 # -1: there is one
    cat "$sys/devices/system/node/node$node/cpulist" 2>/dev/null || true
}

bind=()
if [[ -n $cores ]]; then
    beside=$(node_cpus "${mine[0]}")
    allowed=$(taskset -cp $$ | sed 's/.*: //')
    usable=$(comm -12 <(expand "${beside:-$allowed}" | sort) <(expand "$allowed" | sort) | sort -n)
    mapfile -t usable <<<"$usable"
    # Which ranks share these cores is known only where every rank sees all GPUs.
    sharing=0 place=0
    for ((other = 0; other < size; other++)); do
        gpu=${all[other * gpus]:-}
        if ((${#all[@]} == gpus)) || [[ -n $gpu && $(node_cpus "$gpu") == "$beside" ]]; then
            ((other < rank)) && place=$((place + 1))
            sharing=$((sharing + 1))
        fi
    done
    share=$((${#usable[@]} / (sharing > 0 ? sharing : 1)))
    if [[ -n ${usable[0]} ]] && ((share > 0)); then
        list=$(IFS=,; echo "${usable[*]:place * share:share}")
        bind=(taskset -c "$list")
    fi
fi

visible=$(IFS=,; echo "${mine[*]}")
if [[ -n $dry_run ]]; then
    printf 'CUDA_VISIBLE_DEVICES=%s' "$visible"
    printf ' %q' "${bind[@]}" "$@"
    printf '\n'
    exit 0
fi
export CUDA_VISIBLE_DEVICES=$visible
exec "${bind[@]}" "$@"
