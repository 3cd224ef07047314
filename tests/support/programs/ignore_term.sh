# ignore_term.sh PIDFILE: ignore SIGTERM, write the pid, and sleep. The program that sleeps inherits the ignored signal.
trap '' TERM
echo $$ >"$1"
exec sleep 600
