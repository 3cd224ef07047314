#!/bin/sh
# go_agent.sh BINARY MONIT CONFIG BASE: run the Go agent with its base directory BASE, and a monit as on a stemcell.
#
# tools/bench/go_agent.py runs this in new namespaces, because monit's port is always the same. With the "dummy"
# platform, the Go agent does not change the machine, but neither does it restart monit through a service manager.
# Therefore, this script restarts monit when the agent's log says that the agent is waiting for a restart. monit has its
# usual cycle of ten seconds. MONIT_PORT is for testing this script without the agent. The agent itself supports only
# the usual port.
set -eu
port=${MONIT_PORT:-2822}
binary=$1 monit=$2 config=$3 base=$4
beside=${base%/*}/beside log=${base%/*}/agent.log rc=$base/bosh/etc/monitrc

keep_monit() {
    trap '' HUP
    tail -n 0 -F "$log" 2>/dev/null | grep --line-buffered -F 'Waiting for monit to reload' | while read -r _; do
        kill -9 "$(cat "$beside/monit.pid")"
    done &
    while [ -e "$rc" ]; do # exit code 137 means that monit was killed
        "$monit" -I -c "$rc" || [ $? = 137 ] || sleep 1
    done
}

first_start() {
    mkdir -p "$beside" "$base/bosh/bin" "$base/bosh/etc" "$base/monit/job" "$base/data/sys/run"
    ln -sfn "$base/data/sys" "$base/sys"
    : >"$base/monit/empty.monitrc"
    (
        umask 077
        cat >"$rc" <<END
set daemon 10
set logfile $base/monit/monit.log
set pidfile $beside/monit.pid
set idfile $base/monit/monit.id
set statefile $base/monit/monit.state
set httpd port $port and use address 127.0.0.1
    allow 127.0.0.1
include $base/monit/*.monitrc
include $base/monit/job/*.monitrc
END
    )
    printf '#!/bin/sh\nexec %s -c %s "$@"\n' "$monit" "$rc" >"$base/bosh/bin/monit"
    chmod 755 "$base/bosh/bin/monit"
    setsid "$0" "$@" keeper >>"$base/monit/out" 2>&1 &
    echo $! >"$beside/group"
    until [ -s "$beside/monit.pid" ]; do sleep 0.02; done
}

if [ "${5:-}" = keeper ]; then
    keep_monit
elif ! [ -e "$beside/group" ]; then
    if grep -q "$(printf ' 0100007F:%04X 00000000:0000 0A ' "$port")" /proc/net/tcp; then # a process is listening on the port
        echo "cannot start monit: another one listens on port $port, which is the same for every Go agent" >&2
        exit 1
    fi
    first_start "$@"
fi
export PATH="$base/bosh/bin:/usr/sbin:/usr/bin:/sbin:/bin"
exec "$binary" -P dummy -M monit -C "$config" -b "$base"
