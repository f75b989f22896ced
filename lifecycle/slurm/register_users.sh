#!/bin/bash
# Register users in Slurm's accounting, so that they may submit jobs where it is enforced: register_users.sh USER ...
#
# In the account `root`, which every cluster has and in which AWS's add-users registers users too. Users who are in any
# account already are left as they are. Exit status 1 while Slurm does not answer, or answers before HyperPod has
# configured its accounting.
set -euo pipefail
export PATH=/opt/slurm/bin:$PATH

config=$(timeout 30 scontrol show config)
setting() {
  sed -n "s/^$1 *= *//p" <<<"$config"
}
if [[ $(setting AccountingStorageType) != accounting_storage/slurmdbd ]]; then
  echo "Slurm has no accounting yet: AccountingStorageType is $(setting AccountingStorageType)"
  exit 1
fi
cluster=$(setting ClusterName)
cluster=${cluster,,} # as the database has it
known=$(timeout 30 sacctmgr --noheader --parsable2 show association "cluster=$cluster" format=user)
for user in "$@"; do
  if ! grep --quiet --line-regexp --fixed-strings -- "$user" <<<"$known"; then
    timeout 30 sacctmgr --immediate add user "name=$user" account=root "cluster=$cluster"
  fi
done
