# leave_child.sh PIDFILE: leave a child in the own group behind, and end at TERM without it.
trap 'exit 0' TERM
sh "$(dirname "$0")/ignore_term.sh" "$1" &
wait
