# say_signals.sh LOG PIDFILE: write the name of each signal that arrives to LOG, and exit on SIGTERM.
trap 'echo HUP >>"$1"' HUP
trap 'echo TERM >>"$1"; exit 0' TERM
echo $$ >"$2"
while :; do sleep 600 & wait $!; done
