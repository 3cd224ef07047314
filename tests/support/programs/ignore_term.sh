# ignore_term.sh PIDFILE: ignore SIGTERM, write the pid, and sleep. The setting is inherited by the program that sleeps.
trap '' TERM
echo $$ >"$1"
exec sleep 600
