# edgeinfer completion for bash: eval "$(edgeinfer completion bash)", or a file in
# ~/.local/share/bash-completion/completions named edgeinfer
_edgeinfer() {
    local IFS=$'\n'
    COMPREPLY=($(edgeinfer completion words "${COMP_WORDS[@]:1:COMP_CWORD}" 2>/dev/null | cut -f 1))
}
complete -o default -F _edgeinfer edgeinfer
