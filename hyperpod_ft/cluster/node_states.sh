# Print Slurm's state of every node. Runs on the controller: sh -s
# Prints one line: "hyperpod-ft-nodes: ", then NODE=STATE for each, or the error.
# shellcheck shell=sh
PATH=$PATH:/opt/slurm/bin
if said=$(timeout 30 sinfo --noheader --Node --format=%N=%T 2>&1); then
    echo "hyperpod-ft-nodes: $(echo "$said" | sort -u | tr "\n" " ")"
else
    echo "hyperpod-ft-nodes: failed: $(echo "$said" | tr "\n" " ")"
fi
