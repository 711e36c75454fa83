#!/usr/bin/env bash
# From a bare clone to a trained model on two ranks, with a verdict.
set -euo pipefail

usage() {
    cat <<'TEXT'
usage: launch/quickstart.sh [ARGUMENTS...]

Sets up the environment (launch/setup.sh -h), runs the flights example on N ranks and checks its result: better than
logistic regression, and no collective that nobody waited for. ARGUMENTS go to the example.

  N     number of ranks (default: 2)
  MPI   openmpi (default) or mpich
TEXT
}

case ${1:-} in
    -h | --help)
        usage
        exit 0
        ;;
esac

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
# shellcheck source=launch/setup.sh
source "$here/setup.sh" examples,test

report=$(mktemp)
trap 'rm -f "$report"' EXIT
"$here/run.sh" -n "${N:-2}" python -m hpc_inflight.examples.flights --report-json "$report" "$@" || {
    status=$?
    echo "quickstart.sh: FAILED, the example ended with exit code $status (its message is above)." >&2
    exit "$status"
}

python - "$report" <<'PYTHON'
import json
import sys

with open(sys.argv[1]) as file:
    text = file.read()
try:
    report = json.loads(text)
    auc, logistic = report["quality"]["auc"], report["quality"]["logistic_auc"]
    unwaited = report["works_unwaited"]
except (ValueError, KeyError, TypeError) as error:
    sys.exit(f"quickstart.sh: FAILED, the example wrote no usable report ({error!r}): {text[:200]!r}")
found = f"AUC {auc:.4f} (logistic regression: {logistic:.4f}), works never waited for: {unwaited}"
if not (auc > logistic and unwaited == 0):
    sys.exit(f"quickstart.sh: FAILED, {found}")
print(f"quickstart.sh: OK, {found}")
PYTHON
