# Copy what a new image wipes on Slurm's controller to the shared volume. Runs there: sh -s -- MOUNT-PATH
# Prints one line: "hyperpod-ft-backup: ", then what was copied and where, or "failed: " and the error.
# shellcheck shell=sh
say() { echo "hyperpod-ft-backup: $(echo "$*" | tr "\n" " ")"; }
if [ "$(id -u)" = 0 ]; then become() { "$@"; }
else become() { sudo -n "$@"; }
fi
copy=$(cat <<"END"
set -eu
umask 077
PATH=$PATH:/opt/slurm/bin:/usr/sbin:/sbin
config=$(timeout 20 scontrol show config)
value() { echo "$config" | sed -n "s/^$1 *= *//p" | head -n 1; }
state=$(value StateSaveLocation)
etc=$(dirname "$(value SLURM_CONF)")
backup=$1/.provision/backups/$(date -u +%Y%m%dT%H%M%SZ)
mkdir -p "$backup"
sleep 6 # slurmctld writes a change within five seconds (SAVE_MAX_WAIT in its state_save.c)
# 1: a file changed while it was read, which slurmctld may do; it keeps a previous version of each
tar -C / -czf "$backup/slurm.tar.gz" "${state#/}" "${etc#/}" 2>"$backup/tar.log" || [ $? = 1 ] || {
    tail -n 1 "$backup/tar.log"
    exit 1
}
copied="queue and configuration"
if [ "$(value AccountingStorageType)" = accounting_storage/slurmdbd ] && [ -f "$etc/slurmdbd.conf" ]; then
    setting() { sed -n "s/^ *$1 *= *//Ip" "$etc/slurmdbd.conf" | head -n 1; }
    host=$(setting StorageHost) database=$(setting StorageLoc)
    case ${host:-localhost} in
    localhost | 127.0.0.1 | "$(hostname)" | "$(hostname -s)")
        mysqldump --single-transaction --databases "${database:-slurm_acct_db}" >"$backup/accounting.sql"
        gzip "$backup/accounting.sql"
        copied="queue, configuration and accounting" ;;
    *) copied="$copied (the accounting database is on $host)" ;;
    esac
fi
rm "$backup/tar.log"
echo "$copied in $backup"
END
)
if said=$(become sh -c "$copy" sh "$1" 2>&1 </dev/null); then say "$said"; else say "failed: $said"; fi
