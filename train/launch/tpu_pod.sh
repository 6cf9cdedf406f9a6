#!/usr/bin/env bash
# A training run on a Cloud TPU slice of one or many hosts: a process for each host. From a machine
# with gcloud:
#
#   export TPU=my-slice ZONE=us-central2-b   # PROJECT too, unless it is gcloud's default
#   train/launch/tpu_pod.sh --config=configs/small.py --workdir=/shared/runs/small
#
# The arguments are handed to `python -m train` on every host, and JAX finds the other hosts by
# itself. The workdir must be one folder that all hosts have mounted (Filestore, or a bucket by
# gcsfuse). The same command resumes a run that has stopped.
#
# Before the first run every host needs the repository, with its .venv, in $FOLDER (Python >= 3.11):
#
#   gcloud compute tpus tpu-vm ssh "$TPU" --zone="$ZONE" --worker=all --command="
#     git clone REPOSITORY tessera && cd tessera &&
#     python3 -m venv .venv && .venv/bin/pip install -c constraints.txt -e '.[tpu]'"
set -euo pipefail
: "${TPU:?set TPU to the name of the TPU, for example TPU=my-slice}"
: "${ZONE:?set ZONE to the zone of the TPU, for example ZONE=us-central2-b}"
FOLDER=${FOLDER:-tessera}  # the repository on the hosts, from the home folder
exec gcloud compute tpus tpu-vm ssh "$TPU" --zone="$ZONE" ${PROJECT:+--project="$PROJECT"} \
  --worker=all --command="cd $(printf %q "$FOLDER") && .venv/bin/python -u -m train$(printf ' %q' "$@")"
