#!/bin/bash
# Slurm's Prolog: runs as root on each node before the first step of a job there.
#
# A prolog that fails drains the node and requeues the job, so this one never fails. It only records in the system log
# what earlier jobs left in memory, which may explain a slow job.

leftovers() {
  # Memory that ended jobs left allocated.
  df --output=used -k /dev/shm 2>/dev/null | tail -n 1
}

logger -t slurm-prolog -- "job ${SLURM_JOB_ID:-?} of uid ${SLURM_JOB_UID:-?}: /dev/shm holds $(leftovers) KiB" 2>/dev/null
exit 0
