# Read by login shells, and by interactive shells at the end of .bashrc, which has already set the distribution's
# prompt.
case ":$PATH:" in
    *:/var/vcap/bosh/bin:*) ;;
    *) export PATH="$PATH:/var/vcap/bosh/bin" ;;
esac
if [ -n "${BASH-}" ] && [ -n "${PS1-}" ] && [ -s /var/vcap/instance/name ] && [ -s /var/vcap/instance/id ]; then
    PS1="$(cat /var/vcap/instance/name)/$(cat /var/vcap/instance/id):\\w\\\$ "
fi
# The image does not contain the bash-completion package, which would load this file automatically.
if [ -n "${BASH-}" ] && [ -n "${PS1-}" ] && [ -r /usr/local/share/bash-completion/completions/agent-shim ]; then
    . /usr/local/share/bash-completion/completions/agent-shim
fi
