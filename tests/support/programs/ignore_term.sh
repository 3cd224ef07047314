# ignore_term.sh PIDFILE: take no notice of TERM, nor let the child do so.
trap '' TERM
echo $$ >"$1"
exec sleep 600
