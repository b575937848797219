# edgeinfer completion for fish:
# edgeinfer completion fish > ~/.config/fish/completions/edgeinfer.fish
function __edgeinfer_words
    set -l before (commandline -opc)
    set -e before[1]
    set -l current (commandline -ct)
    edgeinfer completion words $before "$current" 2>/dev/null
    or __fish_complete_path "$current"
end
complete -c edgeinfer -f -a '(__edgeinfer_words)'
