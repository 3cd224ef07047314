# ignore_term.sh PIDFILE: ignore SIGTERM, write the pid, and sleep. `sleep` inherits the ignored signal, so SIGTERM does not
# end it.
trap '' TERM
echo $$ >"$1"
exec sleep 600
