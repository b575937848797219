#compdef edgeinfer
# edgeinfer completion for zsh: a file named _edgeinfer in a folder of $fpath,
# or eval "$(edgeinfer completion zsh)"
_edgeinfer() {
    local line
    local -a found
    for line in "${(@f)$(edgeinfer completion words "${(@)words[2,CURRENT]}" 2>/dev/null)}"; do
        [ -n "$line" ] && found+=("${${line%%$'\t'*}//:/\\:}:${line#*$'\t'}")
    done
    _describe edgeinfer found || _files
}
if [ "$funcstack[1]" = _edgeinfer ]; then _edgeinfer "$@"; else compdef _edgeinfer edgeinfer; fi
