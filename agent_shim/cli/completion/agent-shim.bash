# Completion of agent-shim for bash. Made by `python -m tests.support.drawn`.
_agent_shim_members() {
    local place=() number
    for ((number = 2; number < ${#COMP_WORDS[@]} - 1; number++)); do
        [ "${COMP_WORDS[number]}" = -b ] && place=(-b "${COMP_WORDS[number + 1]}")
    done
    "${COMP_WORDS[0]}" status --json "${place[@]}" 2>/dev/null |
        sed -n '/^  "processes": /,/^  ]/s/^      "'"$1"'": "\(.*\)",\{0,1\}$/\1/p'
}

_agent_shim() {
    local word=${COMP_WORDS[COMP_CWORD]} before=${COMP_WORDS[COMP_CWORD - 1]} words="" kind=""
    if [ "$COMP_CWORD" = 1 ]; then
        words="run status logs doctor drain start stop restart monitor unmonitor call check render probe handback demo completion help version --help --version"
    else
        case "${COMP_WORDS[1]} $before" in
            "run -C") kind=f ;;
            "run -b") kind=d ;;
            "run -P") : ;;
            "run -M") : ;;
            "run --http") : ;;
            "run --log-format") words="json text" ;;
            "run --log-level") words="debug info warning error" ;;
            "status --every") : ;;
            "status -b") kind=d ;;
            "logs -n" | "logs --lines") : ;;
            "logs --since") : ;;
            "logs -b") kind=d ;;
            "doctor -C") kind=f ;;
            "doctor -b") kind=d ;;
            "drain --timeout") : ;;
            "drain -b") kind=d ;;
            "start -b") kind=d ;;
            "stop -b") kind=d ;;
            "restart -b") kind=d ;;
            "monitor -b") kind=d ;;
            "unmonitor -b") kind=d ;;
            "call -b") kind=d ;;
            "check --as") words="monit bpm agent settings" ;;
            "render --group") : ;;
            "render --only") : ;;
            "render --out") kind=d ;;
            "probe -b") kind=d ;;
            "handback -b") kind=d ;;
            *)
                case "${COMP_WORDS[1]}" in
                    run) words="--help -C -b -P -M --http --log-format --log-level --job-logs" ;;
                    status) words="--help --json --watch --every -b" kind=name ;;
                    logs) words="--help -f --follow -n --lines --since --agent -b" kind=job ;;
                    doctor) words="--help --json -C -b" ;;
                    drain) words="--help --timeout -b" ;;
                    start) words="--help --wait -b all" kind=name ;;
                    stop) words="--help --wait -b all" kind=name ;;
                    restart) words="--help --wait -b all" kind=name ;;
                    monitor) words="--help --wait -b all" kind=name ;;
                    unmonitor) words="--help --wait -b all" kind=name ;;
                    call) words="--help -b" ;;
                    check) words="--help --as --json --strict" kind=f ;;
                    render) words="--help --group --only --out" kind=f ;;
                    probe) words="--help live ready -b" ;;
                    handback) words="--help -b" ;;
                    demo) words="--help --keep" ;;
                    completion) words="--help bash zsh fish" ;;
                    help) words="--help" ;;
                    version) words="--help" ;;
                esac
                ;;
        esac
    fi
    case $kind in
        name | job) words+=" $(_agent_shim_members "$kind")" ;;
        ?) [[ $word = -* ]] || compopt -o filenames ;;
    esac
    mapfile -t COMPREPLY < <(
        compgen -W "$words" -- "$word"
        case $kind in ?) compgen "-$kind" -- "$word" ;; esac
    )
}

complete -F _agent_shim agent-shim
