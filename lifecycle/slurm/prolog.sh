#!/bin/bash
# Slurm's Prolog: runs as root on each node before the first step of a job there.
#
# A prolog that ends other than with 0 drains the node and requeues the job, so nothing that may pass makes it fail.
# It only says in the system's log what the job finds, for whoever asks afterwards why it was slow.

leftovers() {
  # Memory that earlier jobs left behind although they are gone.
  df --output=used -k /dev/shm 2>/dev/null | tail -n 1
}

logger -t slurm-prolog -- "job ${SLURM_JOB_ID:-?} of uid ${SLURM_JOB_UID:-?}: /dev/shm holds $(leftovers) KiB" 2>/dev/null
exit 0
